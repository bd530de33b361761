"""Chooser: tries strategies on the training's own steps, between two of which they take over, and keeps the fastest."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from strategies import STRATEGIES, Program, Regional, Strategy
from strategies.base import ordered
from strategies.compile_errors import SECOND_ORDER, one_line
from strategies.loop_protocol import Loop, StepHook
from strategies.modules import CANDIDATES, Auto
from trainer.auto.past_runs import load_timings, save_timings, timings_file
from trainer.auto.rule import DERIVING, EAGER, MARGIN, MODULES, REPEATED, SURE, Arm, Choice, Timings
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
TIMED_STEPS, TIMED_SECONDS, MAX_TIMED_STEPS = 10, 0.5, 100
"""An arm is timed for as many steps, until they took as many seconds and a difference is beyond the spread, or are the
most; then what was cheaper stays."""
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


class Chooser(StepHook):
    """Stands around every step until it has ``decided``; it acts where an optimizer step begins."""

    def __init__(self, auto: Auto, loop: Loop, program: Program, telemetry: Telemetry, switch: Switch) -> None:
        self._auto, self._loop, self._program, self._telemetry = auto, loop, program, telemetry
        self._switch = switch
        self.decided = False
        self._others = [strategy for strategy in program.strategies if strategy is not auto]
        self._named = {name: STRATEGIES[name]() for name in (*CANDIDATES, DERIVING)}
        self._base = self._best = self._on = Arm()
        self._timings = Timings(arms={(EAGER, False): self._base})
        self._next: Arm | None = None
        self._memory: Path | None = None
        self._begun, self._step_begins = False, True
        self._under_way: tuple[Any, float] | None = None
        """Shape and beginning of the step under way."""
        self._done: tuple[Any, float, bool] | None = None
        """Of the last step, whose clock is read when the next one begins."""
        self._steps: list[TimedStep] = []
        """Of the arm that trains."""
        self._warmup_steps: int | None = None
        self._look_at = 0
        self._switching_seconds = 0.0
        self._eager_parts: dict[str, str] = {}
        """What ran eager before the arm on trial."""
        self._last_event: Any = None
        self._first, self._batches = loop.steps_done, 0
        self._planned = self._steps_planned()
        self.choice = Choice(chosen=EAGER, planned_steps=self._planned)

    # ---- around a step -------------------------------------------------------------------------------------------

    def before(self, batch: Any) -> None:
        """Where an optimizer step begins: judge the arm that trains, and let what is to be tried take over. Raises
        nothing that a candidate raises."""
        if self.decided or not self._step_begins:
            return
        if not self._begun:
            if any(map(is_lazy, self._program.module.parameters())):  # of no shape before eager has run
                return
            self._begin(batch)
        self._note_step()
        if self._next is None:
            self._judge_arm()
        while self._next is not None:
            arm, self._next = self._next, None
            self._switch_to(arm)
        self._step_begins = False
        self._under_way = shape_of(batch), now()

    def after(self, *, stepped: bool) -> None:
        """Where an optimizer step is over, its host's time is."""
        if self.decided or self._under_way is None or not stepped:
            return
        shape, began = self._under_way
        self._done = shape, now() - began, self._device_is_behind()
        self._under_way, self._step_begins = None, True

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
            self._batches += 1
            self._timings.shapes[self._done[0]] += 1
            self._steps.append(TimedStep(self._telemetry.last_step, *self._done))
            self._done = None

    def _begin(self, batch: Any) -> None:
        self._begun = True
        capture, known = self._may_capture(), self._timings
        modules = [name for name in MODULES if name in (EAGER, *self._auto.candidates)]
        for name in modules:
            known.take_in(name, captures=capture)
        if self._auto.remember:
            self._memory = timings_file(self._program, self._loop, batch, leave_out=self._auto.name)
            self.choice.remembered = load_timings(known, self._memory)
            # The first process decides: clocks and caches of the others may say something else.
            known, self.choice.remembered = self._loop.broadcast((known, self.choice.remembered))
            self._timings, self._base = known, known.arms[EAGER, False]
            self._best = self._on = self._base
        self._base.switched_at_step = self._loop.steps_done
        padding = self._program.padding
        apart = math.inf if padding is not None and padding.dynamic is False else 0
        known.max_further_shapes = 1 if padding is None else apart
        if "regional" in modules:
            self._count_kinds()
        self._begin_arm(self._base)
        best = known.best_known(self._base, self._steps_left)
        self._next = None if best is self._base else best

    def _count_kinds(self) -> None:
        regional, module = self._named["regional"], self._program.module
        assert isinstance(regional, Regional)
        try:
            blocks, parts = regional.paths(dataclasses.replace(self._program, notes=[]))
        except ValueError as error:
            for arm in self._timings.arms.values():
                arm.failed = arm.failed or (str(error) if arm.module == "regional" else None)
            return
        self._timings.blocks_alone = not parts
        found = {_kind_of(one): one for one in (module.get_submodule(path) for path in {*blocks, *parts})}
        self._timings.kinds = len(found)
        self._timings.layers = {"regional": _layers(found.values()), "whole": _layers([module])}

    def _may_capture(self) -> bool:
        loop = self._loop
        wanted = "cuda_graph" in self._auto.candidates and loop.device.type == "cuda" and loop.world_size == 1
        return wanted and not any(strategy.captures_step for strategy in self._program.strategies)

    # ---- an arm ----------------------------------------------------------------------------------------------------

    def _begin_arm(self, arm: Arm) -> None:
        self._on, self._steps, self._warmup_steps, self._look_at = arm, [], None, WARMUP_STEPS

    def _switch_to(self, arm: Arm) -> None:
        """``arm`` trains from now on, the best one for good."""
        program, began = self._program, now()
        if arm is not self._best:
            takes = self._loop.broadcast(self._timings.expected_setup(arm, self._best))
            arm.before, arm.switched_at_step = self._best, self._loop.steps_done
            self._eager_parts = program.eager_parts
            if takes >= ANNOUNCED_SECONDS:
                at = self._loop.steps_done + 1
                program.notes.append(f"auto: step {at:,} begins to compile {arm.name}, which may take {takes:.0f} s")
        error: Exception | None = None
        try:
            self._switch(self._strategies(arm))
        except Exception as caught:  # whatever it is, the run continues without this candidate
            error = caught
        self._begin_arm(arm)
        self._switching_seconds = now() - began
        if self._loop.any_rank(error is not None):
            if arm is self._best:  # it trained before, so that something else is wrong
                raise error or RuntimeError(f"auto: another process could not go back to {arm.name}")
            reason = str(error) if isinstance(error, ValueError) else one_line(error) if error else None
            self._drop_arm(arm, reason or "another process failed")
        elif arm is self._best:
            self._decide()

    def _judge_arm(self) -> None:
        """Judge the arm that trains once enough is known of it; the same on all processes."""
        arm = self._on
        if len(self._steps) < self._look_at:
            return
        self._look_at = len(self._steps) + CHECK_EVERY
        reason = None if arm is self._base else self._gave_up(arm)
        if reason is not None:
            self._drop_arm(arm, reason)
            return
        if self._warmup_steps is None:
            if len(self._steps) < MAX_WARMUP_STEPS and self._loop.any_rank(self._still_warming_up()):
                return
            if arm.captured and not self._loop.all_ranks(self._program.replays > 0):
                self._drop_arm(arm, f"no step was captured in {len(self._steps)} steps")
                return
            self._warmup_steps = len(self._steps) - (0 if arm is self._base else QUIET_STEPS)
            self._look_at = self._warmup_steps + TIMED_STEPS
            return
        self._telemetry.meter.time_steps()
        found = self._loop.broadcast(self._judged(arm))
        if found is None:
            return
        arm.by_shape, arm.step_seconds, arm.setup_seconds, arm.never_waited_steps, stays = found
        if stays:
            self._best = arm
        else:
            arm.stepped_back_at_step = self._loop.steps_done
        self._look_for_next()

    def _still_warming_up(self) -> bool:
        """Whether something is still being prepared."""
        program = self._program
        busy = program.found is not None
        busy |= any(region.called and region.state == "checking" for region in program.regions)
        busy |= self._on.captured and not (program.done_capturing and program.replays)
        return busy or not all(one.steady for one in self._steps[-QUIET_STEPS:])

    def _judged(self, arm: Arm) -> tuple[dict[Any, list[float]], float, float, int | None, bool] | None:
        """What was measured of ``arm``, and whether it stays; None where more steps have to be timed."""
        timed = [one for one in self._steps[self._warmup_steps :] if one.steady]
        seconds = [one.step.seconds for one in timed]
        if not seconds or (len(timed) < TIMED_STEPS and len(self._steps) < MAX_STEPS):
            return None
        by_shape: dict[Any, list[float]] = {}
        for one in timed:
            by_shape.setdefault(one.shape, []).append(one.step.seconds)
        median = statistics.median(seconds)
        setup = self._switching_seconds + sum(
            max(0.0, one.seconds - median) for one in self._steps[: self._warmup_steps]
        )
        setup += sum(max(0.0, one.seconds - median) for one in self._steps[self._warmup_steps :] if one.step.compiled)
        ahead = sum(one.ahead for one in timed)
        waited = ahead < max(AHEAD_STEPS, AHEAD_SHARE * len(timed))
        measured = Arm(step_seconds=median, by_shape=by_shape)
        last = len(timed) >= MAX_TIMED_STEPS or len(self._steps) >= MAX_STEPS
        enough = sum(seconds) >= TIMED_SECONDS or last
        # What an earlier run chose was not measured against anything here: it stays.
        alone = arm is self._best or not self._best.by_shape
        if alone:
            _, error = measured.compared(measured)
            enough &= error <= BASE_ERROR or len(timed) >= BASE_STEPS
            stays = True
        else:
            ratio, error = measured.compared(self._best)
            stays = ratio < 1 - MARGIN and self._pays(arm, ratio)
            enough &= last or abs(ratio - (1 - MARGIN)) > SURE * error
        if not enough:
            return None
        return by_shape, median, 0.0 if arm is self._base else setup, None if waited else ahead, stays

    def _pays(self, arm: Arm, ratio: float) -> bool:
        """Whether the steps left take less time under ``arm``, captures of further shapes included."""
        assert self._best.step_seconds is not None
        to_come = self._timings.capture_seconds(arm, self._best, self._steps_left, {one.shape for one in self._steps})
        return (1 - ratio) * self._best.step_seconds * self._steps_left > to_come

    def _gave_up(self, arm: Arm) -> str | None:
        """Why nothing of what ``arm`` adds is compiled or captured any more."""
        program = self._program
        lost = arm.module != EAGER and all(region.state == "failed" for region in program.regions)
        lost |= arm.captured and not program.captures
        reasons = [why for part, why in program.eager_parts.items() if self._eager_parts.get(part) != why]
        return next(iter(reasons), "nothing of it could be compiled") if self._loop.any_rank(lost) else None

    def _drop_arm(self, arm: Arm, reason: str) -> None:
        """Go on without ``arm``; what eager's steps cannot be captured for holds for compiled ones, too."""
        arm.failed = reason
        if SECOND_ORDER in reason:
            # Larger graphs would find the same after a longer wait.
            for name in MODULES[MODULES.index(arm.module) :] if arm.module in MODULES else ():
                for one in self._timings.of_module(name):
                    one.failed = one.failed or reason
            self._timings.take_in(DERIVING, captures=self._may_capture())
        if (arm.module, arm.captured) == (EAGER, True):
            for one in self._timings.arms.values():
                one.failed = one.failed or (reason if one.captured else None)
        arm.stepped_back_at_step = self._loop.steps_done
        spent = self._switching_seconds + sum(one.host_seconds for one in self._steps)
        spent -= len(self._steps) * (self._best.step_seconds or 0.0)
        arm.setup_seconds = float(self._loop.broadcast(max(0.0, spent)))
        self._look_for_next()

    # ---- the decision ----------------------------------------------------------------------------------------------

    def _look_for_next(self) -> None:
        arm = self._timings.next(self._best, self._steps_left, process_age_seconds() or 0.0)
        key = self._loop.broadcast(None if arm is None else (arm.module, arm.captured))
        self._next = None if key is None else self._timings.arms[key]
        if self._next is None and self._on is not self._best:
            self._next = self._best
        elif self._next is None:
            self._decide()

    def _decide(self) -> None:
        self.decided = True
        self.choice.decided_at_step = self._loop.steps_done
        self._program.notes.append(self._line())

    @property
    def _steps_left(self) -> float:
        """Steps of the loop that are still to come; under manual optimization one may step several optimizers."""
        done = self._loop.steps_done - self._first
        each = done / self._batches if self._batches and done else 1.0
        return max(0.0, (self._planned - done) / each)

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
        if self._on is not self._best:
            self._switch(self._strategies(self._best))
            self._begin_arm(self._best)
        return ordered([*self._others, *self._strategies(self._best)])

    def finish(self) -> list[Strategy]:
        """The training is over: write the table, remember what was measured; returns what was chosen."""
        choice, done = self.choice, self._loop.steps_done
        self._note_step()
        if not self.decided:
            self._program.notes.append(self._line())
        choice.chosen, choice.summary = self._best.name, self._line()
        tried = [arm for arm in self._timings.arms.values() if arm.switched_at_step is not None]
        tried.sort(key=lambda arm: arm.switched_at_step or 0)
        choice.setup_seconds = sum(arm.setup_seconds or 0.0 for arm in tried)
        untried = [arm for arm in self._timings.arms.values() if arm not in tried]
        choice.table = {arm.name: arm.facts(done) for arm in [*tried, *untried]}
        gains = [row["gained_seconds"] for row in choice.table.values() if row["gained_seconds"] is not None]
        choice.gained_seconds = sum(gains) if gains else None
        if len(tried) > 1:
            self._program.notes.append(choice.lines())
        self._program.report[self._auto.name] = asdict(choice)
        eager, chosen = self._base.seconds, self._best.seconds
        if self._best is not self._base and eager and chosen:  # real steps of both, for the run's verdict
            pairs = min(len(eager), len(chosen))
            sample = {"eager_seconds": eager[-pairs:], "compiled_seconds": chosen[-pairs:]}
            facts = self._program.report.setdefault("slowdown", {})
            facts["before_the_first_step"] = {**sample, "replayed": self._best.captured}
        if self._memory is not None and self._base.step_seconds is not None and self._loop.is_first_process:
            not_kept = save_timings(self._timings, self._memory)
            if not_kept is not None:
                self._program.notes.append(f"auto: the decision is not remembered, {not_kept}")
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
        reasons = {arm.name: arm.failed for arm in self._timings.arms.values()}
        parts = [line, *(f"{name} is out: {reason}" for name, reason in reasons.items() if reason)]
        parts.append(
            "the steps to come pay for nothing else" if self.decided else "the run ended before the choice did"
        )
        shapes = self._timings.shapes
        if self._program.padding is None and len(shapes) > 2:  # one more than a last, smaller batch
            line = f"{len(shapes)} shapes of batches in {shapes.total():,} steps, and a capture serves one of them"
            parts.append(f"{line}: where lengths differ, compile=[auto,buckets] leaves a few")
        if best.never_waited_steps is not None:
            parts.append(f"the device never waited for the host in {best.never_waited_steps} steps")
        source = f" (began with what a run of {self.choice.remembered} measured)" if self.choice.remembered else ""
        return "; ".join(parts) + source


def _kind_of(module: nn.Module) -> Any:
    """Equal where a compiler makes the same of two modules."""
    return type(module), tuple(weight.shape for weight in module.parameters())


def _layers(modules: Iterable[nn.Module]) -> float:
    """Modules with weights of their own, a repeated one as ``REPEATED``."""
    layers = [one for each in modules for one in each.modules() if any(True for _ in one.parameters(recurse=False))]
    different = len({_kind_of(one) for one in layers})
    return different + REPEATED * (len(layers) - different)
