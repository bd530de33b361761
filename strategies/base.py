"""Strategy, Stage and Program: how a strategy is declared and what it changes; and how strategies are put in order and
called: order comes from their stages, conflicts are errors that name both.

A strategy is one keyword-only, slotted dataclass whose fields are its configuration (``compile.<name>.<field>=``).
Importing this module must stay cheap (no torch): the command line imports every strategy to know its configuration.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strategies.cuda_graph.network import NetworkGraphs
    from strategies.cuda_graph.step_graphs import StepGraphs
    from strategies.loop_protocol import Loop
    from strategies.region import Checking, Kind, Region


def has_another_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` itself was given another ``step`` than its class's; a schedule of torch's wraps it."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


class WrongOption(ValueError):
    """An option of a strategy that cannot be, see ``wrong``. Its message is Python, where strategies are made; the
    command line takes ``typed``."""

    def __init__(self, message: str, typed: str = "") -> None:
        super().__init__(message)
        self.typed = typed or message


def wrong(key: str, option: str, value: object, complaint: str) -> WrongOption:
    """The error for ``Regional(mode='fastest') is not one of (...)``, which is ``compile.regional.mode='fastest' is not
    one of (...)`` where the option is typed; ``key`` is what is typed before the option's name."""
    name, *inner = key.removeprefix("compile.").split(".", 2)
    given = f"{option}={value!r}"
    if inner:  # one of a mapping of parts
        given = f"{inner[0]}={{{inner[1]!r}: {{{option!r}: {value!r}}}}}"
    joined = complaint if complaint.startswith(":") else f" {complaint}"
    return WrongOption(f"{name.title().replace('_', '')}({given}){joined}", f"{key}.{option}={value!r}{joined}")


class Stage(enum.IntEnum):
    """When a strategy acts, and on what. Strategies run in this order whatever their order on the command line.

    - ``CACHE``: what compiles later; compiled code that was stored is loaded (``cached``).
    - ``SHAPES``: batches; how examples are grouped and padded, which sizes are symbolic (``buckets``, ``dynamic``).
    - ``ACTIVATIONS``: the module as it runs in eager, before parts of it are compiled; what it keeps for its backward
      (``checkpointing``), and how its weights and inputs lie in memory, ``channels_last`` for instance.
    - ``MODULE``: which submodules are compiled, and how (``whole``, ``regional``, ``modular``, ``second_order``,
      ``auto``).
    - ``OPTIMIZER``: how the optimizers step (``optimizer``).
    - ``STEP``: the whole training step, as all the others have left it (``cuda_graph``).

    Two strategies of one stage are an error, since both would change the same thing; unless both declare ``exclusive =
    False``, because each changes another part of it.
    """

    CACHE = 0
    SHAPES = 1
    ACTIVATIONS = 2
    MODULE = 3
    OPTIMIZER = 4
    STEP = 5


class Ragged(NamedTuple):
    """A tensor of the batch whose length differs from batch to batch; tuples in this order are taken as well."""

    field: str
    """Attribute or key of the batch that holds the tensor; a batch that is a tuple or list is indexed: ``"0"``."""
    dim: int
    """Dimension along which it is ragged."""
    pad: float = 0
    """Value of padding."""
    extra: int = 0
    """Positions that the tensor has beyond the length the model computes with: 1 where the model reads all positions
    but the last and predicts all but the first."""


@dataclass(kw_only=True, slots=True)
class Padding:
    """Filled in by the strategy; the trainer rebuilds the loaders by it and fills in what only the data can tell."""

    name: str
    """Name of the strategy, for messages and for its part of ``Program.report``."""
    ragged: tuple[Ragged, ...]
    """The batch's tensors that are padded."""
    multiple: int = 1
    """Every edge is a multiple of this; so is what a batch longer than the last edge is padded to."""
    choose_edges: Callable[[Sequence[int]], tuple[int, ...]] | None = None
    """Lengths of the training examples to ascending edges; None: batches stay, only padded up to ``multiple``."""
    tables: tuple[int, ...] = ()
    """Sizes at which a position table may end; nothing is padded beyond one that it fits into, be it a multiple or
    not."""
    tokens_per_batch: int | None = None
    """Positions a training batch, padding included: shorter buckets have more rows; None: the loader's own rows."""
    warm: bool = False
    """Whether the first batches of a training should be one of each shape."""
    on_recompile: str = "warn"
    """``fail`` or ``warn``: what compiles once all shapes have come ends the run, or is reported."""
    edges: tuple[int, ...] = ()
    """Ascending; filled in when the loaders are built (before the first batch), empty without ``choose_edges``."""
    batch_sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rows of the training batches on this process by edge that occurs, most first; filled in like ``edges``."""
    dynamic: bool | None = None
    """What ``dynamic=null`` of a module strategy stands for."""
    seen: Callable[[], dict[str, Any]] | None = None
    """Figures of the batches that were really handed out, for the report; filled in like ``edges``."""

    @property
    def edge_of(self) -> Callable[[int], int]:
        """``edge_of`` with what is known by now; it goes to data workers without the rest."""
        return partial(edge_of, edges=self.edges, multiple=self.multiple, tables=self.tables)


def edge_of(length: int, edges: Sequence[int], multiple: int, tables: Sequence[int] = ()) -> int:
    """The first of ``edges`` that is at least ``length``; beyond the last one, the next multiple or end of a table."""
    place = bisect_left(edges, length)
    if place < len(edges):
        return edges[place]
    beyond = math.ceil(length / multiple) * multiple
    return min(beyond, end_of_table(length, tables) or beyond)


def end_of_table(longest: int, tables: Sequence[int]) -> int | None:
    """Most positions that a batch of ``longest`` may be padded to: the first of ``tables`` that it fits into."""
    return next((size for size in tables if size >= longest), None)


@dataclass(frozen=True, slots=True)
class Found:
    """Modules that a strategy has chosen by itself, from how the module is built and not from how it is called."""

    name: str
    """The strategy's."""
    paths: tuple[str, ...]
    compile: Callable[[Sequence[str]], Any]
    """Compiles what is called in their place, as the strategy would have."""


class Activated(Protocol):
    """A part of the module that is another one while a step or an evaluation is under way."""

    def activate(self, active: bool) -> None:
        """One begins, or is over."""


def _checking() -> Checking:
    from strategies.region import Checking  # which imports torch

    return Checking()


@dataclass(slots=True, kw_only=True)
class Program:
    """What will execute each step; strategies change it in place."""

    module: nn.Module
    """The user's module, never wrapped or replaced."""
    whole: tuple[str, ...] = ()
    """Declared submodules whose forward calls together are forward and loss."""
    blocks: tuple[str, ...] = ()
    """Declared containers of repeated blocks."""
    parts: tuple[str, ...] = ()
    """Declared submodules worth a region of their own."""
    ragged: tuple[Ragged, ...] = ()
    """Declared tensors of ragged length."""
    strategies: tuple[Strategy, ...] = ()
    """All strategies of the run in the order in which they act."""
    device: torch.device | None = None
    """Where the module trains; known from ``apply`` on."""
    precision: str = "32-true"
    """Lightning's name for the precision of the run."""
    sharded: bool = False
    """Whether the loop shards parameters over processes; known from ``apply`` on."""
    optimizers: Sequence[torch.optim.Optimizer] = ()
    """Optimizers with their restored state; empty before ``begin``."""
    own_steps: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Of each optimizer, what makes its step its own; filled in before any strategy begins, see ``begin``."""
    loop: Loop | None = None
    """What trains the module; known from ``begin`` on."""
    padding: Padding | None = None
    """Filled by a strategy of the SHAPES stage: how batches are grouped and padded, and regions compiled for them."""
    step: StepGraphs | None = None
    """Filled by a strategy of the STEP stage: runs whole training steps."""
    network: NetworkGraphs | None = None
    """Filled by a strategy of the STEP stage: replays the modules that a step calls where the step runs in Python."""
    regions: list[Region] = field(default_factory=list)
    """Filled by strategies: what was handed to the compiler; none lies in another."""
    kinds: dict[Any, Kind] = field(default_factory=dict)
    """Regions of one class that are compiled alike."""
    found: Found | None = None
    """Filled by a strategy that was not told what to compile: until it is known whether that is called at all."""
    checking: Checking = field(default_factory=_checking)
    """How regions are compared with eager."""
    recomputed: list[Activated] = field(default_factory=list)
    """Blocks that compute their activations again."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Filled by strategies: what ``compiler_settings`` sets while the run lasts."""
    given_up: dict[str, str] = field(default_factory=dict)
    """What beside regions was to be compiled or captured and runs eager now (``optimizer``, ``step``, a part that
    joined the module), with the reason."""
    notes: list[str] = field(default_factory=list)
    """Filled by strategies: lines the user should read (an option without effect, an undeclared loss)."""
    applied_notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Those of them that a strategy wrote when it was applied, by its name."""
    built: dict[str, nn.Module] = field(default_factory=dict)
    """Submodules of ``module`` by path, as they were when the strategies had been applied."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What strategies keep between their calls, by their name: a strategy's own fields are configuration."""
    report: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Filled by strategies, by their name: figures and facts for the record, in types that JSON knows."""

    @property
    def dynamic(self) -> bool | None:
        """What ``dynamic=null`` of a module strategy stands for."""
        return None if self.padding is None else self.padding.dynamic

    def activate(self, active: bool) -> None:
        """A step or an evaluation begins, or is over: outside of it modules are what their authors wrote."""
        if active:
            self.checking.step_begins()
        if self.network is not None and not active:  # it stands around regions
            self.network.activate(False)
        for block in self.recomputed:
            block.activate(active)
        for region in self.regions:
            region.activate(active)
        if self.network is not None and active:
            self.network.activate(True)

    @property
    def eager_parts(self) -> dict[str, str]:
        """What was to be compiled and runs eager now (path of a region, or as in ``given_up``), with the reason."""
        failed = {one.path: one.reason for one in self.regions if one.state == "failed"}
        return {**failed, **self.given_up}

    @property
    def eager_evaluations(self) -> dict[str, str]:
        """Regions that train compiled and run eager in evaluations, by path, with the reason."""
        kinds = [one for one in self.kinds.values() if one.eager_evaluations]
        return {one.path: kind.eager_evaluations for kind in kinds for one in kind.regions if one.state != "failed"}

    @property
    def compiled_beside_regions(self) -> list[Strategy]:
        """Strategies of which something runs compiled that is neither a region nor a captured step."""
        return [strategy for strategy in self.strategies if strategy.is_compiled(self)]

    @property
    def captures_steps(self) -> bool:
        """Whether whole steps are, or will be, captured."""
        return self.step is not None and not self.step.given_up

    @property
    def captures(self) -> bool:
        """Whether whole steps, or modules that they call, are or will be captured."""
        return self.captures_steps or (self.network is not None and self.network.alive)

    @property
    def done_capturing(self) -> bool:
        """Whether nothing that the last step called waits for a graph."""
        step, network = self.step, self.network
        whole = step is None or step.given_up or step.done_capturing
        return whole and (network is None or not network.wanted or network.done_capturing)

    @property
    def replays(self) -> int:
        """Steps and calls of modules that were replayed so far."""
        steps = 0 if self.step is None else self.step.replays
        return steps + (0 if self.network is None else self.network.replays)

    @property
    def ended_in_eager(self) -> bool | None:
        """Whether nothing is left that is compiled or captured; None where nothing was to be."""
        others, parts = bool(self.compiled_beside_regions), self.eager_parts
        if not parts:
            return None if not self.regions and not others else False
        regions = any(region.path not in parts for region in self.regions)
        captured = self.step is not None and not self.step.given_up and self.step.captures > 0
        captured |= self.network is not None and bool(self.network.captured)
        return not (regions or captured or others)

    @property
    def graphs_expected(self) -> int:
        """Graphs that training makes where none breaks and no more shapes come than planned: one for each kind of
        region and shapes of its weights, and one for each optimizer's step. Counted before anything is compiled."""
        codes = {(id(one.of), one.shapes_of_weights()) for one in self.regions if one.state != "failed"}
        one_by_one = self.padding is not None and self.padding.warm and self.dynamic is False
        shapes = max(len(self.padding.batch_sizes), 1) if self.padding is not None and one_by_one else 1
        steps = len(self.optimizers) if self.compiled_beside_regions else 0
        return len(codes) * shapes + steps

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether Inductor replays what it compiled from CUDA graphs; on a CPU, modes that ask for it mean nothing."""
        on_cuda = self.device is not None and self.device.type == "cuda"
        return on_cuda and any(strategy.uses_cuda_graphs for strategy in self.strategies)


@dataclass(kw_only=True, slots=True)
class Strategy:
    """Base of every strategy: one change to how a task executes, at one declared stage."""

    name: ClassVar[str]
    """Key under ``compile`` in the configuration."""
    stage: ClassVar[Stage]
    """When the strategy acts."""
    exclusive: ClassVar[bool] = True
    """Whether any other strategy of the same stage is a conflict; if not, one that is not exclusive either is none."""
    reorders_data: ClassVar[bool] = False
    """Whether training sees its examples in another order than eager does: a comparison needs the same one on both."""
    captures_step: ClassVar[bool] = False
    """Whether it captures whole steps in CUDA graphs, within which no other CUDA graph may be captured."""
    headlines: ClassVar[tuple[str, ...]] = ()
    """Facts of its report that a person looks for first, by dotted name; all are shown where it has none of these."""
    removed: ClassVar[bool] = False
    """Whether it is the name of a strategy that is no more: taken, with a warning, and left out."""

    def facts(self) -> dict[str, Any]:
        """Name and parameters, for records and fingerprints."""
        return {"name": self.name, **asdict(self)}

    def check(self) -> None:
        """Look at this machine and this torch before any work starts. Raises ValueError with the way out."""

    @property
    def needs_inductor(self) -> bool:
        """Whether Inductor will be asked to compile, so that it can be got ready while data and model are built."""
        return False

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether what it compiles is replayed from CUDA graphs, which keep their outputs in memory of their own."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether it changes how a step computes, so that a step is compared with eager's."""
        return self.stage in (Stage.MODULE, Stage.OPTIMIZER)

    def apply(self, program: Program) -> None:
        """Change ``program`` before the first batch: once, however many trainings and evaluations it has. Raises
        ValueError for options that do not fit this program."""

    def begin(self, program: Program) -> None:
        """A training is about to begin, the program's first or a later one: ``program.optimizers`` are there, with
        their restored state. Do again what ``end`` has undone."""

    def is_compiled(self, program: Program) -> bool:
        """Whether something of it runs compiled beside the program's regions and captured steps."""
        return self.stage is Stage.OPTIMIZER and self.name not in program.given_up

    def end(self, program: Program) -> None:
        """A training is over, finished or broken, or an evaluation without one, or all runs eager from now on: keep
        what is worth keeping and undo what must not outlive it. May be called twice, and before the first ``begin``.
        Optimizers get their own steps back in any case."""


# ---- several strategies ----------------------------------------------------------------------------------------------


def ordered(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Strategies by stage, then name, without those that were removed. Raises ValueError for two of one stage, unless
    neither is exclusive, for two of one name, or for another object."""
    given = list(strategies) if isinstance(strategies, Iterable) else [None]
    if not all(isinstance(one, Strategy) for one in given):
        raise ValueError(f"compile={strategies!r} is not a list of strategies, such as [Regional()]")
    for one in given:
        require_types(one)
    kept = [strategy for strategy in given if not strategy.removed]
    result = sorted(kept, key=lambda strategy: (strategy.stage, strategy.name))
    for first, second in itertools.pairwise(result):
        together = first.name != second.name and not (first.exclusive or second.exclusive)
        if first.stage == second.stage and not together:
            raise ValueError(
                f"compile: {first.name!r} and {second.name!r} both act on the {first.stage.name.lower()} stage; "
                "choose one of them"
            )
    capturing = [strategy for strategy in result if strategy.captures_step]
    graphed = [strategy for strategy in result if strategy.uses_cuda_graphs]
    if capturing and graphed:
        raise ValueError(
            f"compile: {capturing[0].name!r} captures whole steps, {graphed[0].name!r} asks Inductor for CUDA graphs "
            f"of its own (mode reduce-overhead or max-autotune); give {graphed[0].name!r} mode default or "
            f"max-autotune-no-cudagraphs, or leave {capturing[0].name!r} out"
        )
    return result


def require_types(strategy: Strategy) -> None:
    """Raise ValueError for an option of ``strategy`` that is of another type, which the command line knows and Python
    does not. To be called before options are compared; ``ordered`` does so for all."""
    for option in fields(strategy):
        value, kind = getattr(strategy, option.name), str(option.type)
        if (complaint := _type_complaint(value, kind)) is not None:
            raise wrong(f"compile.{strategy.name}", option.name, value, complaint)


def _type_complaint(value: object, kind: str) -> str | None:
    """What is wrong with a value where ``kind``, an annotation, stands."""
    kind, optional, _ = kind.partition(" | None")
    if value is None and optional:
        return None
    if kind == "list[str]":
        return list_complaint(value)
    if kind in ("bool", "int", "float") and isinstance(value, str):
        return f"is a text, not {kind}"
    if kind in ("int", "float") and not hasattr(value, "__float__"):
        return "is not a number"
    if kind == "str" and not isinstance(value, str):
        return "is not a text"
    return "is not a dictionary" if kind.startswith("dict[") and not isinstance(value, Mapping) else None


def list_complaint(value: object) -> str | None:
    """What is wrong with a value where a list of texts belongs: of ``"net.layers"`` each letter would be taken for a
    path, and a class or a module is none."""
    if isinstance(value, str):
        return f"is a text, not a list: write [{value!r}]"
    listed = isinstance(value, Collection) and all(isinstance(one, str) for one in value)
    return None if listed else "is not a list of names, such as ['net.layers']"


def label(strategies: Iterable[Strategy]) -> str:
    """Name of a combination in paths and tables: the strategies in order joined by ``+``, or ``eager``."""
    return "+".join(strategy.name for strategy in ordered(strategies)) or "eager"


@contextlib.contextmanager
def compiler_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Set ``torch._dynamo.config`` values for the length of a run, avoid known faults, and restore all of it. An
    ``embedding_gradient`` among the values says that Inductor's own stays, see ``ModuleRequest``."""
    import torch._dynamo.config as config
    import torch._functorch.config as autograd_config

    from strategies.torch_patches import (
        allowed_for_now,
        embeddings_as_in_eager,
        exporting_is_told,
        faults_avoided,
        graphs_may_be_left_out,
        guards_are_printed,
        leaves_within_graphs,
        one_compile_for_all_ranks,
    )

    # A graph may be kept (retain_graph=True) at any step, so that no backward writes over what its forward has saved. A
    # backward is compiled with its forward: one that does not compile is found before anything of the step has run.
    graphs = autograd_config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True)
    of_dynamo = {name: value for name, value in settings.items() if name != "embedding_gradient"}
    embeddings = contextlib.nullcontext() if "embedding_gradient" in settings else embeddings_as_in_eager()
    derives = leaves_within_graphs() if "trace_autograd_ops" in settings else contextlib.nullcontext()
    faults = faults_avoided(), guards_are_printed(), exporting_is_told(), graphs_may_be_left_out()
    patches = (*faults, one_compile_for_all_ranks(), allowed_for_now(), embeddings, derives)
    with config.patch(of_dynamo), graphs, contextlib.ExitStack() as patched:
        for each in patches:
            patched.enter_context(each)
        yield


@contextlib.contextmanager
def eager(program: Program) -> Iterator[None]:
    """Inside, everything runs as it was written, optimizers with torch's own step; nothing is compiled, or lost."""
    from strategies.region import plain
    from strategies.torch_patches import as_capturing

    with contextlib.ExitStack() as stack:
        stack.enter_context(plain(program.regions))
        stack.enter_context(as_capturing(False))
        if program.network is not None:
            stack.enter_context(program.network.within(False))
        for optimizer, own in program.own_steps:
            stack.callback(_bind, optimizer, "step", vars(optimizer).get("step"))
            _bind(optimizer, "step", own["step"])
        yield


def apply(strategies: Iterable[Strategy], program: Program) -> None:
    """Apply ``strategies`` to ``program`` in the order of their stages."""
    for strategy in ordered(strategies):
        known = len(program.notes)
        strategy.apply(program)
        program.applied_notes[strategy.name] = tuple(program.notes[known:])


def begin(strategies: Iterable[Strategy], program: Program) -> None:
    """Tell ``strategies`` that training is about to begin, in the order of their stages."""
    if not program.own_steps:
        program.own_steps = [(one, {name: vars(one).get(name) for name in _OF_A_STEP}) for one in program.optimizers]
    for strategy in ordered(strategies):
        strategy.begin(program)


def end(strategies: Iterable[Strategy], program: Program) -> None:
    """Tell ``strategies`` that training is over, in reverse order; one that fails does not keep the others from it."""
    with contextlib.ExitStack() as ends:
        ends.callback(program.own_steps.clear)
        ends.callback(_restore_steps, program)
        for strategy in ordered(strategies):
            ends.callback(strategy.end, program)


def disable_other_strategies(program: Program, reason: str) -> list[str]:
    """Let all that is compiled beside regions and captured steps run eager from now on; returns whose it was."""
    given_up = program.compiled_beside_regions
    for strategy in given_up:
        strategy.end(program)
        program.given_up[strategy.name] = reason
    _restore_steps(program)
    return [strategy.name for strategy in given_up]


_OF_A_STEP = ("step", "_step_supports_amp_scaling")
"""Attributes of an optimizer by which it steps in another way than its class does: a scheduler sets the first."""


def _restore_steps(program: Program) -> None:
    for optimizer, own in program.own_steps:
        for name, value in own.items():
            _bind(optimizer, name, value)


def _bind(optimizer: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(optimizer, name, value)
    elif name in vars(optimizer):
        delattr(optimizer, name)
