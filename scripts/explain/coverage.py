"""Coverage: which part of a step's time is compiled code, and what runs eager beside it, from torch's profiler.

Torch marks each call of compiled code (``Torch-Compiled Region: 0/0``), and compiled backwards
(``CompiledFunctionBackward``). Whatever else has a name in the step ran eager: operators under the mark of the module
that called them, nodes of the backward under their own names.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from scripts.explain.explanation import Coverage, Share

STEP, FORWARD, BACKWARD = "explain: step", "explain: forward", "explain: backward"
MODULE = "explain: module "
COMPILED = "Torch-Compiled Region"
BACKWARD_COMPILED = "CompiledFunctionBackward"
INNER_GRAPH = ("CompiledFunction", "## Call CompiledFxGraph")
"""Calls of the graph itself within compiled code; operators beside them run where a graph was broken."""
LOOKUP = "TorchDynamo Cache Lookup"
COMPILING = "(dynamo_timed)"
ENGINE = "autograd::engine::evaluate_function: "
NODES = (ENGINE, "torch::autograd")
OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
MARKS = (FORWARD, BACKWARD, MODULE, COMPILED, *OPTIMIZER)
HOST = "Python, Lightning and waiting for the device"


class Place(NamedTuple):
    """Where a piece of time belongs."""

    phase: str
    what: str
    compiled: bool = False


IN_ENGINE = Place("backward", "autograd engine")
Piece = tuple[Place, float, float]
"""Microseconds on the host and on the device."""


def coverage(events: Sequence[Any]) -> Coverage | None:
    """Coverage of the median step among ``events`` of a profile: trees with ``name``, ``time_range``, ``cpu_children``
    and times in microseconds. Its parts add up to it; those of a mean would hold whatever disturbed one step."""
    steps = sorted((event for event in events if event.name == STEP), key=lambda event: event.cpu_time_total)
    if not steps:
        return None
    elsewhere = [event for event in events if event.cpu_parent is None and event.name.startswith(NODES)]
    host: dict[Place, float] = defaultdict(float)
    device: dict[Place, float] = defaultdict(float)
    step = steps[len(steps) // 2]
    for place, host_us, device_us in _of_step(step, elsewhere):
        host[place] += host_us / 1e6
        device[place] += device_us / 1e6
    whole, on_device = sum(host.values()) or 1.0, any(device.values())
    shares = [
        Share(
            **place._asdict(),
            seconds=seconds,
            share=seconds / whole,
            device_seconds=device[place] if on_device else None,
        )
        for place, seconds in host.items()
    ]
    return Coverage(
        step_seconds=step.cpu_time_total / 1e6,
        compiled_share=sum(share.share for share in shares if share.compiled),
        steps=len(steps),
        shares=sorted(shares, key=lambda share: -share.seconds),
    )


def _of_step(step: Any, elsewhere: Sequence[Any]) -> Iterator[Piece]:
    # On an accelerator, a thread of autograd's own runs the backward while the step's thread waits for it.
    span = step.time_range
    theirs = [event for event in elsewhere if span.start <= event.time_range.start <= span.end]
    waited = sum(event.cpu_time_total for event in theirs)
    for place, host, device in _pieces(step, "host", HOST):
        here = min(waited, host) if place == IN_ENGINE else 0.0
        waited -= here
        yield place, host - here, device
    yield from map(_node, theirs)


def _pieces(event: Any, phase: str, eager: str) -> Iterator[Piece]:
    """What lies below ``event`` and its own time; ``eager`` names what runs there eager."""
    here = Place(phase, eager)
    yield here, _piece(event, here, event.cpu_children)[1], 0.0
    for child in event.cpu_children:
        name = child.name
        if name == FORWARD:
            yield from _pieces(child, "forward", "training_step itself (eager)")
        elif name == BACKWARD:
            yield from _pieces(child, *IN_ENGINE[:2])
        elif name.startswith(NODES):
            yield _node(child)
        elif name.startswith(OPTIMIZER):
            yield from _pieces(child, "optimizer", f"{name.split('#')[-1]} (eager)")
        elif name.startswith(COMPILED):
            yield from _compiled(child, phase)
        elif name.startswith(MODULE):
            yield from _pieces(child, phase, f"{name.removeprefix(MODULE)} (eager module)")
        elif name.endswith(COMPILING):
            yield _piece(child, Place(phase, "compiling, because every step does"))
        elif name.startswith(LOOKUP):
            yield _piece(child, Place(phase, "guards: looking up compiled code"))
        elif _holds_a_mark(child):
            yield from _pieces(child, phase, eager)
        else:
            yield _piece(child, here)


def _compiled(event: Any, phase: str) -> Iterator[Piece]:
    """Compiled code: all of it, less the operators that run eager between two graphs of broken code."""
    inner, compiling, loose = [], [], []
    for child in event.cpu_children:
        if child.name.startswith(COMPILED):
            inner.append(child)
        elif child.name.endswith(COMPILING):
            compiling.append(child)
        elif child.name.startswith("aten::"):
            loose.append(child)
    if not inner and not any(child.name.startswith(INNER_GRAPH) for child in event.cpu_children):
        loose = []
    for child in inner:
        yield from _compiled(child, phase)
    yield from (_piece(child, Place(phase, "compiling, because every step does")) for child in compiling)
    yield from (_piece(child, Place(phase, "eager operators between graphs")) for child in loose)
    yield _piece(event, Place(phase, "compiled graphs", True), [*inner, *compiling, *loose])


def _node(event: Any) -> Piece:
    """A node of the backward."""
    node = event.name.removeprefix(ENGINE).removeprefix("torch::autograd::")
    compiled = node.startswith(BACKWARD_COMPILED)
    return _piece(event, Place("backward", "compiled graphs" if compiled else f"{node} (eager)", compiled))


def _piece(event: Any, place: Place, apart: Sequence[Any] = ()) -> Piece:
    """All of ``event`` less what lies ``apart``."""
    host = event.cpu_time_total - sum(each.cpu_time_total for each in apart)
    device = event.device_time_total - sum(each.device_time_total for each in apart)
    return place, max(float(host), 0.0), max(float(device), 0.0)


def _holds_a_mark(event: Any) -> bool:
    return any(child.name.startswith(MARKS) or _holds_a_mark(child) for child in event.cpu_children)


class StepProfile:
    """Profiles steps, told where each begins and ends."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._step: Any = None
        self._marks = contextlib.ExitStack()

    def begin(self, trainer: L.Trainer, regions: Sequence[str]) -> None:
        """Mark forward, backward and the eager modules, and start the profiler."""
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._marks.enter_context(_marked(trainer, regions))
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)
        self._profile.__enter__()

    def step_begins(self) -> None:
        if self._profile is not None:
            self._step = record_function(STEP)
            self._step.__enter__()

    def step_ends(self) -> None:
        if self._step is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._step.__exit__(None, None, None)
            self._step = None

    def end(self) -> Coverage | None:
        """Stop; what was measured, None without a step."""
        if self._profile is None:
            return None
        self.step_ends()
        self._profile.__exit__(None, None, None)
        self._marks.close()
        taken, self._profile = self._profile, None
        return coverage(list(taken.events()))


@contextlib.contextmanager
def _marked(trainer: L.Trainer, regions: Sequence[str]) -> Iterator[None]:
    """While it lasts, forward, backward and every submodule that is not compiled are marked in the profile."""
    strategy: Any = trainer.strategy
    calls = {FORWARD: "training_step", BACKWARD: "backward"}
    for name, method in calls.items():
        setattr(strategy, method, record_function(name)(getattr(strategy, method)))
    handles = []
    for path, child in trainer.lightning_module.named_modules():
        compiled = any(path == region or path.startswith(f"{region}.") for region in regions)
        if path and not compiled:  # a hook on compiled code would be compiled with it
            handles += _mark(child, MODULE + path)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for method in calls.values():
            delattr(strategy, method)  # of this one object, in front of its class's own


def _mark(module: nn.Module, name: str) -> list[Any]:
    open_marks: list[Any] = []

    def enter(*_: Any) -> None:
        open_marks.append(record_function(name))
        open_marks[-1].__enter__()

    def leave(*_: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
