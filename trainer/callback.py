"""The Compile callback: brings strategies into any Lightning training and measures what they cost and gave.

    L.Trainer(callbacks=[Compile([Regional()])])

It is one callback on purpose: Lightning spends about 10 microseconds a step on every further one, used or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from strategies import Program, Ragged, Strategy
from strategies.compose import apply, begin, check, compiler_settings, end, label, ordered
from strategies.prepare import Preparation
from trainer.loaders import pad_loaders
from trainer.rehearsal import Rehearsal
from trainer.step_capture import capture_steps
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import BatchCounter, Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages


class CompiledNothing(RuntimeError):
    """A strategy handed modules to the compiler and none of them was compiled."""


class Compile(L.Callback):
    """Applies strategies in place before training starts, verifies that they compiled, and keeps the telemetry.

    Args:
        strategies: What to apply; empty means eager, measured by the same code.
        whole, blocks, parts: What the module declares to the compiler, see ``strategies.Program``.
        ragged: The batch's tensors of ragged length, see ``strategies.Ragged``.
        count: Counts a batch for the throughput figures, see ``BatchCounter``; None leaves them out.
        warmup_steps: Optimizer steps left out of the steady figures even when nothing is compiled.
        record: Filled in as the run goes; a plain one is made when None.

    Raises:
        ValueError: Strategies that conflict, or options that this machine or module does not have.
        CompiledNothing: After the first step, when no region was compiled.
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
        record: RunRecord | None = None,
    ) -> None:
        self.strategies = ordered(strategies)
        check(self.strategies)
        self._preparation = Preparation() if any(strategy.needs_inductor for strategy in self.strategies) else None
        self.record = record or RunRecord(task="", label=label(self.strategies))
        self.program: Program | None = None
        self._declared: dict[str, Any] = {
            "whole": tuple(whole),
            "blocks": tuple(blocks),
            "parts": tuple(parts),
            "ragged": tuple(Ragged(*entry) for entry in ragged),
        }
        self._count = count
        self._warmup_steps = warmup_steps
        self._settings = contextlib.ExitStack()
        self._pages: TensorBoardPages | None = None
        self._rehearsal = Rehearsal(self.record)
        self._rehearsed = False
        self.telemetry = Telemetry(count=count, warmup_steps=warmup_steps, log_every_n_steps=50)

    # ---- before training -------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Apply the strategies, once; their settings hold until ``teardown``."""
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
        # On a CPU these modes mean nothing, and neither does what follows from them.
        on_cuda = trainer.strategy.root_device.type == "cuda"
        self._cuda_graphs = on_cuda and any(strategy.uses_cuda_graphs for strategy in self.strategies)
        if self._cuda_graphs and trainer.accumulate_grad_batches > 1:
            # https://github.com/pytorch/pytorch/issues/169545, https://github.com/pytorch/pytorch/issues/96693
            raise ValueError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: CUDA graphs "
                "(mode reduce-overhead or max-autotune) may overwrite accumulated gradients without a word; "
                "use mode=max-autotune-no-cudagraphs or default"
            )
        self._settings.enter_context(compiler_settings(self.program.settings))
        if self.program.padding is not None:
            pad_loaders(trainer, self.program)
        if stage == "fit":
            self._rehearsed = False
            self.telemetry = Telemetry(
                count=self._count,
                warmup_steps=self._warmup_steps,
                log_every_n_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]
            )
            self.telemetry.compiler.start()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Model, optimizer and restored state are in place: begin to measure."""
        assert self.program is not None
        self.program.optimizers = tuple(trainer.optimizers)
        begin(self.strategies, self.program)
        self._tell(self.program)
        if self.program.step is not None:
            capture_steps(trainer, self.program)
        self._pages = TensorBoardPages(trainer.logger if trainer.is_global_zero else None)
        self._pages.begin(self.record)
        self._verified = not self.strategies
        self.telemetry.start(trainer, self._pages)

    # ---- the hot path ----------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Rehearse on the first batch; tell the telemetry that a step begins."""
        if not self._rehearsed:
            self._rehearse(trainer, batch)
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.telemetry.batch_start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the telemetry that a batch is through; after the first optimizer step, verify the compile."""
        # Automatic optimization hands over {"loss": <detached clone divided by the micro-batches of a step>}.
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        stepped = self.telemetry.batch_end(loss if isinstance(loss, torch.Tensor) else None, batch)
        if stepped and not self._verified:
            self._verify()

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
        with contextlib.suppress(Exception):
            self._finish(trainer, together=False)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the strategies undo what must not outlive the run; restore the process-wide compiler settings."""
        with self._settings:
            if self.program is not None:
                try:
                    end(self.strategies, self.program)
                finally:
                    self._tell(self.program)
        self.telemetry.compiler.stop()

    def close_pages(self, summary: dict[str, str]) -> None:
        """Write the last TensorBoard pages once the record is complete."""
        if self._pages is not None:
            self._pages.finish(self.record, summary)

    def _rehearse(self, trainer: L.Trainer, batch: Any) -> None:
        self._rehearsed = True
        assert self.program is not None
        if self._rehearsal.wanted(self.program):
            with self.telemetry.rehearsal():
                self._rehearsal.run(trainer, self.program, batch)
            self._tell(self.program)

    def _tell(self, program: Program) -> None:
        """Pass on what the strategies have noted since the last time."""
        for note in program.notes[self._told :]:
            self.record.notes.append(note)
            rank_zero_info(f"compile: {note}")
        self._told = len(program.notes)

    def _verify(self) -> None:
        self._verified = True
        assert self.program is not None
        regions = self.program.regions
        compiled = self.telemetry.compiler.compiled(region.frame for region in regions)
        self.record.regions_compiled = sum(compiled)
        missing = [region.path for region, done in zip(regions, compiled, strict=True) if not done]
        if regions and len(missing) == len(regions):
            raise CompiledNothing(
                f"{self.record.label}: the compiler was handed {len(regions)} regions and compiled none of them"
                + "".join(f"; {event.reason}" for event in self.telemetry.compiler.events[:1])
                + " (is TORCHDYNAMO_DISABLE set, or does the step never call them?)"
            )
        if missing:
            note = (
                f"{self.record.label}: not compiled, the first step ran them eager or not at all: {', '.join(missing)}"
            )
            self.record.notes.append(note)
            rank_zero_warn(note)

    def _finish(self, trainer: L.Trainer, *, together: bool) -> None:
        self.telemetry.compiler.collect()
        if self._pages is None:  # it failed before training started
            return
        self.telemetry.finish()
        for name, value in self.telemetry.figures(together=together).items():
            setattr(self.record, name, value)
        if self.program is not None:
            self.record.report = self.program.report
        if self.strategies:
            for name, value in self.telemetry.compiler.figures().items():
                setattr(self.record, name, value)
            self.record.events = list(self.telemetry.compiler.events)
            self._pages.events(self.record.events, self.telemetry.steps_done)
        if self.telemetry.ready_seconds is not None and self.record.import_seconds is not None:
            self.record.setup_seconds = self.telemetry.ready_seconds - self.record.import_seconds
        self.record.final_metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
