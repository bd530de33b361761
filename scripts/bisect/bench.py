"""Bench: a training up to its first step, of which any submodules can be compiled by themselves, each try from the
same state. A try tells whether a step fails to compile, departs from eager's or is slower. Nothing is trained."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from scripts.bisect.search import OPTIMIZER, Node, Outcome, Site, Trial, holds, searched
from scripts.steps import ONE_DEVICE, copied, kind_of, several_devices, training, wrap_training_loader
from strategies import Modular, Program, Stage, Strategy
from strategies.compose import aside, eager
from strategies.errors import one_line
from strategies.modular import Part
from strategies.options import ModuleRequest
from strategies.regions import compile_in_place, fixed_sizes, uncompile
from trainer.callback import Compile
from trainer.guards.compare import ParityError
from trainer.guards.parity import ParityGate
from trainer.guards.preflight import REPLAYED_FROM
from trainer.guards.slowdown import MARGIN
from trainer.guards.snapshot import Snapshot
from trainer.loops.lightning import LightningLoop
from trainer.loops.private import replaced
from trainer.settings import Config
from trainer.telemetry import hardware, source
from trainer.telemetry.files import number as figure

OPTIONS = tuple(option.name for option in dataclasses.fields(ModuleRequest))
"""Names of the options that reach torch.compile."""
MAX_BATCHES = 32
"""Batches among which different shapes are looked for."""
PAIRS, MIN_PAIRS, MAX_SECONDS = 9, 3, 6.0
"""Steps of each that are timed in pairs, and about how long that takes at most."""
PROJECT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{PROJECT / package}{os.sep}" for package in ("trainer", "strategies", "scripts"))
"""Whose lines are nobody's mistake to fix."""


class Bench:
    """Tries what strategies compile, piece by piece.

    Args:
        program: With the strategies applied; what they compiled is undone and can be tried from here on.
        strategies: Those that are applied.
        batches: On their device, one of each shape, by what they look like.
        passes: Quiet for as long as the bench is used.

    Raises ValueError where nothing can be tried: a step that cannot be repeated, or that fails in eager.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        program: Program,
        strategies: Sequence[Strategy],
        batches: dict[str, Any],
        passes: LightningLoop,
        *,
        notes: Sequence[str] = (),
    ) -> None:
        reason = passes.why_not_apart()
        if reason is not None:
            raise ValueError(f"no step can be tried and undone: {reason}")
        self._trainer, self._program, self._batches, self._passes = trainer, program, batches, passes
        self._requests = _requests(program, strategies)
        strategy = next((each for each in strategies if each.stage is Stage.MODULE), None)
        paths = [region.path for region in program.regions]
        uncompile(program)
        self._repeats = REPLAYED_FROM if program.uses_cuda_graphs else 2  # the first step makes the optimizer's state
        self._phase, self._batch = "forward", ""
        self._snapshot = Snapshot(passes, list(batches.values()), program)
        called = self._called()
        self.site = Site(
            regions=[_node(program.module.get_submodule(path), path, called) for path in paths],
            strategy=strategy.name if strategy is not None else None,
            requests={path: _not_neutral(self._requests[path]) for path in paths},
            optimizer=bool(program.compiled_beside_regions),
            device=trainer.strategy.root_device.type,
            notes=list(notes),
        )

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial from the state of the first step."""
        torch.compiler.reset()
        with contextlib.ExitStack() as stack:
            if OPTIMIZER not in trial.paths:
                stack.enter_context(aside(self._program))
            stack.callback(self._snapshot.restore)
            stack.callback(uncompile, self._program)
            self._compile(trial)
            self._snapshot.restore()
            stack.enter_context(self._phases())
            try:
                return getattr(self, f"_{trial.symptom}")(trial)
            except Exception as error:
                where, code = place(error)
                return Outcome(
                    shows=trial.symptom in ("fails", "breaks"),
                    reason=one_line(error),
                    phase=self._phase,
                    where=where,
                    code=code,
                    batch=self._batch,
                    crashed="CUDA error" in str(error),  # nothing works in this process any more
                )

    def _compile(self, trial: Trial) -> None:
        """In place, with the options of the region that each path lies in."""
        paths = [path for path in trial.paths if path != OPTIMIZER]
        for path in paths:
            region = next(region for region in self._requests if holds(region, path))
            request = dataclasses.replace(self._requests[region], **trial.changes)
            arguments: dict[str, Any] = request.compile_arguments()
            if trial.symptom == "breaks":
                arguments["fullgraph"] = True  # so that a break is an error, which names the line
            # Compiled apart, what were parts of one graph would have one code for their several sizes.
            if len(paths) > 1 and fixed_sizes(self._program, paths, arguments["dynamic"]):
                arguments["dynamic"] = False
            compile_in_place(self._program, path, arguments)

    def _each(self) -> Iterator[Any]:
        for kind, batch in self._batches.items():
            self._batch = kind
            yield batch

    def _fails(self, trial: Trial) -> Outcome:
        for batch in self._each():
            for _ in range(self._repeats):
                self._phase = "forward"
                self._passes.step(batch, self._backward_is_over)
        return Outcome(shows=False)

    _breaks = _fails

    def _differs(self, trial: Trial) -> Outcome:
        for batch in self._each():
            try:
                ParityGate("on", self._passes, self._program, self._snapshot).run(batch)
            except ParityError as error:
                return Outcome(shows=True, reason=beyond_tolerance(error.facts), batch=self._batch)
        return Outcome(shows=False)

    def _slower(self, trial: Trial) -> Outcome:
        """Of the batches, the one that loses most."""
        found = [self._lost(batch, trial.min_lost_seconds) for batch in self._each()]
        return max(found, key=lambda one: (one.shows, one.lost_seconds or 0.0))

    def _lost(self, batch: Any, min_lost_seconds: float | None) -> Outcome:
        for _ in range(self._repeats):
            self._passes.step(batch)
        with eager(self._program):
            self._passes.step(batch)
        outcome = Outcome(shows=True, batch=self._batch)
        for _ in range(2):  # slower by chance once is not slower by chance twice
            eagers, compiled = self._timed(batch)
            eager_seconds = statistics.median(eagers)
            outcome.lost_seconds = lost = statistics.median(compiled) - eager_seconds
            wanted = (MARGIN - 1) * eager_seconds if min_lost_seconds is None else min_lost_seconds
            if not (lost > wanted and sorted(compiled)[len(compiled) // 4] > eager_seconds):
                return Outcome(shows=False, lost_seconds=lost)
            took, in_eager = figure((eager_seconds + lost) * 1e3), figure(eager_seconds * 1e3)
            outcome.reason = f"a step takes {took} ms, {in_eager} ms in eager"
        return outcome

    def _timed(self, batch: Any) -> tuple[list[float], list[float]]:
        """Seconds of steps of eager and compiled, taken in pairs."""
        eagers: list[float] = []
        compiled: list[float] = []
        device, began = self._trainer.strategy.root_device, time.perf_counter()

        def step() -> None:
            self._passes.step(batch)

        while len(eagers) < PAIRS and (len(eagers) < MIN_PAIRS or time.perf_counter() - began < MAX_SECONDS):
            with eager(self._program):
                eagers.append(hardware.seconds_of(device, step))
            compiled.append(hardware.seconds_of(device, step))
        return eagers, compiled

    def _phases(self) -> contextlib.AbstractContextManager[Any]:
        """Know which phase of a step is under way."""
        self._phase, self._batch = "forward", ""
        strategy: Any = self._trainer.strategy
        backward = strategy.backward

        def marked(*args: Any, **kwargs: Any) -> Any:
            self._phase = "backward"
            return backward(*args, **kwargs)

        return replaced(strategy, "backward", marked)

    def _backward_is_over(self, _: torch.Tensor) -> None:
        self._phase = "optimizer step"

    def _called(self) -> set[int]:
        """Modules that a step of eager calls. Raises ValueError if that step fails."""
        called: set[int] = set()
        handle = nn.modules.module.register_module_forward_pre_hook(lambda module, _: called.add(id(module)))
        try:
            with aside(self._program):
                for batch in self._each():
                    try:
                        self._passes.step(batch)
                    except Exception as error:
                        raise ValueError(f"the training step fails in eager already: {one_line(error)}") from error
                    finally:
                        self._snapshot.restore()
        finally:
            handle.remove()
        return called


def _requests(program: Program, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """What each region is compiled with. Raises ValueError for a strategy without torch.compile's options."""
    requests: dict[str, Any] = {}
    for strategy in strategies:
        if strategy.stage is not Stage.MODULE:
            continue
        if isinstance(strategy, Modular):
            for name, paths in program.report[strategy.name].items():
                requests |= dict.fromkeys(paths, strategy.parts[name])
        elif isinstance(strategy, ModuleRequest):
            requests |= {region.path: strategy for region in program.regions}
        else:
            raise ValueError(f"compile.{strategy.name}: only strategies with torch.compile's options can be searched")
    return requests


def _not_neutral(request: Any) -> dict[str, Any]:
    """Options that a ``Part`` would have to be given to be compiled like ``request``."""
    values = {name: copy.deepcopy(getattr(request, name)) for name in OPTIONS}
    return {name: value for name, value in values.items() if value != getattr(Part(), name)}


def _node(module: nn.Module, path: str, called: set[int]) -> Node:
    kind = type(module)
    try:
        begins = f"{Path(str(inspect.getsourcefile(kind))).resolve()}:{inspect.getsourcelines(kind)[1]}"
    except (TypeError, OSError):  # no source to read
        begins = None
    sizes = [tuple(parameter.shape) for parameter in module.parameters()]
    return Node(
        path=path,
        kind=kind.__name__,
        source=begins,
        likeness=f"{kind.__module__}.{kind.__qualname__} {module!r} {sizes}",
        called=id(module) in called,
        children=[_node(child, f"{path}.{name}", called) for name, child in module.named_children()],
    )


def with_config(config: Config, use: Callable[[Bench], object], *, shapes: int) -> None:
    """Call ``use`` with the bench of ``config.task`` under ``config.compile``. Raises ValueError for bad input.

    Of the epoch's first batches, so many of different ``shapes`` are kept and tried.
    """
    strategies, notes = searched(config.compile.values())
    if several_devices(config):
        notes.append(ONE_DEVICE.format("tried"))

    def callbacks(compile_: Compile) -> list[L.Callback]:
        return [BenchCallback(compile_, use, notes, shapes=shapes), compile_]

    with training(config, strategies, callbacks, val_every_n_steps=0, checkpoint_every_n_steps=0) as made:
        fit(made.trainer, made.module, datamodule=made.data)


class _Done(BaseException):
    """The bench was used. Not an Exception, so that nobody takes it for a failure."""


def fit(trainer: L.Trainer, module: L.LightningModule, **data: Any) -> None:
    """Fit up to the first batch, at which a ``BenchCallback`` ends."""
    with contextlib.suppress(_Done):
        trainer.fit(module, **data)
        raise ValueError("the training loader brings no batch")


class BenchCallback(L.Callback):
    """Comes before ``Compile`` in the trainer's callbacks, hands over a bench and ends before the first step."""

    def __init__(
        self, compile_: Compile, use: Callable[[Bench], object], notes: Sequence[str] = (), *, shapes: int = 4
    ) -> None:
        self._compile, self._use, self._notes, self._max_shapes = compile_, use, list(notes), shapes
        self._chosen: dict[str, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Strategies are applied: stand between the training loader and the loop."""
        wrap_training_loader(trainer, self._choose)

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
            self._use(Bench(trainer, program, self._compile.strategies, on_device, passes, notes=self._notes))
        raise _Done

    def _choose(self, loader: Any) -> Any:
        """The first batch of each shape."""
        began, seen = time.perf_counter(), set()
        for batch in itertools.islice(loader, MAX_BATCHES):
            seen.add(kind := kind_of(batch))
            if len(self._chosen) < self._max_shapes:
                self._chosen.setdefault(kind, batch)
            if time.perf_counter() - began > 60.0:  # a slow loader
                break
        if len(seen) > len(self._chosen):
            self._notes.append(f"{len(seen)} shapes of batch were seen, {len(self._chosen)} of them tried (--shapes)")
        # The loop is given one batch more than it will get to: its fetcher looks ahead.
        return [copied(batch) for batch in list(self._chosen.values())[:1] * 2]


def beyond_tolerance(facts: dict[str, Any]) -> str:
    """What a failed comparison found, in words: the first figure beyond its tolerance, and a tensor by name."""
    beyond = []
    for name, label in (
        ("loss", "loss"),
        ("gradient_norm", "norm of the gradients"),
        ("weights", "update of {}"),
        ("gradients", "gradient of {}"),
        ("optimizer_state", "optimizer state {}"),
        ("buffers", "buffer {}"),
    ):
        figures = facts.get(name)
        if figures and not figures["difference"] <= figures["tolerance"]:
            what = label.format(figures.get("worst"))
            beyond.append(f"{what} {figures['difference']:.2g} of eager's away, tolerance {figures['tolerance']:.2g}")
    return "; ".join([*beyond[:1], *beyond[1:][-1:]]) or facts["reason"]


def place(error: BaseException) -> tuple[str | None, str | None]:
    """The line of code that an error is about, as ``file:line in function``, and its text."""
    text = str(error)
    if "from user code:" in text:
        stack = source.lines_of_stack(text.split("from user code:", 1)[1])
    else:
        frames = traceback.extract_tb(error.__traceback__)
        stack = [source.line(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    stack = [each for each in stack if not each.file.startswith(OURS)]
    where, _, _ = source.of_interest(stack)
    return (str(where), where.code) if where is not None else (None, None)
