"""Watching: the Lightning callback that looks on while a few steps are trained under the strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import RunningStage

from strategies import Program
from trainer.callback import Compile
from trainer.eager import eager
from trainer.explain.batches import TIMED_BATCHES, ChosenBatches
from trainer.explain.compiler import CompilerLook
from trainer.explain.explanation import Coverage
from trainer.explain.profiling import StepProfile
from trainer.passes import Passes
from trainer.telemetry.compiler import EventReporter

SETTLING_BATCHES = 2
"""Of the timed batches, those before the profiler starts."""


class Watching(L.Callback):
    """Comes after ``Compile`` in the trainer's callbacks: chooses the batches, names regions, profiles the last steps.

    Args:
        compile_: The callback that applies the strategies.
        batches, seconds: See ``ChosenBatches``.
        profiles: Whether the last steps are profiled.
        progress: Called with a line for the user whenever something takes its time.
        before_steps: Called when training begins.
    """

    def __init__(
        self,
        compile_: Compile,
        *,
        batches: int | None,
        seconds: float,
        profiles: bool = True,
        progress: Callable[[str], None] = lambda line: None,
        before_steps: Callable[[], None] = lambda: None,
    ) -> None:
        self.look = CompilerLook()
        self.chosen: ChosenBatches | None = None
        self.coverage: Coverage | None = None
        self.validated = False
        """Whether a validation came up."""
        self.eager_passed = False
        """Whether the batch that ended the look with an error runs in eager without one."""
        self._batch: Any = None
        self.paths: dict[str, list[str]] = {}
        """Paths of the regions by their kind."""
        self._compile, self._progress, self._before_steps = compile_, progress, before_steps
        self._batches, self._seconds, self._profiles = batches, seconds, profiles
        self._profile = StepProfile()
        self._calls: list[tuple[Any, Any]] = []

    # ---- before training -------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Strategies are applied: watch their regions, and stand between the training loader and the loop."""
        self.look.start()
        program = self._compile.program
        assert program is not None
        self._watch_regions(program)
        strategy: Any = trainer.strategy
        process = strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            processed = process(loader)
            if trainer.state.stage is not RunningStage.TRAINING:
                return processed
            self.chosen = ChosenBatches(
                processed,
                batches=self._batches,
                seconds=self._seconds,
                accumulate=trainer.accumulate_grad_batches,
                timed=self._profiles,
            )
            return self.chosen

        strategy.process_dataloader = process_dataloader

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What a run tells line by line is told here at the end."""
        self._compile.telemetry.reporter = EventReporter(enabled=False)
        self._before_steps()

    # ---- the loop --------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Profile the last steps; say which batch it is."""
        self._batch = batch
        self.look.read()  # before the first batch, Compile has warmed all shapes where a strategy asks for it
        self.look.phase = "training"
        assert self.chosen is not None
        first = self.chosen.timed_from
        if first is None or batch_idx < first:  # Lightning fetches one batch ahead, so that this may be known early
            self._progress(f"batch {batch_idx + 1}, {self.chosen.looked_at} looked at: forward, backward, step")
            return
        if batch_idx == first + SETTLING_BATCHES * trainer.accumulate_grad_batches:
            self._progress(f"profiling {TIMED_BATCHES - SETTLING_BATCHES} steps")
            program = self._compile.program
            assert program is not None
            self._profile.begin(trainer, [region.path for region in program.regions])
        self._profile.step_begins()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is through."""
        self._profile.step_ends()
        self.look.read()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Its graphs are its own."""
        self.look.read()
        self.look.phase = "validating"
        self._progress("validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Once is enough."""
        self.look.read()
        self.look.phase, self.validated = "training", True
        trainer.val_check_batch = float("inf")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ask eager, on the same batch: nothing is trained for keeps."""
        program, batch = self._compile.program, self._batch
        if batch is None or program is None or not isinstance(exception, Exception):
            return
        passes = Passes(trainer, cuda_graphs=False)
        with contextlib.suppress(Exception), passes.quiet(), eager(program):
            passes.step(batch)
            self.eager_passed = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """One epoch is all."""
        trainer.should_stop = True

    # ---- after it --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop watching, whatever happened; figures stay."""
        self.coverage = self._profile.end() or self.coverage
        self.look.read()
        self.look.stop()
        for module, call in self._calls:
            module._compiled_call_impl = call
        self._calls.clear()

    def _watch_regions(self, program: Program) -> None:
        """Have each compiled call say on whose behalf the compiler works; regions within regions are not called."""
        every = [region.path for region in program.regions]
        for region in program.regions:
            self.paths.setdefault(region.kind, []).append(region.path)
            module = program.module.get_submodule(region.path)
            if any(region.path.startswith(f"{path}.") for path in every) or module._compiled_call_impl is None:
                continue
            self._calls.append((module, module._compiled_call_impl))
            module._compiled_call_impl = self._watched(module._compiled_call_impl, region.kind)

    def _watched(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        called: set[str] = set()

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.look.read()
            first = self.look.phase not in called
            called.add(self.look.phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.look.read(kind, first_call=first)

        return watched
