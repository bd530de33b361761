"""The Compile callback in inference: the same strategies, applied at the same time, measured by other telemetry."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning as L

from strategies import Program
from strategies.compose import begin
from trainer.callback import Compile
from trainer.filled_record import ended_in_eager
from trainer.rehearsal import Guarding
from trainer.telemetry.facts import with_idle_share
from trainer.telemetry.inference import InferenceTelemetry
from trainer.telemetry.record import AuditFacts
from trainer.telemetry.tensorboard import TensorBoardPages


class CompileForInference(Compile):
    """``Compile`` whose owner is the inference loop instead of Lightning's training loop."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.inference_telemetry = InferenceTelemetry(
            count=self._measured["count"], measure_peak=self._measured["measure_peak"]
        )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Apply the strategies, and begin to watch the compiler."""
        super().setup(trainer, pl_module, stage)
        self.inference_telemetry.compiler.start()

    @property
    def guarding(self) -> Guarding:
        """What is asked for where the compiled forward is not eager's."""
        return self._guarding

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether Inductor replays what it compiled from CUDA graphs."""
        return self._cuda_graphs

    def begin_inference(self, trainer: L.Trainer) -> Program:
        """Model and weights are in place; returns the program."""
        assert self.program is not None
        begin(self.strategies, self.program)
        self._tell(self.program)
        self._pages = TensorBoardPages(trainer.logger if trainer.is_global_zero else None)
        self._pages.begin(self.record)
        if self.strategies and self._guarding.parity != "off":
            self.record.audits = AuditFacts(verdict="not audited", reason="nothing is trained")
        self.inference_telemetry.start(trainer, self._pages)
        return self.program

    def tell(self) -> None:
        """Pass on what the strategies have noted since the last time."""
        assert self.program is not None
        self._tell(self.program)

    def finish_inference(self, trainer: L.Trainer, *, together: bool) -> None:
        """Fill in the record with what was measured; ``together`` adds the rates of all processes up."""
        telemetry, record = self.inference_telemetry, self.record
        telemetry.phase = "finishing"
        telemetry.compiler.collect()
        telemetry.fill(record, together=together)
        if self.strategies:
            record.take(telemetry.compiler.figures())
            record.events = list(telemetry.compiler.events)
            if self._pages is not None:
                self._pages.events(record.events, telemetry.steps_done)
        if self.program is not None:
            record.report = self.program.report
            record.eager_parts = dict(self.program.eager_parts)
            record.ended_in_eager = ended_in_eager(self.program)
            if "profile" in record.report:
                facts = with_idle_share(record.report["profile"], record.latency_seconds_median)
                record.report["profile"] = facts

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The loop has kept what was measured; undo what must not outlive the run."""
        with contextlib.suppress(Exception):
            self._close()

    def _close(self) -> None:
        super()._close()
        self.inference_telemetry.compiler.stop()
