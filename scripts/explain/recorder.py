"""Recorder: the Lightning callback that chooses the batches of an explanation and records what their steps compile.

A recompile over an epoch comes from a shape that is new; a batch like one that was run has nothing more to tell.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from scripts.explain.compiler import CompilerRecorder
from scripts.explain.coverage import StepProfile
from scripts.explain.explanation import Coverage
from strategies import Program
from strategies.compose import eager
from strategies.regions import RegionCall, region_calls
from trainer.callback import Compile
from trainer.loops.lightning import LightningLoop
from trainer.telemetry.compiler import EventReporter

FIRST_BATCHES = 4
"""Run whatever their shape: optimizer state, gradient buffers and counters change over the first steps."""
TIMED_BATCHES = 5
"""Copies of the first batch at the end."""
SETTLING_BATCHES = 2
"""Of the timed batches, those before the profiler starts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to explain."""

    backend: str = "configured"
    """``inductor``, ``aot_eager`` or ``eager``; ``configured`` leaves each strategy its own."""
    batches: int | None = None
    """Batches of the epoch to look at; None = all."""
    seconds: float = 120.0
    """After so many seconds no further batch is looked at. The first batches do not count: they may compile long."""
    profiles: bool = True
    """Whether the last steps are profiled, to tell what ran eager."""
    progress: Callable[[str], None] = lambda line: None
    """Called with a line about what is being done."""
    before_steps: Callable[[], None] = lambda: None
    """Called once Lightning has set its signal handlers: for whoever has handlers of their own."""


def kind_of(batch: Any) -> str:
    """Dtypes and shapes of everything in a batch that is a tensor, and the types of the rest, with names."""
    return ", ".join(_parts("", batch)) or "empty"


def _parts(name: str, value: Any) -> Iterator[str]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Tensor):
        shape = " x ".join(map(str, value.shape)) or "scalar"
        yield f"{name} {str(value.dtype).removeprefix('torch.')} {shape}".strip()
        return
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(option.name, getattr(value, option.name)) for option in dataclasses.fields(value)]
    else:
        if value is not None:
            yield f"{name} {type(value).__name__}".strip()
        return
    for key, item in items:
        yield from _parts(f"{name}.{key}" if name else str(key), item)


class ChosenBatches:
    """A training loader over another one, which passes on the first batches and then one of each new kind.

    Args:
        loader: What the training would iterate over.
        batches, seconds: See ``Options``.
        accumulate: Batches that make up an optimizer step, which is never left half done.
        timed: Whether copies of the first batch follow, to be timed.
    """

    def __init__(
        self, loader: Iterable[Any], *, batches: int | None, seconds: float, accumulate: int = 1, timed: bool = True
    ) -> None:
        self._loader, self._max_batches, self._seconds = loader, batches, seconds
        self._accumulate, self._timed = accumulate, timed
        self.kinds: Counter[str] = Counter()
        self.looked_at = self.run = 0
        self.stopped: str | None = None
        self.timed_from: int | None = None
        """Number of the first batch, counted from 0, that is there to be timed; None before that is known."""

    def __iter__(self) -> Iterator[Any]:
        began: float | None = None
        first: Any = None
        for batch in self._loader:
            kind = kind_of(batch)
            new = kind not in self.kinds
            self.kinds[kind] += 1
            self.looked_at += 1
            if first is None:
                first = _copied(batch)
            if new or self.run < FIRST_BATCHES * self._accumulate or self.run % self._accumulate:
                self.run += 1
                yield batch
            if self._max_batches is not None and self.looked_at >= self._max_batches:
                self.stopped = f"--batches {self._max_batches}"
                break
            if self.run < FIRST_BATCHES * self._accumulate:
                continue
            began = began or time.perf_counter()
            if time.perf_counter() - began > self._seconds:
                self.stopped = f"--seconds {self._seconds:g} were over"
                break
        while self.run % self._accumulate:
            self.run += 1
            yield _copied(first)
        self.timed_from = self.run
        for _ in range(TIMED_BATCHES * self._accumulate if self._timed and first is not None else 0):
            yield _copied(first)


def _copied(batch: Any) -> Any:
    """A batch that a step may change."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # a class that refuses; then steps get the same object
        return batch


def wrap_training_loader(trainer: L.Trainer, wrap: Callable[[Any], Any]) -> None:
    """Have the training loop iterate over what ``wrap`` makes of its loader."""
    strategy: Any = trainer.strategy
    process = strategy.process_dataloader

    def process_dataloader(loader: Any) -> Any:
        processed = process(loader)
        return wrap(processed) if trainer.state.stage is RunningStage.TRAINING else processed

    strategy.process_dataloader = process_dataloader


class StepRecorder(L.Callback):
    """Comes after ``Compile`` in the trainer's callbacks: chooses the batches, names regions, profiles the last steps.

    Args:
        compile_: The callback that applies the strategies.
    """

    def __init__(self, compile_: Compile, options: Options) -> None:
        self.compiler = CompilerRecorder()
        self.chosen: ChosenBatches | None = None
        self.coverage: Coverage | None = None
        self.validated = False
        """Whether a validation came up."""
        self.eager_passed = False
        """Whether the batch that ended the steps with an error runs in eager without one."""
        self._compile, self._options = compile_, options
        self._batch: Any = None
        self._profile = StepProfile()
        self._calls: list[tuple[RegionCall, Callable[..., Any]]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Strategies are applied: record their regions, and stand between the training loader and the loop."""
        self.compiler.start()
        program = self._compile.program
        assert program is not None
        self._record_regions(program)

        def chosen(loader: Any) -> ChosenBatches:
            self.chosen = ChosenBatches(
                loader,
                batches=self._options.batches,
                seconds=self._options.seconds,
                accumulate=trainer.accumulate_grad_batches,
                timed=self._options.profiles,
            )
            return self.chosen

        wrap_training_loader(trainer, chosen)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What a run logs line by line is reported here at the end."""
        self._compile.telemetry.reporter = EventReporter(enabled=False)
        self._options.before_steps()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Profile the last steps; report which batch it is."""
        self._batch = batch
        self.compiler.read()  # before the first batch, Compile has warmed all shapes where a strategy asks for it
        self.compiler.phase = "training"
        assert self.chosen is not None
        first = self.chosen.timed_from
        if first is None or batch_idx < first:  # Lightning fetches one batch ahead, so that this may be known early
            self._options.progress(f"batch {batch_idx + 1}, {self.chosen.looked_at} looked at: forward, backward, step")
            return
        if batch_idx == first + SETTLING_BATCHES * trainer.accumulate_grad_batches:
            self._options.progress(f"profiling {TIMED_BATCHES - SETTLING_BATCHES} steps")
            program = self._compile.program
            assert program is not None
            self._profile.begin(trainer, [region.path for region in program.regions])
        self._profile.step_begins()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._profile.step_ends()
        self.compiler.read()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.compiler.read()
        self.compiler.phase = "validating"
        self._options.progress("validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.compiler.read()
        self.compiler.phase, self.validated = "training", True
        trainer.val_check_batch = float("inf")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ask eager, on the same batch: nothing is trained for keeps."""
        program, batch = self._compile.program, self._batch
        if batch is None or program is None or not isinstance(exception, Exception):
            return
        passes = LightningLoop(trainer, cuda_graphs=False)
        with contextlib.suppress(Exception), passes.quiet(), eager(program):
            passes.step(batch)
            self.eager_passed = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = True

    def close(self) -> None:
        """Stop recording, whatever happened; figures stay."""
        self.coverage = self._profile.end() or self.coverage
        self.compiler.read()
        self.compiler.stop()
        for call, compiled in self._calls:
            call.compiled = compiled
        self._calls.clear()

    def _record_regions(self, program: Program) -> None:
        """Have each compiled call say on whose behalf the compiler works; regions within regions are not called."""
        for region in program.regions:
            self.compiler.graphs_of(region.kind).paths.append(region.path)
        for region, call in region_calls(program):
            self._calls.append((call, call.compiled))
            call.compiled = self._recorded(call.compiled, region.kind)

    def _recorded(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        called: set[str] = set()

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.compiler.read()
            first = self.compiler.phase not in called
            called.add(self.compiler.phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.compiler.read(kind, first_call=first)

        return recorded
