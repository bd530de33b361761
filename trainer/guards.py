"""Guards: what is checked before the first step and watched after it, on the callback's behalf."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parameter import is_lazy

from strategies import Program
from strategies.compile_errors import is_compile_error
from strategies.inplace import give_up, outermost
from trainer.eager import eager
from trainer.parity.comparison import ParityError
from trainer.reasons import one_line
from trainer.rehearsal import Guarding, Rehearsal
from trainer.rollback import Rollback
from trainer.telemetry.facts import number
from trainer.telemetry.record import Event, RunRecord
from trainer.telemetry.telemetry import Telemetry
from trainer.warming import Lock
from trainer.watchdog import Sample, Watchdog

CHANCES = 10
"""Optimizer steps within which a region has to be called: what joins later, or a first batch without a loss, is no
mistake."""
NEVER_CALLED = "never called (a module has to be called itself, not its forward or another method)"
CALLED_IN_VAIN = "called, and nothing in it was compiled"


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
        chances: int = CHANCES,
        chosen: bool = False,
    ) -> None:
        """``chances``: optimizer steps after which it is an error that nothing was compiled. ``chosen``: the strategies
        are what ``compile=auto`` chose, so that eager takes over where they fail."""
        if chosen:
            guarding = dataclasses.replace(guarding, on_compile_error="eager")
        self._chances, self._chosen = chances, chosen
        self._steps = self._waited = 0
        self._verified = self._waits = False
        self._eagerly = contextlib.ExitStack()
        self._guarding, self._trainer, self._program, self._telemetry = guarding, trainer, program, telemetry
        self._record = record
        self._rehearsal = Rehearsal(guarding, trainer, program, telemetry, cuda_graphs=cuda_graphs, sample=sample)
        self._begun = self._stepped = False
        self._rollback = self._new_rollback()
        self._watchdog: Watchdog | None = None
        self._lock: Lock | None = None

    def before_batch(self, batch: Any) -> None:
        """A batch is on the device: rehearse on the first one; later, time it where the run is under suspicion."""
        if not self._begun and (self._rehearsal.wanted or self._program.regions) and self._waits_for_parameters():
            return
        if not self._begun:
            self._begun, self._waits = True, False
            if self._rehearsal.wanted:
                with self._telemetry.preflight():
                    self._rollback = self._rehearse(batch) or self._rollback
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
        self._eagerly.close()
        stepped = stepped and not self._waits
        if stepped and self._steps < self._chances and self._record.regions:  # which is the same on all processes
            self._steps += 1
            if self._steps in (1, self._chances):
                self._rollback.look()
                self._verify(last=self._steps == self._chances)
        if stepped and not self._stepped:
            self._stepped = True
            if self._lock is not None:
                self._lock.close()
                self._telemetry.reporter.recompiles = False
        elif self._lock is not None:
            self._lock.look(lambda: f"in training step {self._trainer.global_step}")
        if stepped and self._reads_clock():
            self._rollback.look()
            if self._watchdog is not None:
                self._watchdog.look()

    def after_validation_batch(self) -> None:
        """A validation batch is through. Raises RecompileError after warming."""
        if self._lock is not None:
            self._lock.look(lambda: f"in the validation after step {self._trainer.global_step}")

    def finish(self) -> None:
        """The training is over, one way or another: note what was to be compiled and was not."""
        self._eagerly.close()
        if not self._stepped:
            return
        self._rollback.look()
        missing = self._not_compiled()
        self._program.eager_parts.update(missing)
        if missing and not self._verified:
            self._say_missing(missing)
        events = self._telemetry.compiler.events
        for part, reason in self._program.eager_parts.items():
            if not any(event.kind == "fallback" and reason in event.reason for event in events):
                events.append(Event(kind="fallback", reason=f"{part}: {reason}"))

    def on_exception(self, error: BaseException) -> None:
        """A compile that failed in the middle of a step, where nothing can be rolled back, deserves a word."""
        if self._stepped and self._guarding.on_compile_error == "eager" and is_compile_error(error):
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
            f"slower than eager: a step takes {number(again.compiled_median * 1e3)} ms compiled against "
            f"{number(again.eager_median * 1e3)} ms eager on the same batch (steady steps: {number(steady * 1e3)} ms)"
        )
        if self._guarding.on_slower == "eager":
            undone = [region.path for region in self._program.regions]
            give_up(self._program, list(self._program.regions), f"{line}; on_slower=eager")
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
            f"slower than eager, maybe: captured steps take {number(steady * 1e3)} ms each, a step of eager took "
            f"{number(eager * 1e3)} ms on the first batch"
        )
        if self._guarding.on_slower == "eager":
            line += "; on_slower=eager leaves captured steps as they are"
        self._program.report.setdefault("watchdog", {}).update({"steady_step_seconds": steady, "slower": None})
        self._program.notes.append(line)
        rank_zero_warn(line)

    def _reads_clock(self) -> bool:
        return self._trainer.global_step % self._trainer.log_every_n_steps == 0  # type: ignore[attr-defined]

    def _verify(self, *, last: bool) -> None:
        """Raise CompiledNothing where that is certain: all regions were called, or had all their chances."""
        missing = self._not_compiled()
        nothing = bool(missing) and len(missing) == len(self._program.regions)
        uncalled = NEVER_CALLED in missing.values()
        decide = self._trainer.strategy.reduce_boolean_decision
        if decide(nothing and (last or not uncalled), all=True):
            self._verified = True
            line = (
                f"{self._record.label}: the compiler was handed {len(missing)} regions and compiled none of them"
                + "".join(f"; {event.reason}" for event in self._telemetry.compiler.events[:1])
            )
            line += f" (in {self._steps} optimizer steps: {_by_reason(missing)})"
            if self._guarding.on_compile_error == "fail":
                raise CompiledNothing(f"{line}; on_compile_error=eager trains all the same")
            self._rollback.give_up(list(self._program.regions), line)
        elif (last or not uncalled) and not self._verified:
            self._verified = True
            if missing:
                self._say_missing(missing)

    def _not_compiled(self) -> dict[str, str]:
        """Regions of which nothing was compiled so far, with the reason; a region within another is that one's part."""
        watch, program = self._telemetry.compiler, self._program
        missing: dict[str, str] = {}
        for outer in outermost(program):
            if outer.called and watch.compiled(program.module.get_submodule(outer.path)):
                continue
            inside = [one.path for one in program.regions if f"{one.path}.".startswith(f"{outer.path}.")]
            missing.update(dict.fromkeys(inside, CALLED_IN_VAIN if outer.called else NEVER_CALLED))
        done = len(program.regions) - len(missing)
        if self._record.regions is not None:
            self._record.regions_compiled = max(self._record.regions_compiled or 0, done)
        return missing

    def _say_missing(self, missing: dict[str, str]) -> None:
        note = f"{self._record.label}: not compiled in {self._steps} optimizer steps, {_by_reason(missing)}"
        self._program.notes.append(note)
        rank_zero_warn(note)

    def _waits_for_parameters(self) -> bool:
        """Whether parameters have no shape yet (``nn.LazyLinear``): their first batch makes them, and runs eager."""
        lazy = [name for name, parameter in self._program.module.named_parameters() if is_lazy(parameter)]
        if not lazy:
            return False
        self._waits = True
        self._waited += 1
        if self._waited > self._chances:
            reason = f"{', '.join(lazy[:3])} got no shape in {self._chances} batches"
            self._begun, self._waits = True, False
            self._program.notes.append(f"nothing was rehearsed, compared with eager or warmed: {reason}")
            if self._program.regions:
                self._rollback.give_up(list(self._program.regions), reason, because="nn.Lazy modules")
            return True
        if self._waited == 1:
            named = f"{', '.join(lazy[:3])}{' ...' if len(lazy) > 3 else ''}"
            line = f"{named}: no shape before the first call (nn.Lazy modules), so the first batch runs eager"
            self._program.notes.append(line)
        self._eagerly.enter_context(eager(self._program))
        return True

    def _rehearse(self, batch: Any) -> Rollback | None:
        try:
            return self._rehearsal.run(batch)
        except ParityError as error:
            if not self._chosen:
                raise
            self._rollback.give_up(list(self._program.regions), one_line(error), because="compile=auto")
            self._rehearsal.sample = None
            return self._rehearsal.run(batch) if self._rollback.anything_left else None

    def _new_rollback(self) -> Rollback:
        return Rollback(self._guarding.on_compile_error, self._trainer, self._program, self._telemetry.compiler)


def _by_reason(missing: dict[str, str]) -> str:
    reasons = dict.fromkeys(missing.values())
    return "; ".join(f"{', '.join(p for p, why in missing.items() if why == one)}: {one}" for one in reasons)


def refuse_accumulation(trainer: L.Trainer) -> None:
    """Raise ValueError where Inductor's CUDA graphs would be given several batches a step."""
    if trainer.accumulate_grad_batches > 1:
        # https://github.com/pytorch/pytorch/issues/169545, https://github.com/pytorch/pytorch/issues/96693
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: CUDA graphs "
            "(mode reduce-overhead or max-autotune) may overwrite accumulated gradients without a word; "
            "use mode=max-autotune-no-cudagraphs or default"
        )
