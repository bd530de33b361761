"""Snapshot: everything that a training step may change, copied, and put back into the storage that it came from.

Compiled code, CUDA graphs and optimizers hold on to tensors by identity, so
that nothing is replaced that can be filled.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from strategies.optimizer_step import installed
from strategies.optimizer_update import FunctionalUpdate

OFFLOAD_SHARE = 0.1
"""Copies that take more than this share of the device's memory are kept on the host: the passes need the room."""

_SKIPPED = {*vars(nn.Module()), *vars(L.LightningModule()), "_compiled_call_impl"} - {
    "training",
    "_parameters",
    "_buffers",
    "_param_requires_grad_state",  # by toggle_optimizer, until its untoggle_optimizer
}
"""Attributes of torch's and Lightning's base classes: hooks, the trainer, compiled calls. A step changes none."""


class Snapshot:
    """Taken when it is made: parameters and which of them want gradients, buffers, gradients, optimizers, schedulers,
    gradient scalers, random generators, plain attributes of the modules (numbers, lists, tensors, dataclasses of them),
    training flags, progress counters and the batch. Objects of other classes, and what they hold, are not copied.

    Args:
        trainer: Gives module, optimizers, schedulers and scaler.
        batch: Batch that the passes will be given; a step may change it.
        weights: Whether parameters, gradients, optimizers, schedulers and scalers are kept as well. ``False`` is for a
            forward, which changes none of them.
    """

    def __init__(self, trainer: L.Trainer, batch: Any, *, weights: bool = True) -> None:
        self._module = trainer.lightning_module
        self._weights = weights
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: dict[int, Callable[[], None]] = {}
        self._device = trainer.strategy.root_device
        self._offload = False
        modules = list(self._module.modules())
        parameters = list(self._module.parameters())
        self._optimizers = list(trainer.optimizers) if weights else []
        self._offload = self._too_large([*(parameters if weights else []), *self._module.buffers()], self._optimizers)
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in modules:
            attributes = {name: value for name, value in vars(module).items() if name not in _SKIPPED}
            self._attributes.append((module, attributes))
            for value in attributes.values():
                self._keep(value)
        self._gradients = [(parameter, parameter.grad) for parameter in parameters] if weights else []
        self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        for optimizer in self._optimizers:
            self._keep(optimizer)
        for config in trainer.lr_scheduler_configs if weights else []:  # stepped by hand within a training step
            self._keep(vars(config.scheduler))
        for _, gradient in self._gradients:
            self._keep(gradient)
        # Lightning counts optimizer steps and zeroed gradients here; checkpoints hold it.
        self._keep(trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress)
        self._keep(trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress)
        self._keep(batch)
        scaler = getattr(trainer.precision_plugin, "scaler", None) if weights else None
        self._scaler = None if scaler is None else (scaler, dict(vars(scaler)))
        if scaler is not None:
            self._keep(vars(scaler))
        self._random = random_state()
        updates = [installed(optimizer) for optimizer in self._optimizers]
        self._updates = [(update, update.counted()) for update in updates if isinstance(update, FunctionalUpdate)]

    def of(self, tensor: Tensor) -> Tensor:
        """What ``tensor`` held, on its device; a copy or not, so do not write to it."""
        return self._tensors[id(tensor)][1].to(tensor.device)

    @torch.no_grad()
    def restore(self, *, same_plan: bool = False) -> None:
        """Put everything back; can be done any number of times.

        ``same_plan``: state tensors are those that the snapshot found; what was captured in CUDA graphs goes on.
        """
        for module, attributes in self._attributes:
            for name in [name for name in vars(module) if name not in attributes and name not in _SKIPPED]:
                delattr(module, name)
            for name, value in attributes.items():
                if vars(module).get(name, self) is not value:
                    vars(module)[name] = value
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, trained in self._trained:
            if parameter.requires_grad is not trained:
                parameter.requires_grad_(trained)
        if self._scaler is not None:
            scaler, attributes = self._scaler
            vars(scaler).clear()
            vars(scaler).update(attributes)
        for put_back in self._kept.values():
            put_back()
        for tensor, kept in self._tensors.values():
            tensor.detach().copy_(kept)
        set_random_state(self._random)
        for update, counted in self._updates:
            # A compiled step counts on the host, and holds on to state tensors that may be gone now.
            if same_plan:
                update.recount(counted)
            else:
                update.forget()

    def _too_large(self, tensors: list[Tensor], optimizers: list[torch.optim.Optimizer]) -> bool:
        if self._device.type != "cuda":
            return False
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        held = [*tensors, *(value for value in states if isinstance(value, Tensor))]
        total = torch.cuda.get_device_properties(self._device).total_memory
        return sum(tensor.numel() * tensor.element_size() for tensor in held) > OFFLOAD_SHARE * total

    def _keep(self, value: Any) -> None:
        """Remember the contents of ``value`` and of everything plain inside it."""
        if not self._weights and isinstance(
            value, nn.Parameter | torch.optim.Optimizer | LRScheduler | torch.amp.GradScaler
        ):
            return
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                kept = value.detach().to("cpu", copy=True) if self._offload else value.detach().clone()
                self._tensors[id(value)] = value, kept
            return
        if id(value) in self._kept or value is None or isinstance(value, str | bytes | int | float | complex):
            return
        inner: list[Any] = []
        put_back: Callable[[], None] | None = None
        if isinstance(value, dict):
            inner, put_back = list(value.values()), _dict_restorer(value)
        elif isinstance(value, list | deque):
            inner, put_back = list(value), _sequence_restorer(value)
        elif isinstance(value, tuple):
            inner, put_back = list(value), _nothing
        elif isinstance(value, set):
            put_back = _set_restorer(value)
        elif isinstance(value, numpy.ndarray):
            put_back = _array_restorer(value)
        elif isinstance(value, torch.Generator):
            put_back = _generator_restorer(value)
        elif isinstance(value, torch.optim.Optimizer):
            # Not what else it holds: the step in force may be another one after a rollback.
            inner, put_back = [value.param_groups, value.state], _nothing
        elif isinstance(value, LRScheduler | torch.amp.GradScaler) or (
            _is_record(value) and hasattr(value, "__dict__")
        ):
            inner, put_back = list(vars(value).values()), _dict_restorer(vars(value))
        if put_back is not None:
            self._kept[id(value)] = put_back  # before going deeper: a list may hold itself
            for item in inner:
                self._keep(item)


def _is_record(value: Any) -> bool:
    return isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _nothing() -> None:
    """It cannot change, or must not be put back; what it holds has a restorer of its own."""


def _dict_restorer(value: dict[Any, Any]) -> Callable[[], None]:
    before = dict(value)

    def put_back() -> None:
        # Left alone where nothing changed: compiled code may have looked at its version.
        if list(value) != list(before) or any(value[key] is not before[key] for key in before):
            value.clear()
            value.update(before)

    return put_back


def _sequence_restorer(value: Any) -> Callable[[], None]:
    before = list(value)

    def put_back() -> None:
        if len(value) != len(before) or any(now is not then for now, then in zip(value, before, strict=True)):
            value.clear()
            value.extend(before)

    return put_back


def _set_restorer(value: set[Any]) -> Callable[[], None]:
    before = set(value)

    def put_back() -> None:
        if value != before:
            value.clear()
            value.update(before)

    return put_back


def _array_restorer(value: numpy.ndarray[Any, Any]) -> Callable[[], None]:
    before = value.copy()

    def put_back() -> None:
        value[...] = before

    return put_back


def _generator_restorer(value: torch.Generator) -> Callable[[], None]:
    before = value.get_state()

    def put_back() -> None:
        value.set_state(before)

    return put_back


def random_state() -> tuple[Any, ...]:
    """State of Python's, NumPy's and torch's random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), copy.deepcopy(numpy.random.get_state()), torch.get_rng_state(), cuda


def drew_random_numbers(before: tuple[Any, ...]) -> bool:
    """Whether any generator has moved since ``before``, a ``random_state()``."""
    (python, array, host, cuda), now = before, random_state()
    moved = now[0] != python or now[1][2] != array[2] or not numpy.array_equal(now[1][1], array[1])
    return moved or not all(
        torch.equal(one, other) for one, other in zip([host, *cuda], [now[2], *now[3]], strict=True)
    )


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put a ``random_state()`` back in force."""
    python, array, host, cuda = state
    random.setstate(python)
    numpy.random.set_state(array)
    torch.set_rng_state(host)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
