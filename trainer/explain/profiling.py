"""Profiling: a few steps under torch's profiler, with marks that say which part of the step is which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.explain.coverage import BACKWARD, FORWARD, MODULE, STEP, coverage
from trainer.explain.explanation import Coverage


class StepProfile:
    """Profiles steps, told where each begins and ends."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._step: Any = None
        self._marks = contextlib.ExitStack()

    def begin(self, trainer: L.Trainer, regions: Iterable[str]) -> None:
        """Mark forward, backward and the eager modules, and start the profiler."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._marks.enter_context(marked(trainer, list(regions)))
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.__enter__()

    def step_begins(self) -> None:
        """A batch is about to be computed."""
        if self._profile is not None:
            self._step = record_function(STEP)
            self._step.__enter__()

    def step_ends(self) -> None:
        """And done."""
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
def marked(trainer: L.Trainer, regions: Sequence[str]) -> Iterator[None]:
    """While it lasts, forward, backward and every submodule that is not compiled are marked in the profile."""
    strategy: Any = trainer.strategy
    module = trainer.lightning_module
    calls = {FORWARD: "training_step", BACKWARD: "backward"}
    before = {method: getattr(strategy, method) for method in calls.values()}
    for name, method in calls.items():
        setattr(strategy, method, record_function(name)(before[method]))
    handles = []
    for path, child in module.named_modules():
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
        mark = record_function(name)
        mark.__enter__()
        open_marks.append(mark)

    def leave(*_: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
