"""Chooser: tries strategies on the training's own steps, between two of which they take over, and keeps the fastest."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from strategies import STRATEGIES, Program, Regional, Strategy
from strategies.base import ordered
from strategies.compile_errors import SECOND_ORDER, one_line
from strategies.loop_protocol import Loop, StepHook
from strategies.modules import CANDIDATES, Auto
from trainer.auto.past_runs import load_timings, save_timings, timings_file
from trainer.auto.rule import DERIVING, EAGER, MARGIN, MODULES, Arm, Timings, compile_seconds, kind_of, table_lines
from trainer.telemetry.hardware import process_age_seconds
from trainer.telemetry.machine_monitor import now
from trainer.telemetry.meter import Step, shape_of
from trainer.telemetry.telemetry import Telemetry

ENDLESS = 1_000_000
"""Steps that are planned for a run whose length nobody knows."""
WARMUP_STEPS, QUIET_STEPS, MAX_WARMUP_STEPS = 5, 3, 60
"""First steps of an arm, which are not timed: regions are checked, kernels are loaded, steps are captured. They are
over once nothing was prepared in ``QUIET_STEPS``, or after the most."""
CHECK_EVERY = 5
"""Steps between two looks at an arm; processes speak to each other at a look."""
TIMED_STEPS, TIMED_SECONDS, MAX_TIMED_STEPS, SURE = 10, 0.5, 100, 3.0
"""An arm is timed for as many steps, until they took as many seconds and a difference is ``SURE`` standard errors, or
are the most; then what was cheaper stays."""
BASE_STEPS, BASE_ERROR = 30, 0.005
"""The first arm, to which all are compared, is timed until its median is as sure, or for as many steps."""
MAX_STEPS = 250
"""Steps after which an arm is judged by the steady steps that it had, however few."""
AHEAD_STEPS, AHEAD_SHARE = 8, 0.875
"""The device counts as never waiting for the host where it did not in so many timed steps, and this share of them; one
of ten may read its loss for a log."""
ANNOUNCED_SECONDS = 3.0
"""A candidate that is expected to stop the training for longer is announced."""

Switch = Callable[[Sequence[Strategy]], None]
"""Between two optimizer steps: lets the training run under these strategies in the place of ``auto`` and of what was
chosen before, from the step that begins. Raises ValueError where one does not fit the module."""


class GaveUp(Exception):
    """An arm cannot be had, for the reason that it says."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One optimizer step of an arm."""

    step: Step
    shape: Any
    host_seconds: float
    ahead: bool
    """Whether the device was a whole step behind the host when it was launched."""

    @property
    def steady(self) -> bool:
        return not (self.step.disturbed or self.step.profiled or self.step.left_out or self.step.after is not None)

    @property
    def seconds(self) -> float:
        """On the device or, where the host compiles and checks, on the host."""
        return max(self.step.seconds, self.host_seconds)


class Chooser(StepHook):
    """Stands around every step until it has ``decided``. Where an optimizer step begins, ``_choose`` goes on: it reads
    from its first line to its last as the training does, and yields how many steps it lets pass."""

    def __init__(self, auto: Auto, loop: Loop, program: Program, telemetry: Telemetry, switch: Switch) -> None:
        self._auto, self._loop, self._program, self._telemetry = auto, loop, program, telemetry
        self._switch = switch
        self._others = [strategy for strategy in program.strategies if strategy is not auto]
        self._named = {name: STRATEGIES[name]() for name in (*CANDIDATES, DERIVING)}
        self._timings = Timings(arms={(EAGER, False): Arm()})
        self._best = self._arm = self._base
        """What trains now is ``_arm``, with ``_steps`` since it took over; what has won so far is ``_best``."""
        self._tried: list[Arm] = []
        """In the order in which they took over."""
        self._steps: list[TimedStep] = []
        self._eager_parts: dict[str, str] = {}
        """What ran eager before it took over."""
        self._switching_seconds = 0.0
        self._choosing, self._look_at = self._choose(), 0
        self._batch: Any = None
        self._under_way: tuple[Any, float] | None = None
        """Shape and beginning of the optimizer step under way."""
        self._done: tuple[Any, float, bool] | None = None
        """Of the last step, whose clock is read when the next one begins."""
        self._last_event: Any = None
        self._memory: Path | None = None
        self._remembered: str | None = None
        """When the run was whose measurements are used."""
        self._first = loop.steps_done
        self._planned = self._steps_planned()
        self._decided_at: int | None = None

    @property
    def decided(self) -> bool:
        return self._decided_at is not None

    @property
    def _base(self) -> Arm:
        return self._timings.arms[EAGER, False]

    # ---- around a step -------------------------------------------------------------------------------------------

    def before(self, batch: Any) -> None:
        """Raises nothing that a candidate raises."""
        if self.decided or self._under_way is not None:
            return
        self._note_step()
        self._batch = batch
        if len(self._steps) >= self._look_at:
            passes = next(self._choosing, 0)
            self._look_at = len(self._steps) + passes
        self._under_way = shape_of(batch), now()

    def after(self, *, stepped: bool) -> None:
        """Where an optimizer step is over, its host's time is."""
        if self.decided or self._under_way is None or not stepped:
            return
        shape, began = self._under_way
        self._done = shape, now() - began, self._device_is_behind()
        self._under_way = None

    def _device_is_behind(self) -> bool:
        """Whether the device has not come to the end of the step before: it waited for the host at no moment since.
        False where nothing is known, as for steps of more launches than a stream's queue holds, about a thousand."""
        if self._loop.device.type != "cuda":
            return False
        last, self._last_event = self._last_event, torch.cuda.Event()
        self._last_event.record()
        return last is not None and not last.query()

    def _note_step(self) -> None:
        if self._done is not None:
            self._timings.shapes[self._done[0]] += 1
            self._steps.append(TimedStep(self._telemetry.last_step, *self._done))
            self._done = None

    # ---- the choice ------------------------------------------------------------------------------------------------

    def _choose(self) -> Iterator[int]:
        while any(map(is_lazy, self._program.module.parameters())):  # of no shape before eager has run
            yield 1
        self._begin()
        while (arm := self._next()) is not None:
            try:
                yield from self._try(arm)
            except GaveUp as reason:
                self._drop(arm, str(reason))
        if self._arm is not self._best:
            self._switch_to(self._best)
        self._decided_at = self._loop.steps_done
        self._program.notes.append(self._line())

    def _try(self, arm: Arm) -> Iterator[int]:
        """``arm`` takes over, warms up and is timed; it stays as the best, or steps back. Raises GaveUp."""
        if arm is not self._arm:
            takes = self._loop.broadcast(self._timings.expected_setup(arm, self._best))
            if takes >= ANNOUNCED_SECONDS:
                step = self._loop.steps_done + 1
                self._program.notes.append(
                    f"auto: step {step:,} begins to compile {arm.name}, which may take {takes:.0f} s"
                )
            self._switch_to(arm)
        yield WARMUP_STEPS
        self._look_for_failures()
        while len(self._steps) < MAX_WARMUP_STEPS and self._loop.any_rank(self._still_warming_up()):
            yield CHECK_EVERY
            self._look_for_failures()
        if arm.captured and not self._loop.all_ranks(self._program.replays > 0):
            raise GaveUp(f"no step was captured in {len(self._steps)} steps")
        warmup = len(self._steps) - (0 if arm is self._base else QUIET_STEPS)
        yield warmup + TIMED_STEPS - len(self._steps)
        self._look_for_failures()
        while (found := self._loop.broadcast(self._measured(warmup))) is None:
            yield CHECK_EVERY
            self._look_for_failures()
        arm.by_shape, arm.step_seconds, arm.setup_seconds, arm.never_waited_steps, stays = found
        if stays:
            self._best = arm
        else:
            arm.stepped_back_at_step = self._loop.steps_done

    def _next(self) -> Arm | None:
        """What to try now; None where the steps to come pay for nothing."""
        arm = self._timings.next(self._best, self._steps_left, process_age_seconds() or 0.0)
        key = self._loop.broadcast(None if arm is None else (arm.module, arm.captured))
        return None if key is None else self._timings.arms[key]

    def _begin(self) -> None:
        self._steps = []
        for name in MODULES:
            if name in (EAGER, *self._auto.candidates):
                self._timings.take_in(name, captures=self._may_capture())
        if self._auto.remember:
            self._memory = timings_file(self._program, self._loop, self._batch, leave_out=self._auto.name)
            remembered = load_timings(self._timings, self._memory)
            # The first process decides: clocks and caches of the others may say something else.
            self._timings, self._remembered = self._loop.broadcast((self._timings, remembered))
        padding = self._program.padding
        self._timings.static = padding is not None and padding.dynamic is False
        self._expect_compiles()
        self._best = self._arm = self._base
        self._base.switched_at_step, self._tried = self._loop.steps_done, [self._base]

    def _expect_compiles(self) -> None:
        """Count what each way to train modules would compile."""
        known, module, regional = self._timings, self._program.module, self._named["regional"]
        assert isinstance(regional, Regional)
        known.compiling = dict.fromkeys(MODULES, compile_seconds([module]))
        try:
            blocks, parts = regional.paths(dataclasses.replace(self._program, notes=[]))
        except ValueError as error:
            for arm in known.arms.values():
                arm.failed = arm.failed or (str(error) if arm.module == "regional" else None)
            return
        known.blocks_alone = not parts
        found = {kind_of(one): one for one in map(module.get_submodule, {*blocks, *parts})}
        known.compiling["regional"] = compile_seconds(found.values())

    def _may_capture(self) -> bool:
        loop = self._loop
        wanted = "cuda_graph" in self._auto.candidates and loop.device.type == "cuda" and loop.world_size == 1
        return wanted and not any(strategy.captures_step for strategy in self._program.strategies)

    # ---- an arm ----------------------------------------------------------------------------------------------------

    def _switch_to(self, arm: Arm) -> None:
        """``arm`` trains from now on. Raises GaveUp where it cannot."""
        began, self._eager_parts = now(), self._program.eager_parts
        error: Exception | None = None
        if arm.switched_at_step is None:
            arm.switched_at_step, arm.step_seconds_before = self._loop.steps_done, self._best.step_seconds
            self._tried.append(arm)
        try:
            self._switch(self._strategies(arm))
        except Exception as caught:  # whatever it is, the run continues without this candidate
            error = caught
        self._arm, self._steps, self._switching_seconds = arm, [], now() - began
        if not self._loop.any_rank(error is not None):
            return
        if arm is self._best:  # it trained before, so that something else is wrong
            raise error or RuntimeError(f"auto: another process could not go back to {arm.name}")
        reason = str(error) if isinstance(error, ValueError) else one_line(error) if error else None
        raise GaveUp(reason or "another process failed")

    def _still_warming_up(self) -> bool:
        """Whether something is still being prepared."""
        program = self._program
        busy = program.found is not None
        busy |= any(region.called and region.state == "checking" for region in program.regions)
        busy |= self._arm.captured and not (program.done_capturing and program.replays)
        return busy or not all(one.steady for one in self._steps[-QUIET_STEPS:])

    def _look_for_failures(self) -> None:
        """Raises GaveUp where nothing of what the arm adds is compiled or captured any more."""
        arm, program = self._arm, self._program
        if arm is self._base:
            return
        lost = arm.module != EAGER and all(region.state == "failed" for region in program.regions)
        lost |= arm.captured and not program.captures
        if self._loop.any_rank(lost):
            reasons = (why for part, why in program.eager_parts.items() if self._eager_parts.get(part) != why)
            raise GaveUp(next(reasons, "nothing of it could be compiled"))

    def _measured(self, warmup: int) -> tuple[dict[Any, list[float]], float, float, int | None, bool] | None:
        """What was measured of the arm after ``warmup`` steps, and whether it stays; None where more have to be
        timed."""
        self._telemetry.meter.time_steps()
        arm, best, steps, left = self._arm, self._best, self._steps, self._steps_left
        timed = [one for one in steps[warmup:] if one.steady]
        last = len(timed) >= MAX_TIMED_STEPS or len(steps) >= MAX_STEPS
        if not timed or not (last or len(timed) >= TIMED_STEPS):
            return None
        by_shape: dict[Any, list[float]] = {}
        for one in timed:
            by_shape.setdefault(one.shape, []).append(one.step.seconds)
        median = statistics.median(one.step.seconds for one in timed)
        measured = Arm(step_seconds=median, by_shape=by_shape)
        if arm is best or not best.by_shape:
            # What an earlier run chose was not measured against anything here: it stays.
            stays, sure = True, measured.compared(measured)[1] <= BASE_ERROR or len(timed) >= BASE_STEPS
        else:
            assert best.step_seconds is not None
            ratio, error = measured.compared(best)
            to_come = self._timings.capture_seconds(arm, best, left, {one.shape for one in steps})
            stays = ratio < 1 - MARGIN and (1 - ratio) * best.step_seconds * left > to_come
            sure = abs(ratio - (1 - MARGIN)) > SURE * error
        if not (last or (sure and sum(measured.seconds) >= TIMED_SECONDS)):
            return None
        prepared = [one for place, one in enumerate(steps) if one.step.compiled or place < warmup]
        setup = self._switching_seconds + sum(max(0.0, one.seconds - median) for one in prepared)
        ahead = sum(one.ahead for one in timed)
        waited = ahead < max(AHEAD_STEPS, AHEAD_SHARE * len(timed))
        return by_shape, median, 0.0 if arm is self._base else setup, None if waited else ahead, stays

    def _drop(self, arm: Arm, reason: str) -> None:
        """Go on without ``arm``; what eager's steps cannot be captured for holds for compiled ones, too."""
        out = [arm]
        if SECOND_ORDER in reason:
            # Larger graphs would find the same after a longer wait.
            larger = MODULES[MODULES.index(arm.module) : -1]
            out += [one for one in self._timings.arms.values() if one.module in larger]
            self._timings.take_in(DERIVING, captures=self._may_capture())
        if (arm.module, arm.captured) == (EAGER, True):
            out += [one for one in self._timings.arms.values() if one.captured]
        for one in out:
            one.failed = one.failed or reason
        arm.stepped_back_at_step = self._loop.steps_done
        spent = self._switching_seconds + sum(one.host_seconds for one in self._steps)
        spent -= len(self._steps) * (self._best.step_seconds or 0.0)
        arm.setup_seconds = float(self._loop.broadcast(max(0.0, spent)))

    @property
    def _steps_left(self) -> float:
        """Steps of the loop that are still to come; under manual optimization one may step several optimizers."""
        done, batches = self._loop.steps_done - self._first, self._timings.shapes.total()
        return max(0.0, (self._planned - done) / (done / batches if batches and done else 1.0))

    def _steps_planned(self) -> int:
        if self._auto.planned_steps is not None:
            return self._auto.planned_steps
        steps = self._loop.steps_planned
        if steps is None or steps <= 0:
            self._program.notes.append(f"auto: the run has no end, taken to be {ENDLESS:,} steps long")
            return ENDLESS
        return max(1, steps - self._first)

    def _strategies(self, arm: Arm) -> list[Strategy]:
        """What trains in the place of ``auto`` under ``arm``; the same objects each time."""
        names = [arm.module] * (arm.module != EAGER) + ["cuda_graph"] * arm.captured
        return ordered(self._named[name] for name in names)

    # ---- at the end ------------------------------------------------------------------------------------------------

    def restore(self) -> list[Strategy]:
        """Leave the module as the best arm has it; returns all strategies of the run with it."""
        if self._arm is not self._best:
            self._switch(self._strategies(self._best))
            self._arm = self._best
        return ordered([*self._others, *self._strategies(self._best)])

    def finish(self) -> list[Strategy]:
        """The training is over: write the table, remember what was measured; returns what was chosen."""
        program, done = self._program, self._loop.steps_done
        self._note_step()
        line = self._line()
        if not self.decided:
            program.notes.append(line)
        tried = self._tried
        untried = [arm for arm in self._timings.arms.values() if arm.switched_at_step is None]
        table = {arm.name: arm.row(done) for arm in (*tried, *untried)}
        gains = [row["gained_seconds"] for row in table.values() if row["gained_seconds"] is not None]
        if len(tried) > 1:
            program.notes.append(table_lines(table, self._best.name))
        program.report[self._auto.name] = {
            "chosen": self._best.name,
            "planned_steps": self._planned,
            "decided_at_step": self._decided_at,
            "setup_seconds": sum(arm.setup_seconds or 0.0 for arm in tried),
            "gained_seconds": sum(gains) if gains else None,
            "remembered": self._remembered,
            "summary": line,
            "table": table,
        }
        eager, chosen = self._base.seconds, self._best.seconds
        if self._best is not self._base and eager and chosen:  # real steps of both, for the run's verdict
            pairs = min(len(eager), len(chosen))
            sample = {"eager_seconds": eager[-pairs:], "compiled_seconds": chosen[-pairs:]}
            facts = program.report.setdefault("slowdown", {})
            facts["before_the_first_step"] = {**sample, "replayed": self._best.captured}
        if self._memory is not None and self._base.step_seconds is not None and self._loop.is_first_process:
            not_kept = save_timings(self._timings, self._memory)
            if not_kept is not None:
                program.notes.append(f"auto: the decision is not remembered, {not_kept}")
        return self._strategies(self._best)

    def _line(self) -> str:
        """What was chosen and why, for a reader in a hurry."""
        best, setup = self._best, self._best.setup_seconds
        line = f"auto: {best.name}"
        line += f" from step {best.switched_at_step + 1:,} on" if best.switched_at_step is not None else ""
        line += f", {best.step_seconds * 1e3:,.1f} ms a step" if best.step_seconds is not None else ""
        if best is not self._base and best.step_seconds and self._base.step_seconds:
            line += f" where eager takes {self._base.step_seconds * 1e3:,.1f}"
        line += f", {setup:.1f} s to set up" if setup else ""
        parts = [line, *(f"{arm.name} is out: {arm.failed}" for arm in self._timings.arms.values() if arm.failed)]
        parts.append(
            "the steps to come pay for nothing else" if self.decided else "the run ended before the choice did"
        )
        shapes = self._timings.shapes
        if self._program.padding is None and len(shapes) > 2:  # one more than a last, smaller batch
            line = f"{len(shapes)} shapes of batches in {shapes.total():,} steps, and a capture serves one of them"
            parts.append(f"{line}: where lengths differ, compile=[auto,buckets] leaves a few")
        if best.never_waited_steps is not None:
            parts.append(f"the device never waited for the host in {best.never_waited_steps} steps")
        source = f" (began with what a run of {self._remembered} measured)" if self._remembered else ""
        return "; ".join(parts) + source
