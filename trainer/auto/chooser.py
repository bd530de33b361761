"""Chooser: tries strategies on the training's own steps, between two of which they take over, and keeps the fastest."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from strategies import STRATEGIES, Program, Strategy
from strategies.base import ordered
from strategies.cached.session import facts_of, fingerprint_of
from strategies.errors import one_line
from strategies.loop import Loop
from strategies.modules import Auto
from strategies.regions import uncompile
from trainer.auto import EAGER, MARGIN, NEVER_WAITED, Ahead, Arm, Choice, Knowledge, memory_of, program_facts
from trainer.auto.candidates import Candidate, Candidates
from trainer.background import release
from trainer.guards.compare import ParityError
from trainer.guards.preflight import shapes_of
from trainer.guards.rollback import raised_together
from trainer.guards.slowdown import Sample
from trainer.telemetry.hardware import process_age_seconds
from trainer.telemetry.meter import Step, shape_of
from trainer.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from trainer.guards.guards import Guards

ENDLESS = 1_000_000
"""Steps that are planned for a run whose length nobody knows."""
SETTLE_STEPS = 5
"""First steps of an arm, which are not timed: kernels are loaded, memory is asked for, steps are captured."""
TIMED_STEPS, TIMED_SECONDS, MAX_TIMED_STEPS = 10, 0.5, 50
"""An arm is timed for as many steps, until they took as many seconds or are the most."""
AHEAD_STEPS, AHEAD_SHARE = 8, 0.875
"""The device counts as never waiting for the host where it did not in so many timed steps, and this share of them; one
of ten may read its loss for a log."""
MAX_STEPS = 200
"""Steps after which an arm is judged by the steady steps that it had, however few."""

Switch = Callable[[Sequence[Strategy], "Guards | None", bool], "Guards | None"]
"""Lets the training run under these strategies, whose regions are in place, from the step that begins; with new guards,
or those given, which had them before; and whether each region was compared with eager. Returns the guards."""


class Chooser:
    """Called at the beginning and the end of every optimizer step until it has ``decided``.

    Args:
        settings: Takes the compiler settings of what is compiled, and ends the helper; closed when the run ends.
        switch: See ``Switch``.
        guards: Those of the other strategies.
    """

    def __init__(
        self,
        auto: Auto,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        settings: contextlib.ExitStack,
        switch: Switch,
        guards: Guards | None,
        parity: str,
    ) -> None:
        self._auto, self._loop, self._program, self._telemetry = auto, loop, program, telemetry
        self._settings, self._switch = settings, switch
        self.decided = False
        self._others = [strategy for strategy in program.strategies if strategy is not auto]
        self._base = Arm()
        self._known = Knowledge(arms={(EAGER, False): self._base})
        self._best = self._on = self._base
        self._candidates = Candidates(auto.helper, loop, program, settings, parity, self._known)
        settings.callback(self._candidates.close)
        self._ahead = Ahead(loop)
        settings.callback(self._ahead.close)
        self._guards: dict[str, Guards | None] = {EAGER: guards}
        self._eager_parts: dict[str, str] = {}
        self._begun = False
        self._next: Arm | None = None
        self._memory: Path | None = None
        self._steps: list[tuple[Step, Any, bool]] = []
        self._shape: Any = None
        self._check_at = SETTLE_STEPS + TIMED_STEPS
        self._switching_seconds = 0.0
        self._first = loop.steps_done
        self._planned = self._steps_planned()
        self.choice = Choice(chosen=EAGER, planned_steps=self._planned)
        reason = loop.why_not_apart()
        if reason is None and loop.manual:
            reason = "under manual optimization only the module knows how many steps are to come"
        if reason is not None:
            self.choice.reason = f"no candidate could be compared with eager and timed: {reason}"
            self._decide()

    # ---- at the beginning of a step ------------------------------------------------------------------------------

    def before_step(self, batch: Any, guard: Callable[[], None]) -> None:
        """``batch`` is the first of a step: let what is to be tried take over.

        ``guard`` runs the guards' checks of the program on this batch, once it is in place. Raises nothing that a
        candidate raises, unless it does so on one of several processes alone.
        """
        self._shape = shape_of(batch)
        if not self._begun:
            if any(map(is_lazy, self._program.module.parameters())):  # of no shape before eager has run
                return
            self._begin(batch)
            if self._known.helped:  # this step's calls are recorded: a graph would stand for them
                return
        if self._candidates.trying:
            if self._on is not self._base:
                self._put_on(self._base)
            self._candidates.try_next()
            return
        arm, self._next = self._next, None
        if arm is self._best and arm is not self._on:
            self._put_on(arm)
            if self._candidates.compiling is None:
                self._decide()
        elif arm is not None:
            self._try(arm, guard)
        if len(self._steps) >= SETTLE_STEPS and not self._on.steps_timed and not self._on.captured:
            self._ahead.begin(within_backward=self._on is self._base and self._loop.world_size == 1)

    def _begin(self, batch: Any) -> None:
        self._begun = True
        capture = self._may_capture()
        modules = [EAGER, *(name for name in ("regional", "whole") if name in self._auto.candidates)]
        for captured in (False, True) if capture else (False,):
            for name in modules:
                self._known.arms.setdefault((name, captured), Arm(module=name, captured=captured))
        if self._auto.remember:
            facts = {
                **facts_of(self._program, leave_out=self._auto.name),
                **program_facts(self._program),
                "batch": shapes_of(batch),
                "processes": self._loop.world_size,
                "micro_batches": self._loop.micro_batches,
            }
            self._memory = memory_of(fingerprint_of(facts))
            self.choice.remembered = self._known.recall(self._memory)
            # The first process decides: clocks and caches of the others may say something else.
            self._known, self.choice.remembered = self._loop.broadcast((self._known, self.choice.remembered))
            self._candidates.known = self._known
            self._base = self._best = self._on = self._known.arms[EAGER, False]
        self._base.switched_at_step = self._loop.steps_done
        padding = self._program.padding
        apart = math.inf if padding is not None and padding.dynamic is False else 0
        self._known.max_further_shapes = 1 if padding is None else apart
        best = self._known.best_known(self._base, self._steps_left)
        self._candidates.record_calls(self._others, STRATEGIES)
        if best is not self._base and not self._known.needs_helper(best, self._base):
            self._next = best

    def _may_capture(self) -> bool:
        loop, program = self._loop, self._program
        assert program.device is not None
        wanted = "cuda_graph" in self._auto.candidates and program.device.type == "cuda" and loop.world_size == 1
        if not wanted or any(strategy.captures_step for strategy in program.strategies):
            return False
        reason = next(iter(loop.why_not_capture()), None)
        if reason is not None:
            program.notes.append(f"auto: no step is captured: {reason}")
        return reason is None

    def _try(self, arm: Arm, guard: Callable[[], None]) -> None:
        arm.before, arm.switched_at_step = self._best, self._loop.steps_done
        self._eager_parts = dict(self._program.eager_parts)
        began = time.perf_counter()
        error: Exception | None = None
        try:
            self._put_on(arm)
        except Exception as caught:  # whatever it is, the run continues without this candidate
            error = caught
        if self._loop.anywhere(error is not None):
            self._fail(arm, "another process failed" if error is None else one_line(error))
        else:
            try:
                guard()
            except Exception as caught:
                if self._loop.world_size > 1 and not raised_together(caught):
                    raise
                different = caught.facts.get("reason") if isinstance(caught, ParityError) else None
                self._fail(arm, f"not eager's step: {different}" if different else one_line(caught))
            if arm.failed is None and (reason := self._gave_up(arm)) is not None:
                self._fail(arm, reason)
        tried = self._candidates.named.get(arm.module)
        self._switching_seconds = time.perf_counter() - began + (tried.trial_seconds if tried is not None else 0.0)
        if arm.failed is not None:
            arm.setup_seconds = float(self._loop.broadcast(self._switching_seconds))
            self._put_on(self._best)
            self._look_for_next()

    def _put_on(self, arm: Arm) -> None:
        program = self._program
        uncompile(program)
        if arm.module != EAGER:
            candidate = Candidate(strategy=STRATEGIES[arm.module]())
            self._candidates.named.setdefault(arm.module, candidate).put_on(program, self._settings)
        self._on, self._steps, self._check_at = arm, [], SETTLE_STEPS + TIMED_STEPS
        compared = self._known.helped.get(arm.module, False) and not self._candidates.named[arm.module].vague
        strategies = [*self._others, *self._strategies(arm)]
        self._guards[arm.name] = self._switch(strategies, self._guards.get(arm.name), compared)

    def _fail(self, arm: Arm, reason: str) -> None:
        arm.failed = reason
        self._guards.pop(arm.name, None)
        self._leave(arm)

    def _leave(self, arm: Arm) -> None:
        """``arm`` is not to stay: what became of its parts is no fact about the program that trains on."""
        arm.stepped_back_at_step = self._loop.steps_done
        self._program.eager_parts.clear()
        self._program.eager_parts.update(self._eager_parts)

    def _gave_up(self, arm: Arm) -> str | None:
        """Why nothing of what ``arm`` adds is compiled or captured any more."""
        program = self._program
        reasons = [reason for part, reason in program.eager_parts.items() if part not in self._eager_parts]
        lost = (arm.module != EAGER and not program.regions) or (arm.captured and not program.captures_steps)
        return next(iter(reasons), "nothing of it could be compiled") if self._loop.anywhere(lost) else None

    # ---- at the end of a step ------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """An optimizer step is over: judge what has been timed long enough."""
        if not self._begun:
            return
        self._known.shapes[self._shape] += 1
        ahead = self._ahead.end()
        rests = self._on is self._best and self._best.steps_timed > 0 and self._next is None  # it trains on meanwhile
        trying = self._candidates.trying
        compiling = self._candidates.compiling
        pays = compiling is None or self._known.still_pays(compiling, self._best, self._steps_left)
        answered = self._candidates.after_step(may_try=rests, pays=pays)
        tried = answered and self._on is self._base
        if rests or tried or trying or self._candidates.trying:
            if answered or (trying and not self._candidates.trying):
                self._look_for_next()
            return
        self._steps.append((self._telemetry.last_step, self._shape, ahead))
        if len(self._steps) < self._check_at:
            return
        self._check_at = len(self._steps) + TIMED_STEPS
        arm = self._on
        reason = None if arm is self._best else self._gave_up(arm)
        if reason is not None:
            self._fail(arm, reason)
        elif not self._timed(arm):
            return
        elif arm is not self._best:
            # What an earlier run chose was not measured against anything here: it stays.
            chosen_before = self.choice.remembered is not None and not self._best.steps_timed
            if self._loop.broadcast(chosen_before or self._saves(arm)):
                self._best = arm
            else:
                self._leave(arm)
        self._look_for_next()

    def _timed(self, arm: Arm) -> bool:
        """Fill in what ``arm`` takes; False where more steps have to be timed. The same on all processes."""
        self._telemetry.meter.time_steps()
        steady = [
            (step, shape, ahead)
            for step, shape, ahead in self._steps[SETTLE_STEPS:]
            if not step.disturbed and not step.profiled and step.after is None
        ]
        seconds = [step.seconds for step, *_ in steady]
        enough = len(seconds) >= TIMED_STEPS and sum(seconds) >= TIMED_SECONDS
        enough = enough or len(seconds) >= MAX_TIMED_STEPS or (bool(seconds) and len(self._steps) >= MAX_STEPS)
        by_shape: dict[Any, list[float]] = {}
        for step, shape, _ in steady:
            by_shape.setdefault(shape, []).append(step.seconds)
        found = None
        if enough:
            medians = {shape: statistics.median(each) for shape, each in by_shape.items()}
            found = self._measured(arm, statistics.median(seconds), medians)
        found = self._loop.broadcast(found)
        if found is None:
            return False
        arm.step_seconds, arm.by_shape = found
        arm.seconds, arm.steps_timed = seconds, len(seconds)
        never_waited = sum(ahead for *_, ahead in steady)
        if self._loop.everywhere(never_waited >= max(AHEAD_STEPS, AHEAD_SHARE * len(steady))):
            arm.never_waited_steps = never_waited
        settling = sum(max(0.0, step.seconds - arm.step_seconds) for step, *_ in self._steps[:SETTLE_STEPS])
        captures = sum(step.seconds - arm.step_seconds for step, *_ in self._steps[SETTLE_STEPS:] if step.compiled)
        spent = self._switching_seconds + settling + max(0.0, captures)
        arm.setup_seconds = 0.0 if arm is self._base else float(self._loop.broadcast(spent))
        return True

    def _saves(self, arm: Arm) -> bool:
        """Whether the steps left take less time under ``arm``, which was timed, further captures included."""
        assert self._best.step_seconds is not None
        saved = 1 - arm.over(self._best)
        had = {shape for _, shape, _ in self._steps}
        to_come = self._known.capture_seconds(arm, self._best, self._steps_left, had)
        return saved > MARGIN and saved * self._best.step_seconds * self._steps_left > to_come

    def _measured(self, arm: Arm, median: float, by_shape: dict[Any, float]) -> tuple[float, dict[Any, float]]:
        return median, by_shape

    # ---- the decision --------------------------------------------------------------------------------------------

    def _look_for_next(self) -> None:
        now = self._best, self._steps_left, process_age_seconds() or 0.0
        arm, ahead = self._known.next(*now), None
        if self._candidates.compiling is None and (arm is None or arm.module == self._best.module):
            ahead = self._known.next(*now, helper=True)
        key, module = None if arm is None else (arm.module, arm.captured), None if ahead is None else ahead.module
        key, module = self._loop.broadcast((key, module))
        if module is not None:
            self._candidates.compile_beside(module)
        self._next = None if key is None else self._known.arms[key]
        if self._next is None and self._on is not self._best:
            self._next = self._best
        elif self._next is None and self._candidates.compiling is None:
            self._decide()

    def _decide(self) -> None:
        self.decided = True
        release()
        self.choice.decided_at_step = self._loop.steps_done
        self._program.notes.append(self._line())

    @property
    def _steps_left(self) -> int:
        return max(0, self._planned - (self._loop.steps_done - self._first))

    def _steps_planned(self) -> int:
        if self._auto.planned_steps is not None:
            return self._auto.planned_steps
        steps = self._loop.steps_planned
        if steps is None or steps <= 0:
            self._program.notes.append(f"auto: the run has no end, taken to be {ENDLESS:,} steps long")
            return ENDLESS
        return max(1, steps - self._first)

    def _strategies(self, arm: Arm) -> list[Strategy]:
        """What trains in the place of ``auto`` under ``arm``, which has been put on before."""
        modules = [] if arm.module == EAGER else [self._candidates.named[arm.module].strategy]
        return ordered([*modules, *([STRATEGIES["cuda_graph"]()] if arm.captured else [])])

    def restore(self) -> list[Strategy]:
        """Leave the module as the best arm has it; returns all strategies of the run with it."""
        if self._on is not self._best:
            uncompile(self._program)
            if self._best.module != EAGER:
                self._candidates.named[self._best.module].put_on(self._program, self._settings)
        return ordered([*self._others, *self._strategies(self._best)])

    def finish(self) -> list[Strategy]:
        """The training is over: write the table, remember what was measured; returns what was chosen."""
        choice, done = self.choice, self._loop.steps_done
        if self._candidates.compiling is not None:
            self._program.notes.append(f"auto: the run ended while a helper compiled {self._candidates.compiling}")
        self._candidates.close()
        if not self.decided:
            self._program.notes.append(self._line())
        choice.chosen = self._best.name
        tried = [arm for arm in self._known.arms.values() if arm.switched_at_step is not None]
        tried.sort(key=lambda arm: arm.switched_at_step or 0)
        choice.setup_seconds = sum(arm.setup_seconds or 0.0 for arm in tried)
        untried = [arm for arm in self._known.arms.values() if arm not in tried]
        choice.table = {arm.name: arm.facts(done) for arm in [*tried, *untried]}
        gains = [row["gained_seconds"] for row in choice.table.values() if row["gained_seconds"] is not None]
        choice.gained_seconds = sum(gains) if gains else None
        if len(tried) > 1:
            self._program.notes.append(choice.lines())
        self._program.report[self._auto.name] = asdict(choice)
        eager, chosen = self._base.seconds, self._best.seconds
        if self._best is not self._base and eager and chosen:  # real steps of both, for the run's verdict
            pairs = min(len(eager), len(chosen))
            sample = Sample(eager_seconds=eager[-pairs:], compiled_seconds=chosen[-pairs:])
            self._program.report["slowdown"] = {"before_the_first_step": asdict(sample)}
        if self._memory is not None and self._base.step_seconds is not None and self._loop.is_first_process:
            not_kept = self._known.keep(self._memory)
            if not_kept is not None:
                self._program.notes.append(f"auto: the decision is not remembered, {not_kept}")
        return self._strategies(self._best)

    def _line(self) -> str:
        if self.choice.reason is not None:
            return f"auto: eager; {self.choice.reason}"
        best, setup = self._best, self._best.setup_seconds
        line = f"auto: {best.name}"
        line += f" from step {best.switched_at_step + 1:,} on" if best.switched_at_step is not None else ""
        line += f", {best.step_seconds * 1e3:,.1f} ms a step" if best.step_seconds is not None else ""
        line += f", {setup:.1f} s to set up" if setup else ""
        reasons = {arm.name: arm.failed or arm.not_ready for arm in self._known.arms.values()}
        parts = [line, *(f"{name} is out: {reason}" for name, reason in reasons.items() if reason)]
        parts.append(
            "the steps to come pay for nothing else" if self.decided else "the run ended before the choice did"
        )
        shapes = self._known.shapes
        if self._program.padding is None and len(shapes) > 2:  # one more than a last, smaller batch
            line = f"{len(shapes)} shapes of batches in {shapes.total():,} steps, and a capture serves one of them"
            parts.append(f"{line}: where lengths differ, compile=[auto,buckets] leaves a few")
        if best.never_waited_steps is not None:
            parts.append(NEVER_WAITED.format(best.never_waited_steps))
        source = f" (began with what a run of {self.choice.remembered} measured)" if self.choice.remembered else ""
        return "; ".join(parts) + source
