"""Chooser: times eager, tries what the steps to come could pay for, and names the strategies that take least time."""

from __future__ import annotations

import contextlib
from typing import Any

from strategies import STRATEGIES, Program, Strategy
from strategies.auto import Auto
from strategies.cached.session import facts_of, fingerprint_of
from strategies.errors import one_line
from strategies.loop import Loop, SkippedStep
from strategies.prepare import is_prepared
from trainer.auto.estimates import EAGER, IMPORT_SECONDS, Estimates, Module, Row, best, decision_line, next_trial
from trainer.auto.remembered import Remembered, directory, program_facts
from trainer.auto.trial import Candidate, Trials, prepare
from trainer.guards.preflight import shapes_of
from trainer.guards.slowdown import Sample
from trainer.telemetry.telemetry import Telemetry

ENDLESS = 1_000_000
"""Steps that are planned for a run whose length nobody knows."""


class Chooser:
    """Chooses once, on the first batch of a training; everything is restored, and what was compiled is not lost.

    Args:
        auto: What is asked for.
        settings: Takes the compiler settings of what is compiled; closed when the run ends.
    """

    def __init__(
        self, auto: Auto, loop: Loop, program: Program, telemetry: Telemetry, settings: contextlib.ExitStack
    ) -> None:
        self._auto, self._loop, self._program = auto, loop, program
        self.sample: Sample | None = None
        """Seconds of an eager step and of one as chosen, where modules were compiled and both were timed here."""
        self._candidates: dict[str, Candidate] = {}
        self._trials = Trials(self._candidates, loop, program, telemetry, settings)

    def choose(self, batch: Any) -> list[Strategy]:
        """The strategies to add, modules already compiled where one was tried; the decision is in the report.

        Raises what eager raises; nothing that a candidate raises.
        """
        reason = self._loop.why_not_apart()
        if reason is None and self._loop.manual:
            # A step could be timed. What its seconds are multiplied with could not be known: each batch may count for
            # several optimizer steps, or for none.
            reason = "under manual optimization only the module knows how many steps are to come"
        if reason is not None:
            return self._without_choice(reason)
        remembered = self._remembered(batch)
        estimates = self._estimates(batch)
        known = None if remembered is None else remembered.recall(estimates)
        # The first process decides: clocks and caches of the others may say something else.
        estimates, known = self._loop.broadcast((estimates, known))
        try:
            with self._trials.restored():
                while (module := self._next(estimates)) is not None:
                    self._trials.run(module, estimates, batch)
        except SkippedStep as skipped:
            return self._without_choice(str(skipped))
        except Exception as error:  # eager's: if it is the user's mistake, the first step raises it as it is
            if self._loop.world_size > 1:
                raise
            return self._without_choice(f"it failed on trial: {one_line(error)}")
        if all(module.failed for module in estimates.modules.values()):
            # Eager did not fit beside the copies that a trial needs; without them it may.
            failed = "; ".join(f"{module.name}: {module.failed}" for module in estimates.modules.values())
            return self._without_choice(f"no candidate could train a step on trial ({failed})")
        name = self._loop.broadcast(best(estimates, self._auto.margin).name)
        row = next(row for row in estimates.rows() if row.name == name)
        self._report(estimates, row, known)
        if remembered is not None and self._trials.tried and self._loop.is_first_process:
            not_kept = remembered.keep(estimates, chosen=row.name)
            if not_kept is not None:
                self._program.notes.append(f"auto: the decision is not remembered, {not_kept}")
        self.sample = self._sample(estimates, row)
        return self._put_on(row)

    def _next(self, estimates: Estimates) -> Module | None:
        module = next_trial(estimates, self._auto.margin)
        name = self._loop.broadcast(None if module is None else module.name)
        return None if name is None else estimates.modules[name]

    def _remembered(self, batch: Any) -> Remembered | None:
        if not self._auto.remember:
            return None
        facts = {
            **facts_of(self._program, leave_out=self._auto.name),
            **program_facts(self._program),
            "batch": shapes_of(batch),
            "processes": self._loop.world_size,
            "micro_batches": self._loop.micro_batches,
        }
        return Remembered(directory(self._auto.memory), fingerprint_of(facts))

    def _estimates(self, batch: Any) -> Estimates:
        program = self._program
        assert program.device is not None
        estimates = Estimates(
            steps=self._planned(),
            device=program.device.type,
            modules={EAGER: Module(name=EAGER)},
            capture=self._capture(batch),
            warm=bool(program.findings),
            validates=self._loop.validates,
        )
        for name in ("regional", "whole"):
            if name in self._auto.candidates:
                estimates.modules[name] = self._module(name)
        if any(candidate.needs_inductor for candidate in self._candidates.values()) and not is_prepared():
            estimates.import_seconds = IMPORT_SECONDS
        return estimates

    def _capture(self, batch: Any) -> str:
        loop, program = self._loop, self._program
        assert program.device is not None
        if any(strategy.captures_step for strategy in program.strategies):
            return "always"
        wanted = "cuda_graph" in self._auto.candidates and program.device.type == "cuda" and loop.world_size == 1
        reasons = list(loop.why_not_capture()) if wanted else []
        if wanted and not reasons:
            reasons = self._trials.reasons_against_capture(batch)
        if reasons:
            program.notes.append(f"auto: no step is captured: {reasons[0]}")
        return "maybe" if wanted and not reasons else "no"

    def _module(self, name: str) -> Module:
        try:
            candidate = prepare(name, self._program)
        except Exception as error:  # whatever it is, the run continues without this candidate
            return Module(name=name, failed=one_line(error))
        self._candidates[name] = candidate
        padding = self._program.padding
        shapes = len(padding.edges) if padding is not None and padding.warm and padding.edges else 1
        return Module(name=name, graphs=len(candidate.kinds) * shapes, leaves=sum(candidate.kinds) * shapes)

    def _planned(self) -> int:
        if self._auto.planned_steps is not None:
            return self._auto.planned_steps
        steps = self._loop.steps_planned
        if steps is None or steps <= 0:
            self._program.notes.append(f"auto: the run has no end, taken to be {ENDLESS:,} steps long")
            return ENDLESS
        return max(1, steps - self._loop.steps_done)

    def _put_on(self, row: Row) -> list[Strategy]:
        self._trials.wear(row.module)
        chosen: list[Strategy] = []
        if row.module != EAGER:
            candidate = self._candidates[row.module]
            chosen.append(candidate.strategy)
            self._program.notes.extend(candidate.notes)
        if row.captured and not any(strategy.captures_step for strategy in self._program.strategies):
            chosen.append(STRATEGIES["cuda_graph"]())
        return chosen

    def _report(self, estimates: Estimates, row: Row, known: str | None) -> None:
        trials = self._trials
        self._program.report[self._auto.name] = {
            "chosen": row.name,
            "planned_steps": estimates.steps,
            "probe_seconds": round(trials.seconds, 3),
            "tried": trials.tried,
            "remembered": known,
            "table": [line.facts() for line in estimates.rows()],
        }
        source = (
            f"by what a run of {known} measured" if known and not trials.tried else f"timed in {trials.seconds:.1f} s"
        )
        self._program.notes.append(f"{decision_line(estimates, row)} ({source})")

    def _sample(self, estimates: Estimates, row: Row) -> Sample | None:
        eager, compiled = estimates.modules[EAGER].step_seconds, estimates.modules[row.module].step_seconds
        if row.module == EAGER or row.module not in self._trials.tried or eager is None or compiled is None:
            return None
        return Sample(eager_seconds=[eager], compiled_seconds=[compiled])

    def _without_choice(self, reason: str) -> list[Strategy]:
        self._program.report[self._auto.name] = {"chosen": EAGER, "reason": reason, "table": []}
        self._trials.wear(EAGER)
        self._program.notes.append(f"auto: eager, because no step can be timed before the run: {reason}")
        return []
