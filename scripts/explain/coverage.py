"""Coverage: which part of a step's time is compiled code, and what runs eager beside it, from torch's profiler.

Torch marks each call of compiled code (``Torch-Compiled Region: 0/0``), and compiled backwards
(``CompiledFunctionBackward``). Whatever else has a name in the step ran eager: operators under the mark of the module
that called them, nodes of the backward under their own names.
"""

from __future__ import annotations

import contextlib
import statistics
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
MIN_SHARE = 0.005
"""Shares below it are added up as one."""


class Place(NamedTuple):
    """Where a piece of time belongs."""

    phase: str
    what: str
    compiled: bool = False


class _Times:
    """Microseconds by place, on the host and on the device."""

    def __init__(self) -> None:
        self.host: dict[Place, float] = defaultdict(float)
        self.device: dict[Place, float] = defaultdict(float)

    def add(self, event: Any, place: Place, *, apart: Sequence[Any] = ()) -> None:
        """All of ``event`` less what lies ``apart``."""
        self.host[place] += max(event.cpu_time_total - sum(each.cpu_time_total for each in apart), 0.0)
        self.device[place] += max(_device(event) - sum(map(_device, apart)), 0.0)

    def add_tree(self, event: Any, phase: str, eager: str) -> None:
        """What lies below ``event`` and its own time; ``eager`` names what runs there eager."""
        own = event.cpu_time_total - sum(child.cpu_time_total for child in event.cpu_children)
        self.host[Place(phase, eager)] += max(float(own), 0.0)
        for child in event.cpu_children:
            name = child.name
            if name == FORWARD:
                self.add_tree(child, "forward", "training_step itself (eager)")
            elif name == BACKWARD:
                self.add_tree(child, "backward", "autograd engine")
            elif name.startswith(NODES):
                self.add_node(child)
            elif name.startswith(OPTIMIZER):
                self.add_tree(child, "optimizer", f"{name.split('#')[-1]} (eager)")
            elif name.startswith(COMPILED):
                self.add_compiled(child, phase)
            elif name.startswith(MODULE):
                self.add_tree(child, phase, f"{name.removeprefix(MODULE)} (eager module)")
            elif name.endswith(COMPILING):
                self.add(child, Place(phase, "compiling, because every step does"))
            elif name.startswith(LOOKUP):
                self.add(child, Place(phase, "guards: looking up compiled code"))
            elif _holds_a_mark(child):
                self.add_tree(child, phase, eager)
            else:
                self.add(child, Place(phase, eager))

    def add_node(self, event: Any) -> None:
        node = event.name.removeprefix(ENGINE).removeprefix("torch::autograd::")
        compiled = node.startswith(BACKWARD_COMPILED)
        self.add(event, Place("backward", "compiled graphs" if compiled else f"{node} (eager)", compiled))

    def add_compiled(self, event: Any, phase: str) -> None:
        """Compiled code: all of it, less the operators that run eager between two graphs of broken code."""
        children = event.cpu_children
        inner = [child for child in children if child.name.startswith(COMPILED)]
        broken = inner or any(child.name.startswith(INNER_GRAPH) for child in children)
        loose = [child for child in children if broken and child.name.startswith("aten::")]
        compiling = [child for child in children if child.name.endswith(COMPILING)]
        for child in loose:
            self.add(child, Place(phase, "eager operators between graphs"))
        for child in compiling:
            self.add(child, Place(phase, "compiling, because every step does"))
        for child in inner:
            self.add_compiled(child, phase)
        self.add(event, Place(phase, "compiled graphs", True), apart=[*loose, *inner, *compiling])


def coverage(events: Sequence[Any]) -> Coverage | None:
    """Coverage of the steps among ``events`` of a profile: trees with ``name``, ``thread``, ``time_range``,
    ``cpu_children`` and times in microseconds."""
    steps = [event for event in events if event.name == STEP]
    if not steps:
        return None
    elsewhere = [event for event in events if event.cpu_parent is None and event.name.startswith(NODES)]
    taken = [_of_step(step, elsewhere) for step in steps]
    # Means, of the step and of its parts: medians of parts do not add up to the median of the whole.
    places = {place for times in taken for place in (*times.host, *times.device)}
    seconds = {place: statistics.fmean(times.host[place] for times in taken) / 1e6 for place in places}
    devices = {place: statistics.fmean(times.device[place] for times in taken) / 1e6 for place in places}
    whole = sum(seconds.values()) or 1.0
    on_device = any(devices.values())
    shares = [
        Share(
            phase=place.phase,
            what=place.what,
            seconds=value,
            share=value / whole,
            compiled=place.compiled,
            device_seconds=devices[place] if on_device else None,
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


def _of_step(step: Any, elsewhere: Sequence[Any]) -> _Times:
    times = _Times()
    times.add_tree(step, "host", HOST)
    # On an accelerator, a thread of autograd's own runs the backward while the step's thread waits for it.
    span = step.time_range
    theirs = [event for event in elsewhere if span.start <= event.time_range.start <= span.end]
    for event in theirs:
        times.add_node(event)
    if theirs:
        waited = Place("backward", "autograd engine")
        times.host[waited] = max(times.host[waited] - sum(event.cpu_time_total for event in theirs), 0.0)
    return times


def _holds_a_mark(event: Any) -> bool:
    return any(child.name.startswith(MARKS) or _holds_a_mark(child) for child in event.cpu_children)


def _device(event: Any) -> float:
    return float(getattr(event, "device_time_total", 0.0) or 0.0)


def _without_crumbs(shares: Sequence[Share]) -> list[Share]:
    kept = [share for share in shares if share.share >= MIN_SHARE]
    crumbs = [share for share in shares if share.share < MIN_SHARE]
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
