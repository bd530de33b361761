"""Host effects: what a training step does beside launching kernels, which a CUDA graph would not repeat.

A replay calls no Python. What a step logs is written again after each replay; whatever else it does on the host is
looked for before it is captured, and then it is not captured.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

PROGRESS = {"current_epoch", "global_step", "trainer"}
"""Names by which a training step asks how far training is."""
SILENT_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks within a step; a replay would not call them."""
REPLACED_METHODS = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")
PLAIN = (bool, int, float, str, bytes, type(None))


def reasons_against(trainer: L.Trainer) -> Iterator[str]:
    """Why no step of this training can be captured."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield "manual optimization: the training step itself steps the optimizers"
        return
    if len(trainer.optimizers) != 1:
        yield f"{len(trainer.optimizers)} optimizers"
    for hook in (*SILENT_HOOKS, *REPLACED_METHODS):
        if is_overridden(hook, module):
            yield f"{type(module).__name__}.{hook} is called on the host in every step"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for hook in SILENT_HOOKS:
            if getattr(type(callback), hook, None) is not getattr(L.Callback, hook):
                yield f"{type(callback).__name__}.{hook} is called on the host in every step"
    if trainer._detect_anomaly:
        yield "detect_anomaly reads every gradient on the host"
    yield from _progress_read(module)


def _progress_read(module: L.LightningModule) -> Iterator[str]:
    function = inspect.unwrap(type(module).training_step)
    code = function.__code__
    parameters = list(inspect.signature(function).parameters)
    loads = [instruction for instruction in dis.get_instructions(code) if instruction.opname.startswith("LOAD_")]
    if len(parameters) > 2 and any(_names(load.argval, parameters[2]) for load in loads):
        yield f"training_step reads {parameters[2]}, which a graph would keep as it was"
    for name in sorted(PROGRESS.intersection(code.co_names)):
        yield f"training_step reads self.{name}, which a graph would keep as it was"


def _names(argument: Any, name: str) -> bool:
    # Python 3.13 loads two local variables with one instruction and names both.
    return argument == name or (isinstance(argument, tuple) and name in argument)


class HostEffects:
    """Watches the first run of each kind of step for changes on the host."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._lightnings = set(vars(L.LightningModule()))
        self._watched: set[Hashable] = set()
        self.found: str | None = None
        """What a step did that a graph would not repeat, to follow "training_step"."""

    @contextlib.contextmanager
    def watched(self, kind: Hashable) -> Iterator[None]:
        """Compare before and after, once for each kind."""
        if kind in self._watched:
            yield
            return
        self._watched.add(kind)
        attributes, generators = self._attributes(), self._generators()
        yield
        if changed := sorted(name for name, value in self._attributes().items() if attributes.get(name) != value):
            self.found = f"changes {', '.join(changed)} on the host, which a graph would not repeat"
        elif generators != self._generators():
            self.found = "draws random numbers on the host, which a graph would not repeat"

    def _attributes(self) -> dict[str, Any]:
        """Plain attributes by value and tensors by identity; a tensor changed in place is changed by a graph too."""
        found: dict[str, Any] = {}
        for path, submodule in self._module.named_modules():
            ours = self._lightnings if submodule is self._module else vars(_BARE)
            for name, value in vars(submodule).items():
                if name not in ours:
                    found[f"{path}.{name}".lstrip(".")] = _seen(value)
        return found

    def _generators(self) -> tuple[Any, ...]:
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        states = random.getstate(), kind, numpy.asarray(keys).tobytes(), tuple(rest)
        if self._module.device.type == "cpu":  # there, torch's generator is the device's own
            return states
        return *states, bytes(torch.get_rng_state().numpy())


_BARE = nn.Module()


def _seen(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, list | tuple | set | dict):
        return type(value), len(value)
    return None


@dataclass(frozen=True, slots=True)
class LogCall:
    """One ``self.log``, without its value."""

    name: str
    options: dict[str, Any]


class Logged:
    """Records what a training step logs while it runs, and writes it after every run or replay."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[tuple[LogCall, Any]]]:
        """Keep ``self.log`` from writing inside; yields calls and values, a part of the step's results."""
        calls: list[tuple[LogCall, Any]] = []

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            named = dict(zip(_LOG_PARAMETERS, arguments, strict=False))
            kept = value.detach() if isinstance(value, Tensor) else value
            calls.append((LogCall(name, {**named, **options}), kept))

        def log_dict(dictionary: Any, *arguments: Any, **options: Any) -> None:
            for name, value in dictionary.items():
                log(name, value, *arguments, **options)

        self._module.log = log  # type: ignore[method-assign]
        self._module.log_dict = log_dict  # type: ignore[method-assign]
        try:
            yield calls
        finally:
            del self._module.log, self._module.log_dict

    def write(self, calls: list[tuple[LogCall, Any]]) -> None:
        """Log in the name of the training step."""
        if not calls:
            return
        self._module._current_fx_name = "training_step"
        try:
            for call, value in calls:
                self._module.log(call.name, value, **call.options)
        finally:
            self._module._current_fx_name = None


_LOG_PARAMETERS = tuple(inspect.signature(L.LightningModule.log).parameters)[3:]
