"""Chooser: tries strategies on the training's own steps, between two of which they take over, and keeps the fastest."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Trial:
    """The arm that trains, and its steps so far."""

    arm: Arm
    switching_seconds: float = 0.0
    eager_parts: dict[str, str] = field(default_factory=dict)
    """What ran eager before."""
    steps: list[TimedStep] = field(default_factory=list)
    warmup_steps: int | None = None
    """None until they are over."""
    look_at: int = 0
    """Steps until the next look, but for the first."""


class Chooser(StepHook):
    """Stands around every step until it has ``decided``; it acts where an optimizer step begins: an arm takes over,
    warms up, is timed, stays or steps back, and the rule names the next one, until it names none."""

    def __init__(self, auto: Auto, loop: Loop, program: Program, telemetry: Telemetry, switch: Switch) -> None:
        self._auto, self._loop, self._program, self._telemetry = auto, loop, program, telemetry
        self._switch = switch
        self._others = [strategy for strategy in program.strategies if strategy is not auto]
        self._named = {name: STRATEGIES[name]() for name in (*CANDIDATES, DERIVING)}
        self._timings = Timings(arms={(EAGER, False): Arm()})
        self._best = self._base
        self._trial = Trial(self._base)
        self._begun = False
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
        """Where an optimizer step begins: judge the arm that trains, and let what is to be tried take over. Raises
        nothing that a candidate raises."""
        if self.decided or self._under_way is not None:
            return
        if not self._begun:
            if any(map(is_lazy, self._program.module.parameters())):  # of no shape before eager has run
                return
            self._begin(batch)
        self._note_step()
        self._judge()
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
            self._trial.steps.append(TimedStep(self._telemetry.last_step, *self._done))
            self._done = None

    def _begin(self, batch: Any) -> None:
        self._begun = True
        for name in MODULES:
            if name in (EAGER, *self._auto.candidates):
                self._timings.take_in(name, captures=self._may_capture())
        if self._auto.remember:
            self._memory = timings_file(self._program, self._loop, batch, leave_out=self._auto.name)
            remembered = load_timings(self._timings, self._memory)
            # The first process decides: clocks and caches of the others may say something else.
            self._timings, self._remembered = self._loop.broadcast((self._timings, remembered))
        padding = self._program.padding
        self._timings.static = padding is not None and padding.dynamic is False
        self._expect_compiles()
        self._best, self._trial = self._base, Trial(self._base)
        self._base.switched_at_step = self._loop.steps_done
        known = self._timings.next(self._base, self._steps_left, 0.0, known=True)
        if known is not None:
            self._try(known)

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

    def _try(self, arm: Arm) -> None:
        takes = self._loop.broadcast(self._timings.expected_setup(arm, self._best))
        if takes >= ANNOUNCED_SECONDS:
            at = self._loop.steps_done + 1
            note = f"auto: step {at:,} begins to compile {arm.name}, which may take {takes:.0f} s"
            self._program.notes.append(note)
        self._switch_to(arm)

    def _switch_to(self, arm: Arm) -> None:
        """``arm`` trains from now on; where it cannot, another one."""
        began, before = now(), self._program.eager_parts
        error: Exception | None = None
        if arm.switched_at_step is None:
            arm.switched_at_step, arm.step_seconds_before = self._loop.steps_done, self._best.step_seconds
        try:
            self._switch(self._strategies(arm))
        except Exception as caught:  # whatever it is, the run continues without this candidate
            error = caught
        self._trial = Trial(arm, now() - began, before)
        if not self._loop.any_rank(error is not None):
            return
        if arm is self._best:  # it trained before, so that something else is wrong
            raise error or RuntimeError(f"auto: another process could not go back to {arm.name}")
        reason = str(error) if isinstance(error, ValueError) else one_line(error) if error else None
        self._drop(reason or "another process failed")

    def _judge(self) -> None:
        """Judge the arm that trains once enough is known of it; the same on all processes."""
        trial, arm, count = self._trial, self._trial.arm, len(self._trial.steps)
        if count < max(trial.look_at, WARMUP_STEPS):
            return
        trial.look_at = count + CHECK_EVERY
        if arm is not self._base and (reason := self._gave_up(arm)) is not None:
            self._drop(reason)
        elif trial.warmup_steps is not None:
            self._telemetry.meter.time_steps()
            if (found := self._loop.broadcast(self._measured())) is None:
                return
            arm.by_shape, arm.step_seconds, arm.setup_seconds, arm.never_waited_steps, stays = found
            if stays:
                self._best = arm
            else:
                arm.stepped_back_at_step = self._loop.steps_done
            self._go_on()
        elif count >= MAX_WARMUP_STEPS or not self._loop.any_rank(self._still_warming_up()):
            if arm.captured and not self._loop.all_ranks(self._program.replays > 0):
                self._drop(f"no step was captured in {count} steps")
                return
            trial.warmup_steps = count - (0 if arm is self._base else QUIET_STEPS)
            trial.look_at = trial.warmup_steps + TIMED_STEPS

    def _still_warming_up(self) -> bool:
        """Whether something is still being prepared."""
        program = self._program
        busy = program.found is not None
        busy |= any(region.called and region.state == "checking" for region in program.regions)
        busy |= self._trial.arm.captured and not (program.done_capturing and program.replays)
        return busy or not all(one.steady for one in self._trial.steps[-QUIET_STEPS:])

    def _measured(self) -> tuple[dict[Any, list[float]], float, float, int | None, bool] | None:
        """What was measured of the arm that trains, and whether it stays; None where more steps have to be timed."""
        arm, steps, warmup, left = self._trial.arm, self._trial.steps, self._trial.warmup_steps, self._steps_left
        timed = [one for one in steps[warmup:] if one.steady]
        if not timed or (len(timed) < TIMED_STEPS and len(steps) < MAX_STEPS):
            return None
        by_shape: dict[Any, list[float]] = {}
        for one in timed:
            by_shape.setdefault(one.shape, []).append(one.step.seconds)
        median = statistics.median(one.step.seconds for one in timed)
        measured = Arm(step_seconds=median, by_shape=by_shape)
        last = len(timed) >= MAX_TIMED_STEPS or len(steps) >= MAX_STEPS
        if arm is self._best or not self._best.by_shape:
            # What an earlier run chose was not measured against anything here: it stays.
            stays, enough = True, last or measured.compared(measured)[1] <= BASE_ERROR or len(timed) >= BASE_STEPS
        else:
            assert self._best.step_seconds is not None
            ratio, error = measured.compared(self._best)
            to_come = self._timings.capture_seconds(arm, self._best, left, {one.shape for one in steps})
            stays = ratio < 1 - MARGIN and (1 - ratio) * self._best.step_seconds * left > to_come
            enough = last or abs(ratio - (1 - MARGIN)) > SURE * error
        if not enough or (sum(measured.seconds) < TIMED_SECONDS and not last):
            return None
        prepared = [one for place, one in enumerate(steps) if one.step.compiled or place < (warmup or 0)]
        setup = self._trial.switching_seconds + sum(max(0.0, one.seconds - median) for one in prepared)
        ahead = sum(one.ahead for one in timed)
        waited = ahead < max(AHEAD_STEPS, AHEAD_SHARE * len(timed))
        return by_shape, median, 0.0 if arm is self._base else setup, None if waited else ahead, stays

    def _gave_up(self, arm: Arm) -> str | None:
        """Why nothing of what ``arm`` adds is compiled or captured any more."""
        program = self._program
        lost = arm.module != EAGER and all(region.state == "failed" for region in program.regions)
        lost |= arm.captured and not program.captures
        reasons = [why for part, why in program.eager_parts.items() if self._trial.eager_parts.get(part) != why]
        return next(iter(reasons), "nothing of it could be compiled") if self._loop.any_rank(lost) else None

    def _drop(self, reason: str) -> None:
        """Go on without the arm that trains; what eager's steps cannot be captured for holds for compiled ones, too."""
        trial, arm, out = self._trial, self._trial.arm, [self._trial.arm]
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
        spent = trial.switching_seconds + sum(one.host_seconds for one in trial.steps)
        spent -= len(trial.steps) * (self._best.step_seconds or 0.0)
        arm.setup_seconds = float(self._loop.broadcast(max(0.0, spent)))
        self._go_on()

    # ---- the decision ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """With the next arm to try or, where the steps to come pay for none, with the best for good."""
        arm = self._timings.next(self._best, self._steps_left, process_age_seconds() or 0.0)
        key = self._loop.broadcast(None if arm is None else (arm.module, arm.captured))
        if key is not None:
            self._try(self._timings.arms[key])
            return
        if self._trial.arm is not self._best:
            self._switch_to(self._best)
        self._decided_at = self._loop.steps_done
        self._program.notes.append(self._line())

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

    def restore(self) -> list[Strategy]:
        """Leave the module as the best arm has it; returns all strategies of the run with it."""
        if self._trial.arm is not self._best:
            self._switch(self._strategies(self._best))
            self._trial = Trial(self._best)
        return ordered([*self._others, *self._strategies(self._best)])

    def finish(self) -> list[Strategy]:
        """The training is over: write the table, remember what was measured; returns what was chosen."""
        program, done = self._program, self._loop.steps_done
        self._note_step()
        line = self._line()
        if not self.decided:
            program.notes.append(line)
        arms = sorted(
            self._timings.arms.values(),
            key=lambda arm: done + 1 if arm.switched_at_step is None else arm.switched_at_step,
        )
        table = {arm.name: arm.row(done) for arm in arms}
        gains = [row["gained_seconds"] for row in table.values() if row["gained_seconds"] is not None]
        tried = [arm for arm in arms if arm.switched_at_step is not None]
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
