"""Profile: torch's profiler over a few steps or batches, exported as a Chrome trace and read for what matters.

What matters: the share of the time in which the device had nothing to do, and where the rest of it went. For whoever
finds a step too long: ``profile=on``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from strategies.compiler_warmup import environment
from trainer.telemetry import hardware
from trainer.telemetry.meter import Step
from trainer.wording import shorten

DIRECTORY = "profile"
TRACE = "trace.json.gz"
TOP = 10
"""Kernels or operators that are kept."""
SHOWN = 3
"""Of these in the summary."""
MAX_NAME = 80
COLLECTIVE = re.compile(r"^(nccl|rccl|gloo:)|^void (nccl|rccl)", re.IGNORECASE)
"""Kernels of collectives on a GPU, and what gloo does on the host."""
COMPUTE = re.compile(r"^(aten::|CompiledFunction|## Call CompiledFxGraph)")
"""What computes on a CPU; what dispatches a collective does not."""
STEPS = 5
"""Recorded; each adds thousands of events to a trace, and a viewer has to load them all."""
SETTINGS = {
    "KINETO_LOG_LEVEL": "99",  # the tracing library writes to stderr, errors on a machine without a device among it
    "TEARDOWN_CUPTI": "0",  # CUDA graphs and a tracer that comes and goes crash: torch/profiler/_utils.py
}


class StepProfiler:
    """Decides, after each step, whether the recording begins or ends. What breaks in it never breaks the training. The
    trace lies in a folder of its own in the run's ``directory``; without one none is written."""

    def __init__(self, device: torch.device, directory: Path | None) -> None:
        self._device, self._directory = device, directory
        self._done = self._first = 0
        self.recording = False
        self.facts: dict[str, Any] = {}
        """For the record, once the recording has ended; until then empty."""
        self._settings = contextlib.ExitStack()
        theirs = {name: value for name, value in SETTINGS.items() if name not in os.environ}
        self._settings.enter_context(environment(theirs))
        if device.type == "cuda":
            with self._safely():
                # The tracer sees kernels in CUDA graphs only when it was there before they were captured.
                warmup = self._profiler()
                warmup.start()
                torch.zeros(1, device=device)
                warmup.stop()

    @property
    def full(self) -> bool:
        return self.recording and self._done >= STEPS

    def due(self, step: Step, *, warm: bool) -> bool:
        """Count ``step``, which is over; returns whether ``start`` is due."""
        if self.facts:
            return False
        if self.recording:
            step.profiled = True
            self._first = self._first or step.number
            self._done += 1
            return False
        return warm and not step.disturbed

    def start(self) -> None:
        """Begin to record; what was launched before is waited for."""
        with self._safely():
            hardware.synchronize(self._device)
            self._recorder = self._profiler()
            self._recorder.start()
            self.recording = True

    def stop(self) -> None:
        """End the recording, between two steps; without a whole step in it, it is begun again later."""
        self.recording = False
        with self._safely():
            hardware.synchronize(self._device)
            self._recorder.stop()
            if self._done:
                self._end({"first_step": self._first, "steps": self._done} | self._read(self._done))
            del self._recorder

    def finish(self) -> None:
        """Training is over: note why there is no profile, if there is none."""
        if not self.facts:
            self._end({"reason": "the run ended before a steady step and a profiled one"})

    def _read(self, steps: int) -> dict[str, Any]:
        """Facts of the recording, of which the trace is written."""
        facts: dict[str, Any] = {}
        if self._directory is not None:
            (self._directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
            self._recorder.export_chrome_trace(str(self._directory / DIRECTORY / TRACE))
            facts["trace"] = f"{DIRECTORY}/{TRACE}"
        events, on_cuda = self._recorder.events(), self._device.type == "cuda"
        facts |= of_device(events, steps) if on_cuda else {}
        facts |= of_collectives(events, steps, on_cuda=on_cuda)
        # By the time that operators spent in themselves, not in what they call.
        host = [row for row in self._recorder.key_averages() if row.device_type == DeviceType.CPU]
        spent = [(row.key, row.self_cpu_time_total, row.count) for row in host if row.self_cpu_time_total > 0]
        return {**facts, "operators": top(spent, steps)}

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the tracing library's own
            self._end({"reason": f"the profiler failed: {type(error).__name__}: {error}".splitlines()[0]})

    def _end(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self._settings.close()

    def _profiler(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities, acc_events=True)


Span = tuple[float, float]
"""Begin and end, microseconds."""


def of_device(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Busy seconds and kernels of a recording of ``steps`` steps, from the profiler's function events."""
    kernels: defaultdict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name].append(_span(event))
    spans = [span for each in kernels.values() for span in each]
    if not spans:
        return {"not_seen": "the profiler saw no kernel: is CUPTI there, and allowed to this user?"}
    spent = [(name, sum(end - begin for begin, end in each), len(each)) for name, each in kernels.items()]
    return {"busy_seconds_per_step": covered(spans) / 1e6 / steps, "kernels": top(spent, steps)}


def of_collectives(events: Iterable[Any], steps: int, *, on_cuda: bool) -> dict[str, Any]:
    """Seconds of a step in which a collective runs while nothing computes, and their share of the recording; nothing
    where there is no collective. It includes waiting for slower ranks."""
    there = [event for event in events if (event.device_type == DeviceType.CUDA) is on_cuda]
    there = [event for event in there if not (on_cuda and event.is_user_annotation)]
    collectives = [_span(event) for event in there if COLLECTIVE.match(event.name)]
    compute = [_span(e) for e in there if not COLLECTIVE.match(e.name) and (on_cuda or COMPUTE.match(e.name))]
    if not collectives:
        return {}
    every = [*collectives, *compute]
    exposed, length = covered(every) - covered(compute), max(end for _, end in every) - min(begin for begin, _ in every)
    return {
        "exposed_communication_seconds_per_step": exposed / 1e6 / steps,
        "exposed_communication_share": exposed / length,
    }


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def covered(spans: list[Span]) -> float:
    """Length of the union of intervals: kernels of several streams overlap."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > reached:
            length += end - max(begin, reached)
            reached = end
    return length


def top(spent: Sequence[tuple[str, float, int]], steps: int) -> list[dict[str, Any]]:
    """Kernels or operators that took longest, of name, microseconds and calls of each."""
    total = sum(microseconds for _, microseconds, _ in spent)
    return [
        {
            "name": shorten(name.removeprefix("void "), MAX_NAME),
            "share": microseconds / total,
            "milliseconds_per_step": microseconds / 1e3 / steps,
            "calls_per_step": calls / steps,
        }
        for name, microseconds, calls in sorted(spent, key=lambda one: -one[1])[:TOP]
    ]


def with_idle_share(facts: Mapping[str, Any], steady_seconds: float | None) -> dict[str, Any]:
    """``facts`` with the device's idle share of a steady step, which no profiler slowed down: its host work makes small
    steps look idler than they are. None where steps vary so much that one has less time than the kernels took."""
    busy = facts.get("busy_seconds_per_step")
    if busy is None:
        return dict(facts)
    return {"idle_share": 1 - busy / steady_seconds if steady_seconds and busy <= steady_seconds else None, **facts}


def profile_line(facts: Mapping[str, Any]) -> str:
    if "reason" in facts:
        return f"none: {facts['reason']}"
    idle, exposed = facts.get("idle_share"), facts.get("exposed_communication_share")
    longest = (facts.get("kernels") or facts.get("operators") or [])[:SHOWN]
    parts = [
        facts.get("not_seen"),
        None if idle is None else f"GPU idle {idle:.0%} of the time",
        None if exposed is None else f"communication that nothing hides {exposed:.0%}",
        ", ".join(f"{row['name'][:40]} {row['share']:.0%}" for row in longest),
        facts.get("trace"),
    ]
    return " · ".join(part for part in parts if part)
