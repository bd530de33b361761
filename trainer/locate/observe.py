"""Observe: whether a step fails to compile, breaks, compiles again, departs from eager's or is slower."""

from __future__ import annotations

import contextlib
import linecache
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from strategies import Program
from strategies.compile_errors import is_recompile_limit
from trainer.eager import eager
from trainer.explain import source
from trainer.locate.trial import Outcome, Trial
from trainer.parity.comparison import ParityError
from trainer.parity.gate import ParityGate
from trainer.passes import Passes
from trainer.reasons import one_line
from trainer.rehearsal import REPLAYED_FROM
from trainer.snapshot import Snapshot
from trainer.telemetry.compiler import CompilerMonitor
from trainer.telemetry.facts import number as figure
from trainer.telemetry.record import Event
from trainer.timed import seconds_of
from trainer.watchdog import MARGIN

SETTLING_STEPS, AGAIN_STEPS = 3, 3
"""Steps on every batch until nothing should compile any more (a float attribute becomes symbolic in the second), and
steps in which nothing may."""
PAIRS = 9
"""Steps of each that are timed in turns."""
LEAST_PAIRS = 3
MOST_SECONDS = 6.0
"""Timing takes about this long at most."""
PROJECT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{PROJECT / package}{os.sep}" for package in ("trainer", "strategies", "scripts"))
"""Whose lines are nobody's mistake to mend."""


class Observer:
    """Runs steps of one training and looks at what the compiler makes of them.

    Args:
        passes: Quiet for as long as this lasts.
        cuda_graphs: Whether Inductor replays what it compiled from CUDA graphs.
    """

    def __init__(self, trainer: L.Trainer, program: Program, passes: Passes, *, cuda_graphs: bool) -> None:
        self._trainer, self._program, self._passes = trainer, program, passes
        self._repeats = REPLAYED_FROM if cuda_graphs else 2  # the first step makes the optimizer's state
        self._phase, self._batch = "forward", 0

    def observe(self, trial: Trial, batches: Sequence[Any], snapshot: Snapshot) -> Outcome:
        """What ``trial`` comes to; what it compiles is in place already. The state afterwards is any."""
        looks = {
            "fails": self._steps,
            "breaks": self._breaks,
            "recompiles": self._recompiles,
            "differs": self._differs,
            "slower": self._slower,
        }
        snapshot.restore()
        with self._phases():
            try:
                return looks[trial.symptom](trial, batches, snapshot)
            except Exception as error:
                where, code = place(error)
                return Outcome(
                    # Under fullgraph, compiling as often as torch allows is an error.
                    shows=trial.symptom == "fails" or (trial.symptom == "recompiles" and is_recompile_limit(error)),
                    reason=one_line(error),
                    phase=self._phase,
                    where=where,
                    code=code,
                    batch=self._batch,
                    crashed="CUDA error" in str(error),  # nothing works in this process any more
                )

    def step(self, batch: Any) -> None:
        """One step as it is, for looking at eager."""
        self._passes.step(batch)

    def _steps(self, trial: Trial, batches: Sequence[Any], snapshot: Snapshot) -> Outcome:
        for number, batch in zip(trial.batches, batches, strict=True):
            self._batch = number
            for _ in range(self._repeats):
                self._phase = "forward"
                self._passes.step(batch, self._backward_is_through)
        return Outcome(shows=False)

    def _breaks(self, trial: Trial, batches: Sequence[Any], snapshot: Snapshot) -> Outcome:
        watch = CompilerMonitor()
        watch.start()
        try:
            for number, batch in zip(trial.batches, batches, strict=True):
                self._batch = number
                self._passes.step(batch)
                breaks = [event for event in watch.collect() if event.kind == "graph_break"]
                if breaks:
                    return _outcome(breaks, number)
        finally:
            watch.stop()
        return Outcome(shows=False)

    def _recompiles(self, trial: Trial, batches: Sequence[Any], snapshot: Snapshot) -> Outcome:
        """Whether batches that were there before still compile something, or torch has given up on what did."""
        watch = CompilerMonitor()
        watch.start()
        try:
            for again in range(SETTLING_STEPS + AGAIN_STEPS):
                for number, batch in zip(trial.batches, batches, strict=True):
                    self._batch = number
                    self._passes.step(batch)
                    seen = watch.collect()
                    found = [event for event in seen if event.kind == "recompile" and again >= SETTLING_STEPS]
                    given_up = [event for event in seen if watch.beyond_limit and event.kind == "fallback"]
                    if found or given_up:
                        return _outcome(found or given_up, number)
        finally:
            watch.stop()
        return Outcome(shows=False)

    def _differs(self, trial: Trial, batches: Sequence[Any], snapshot: Snapshot) -> Outcome:
        for number, batch in zip(trial.batches, batches, strict=True):
            self._batch = number
            gate = ParityGate("on", self._trainer, self._program, self._passes, snapshot)
            try:
                gate.run(batch)
            except ParityError as error:
                return Outcome(shows=True, reason=beyond_tolerance(error.facts), batch=number)
        return Outcome(shows=False)

    def _slower(self, trial: Trial, batches: Sequence[Any], snapshot: Snapshot) -> Outcome:
        for number, batch in zip(trial.batches, batches, strict=True):
            self._batch = number
            for _ in range(self._repeats):
                self._passes.step(batch)
            with eager(self._program):
                self._passes.step(batch)
        least = trial.least_lost_seconds
        lost = eager_median = 0.0
        for _ in range(2):  # slower by chance once is not slower by chance twice
            eagers, compiled = self._timed(batches[-1])
            eager_median = statistics.median(eagers)
            lost = statistics.median(compiled) - eager_median
            wanted = least if least is not None else (MARGIN - 1) * eager_median
            if not (lost > wanted and sorted(compiled)[len(compiled) // 4] > eager_median):
                return Outcome(shows=False, lost_seconds=lost, eager_seconds=eager_median)
        return Outcome(
            shows=True,
            reason=f"a step takes {figure((eager_median + lost) * 1e3)} ms, {figure(eager_median * 1e3)} ms in eager",
            batch=trial.batches[-1],
            lost_seconds=lost,
            eager_seconds=eager_median,
        )

    def _timed(self, batch: Any) -> tuple[list[float], list[float]]:
        """Seconds of steps of eager and compiled, taken in turns."""
        eagers: list[float] = []
        compiled: list[float] = []
        device = self._trainer.strategy.root_device
        began = time.perf_counter()

        def step() -> None:
            self._passes.step(batch)

        while len(eagers) < PAIRS:
            with eager(self._program):
                eagers.append(seconds_of(device, step))
            compiled.append(seconds_of(device, step))
            if len(eagers) >= LEAST_PAIRS and time.perf_counter() - began > MOST_SECONDS:
                break
        return eagers, compiled

    @contextlib.contextmanager
    def _phases(self) -> Iterator[None]:
        """Know which phase of a step is under way."""
        self._phase, self._batch = "forward", 0
        strategy: Any = self._trainer.strategy
        backward = strategy.backward

        def marked(*args: Any, **kwargs: Any) -> Any:
            self._phase = "backward"
            return backward(*args, **kwargs)

        strategy.backward = marked
        try:
            yield
        finally:
            vars(strategy).pop("backward")

    def _backward_is_through(self, _: torch.Tensor) -> None:
        self._phase = "optimizer step"


def beyond_tolerance(facts: dict[str, Any]) -> str:
    """What a failed comparison found, in words: the first figure beyond its tolerance, and a tensor by name."""
    said = []
    for name, label in (
        ("loss", "loss"),
        ("gradient_norm", "norm of the gradients"),
        ("weights", "update of {}"),
        ("gradients", "gradient of {}"),
        ("optimizer_state", "optimizer state {}"),
        ("buffers", "buffer {}"),
    ):
        figures = facts.get(name)
        if figures and not figures["difference"] <= figures["tolerance"]:
            what = label.format(figures.get("worst"))
            said.append(f"{what} {figures['difference']:.2g} of eager's away, tolerance {figures['tolerance']:.2g}")
    return "; ".join([*said[:1], *said[1:][-1:]]) or facts["reason"]


def place(error: BaseException) -> tuple[str | None, str | None]:
    """The line of code that an error is about, as ``file:line in function``, and its text."""
    text = str(error)
    if "from user code:" in text:
        stack = source.lines_of_stack(text.split("from user code:", 1)[1])
    else:
        frames = traceback.extract_tb(error.__traceback__)
        stack = [source.line(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    stack = [each for each in stack if not each.file.startswith(OURS)]
    where, _, _ = source.of_interest(stack)
    return (str(where), where.code) if where is not None else (None, None)


def _location(text: str | None) -> tuple[str | None, int, str | None]:
    """File, line and function of an event's ``file:line function``."""
    head, _, function = (text or "").rpartition(" ")
    file, _, number = head.rpartition(":")
    return (file, int(number), function) if file and number.isdigit() and linecache.getlines(file) else (None, 0, None)


def _outcome(events: Sequence[Event], batch: int) -> Outcome:
    """The first of the compiler's events, and how many more there were with it."""
    file, line, function = _location(events[0].location)
    found = source.line(file, line, function) if file else None
    more = f" (and {len(events) - 1} more)" if len(events) > 1 else ""
    return Outcome(
        shows=True,
        reason=_first_line(events[0].reason) + more,
        where=str(found) if found else events[0].location,
        code=found.code if found else None,
        batch=batch,
    )


def _first_line(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
