"""The Compile callback: brings strategies into any Lightning training and measures what they cost and gave.

    L.Trainer(callbacks=[Compile([Regional()])])

It is one callback on purpose: Lightning spends about 10 microseconds a step on every further one, used or not.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.parameter import is_lazy

from strategies import Program, Ragged, Stage, Strategy
from strategies.base import StepRunner
from strategies.compose import apply, begin, check, compiler_settings, end, label, ordered
from strategies.prepare import Preparation
from strategies.regions import give_up
from trainer.choices import profile_complaints
from trainer.guards.audits import Audits, SavedCheckpoints
from trainer.guards.compare import ParityError
from trainer.guards.guards import CompiledNothing, Guards, refuse_accumulation
from trainer.guards.parity import ReplayParity
from trainer.guards.preflight import Guarding
from trainer.guards.rollback import optimizer_to_eager
from trainer.guards.slowdown import Sample
from trainer.loading import pad_loaders
from trainer.loops.lightning import LightningLoop
from trainer.telemetry.files import finite
from trainer.telemetry.record import Event, RunRecord
from trainer.telemetry.telemetry import BatchCounter, Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages

__all__ = ["Compile", "CompiledNothing"]


class Compile(L.Callback):
    """Applies strategies in place before training starts, verifies that they compiled, and keeps the telemetry.

    Args:
        strategies: What to apply; empty means eager, measured by the same code.
        whole, blocks, parts: What the module declares to the compiler, see ``strategies.Program``.
        ragged: The batch's tensors of ragged length, see ``strategies.Ragged``.
        count: Counts a batch for the throughput figures, see ``BatchCounter``; None leaves them out.
        warmup_steps: Optimizer steps left out of the steady figures even when nothing is compiled.
        measure_peak: Whether to time a product of large matrices first; None = on a CUDA device.
        record: Filled in as the run goes; a plain one is made when None.
        profile, profile_steps: Whether, and for how many optimizer steps, torch's profiler records a trace into
            ``<default_root_dir>/profile``; they are left out of the steady figures.
        parity, on_compile_error, on_slower, on_difference: What to do when the compiled program is not eager's before
            the first step, does not compile, is slower than eager or is not eager's later on, see
            ``trainer.settings.Config``.

    Raises:
        ValueError: Strategies that conflict, or options that this machine or module does not have.
        CompiledNothing, ParityError, RecompileError: See ``trainer.guards.guards``.
    """

    def __init__(
        self,
        strategies: Iterable[Strategy] = (),
        *,
        whole: Iterable[str] = (),
        blocks: Iterable[str] = (),
        parts: Iterable[str] = (),
        ragged: Iterable[tuple[str, int] | tuple[str, int, float] | tuple[str, int, float, int]] = (),
        count: BatchCounter | None = None,
        warmup_steps: int = 5,
        measure_peak: bool | None = None,
        record: RunRecord | None = None,
        parity: str = "on",
        on_compile_error: str = "fail",
        on_slower: str = "warn",
        on_difference: str = "fail",
        profile: str = "off",
        profile_steps: int = 5,
    ) -> None:
        self._guarding = Guarding(
            parity=parity, on_compile_error=on_compile_error, on_slower=on_slower, on_difference=on_difference
        )
        self.strategies = ordered(strategies)
        check(self.strategies)
        self._choosing = next((strategy for strategy in self.strategies if strategy.chooser is not None), None)
        self._preparation = Preparation() if any(strategy.needs_inductor for strategy in self.strategies) else None
        self.record = record or RunRecord(task="", label=label(self.strategies))
        self.program: Program | None = None
        self._declared: dict[str, Any] = {
            "whole": tuple(whole),
            "blocks": tuple(blocks),
            "parts": tuple(parts),
            "ragged": tuple(Ragged(*entry) for entry in ragged),
        }
        complaints = profile_complaints(profile, profile_steps)
        if complaints:
            raise ValueError("\n".join(complaints))
        self._measured: dict[str, Any] = {
            "count": count,
            "warmup_steps": warmup_steps,
            "measure_peak": measure_peak,
            "profile_steps": profile_steps if profile == "on" else None,
        }
        self._settings = contextlib.ExitStack()
        self._pages: TensorBoardPages | None = None
        self._guards: Guards | None = None
        self._capture: StepRunner | None = None
        self._audits: Audits | None = None
        self._open, self._told = False, 0
        self.telemetry = Telemetry(**self._measured, log_every_n_steps=50)

    @property
    def profile_steps(self) -> int | None:
        """Steps or batches that the profiler records; None without."""
        return self._measured["profile_steps"]

    # ---- before training -------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Apply the strategies, once; their settings hold until ``teardown``."""
        self._open = True
        if self.program is None or self.program.module is not pl_module:
            if self._preparation is not None:
                self._preparation.wait_for_imports()
            self.program = Program(
                module=pl_module,
                strategies=tuple(self.strategies),
                device=trainer.strategy.root_device,
                precision=str(trainer.precision),
                **self._declared,
            )
            apply(self.strategies, self.program)
            self._told = 0
            self._tell(self.program)
            self.record.regions = len(self.program.regions) if self.strategies else None
            if self._preparation is not None:
                self._preparation.wait()
                self.record.preparation_seconds = self._preparation.cost_seconds
        self._cuda_graphs = self.program.uses_cuda_graphs
        if self._cuda_graphs:
            refuse_accumulation(trainer)
        self._settings.enter_context(
            compiler_settings(self.program.settings, eager_embeddings=self.program.eager_embeddings)
        )
        if self.program.padding is not None:
            pad_loaders(trainer, self.program)
        if stage == "fit":
            every = trainer.log_every_n_steps  # type: ignore[attr-defined]
            self.telemetry = Telemetry(**self._measured, log_every_n_steps=every)
            self.telemetry.compiler.start()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Model, optimizer and restored state are in place: begin to measure."""
        assert self.program is not None
        self.program.optimizers = tuple(trainer.optimizers)
        self.program.loop = self._loop = LightningLoop(trainer, cuda_graphs=self._cuda_graphs)
        begin(self.strategies, self.program)
        self._tell(self.program)
        self._pages = TensorBoardPages(trainer.logger if trainer.is_global_zero else None)
        self._pages.begin(self.record)
        if self._choosing is None:
            self._guard(trainer, self.program)
        self.telemetry.start(trainer, self._pages)

    def _choose(self, choosing: Strategy, trainer: L.Trainer, program: Program, batch: Any) -> None:
        """Put the strategies that it chooses in the place of ``choosing``."""
        assert choosing.chooser is not None
        with self.telemetry.preflight():
            make: Any = pkgutil.resolve_name(choosing.chooser)
            chooser = make(choosing, trainer, program, self.telemetry, self._settings)
            chosen = chooser.choose(batch)
        begin(chosen, program)
        self._choosing = None  # chosen for good: another fit continues with it
        self.strategies = ordered([*(strategy for strategy in self.strategies if strategy is not choosing), *chosen])
        program.strategies = tuple(self.strategies)
        self.record.chosen_strategies = [strategy.facts() for strategy in ordered(chosen)]
        self.record.regions = len(program.regions) if self.strategies else None
        self._guard(trainer, program, chooser.sample, chosen=True)

    def _guard(
        self, trainer: L.Trainer, program: Program, sample: Sample | None = None, *, chosen: bool = False
    ) -> None:
        """The strategies are final: capture steps where one of them says so, and guard what they do."""
        if program.step is not None:
            if self._guarding.parity != "off":
                program.step.verifier = ReplayParity(self._guarding.parity, self._loop, program)
            self._capture = program.step.take_over(self._loop, program)
        self._guards = Guards(
            self._guarding, self._loop, program, self.telemetry, self.record, sample=sample, chosen=chosen
        )
        if self._guarding.parity != "off" and program.strategies:
            assert self._pages is not None
            self._audits = Audits(
                self._guarding.parity,
                self._loop,
                program,
                self.telemetry,
                self._pages,
                checkpoints=SavedCheckpoints(trainer),
                captured=lambda: program.captures_steps,
                gradients=lambda: None if self._capture is None else self._capture.gradients,
                differs=self._differs,
            )
            self.record.audits = self._audits.facts
            if self._capture is not None:
                self._capture.sample = self._audits.sample

    def _differs(self, error: ParityError) -> None:
        """An audited step is not eager's: end the run, or continue in eager."""
        if self._guarding.on_difference != "eager":
            raise error
        assert self._audits is not None
        assert self.program is not None
        self._audits.facts.verdict = "went eager"
        self._release()
        give_up(self.program, list(self.program.regions), str(error))
        if any(strategy.stage is Stage.OPTIMIZER for strategy in self.strategies):
            optimizer_to_eager(self.program)
            self.program.eager_parts["optimizer"] = str(error)
        line = f"on_difference=eager: the run continues in eager. {error}"
        rank_zero_warn(line)
        self.program.notes.append(line)
        event = Event(kind="fallback", reason=line, step=self.telemetry.steps_done + 1)
        self.telemetry.compiler.events.append(event)

    def _release(self) -> None:
        """Give Lightning its own steps back, in the opposite order."""
        if self._audits is not None:
            self._audits.release()
            self._audits = None
        if self._capture is not None:
            self._capture.release()
            self._capture = None

    # ---- the hot path ----------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Choose strategies and run the preflight on the first batch; a step begins."""
        waits = self._choosing is not None and any(map(is_lazy, pl_module.parameters()))  # until eager has shaped them
        if self._choosing is not None and self.program is not None and not waits:
            self._choose(self._choosing, trainer, self.program, batch)
        if self._guards is not None and self.program is not None:
            self._guards.before_batch(batch)
            self._tell(self.program)
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.telemetry.batch_start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the telemetry that a batch is through; after the first optimizer step, verify the compile."""
        # Automatic optimization hands over {"loss": <detached clone divided by the micro-batches of a step>}.
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._capture is not None and not self._capture.settled:
            self.telemetry.disturb()
        stepped = self.telemetry.batch_end(loss if isinstance(loss, torch.Tensor) else None, batch)
        if self._guards is not None:
            self._guards.after_batch(stepped=stepped)

    # ---- pauses ----------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validation is not part of any step."""
        if trainer.state.fn == "fit":
            self.telemetry.pause("validating")

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Without a backward, only this mark tells CUDA graphs which outputs still belong together: one region's
        output would be overwritten by the next region of the same step."""
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Once all shapes are warmed, validation compiles nothing either."""
        if self._guards is not None and trainer.state.fn == "fit":
            self._guards.after_validation_batch()

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is not part of any step."""
        self.telemetry.pause("saving")

    # ---- after training --------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read what is still on its way and fill in the record."""
        self._finish(trainer, together=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Keep what was measured of a run that ends early; a broken device must not hide the first error."""
        if self._guards is not None:
            self._guards.on_exception(exception)
        for _ in range(2):
            # Twice: of data workers that a signal to the group has killed, torch says each one's death from a signal
            # handler, which raises wherever the main thread is, and so perhaps in here.
            with contextlib.suppress(Exception):
                self._finish(trainer, together=False)
                break
        with contextlib.suppress(Exception):
            self._close()  # Lightning calls no teardown after an error

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the strategies undo what must not outlive the run; restore the process-wide compiler settings."""
        self._close()

    def close_pages(self, summary: dict[str, str]) -> None:
        """Write the last TensorBoard pages once the record is complete."""
        if self._pages is not None:
            self._pages.finish(self.record, summary)

    def _tell(self, program: Program) -> None:
        """Pass on what the strategies have noted since the last time."""
        for note in program.notes[self._told :]:
            self.record.notes.append(note)
            rank_zero_info(f"compile: {note}")
        self._told = len(program.notes)

    def _close(self) -> None:
        with self._settings:
            self._release()
            if self.program is not None and self._open:
                self._open = False
                try:
                    end(self.strategies, self.program)
                finally:
                    self._tell(self.program)
        self.telemetry.compiler.stop()

    def _finish(self, trainer: L.Trainer, *, together: bool) -> None:
        self.telemetry.compiler.collect()
        if self._pages is None:  # it failed before training started
            return
        self.telemetry.finish()
        if self._guards is not None:
            self._guards.finish()
        fill_in(self.record, trainer, self.telemetry, self.program, together=together)
        if self.strategies or "auto" in self.record.report:
            self._pages.events(self.record.events, self.telemetry.steps_done)


def fill_in(
    record: RunRecord, trainer: L.Trainer, telemetry: Telemetry, program: Program | None, *, together: bool
) -> None:
    """Write what ``telemetry`` measured and ``program`` reports into ``record``; ``together`` as in
    ``Telemetry.fill``."""
    telemetry.fill(record, together=together)
    if program is not None:
        if (profile := telemetry.profile()) is not None:
            program.report["profile"] = profile
        record.report = program.report
        record.eager_parts = dict(program.eager_parts)
        record.ended_in_eager = ended_in_eager(program)
        # What was tried for a choice and not taken was compiled as well.
        if program.strategies or "auto" in program.report:
            record.take(telemetry.compiler.figures())
            record.events = list(telemetry.compiler.events)
    record.final_metrics = finite({name: float(value) for name, value in trainer.callback_metrics.items()})


def ended_in_eager(program: Program) -> bool | None:
    """Whether nothing is left that is compiled or captured; None where nothing was to be."""
    optimizers = any(strategy.is_compiled(program) for strategy in program.strategies)
    if not program.eager_parts:
        return None if not program.regions and not optimizers else False
    regions = any(region.path not in program.eager_parts for region in program.regions)
    captured = program.captures_steps and program.step is not None and program.step.captures > 0
    return not (regions or captured or optimizers)
