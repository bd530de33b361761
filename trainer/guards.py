"""Guards: what is checked before the first step and watched after it, on the callback's behalf."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from strategies import Program
from strategies.compile_errors import is_compile_error
from strategies.inplace import uncompile
from trainer.rehearsal import Guarding, Rehearsal
from trainer.rollback import Rollback
from trainer.telemetry.events import Event
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry
from trainer.warming import Lock
from trainer.watchdog import Sample, Watchdog


class CompiledNothing(RuntimeError):
    """A strategy handed modules to the compiler and none of them was compiled."""


class Guards:
    """The guards of one training; the owner calls the methods named after the moments of the loop."""

    def __init__(
        self,
        guarding: Guarding,
        trainer: L.Trainer,
        program: Program,
        telemetry: Telemetry,
        record: RunRecord,
        *,
        cuda_graphs: bool,
        sample: Sample | None = None,
    ) -> None:
        self._guarding, self._trainer, self._program, self._telemetry = guarding, trainer, program, telemetry
        self._record = record
        self._rehearsal = Rehearsal(guarding, trainer, program, telemetry, cuda_graphs=cuda_graphs, sample=sample)
        self._begun = self._stepped = False
        self._rollback: Rollback | None = None
        self._watchdog: Watchdog | None = None
        self._lock: Lock | None = None

    def before_batch(self, batch: Any) -> None:
        """A batch is on the device: rehearse on the first one; later, time it where the run is under suspicion."""
        if not self._begun:
            self._begun = True
            if self._rehearsal.wanted:
                with self._telemetry.rehearsal():
                    self._rollback = self._rehearsal.run(batch)
                if self._rehearsal.sample is not None:
                    self._watchdog = Watchdog(self._trainer, self._telemetry, self._rehearsal.sample)
                if self._rehearsal.warmed and self._program.padding is not None:
                    padding = self._program.padding
                    if self._program.step is not None:
                        self._program.step.warmed = True
                    self._lock = Lock(padding.on_recompile, padding.name, self._program, self._telemetry.compiler)
        elif self._watchdog is not None and self._watchdog.suspects:
            self._watchdog.suspects = False
            if self._program.step is not None:
                self._say_captured_is_slow(self._watchdog)
                return
            self._telemetry.pause("timing eager")
            self._judge(self._watchdog, self._rehearsal.time_again(batch))

    def after_batch(self, *, stepped: bool) -> None:
        """A training batch is through. Raises CompiledNothing after the first step, RecompileError after warming."""
        if stepped and not self._stepped:
            self._stepped = True
            if self._program.strategies:
                self._verify()
            if self._lock is not None:
                self._lock.close()
                self._telemetry.teller.recompiles = False
        elif self._lock is not None:
            self._lock.look(lambda: f"in training step {self._trainer.global_step}")
        if stepped and self._watchdog is not None and self._reads_clock():
            self._watchdog.look()

    def after_validation_batch(self) -> None:
        """A validation batch is through. Raises RecompileError after warming."""
        if self._lock is not None:
            self._lock.look(lambda: f"in the validation after step {self._trainer.global_step}")

    def on_exception(self, error: BaseException) -> None:
        """A compile that failed in the middle of a step, where nothing can be rolled back, deserves a word."""
        if self._rollback is not None and self._guarding.on_compile_error == "eager" and is_compile_error(error):
            self._program.notes.append(
                "on_compile_error=eager: this compile failed where nothing could be rolled back (in a backward, or "
                "with several processes); resume with the part left out, or warm all shapes with compile=buckets"
            )

    def _judge(self, watchdog: Watchdog, again: Sample) -> None:
        slower = self._trainer.strategy.reduce_boolean_decision(again.slower, all=False)
        steady = watchdog.steady_seconds()
        facts = {"steady_step_seconds": steady, "on_a_later_batch": again.facts(), "slower": slower}
        self._program.report.setdefault("watchdog", {}).update(facts)
        if not slower:
            return
        line = (
            f"slower than eager: a step takes {again.compiled_median * 1e3:.3g} ms compiled against "
            f"{again.eager_median * 1e3:.3g} ms eager on the same batch (steady steps: {steady * 1e3:.3g} ms)"
        )
        if self._guarding.on_slower == "eager":
            undone = [region.path for region in self._program.regions]
            uncompile(self._program)
            line += f"; on_slower=eager: {len(undone)} regions go on eager"
            self._program.report["watchdog"]["rolled_back"] = undone
            event = Event(kind="fallback", reason=line, step=self._trainer.global_step)
            self._telemetry.compiler.events.append(event)
        self._program.notes.append(line)
        rank_zero_warn(line)

    def _say_captured_is_slow(self, watchdog: Watchdog) -> None:
        # A step from its graph cannot be timed in turns with eager; what there is are the steady steps.
        steady, eager = watchdog.steady_seconds(), watchdog.sample.eager_median
        line = (
            f"slower than eager, maybe: captured steps take {steady * 1e3:.3g} ms each, a step of eager took "
            f"{eager * 1e3:.3g} ms on the first batch"
        )
        if self._guarding.on_slower == "eager":
            line += "; on_slower=eager leaves captured steps as they are"
        self._program.report.setdefault("watchdog", {}).update({"steady_step_seconds": steady, "slower": None})
        self._program.notes.append(line)
        rank_zero_warn(line)

    def _reads_clock(self) -> bool:
        return self._trainer.global_step % self._trainer.log_every_n_steps == 0  # type: ignore[attr-defined]

    def _verify(self) -> None:
        watch, regions = self._telemetry.compiler, self._program.regions
        compiled = watch.compiled(region.frame for region in regions)
        self._record.regions_compiled = sum(compiled)
        missing = [region.path for region, done in zip(regions, compiled, strict=True) if not done]
        if regions and len(missing) == len(regions):
            raise CompiledNothing(
                f"{self._record.label}: the compiler was handed {len(regions)} regions and compiled none of them"
                + "".join(f"; {event.reason}" for event in watch.events[:1])
                + " (is TORCHDYNAMO_DISABLE set, or does the step never call them?)"
            )
        if missing:
            note = f"{self._record.label}: not compiled, the first step ran them eager or not at all: "
            note += ", ".join(missing)
            self._program.notes.append(note)
            rank_zero_warn(note)


def refuse_accumulation(trainer: L.Trainer) -> None:
    """Raise ValueError where Inductor's CUDA graphs would be given several batches a step."""
    if trainer.accumulate_grad_batches > 1:
        # https://github.com/pytorch/pytorch/issues/169545, https://github.com/pytorch/pytorch/issues/96693
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: CUDA graphs "
            "(mode reduce-overhead or max-autotune) may overwrite accumulated gradients without a word; "
            "use mode=max-autotune-no-cudagraphs or default"
        )
