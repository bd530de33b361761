"""Timing: is the run faster than eager? Windows of real steps that train in eager, beside windows as the run trains.

No step is repeated to be timed. Once there are enough steady steps, two steps train in eager and two as the run does,
again and again, for a small share of the run; each window's first step is left out, since it brings its code and memory
back. Nothing waits for the device between the steps of a half, since eager launches ahead without us too, nor after a
window, whose times are read a step later: the steps that follow it count as the run's own. A run that is slower says
so, or goes on in eager. The record's verdict is made of the same steps.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from strategies import Program
from strategies.base import eager
from strategies.loop_protocol import Loop, StepHook
from trainer.telemetry import hardware
from trainer.telemetry.machine_monitor import now
from trainer.telemetry.meter import StepClock
from trainer.telemetry.telemetry import Telemetry
from trainer.wording import number

STEADY_STEPS = 20
"""Steady steps after which windows begin."""
SHARE = 0.05
"""Windows in eager take no more than this share of the time since training began."""
APART_STEPS = 10
"""Steps between two windows, at least."""
WINDOW = 2
"""Steps of half a window that are timed, after one that is not."""
HALF = 1 + WINDOW
ENOUGH, MAX_WINDOWS = 5, 20
"""Windows from which on a run may be called slower, and the most of them."""
MARGIN, MIN_SLOWER = 1.05, 0.9
"""Slower by less than this, or in fewer of the pairs, is taken to be noise."""


@dataclass(slots=True, kw_only=True)
class Window:
    """Seconds of optimizer steps, in eager and as the run trains."""

    eager_seconds: list[float] = field(default_factory=list)
    compiled_seconds: list[float] = field(default_factory=list)
    replayed: bool = False
    """Whether the run's steps were replayed from CUDA graphs."""


class Timing(StepHook):
    """Times eager beside the run; ``slower`` is called with a line once the run is slower."""

    def __init__(
        self,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        slower: Callable[[str], None],
        *,
        wanted: bool,
    ) -> None:
        self._loop, self._program, self._telemetry, self._slower = loop, program, telemetry, slower
        self._wanted = wanted
        self._windows: list[Window] = []
        self._spent = 0.0
        self._next = math.inf
        self._planned = False
        self._clock: StepClock | None = None
        self._open = False
        """Whether a window has begun and is not over."""
        self._step_began: Any = None
        self._laps: list[tuple[Any, Any]] = []
        """Begin and end of the steps of a window, in the device's own time: those in eager, then the run's own."""
        self._replays = self._peak = 0
        self._replayed = False
        self._eagerly = contextlib.ExitStack()
        self._found_slower = False

    def before(self, batch: Any) -> None:
        if not self._wanted:
            return
        if not self._open and self._telemetry.meter.ended >= self._next:
            self._open = True
        if not self._open or self._step_began is not None:  # or within the micro-batches of a step
            return
        self._telemetry.leave_out()
        if len(self._laps) < HALF:
            self._peak = hardware.peak_bytes(self._loop.device)
            self._eagerly.enter_context(eager(self._program))
            if self._program.step is not None:
                self._eagerly.enter_context(self._program.step.left_out())
        if self._clock is None:
            self._clock = StepClock(self._loop.device)
        if len(self._laps) in (0, HALF):
            hardware.synchronize(self._loop.device)  # for what the other half has launched
            self._replays = self._program.replays
        self._step_began = self._clock.now()

    def after(self, *, stepped: bool) -> None:
        if not self._wanted or not stepped:
            return
        if self._step_began is not None:
            assert self._clock is not None
            self._laps.append((self._step_began, self._clock.now()))
            self._step_began = None
            self._eagerly.close()
            if len(self._laps) <= HALF:  # its memory is no part of the run's own
                hardware.count_peak_from(self._loop.device, self._peak)
            if len(self._laps) == 2 * HALF:
                self._open, self._next = False, math.inf
                self._replayed = self._program.replays > self._replays
        elif self._laps:
            self._read()
        elif not self._planned and self._loop.steps_done % self._loop.log_every_n_steps == 0:
            self._plan_first()

    def _read(self) -> None:
        """A window is over, and a step after it launched: the device does not idle while its times are read."""
        assert self._clock is not None
        seconds = [self._clock.seconds(*lap) for lap in self._laps]
        self._laps = []
        self._spent += sum(seconds[:HALF])
        window = Window(eager_seconds=seconds[1:HALF], compiled_seconds=seconds[HALF + 1 :], replayed=self._replayed)
        self._windows.append(window)
        self._judge()
        if len(self._windows) < MAX_WINDOWS and not self._found_slower:
            self._plan(statistics.median(window.eager_seconds) * HALF)

    def _plan_first(self) -> None:
        median = self._telemetry.meter.median_seconds
        enough = median is not None and len(self._telemetry.meter.steady.seconds) >= STEADY_STEPS
        if not self._loop.all_ranks(enough) or median is None:  # each process asks, whatever it knows itself
            return
        program = self._program
        if not self._compiles():
            self._wanted = False
            return
        if self._loop.world_size > 1 and program.step is not None:
            self._wanted = False  # an eager step beside graphs that hold collectives was not tried
            program.report.setdefault("slowdown", {})["reason"] = (
                "captured steps of several processes are not interrupted"
            )
            return
        self._planned = True
        self._plan(2 * median * HALF, gap=0)

    def _compiles(self) -> bool:
        """Whether there is anything to compare with eager."""
        program = self._program
        return bool(program.regions or program.step is not None or program.compiled_beside_regions)

    def _plan(self, cost: float, gap: int = APART_STEPS) -> None:
        """Say when the next window, whose eager steps are going to take ``cost`` seconds, is due."""
        median = self._telemetry.meter.median_seconds or 1e-9
        lacking = (self._spent + cost) / SHARE - (now() - self._telemetry.began)
        gap = max(gap, math.ceil(lacking / max(median, 1e-9)))
        self._next = self._loop.broadcast(self._telemetry.meter.ended + gap)

    def _judge(self) -> None:
        eager_seconds = [seconds for one in self._windows for seconds in one.eager_seconds]
        compiled = [seconds for one in self._windows for seconds in one.compiled_seconds]
        medians = statistics.median(eager_seconds), statistics.median(compiled)
        share = sum(one > two for one, two in zip(compiled, eager_seconds, strict=True)) / len(compiled)
        slower = len(self._windows) >= ENOUGH and medians[1] > MARGIN * medians[0] and share >= MIN_SLOWER
        slower = self._loop.any_rank(slower)
        micro = {} if self._loop.micro_batches == 1 else {"micro_batches": self._loop.micro_batches}
        self._program.report.setdefault("slowdown", {}).update(
            {"on_later_batches": [asdict(one) for one in self._windows], "slower": slower, **micro}
        )
        if slower and not self._found_slower:
            self._found_slower = True
            self._slower(
                f"slower than eager: a step takes {number(medians[1] * 1e3)} ms compiled against "
                f"{number(medians[0] * 1e3)} ms eager, on real steps by turns"
            )

    def close(self) -> None:
        self._eagerly.close()
        if not self._wanted or self._windows or not self._compiles():
            return
        facts, steady = self._program.report.setdefault("slowdown", {}), len(self._telemetry.meter.steady.seconds)
        if steady < STEADY_STEPS:
            facts["reason"] = f"eager is timed beside it from {STEADY_STEPS} steady steps on, and it had {steady}"
        else:
            facts["short_of_time"] = True
