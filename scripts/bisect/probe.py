"""Probe: whether a step fails to compile, breaks, compiles again, departs from eager's or is slower."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from scripts.bisect.report import Outcome, Trial
from strategies import Program
from strategies.compose import eager
from strategies.errors import is_recompile_limit, one_line
from trainer.guards.compare import ParityError
from trainer.guards.parity import ParityGate
from trainer.guards.preflight import REPLAYED_FROM
from trainer.guards.slowdown import MARGIN
from trainer.guards.snapshot import Snapshot
from trainer.loops.lightning import LightningLoop
from trainer.telemetry import source
from trainer.telemetry.compiler import RESUMED, CompilerMonitor, code_at, reason
from trainer.telemetry.facts import number as figure
from trainer.telemetry.hardware import seconds_of
from trainer.telemetry.record import Event

SETTLING_STEPS, AGAIN_STEPS = 3, 3
"""Steps on every batch until nothing should compile any more (a float attribute becomes symbolic in the second), and
steps in which nothing may."""
PAIRS = 9
"""Steps of each that are timed in pairs."""
MIN_PAIRS = 3
MAX_SECONDS = 6.0
"""Timing takes about this long at most."""
PROJECT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{PROJECT / package}{os.sep}" for package in ("trainer", "strategies", "scripts"))
"""Whose lines are nobody's mistake to fix."""


class Probe:
    """Runs steps of one training and checks what the compiler makes of them.

    Args:
        passes: Quiet for as long as this lasts.
    """

    def __init__(self, trainer: L.Trainer, program: Program, passes: LightningLoop) -> None:
        self._trainer, self._program, self._passes = trainer, program, passes
        self._repeats = REPLAYED_FROM if program.uses_cuda_graphs else 2  # the first step makes the optimizer's state
        self._phase, self._batch = "forward", 0

    def run(self, trial: Trial, batches: Sequence[Any], snapshot: Snapshot) -> Outcome:
        """What ``trial`` comes to; what it compiles is in place already. The state afterwards is any."""
        self._numbered = list(zip(trial.batches, batches, strict=True))
        snapshot.restore()
        with self._phases():
            try:
                return self._seen(trial, snapshot) or Outcome(shows=False)
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

    def _seen(self, trial: Trial, snapshot: Snapshot) -> Outcome | None:
        match trial.symptom:
            case "fails":
                for batch in self._batches():
                    for _ in range(self._repeats):
                        self._phase = "forward"
                        self._passes.step(batch, self._backward_is_over)
                return None
            case "differs":
                return self._differs(snapshot)
            case "slower":
                return self._slower(trial.min_lost_seconds)
        watch = CompilerMonitor()
        watch.start()
        try:
            return self._breaks(watch) if trial.symptom == "breaks" else self._recompiles(watch)
        finally:
            watch.stop()

    def _batches(self) -> Iterator[Any]:
        for number, batch in self._numbered:
            self._batch = number
            yield batch

    def _breaks(self, watch: CompilerMonitor) -> Outcome | None:
        for batch in self._batches():
            self._passes.step(batch)
            breaks = [event for event in watch.collect() if event.kind == "graph_break"]
            if breaks:
                return _outcome(breaks, self._batch)
        return None

    def _recompiles(self, watch: CompilerMonitor) -> Outcome | None:
        """Whether batches that were there before still compile something, or torch has given up on what did."""
        for again in range(SETTLING_STEPS + AGAIN_STEPS):
            for batch in self._batches():
                self._passes.step(batch)
                seen = watch.collect()
                found = [event for event in seen if event.kind == "recompile" and again >= SETTLING_STEPS]
                given_up = [event for event in seen if watch.beyond_limit and event.kind == "fallback"]
                if found or given_up:
                    return _outcome(found or given_up, self._batch)
        return None

    def _differs(self, snapshot: Snapshot) -> Outcome | None:
        for batch in self._batches():
            try:
                ParityGate("on", self._passes, self._program, snapshot).run(batch)
            except ParityError as error:
                return Outcome(shows=True, reason=beyond_tolerance(error.facts), batch=self._batch)
        return None

    def _slower(self, min_lost_seconds: float | None) -> Outcome:
        for batch in self._batches():
            for _ in range(self._repeats):
                self._passes.step(batch)
            with eager(self._program):
                self._passes.step(batch)
        outcome = Outcome(shows=True, batch=self._batch)
        for _ in range(2):  # slower by chance once is not slower by chance twice
            eagers, compiled = self._timed(batch)
            eager_seconds = statistics.median(eagers)
            lost = statistics.median(compiled) - eager_seconds
            wanted = (MARGIN - 1) * eager_seconds if min_lost_seconds is None else min_lost_seconds
            outcome.lost_seconds, outcome.eager_seconds = lost, eager_seconds
            if not (lost > wanted and sorted(compiled)[len(compiled) // 4] > eager_seconds):
                return Outcome(shows=False, lost_seconds=lost, eager_seconds=eager_seconds)
            took, in_eager = figure((eager_seconds + lost) * 1e3), figure(eager_seconds * 1e3)
            outcome.reason = f"a step takes {took} ms, {in_eager} ms in eager"
        return outcome

    def _timed(self, batch: Any) -> tuple[list[float], list[float]]:
        """Seconds of steps of eager and compiled, taken in pairs."""
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
            if len(eagers) >= MIN_PAIRS and time.perf_counter() - began > MAX_SECONDS:
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

    def _backward_is_over(self, _: torch.Tensor) -> None:
        self._phase = "optimizer step"


def beyond_tolerance(facts: dict[str, Any]) -> str:
    """What a failed comparison found, in words: the first figure beyond its tolerance, and a tensor by name."""
    beyond = []
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
            beyond.append(f"{what} {figures['difference']:.2g} of eager's away, tolerance {figures['tolerance']:.2g}")
    return "; ".join([*beyond[:1], *beyond[1:][-1:]]) or facts["reason"]


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


def _outcome(events: Sequence[Event], batch: int) -> Outcome:
    """The first of the compiler's events, and how many more there were with it."""
    location = events[0].location
    head, _, function = RESUMED.sub(r"\1", location or "").rpartition(" ")
    more = f" (and {len(events) - 1} more)" if len(events) > 1 else ""
    return Outcome(
        shows=True,
        reason=reason(events[0].reason) + more,
        where=f"{head} in {function}" if head else location,
        code=code_at(location) if location else None,
        batch=batch,
    )
