"""Coverage: which part of a step's time compiled code is, and what ran eager beside it, from a profile's events.

Torch marks each call of compiled code (``Torch-Compiled Region: 0/0``), and compiled backwards
(``CompiledFunctionBackward``). Whatever else has a name in the step ran eager: operators under the mark of the module
that called them, nodes of the backward under their own names.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.explain.explanation import Coverage, Share

STEP, FORWARD, BACKWARD = "explain: step", "explain: forward", "explain: backward"
MODULE = "explain: module "
COMPILED = "Torch-Compiled Region"
BACKWARD_COMPILED = "CompiledFunctionBackward"
INNER_GRAPH = ("CompiledFunction", "## Call CompiledFxGraph")
"""Calls of the graph itself within compiled code; operators beside them run where a graph was broken."""
LOOKUP = "TorchDynamo Cache Lookup"
COMPILING = "(dynamo_timed)"
ENGINE = "autograd::engine::evaluate_function: "
OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
HOST = "Python, Lightning and waiting for the device"
SMALLEST_SHARE = 0.005
"""Shares below it are added up as one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece of time belongs."""

    phase: str
    what: str
    compiled: bool


def coverage(events: Sequence[Any]) -> Coverage | None:
    """Coverage of the steps among ``events`` of a profile: trees with ``name``, ``thread``, ``time_range``,
    ``cpu_children`` and times in microseconds."""
    steps = [event for event in events if event.name == STEP]
    if not steps:
        return None
    elsewhere = [
        event for event in events if event.cpu_parent is None and event.name.startswith((ENGINE, "torch::autograd"))
    ]
    totals: list[dict[Place, float]] = []
    devices: dict[Place, float] = defaultdict(float)
    for step in steps:
        times: dict[Place, float] = defaultdict(float)
        _add(step, "host", HOST, times, devices)
        # On an accelerator, a thread of autograd's own runs the backward while the step's thread waits for it.
        span = step.time_range
        theirs = [event for event in elsewhere if span.start <= event.time_range.start <= span.end]
        for event in theirs:
            _add_node(event, times, devices)
        waited = Place("backward", "autograd engine", False)
        if theirs:
            times[waited] = max(times[waited] - sum(event.cpu_time_total for event in theirs), 0.0)
        totals.append(times)
    # Means, of the step and of its parts: medians of parts do not add up to the median of the whole.
    places = {place for times in totals for place in times}
    seconds = {place: statistics.fmean(times.get(place, 0.0) for times in totals) / 1e6 for place in places}
    whole = sum(seconds.values()) or 1.0
    on_device = any(devices.values())
    shares = [
        Share(
            phase=place.phase,
            what=place.what,
            seconds=value,
            share=value / whole,
            compiled=place.compiled,
            device_seconds=devices[place] / len(steps) / 1e6 if on_device else None,
        )
        for place, value in seconds.items()
    ]
    shares.sort(key=lambda share: -share.seconds)
    return Coverage(
        step_seconds=statistics.fmean(step.cpu_time_total for step in steps) / 1e6,
        compiled_share=sum(share.share for share in shares if share.compiled),
        steps=len(steps),
        shares=_without_crumbs(shares),
    )


def _add(event: Any, phase: str, eager: str, times: dict[Place, float], devices: dict[Place, float]) -> None:
    """Add up what lies below ``event`` and its own time; ``eager`` names what runs there eager."""
    times[Place(phase, eager, False)] += _own(event)
    for child in event.cpu_children:
        name = child.name
        if name == FORWARD:
            _add(child, "forward", "training_step itself (eager)", times, devices)
        elif name == BACKWARD:
            _add(child, "backward", "autograd engine", times, devices)
        elif name.startswith((ENGINE, "torch::autograd")):
            _add_node(child, times, devices)
        elif name.startswith(OPTIMIZER):
            step = name.split("#")[-1]
            _add(child, "optimizer", f"{step} (eager)", times, devices)
        elif name.startswith(COMPILED):
            _add_compiled(child, phase, times, devices)
        elif name.startswith(MODULE):
            _add(child, phase, f"{name.removeprefix(MODULE)} (eager module)", times, devices)
        elif name.endswith(COMPILING):
            _place(child, Place(phase, "compiling, because every step does", False), times, devices)
        elif name.startswith(LOOKUP):
            _place(child, Place(phase, "guards: looking up compiled code", False), times, devices)
        elif _holds_a_mark(child):
            _add(child, phase, eager, times, devices)
        else:
            _place(child, Place(phase, eager, False), times, devices)


def _add_node(event: Any, times: dict[Place, float], devices: dict[Place, float]) -> None:
    """A node of the backward."""
    node = event.name.removeprefix(ENGINE).removeprefix("torch::autograd::")
    compiled = node.startswith(BACKWARD_COMPILED)
    what = "compiled graphs" if compiled else f"{node} (eager)"
    _place(event, Place("backward", what, compiled), times, devices)


def _add_compiled(event: Any, phase: str, times: dict[Place, float], devices: dict[Place, float]) -> None:
    """Compiled code: all of it, less the operators that run eager between two graphs of broken code."""
    inner = [child for child in event.cpu_children if child.name.startswith(COMPILED)]
    graphs = [child for child in event.cpu_children if child.name.startswith(INNER_GRAPH)]
    loose = [child for child in event.cpu_children if child.name.startswith("aten::")] if graphs or inner else []
    for child in loose:
        _place(child, Place(phase, "eager operators between graphs", False), times, devices)
    compiling = [child for child in event.cpu_children if child.name.endswith(COMPILING)]
    for child in compiling:
        _place(child, Place(phase, "compiling, because every step does", False), times, devices)
    for child in inner:
        _add_compiled(child, phase, times, devices)
    apart = [*loose, *inner, *compiling]
    place = Place(phase, "compiled graphs", True)
    times[place] += max(event.cpu_time_total - sum(child.cpu_time_total for child in apart), 0.0)
    devices[place] += max(_device(event) - sum(_device(child) for child in apart), 0.0)


def _place(event: Any, place: Place, times: dict[Place, float], devices: dict[Place, float]) -> None:
    times[place] += event.cpu_time_total
    devices[place] += _device(event)


def _holds_a_mark(event: Any) -> bool:
    marks = (FORWARD, BACKWARD, MODULE, COMPILED, *OPTIMIZER)
    return any(child.name.startswith(marks) or _holds_a_mark(child) for child in event.cpu_children)


def _own(event: Any) -> float:
    return max(float(event.cpu_time_total) - sum(child.cpu_time_total for child in event.cpu_children), 0.0)


def _device(event: Any) -> float:
    return float(getattr(event, "device_time_total", 0.0) or 0.0)


def _without_crumbs(shares: Sequence[Share]) -> list[Share]:
    kept = [share for share in shares if share.share >= SMALLEST_SHARE]
    crumbs = [share for share in shares if share.share < SMALLEST_SHARE]
    if crumbs:
        known = [share.device_seconds for share in crumbs if share.device_seconds is not None]
        kept.append(
            Share(
                phase="host",
                what=f"{len(crumbs)} smaller things",
                seconds=sum(share.seconds for share in crumbs),
                share=sum(share.share for share in crumbs),
                compiled=False,
                device_seconds=sum(known) if known else None,
            )
        )
    return kept
