"""Bench: a training up to its first step, of which any submodules can be compiled by themselves and compared with
eager, each try from the same state. Nothing is trained."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scripts.bisect.search import MAX_SHAPES, OPTIMIZER, Node, Outcome
from scripts.explain.run import training
from strategies import Program, Strategy
from strategies.base import aside, holds
from strategies.errors import one_line
from strategies.regions import compile_in_place, fixed_sizes, uncompile
from trainer.callback import Compile
from trainer.guards.compare import ParityError
from trainer.guards.parity import ParityGate
from trainer.guards.snapshot import Snapshot
from trainer.loops.lightning import LightningLoop
from trainer.settings import Config
from trainer.telemetry.source import shown

Used = TypeVar("Used")
MAX_BATCHES = 32
"""Batches among which different shapes are looked for."""


class Bench:
    """Tries what strategies compile, piece by piece.

    Args:
        program: With the strategies applied; what they compiled is undone and can be tried from here on.
        batches: On their device, one of each shape, by what they look like.
        passes: Quiet for as long as the bench is used.

    Attributes:
        arguments: By the paths of the regions, those of ``torch.compile``.

    Raises ValueError for a step that cannot be repeated.
    """

    def __init__(self, program: Program, batches: dict[str, Any], passes: LightningLoop) -> None:
        if (reason := passes.why_not_apart()) is not None:
            raise ValueError(f"no step can be tried and undone: {reason}")
        self._program, self._batches, self._passes = program, batches, passes
        self.arguments = {region.path: region.arguments for region in program.regions}
        uncompile(program)
        self._snapshot = Snapshot(passes, list(batches.values()), program)
        self.everything = [_node(program.module.get_submodule(path), path) for path in self.arguments]
        if program.compiled_beside_regions:
            self.everything.append(Node(path=OPTIMIZER))

    def trial(self, paths: Sequence[str]) -> Outcome:
        torch.compiler.reset()
        modules = [path for path in paths if path != OPTIMIZER]
        with contextlib.ExitStack() as stack:
            if OPTIMIZER not in paths:
                stack.enter_context(aside(self._program))
            stack.callback(self._snapshot.restore)
            stack.callback(uncompile, self._program)
            for path in modules:
                # In place, with the options of the region that it lies in.
                region = next(region for region in self.arguments if holds(region, path))
                arguments = copy.deepcopy(self.arguments[region])  # torch pops keys from options
                # Compiled apart, what were parts of one graph would have one code for their several sizes.
                if len(modules) > 1 and fixed_sizes(self._program, modules, arguments["dynamic"]):
                    arguments["dynamic"] = False
                compile_in_place(self._program, path, arguments)
            self._snapshot.restore()
            for kind, batch in self._batches.items():
                try:
                    facts = ParityGate("on", self._passes, self._program, self._snapshot).run(batch)
                except ParityError as error:
                    return Outcome(differs=True, reason=error.facts["reason"], batch=kind)
                except Exception as error:
                    if "CUDA error" in str(error):  # nothing works in this process any more
                        raise
                    return Outcome(differs=False, reason=one_line(error), batch=kind)
                if facts["verdict"] != "passed":
                    return Outcome(differs=False, reason=facts["reason"], batch=kind)
        return Outcome(differs=False)


def _node(module: nn.Module, path: str) -> Node:
    kind = type(module)
    about = kind.__name__
    with contextlib.suppress(TypeError, OSError):  # no source to read
        about += f", {shown(str(inspect.getsourcefile(kind)))}:{inspect.getsourcelines(kind)[1]}"
    return Node(path=path, about=about, children=list(_children(module, path)))


def _children(module: nn.Module, path: str) -> Iterator[Node]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # which no step calls
            yield from _children(child, f"{path}.{name}")
        else:
            yield _node(child, f"{path}.{name}")


def with_config(config: Config, strategies: Sequence[Strategy], use: Callable[[Bench], Used]) -> Used:
    """What ``use`` returns for the bench of ``config.task`` under ``strategies``. Raises ValueError for bad input."""
    with training(
        config,
        strategies,
        lambda compile_: [BenchCallback(compile_, use), compile_],
        val_every_n_steps=0,
        checkpoint_every_n_steps=0,
    ) as (_, trainer, module, data):
        used: Used = fit(trainer, module, datamodule=data)
    return used


class _Done(BaseException):
    """The bench was used, with this result. Not an Exception, so that nobody takes it for a failure."""


def fit(trainer: L.Trainer, module: L.LightningModule, **data: Any) -> Any:
    """Fit up to the first batch, at which a ``BenchCallback`` ends; returns the result of its use."""
    try:
        trainer.fit(module, **data)
    except _Done as done:
        return done.args[0]
    raise ValueError("the training loader brings no batch")


class BenchCallback(L.Callback):
    """Comes before ``Compile`` in the trainer's callbacks, hands over a bench and ends before the first step."""

    def __init__(self, compile_: Compile, use: Callable[[Bench], object]) -> None:
        self._compile, self._use = compile_, use
        self._chosen: dict[str, Any] = {}  # by dtypes and shapes of the tensors

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Strategies are applied: stand between the training loader and the loop."""
        strategy: Any = trainer.strategy
        process = strategy.process_dataloader
        strategy.process_dataloader = lambda loader: self._choose(process(loader))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Everything is in place: use the bench, then end."""
        program = self._compile.program
        assert program is not None
        passes = LightningLoop(trainer, cuda_graphs=program.uses_cuda_graphs)
        first, *others = self._chosen
        on_device = {first: batch, **{kind: passes.to_device(self._chosen[kind]) for kind in others}}
        with passes.quiet():
            raise _Done(self._use(Bench(program, on_device, passes)))

    def _choose(self, loader: Any) -> Any:
        """The first batch of each shape."""
        for batch in itertools.islice(loader, MAX_BATCHES):
            tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
            kinds = [f"{str(one.dtype).removeprefix('torch.')} {' x '.join(map(str, one.shape))}" for one in tensors]
            if len(self._chosen) < MAX_SHAPES:
                self._chosen.setdefault(", ".join(kinds) or "no tensor", batch)
        # The loop is given one batch more than it will get to: its fetcher looks ahead.
        return list(self._chosen.values())[:1] * 2
