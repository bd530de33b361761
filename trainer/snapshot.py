"""Snapshot: everything that a training step may change, copied, and put back into the storage that it came from.

Compiled code, CUDA graphs and optimizers hold on to tensors by identity, so
that nothing is replaced that can be filled.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from strategies.optimizer.functional import FunctionalUpdate
from strategies.optimizer.step import installed
from trainer.held import Held, copied, held_by, held_by_module, is_iterator, items_of, nothing, outside_of, restorer

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
    gradient scalers, training flags, progress counters, the batch and the attributes of the modules: numbers, tensors,
    arrays, random generators, iterators, containers and objects of the user's own classes, however deep they lie, in
    closures and in globals that the module's methods name. Not copied are data sets, loaders, loggers, callbacks and
    objects of other libraries. An iterator comes back as another object in the same place.

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
        self._kept: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._iterators: dict[int, tuple[Any, list[Held]]] = {}
        self.cannot_restore: list[str] = []
        """What a step may use up and nobody can put back, in words: nothing should be run that would."""
        self._device = trainer.strategy.root_device
        self._offload = False
        parameters = list(self._module.parameters())
        self._optimizers = list(trainer.optimizers) if weights else []
        self._offload = self._too_large([*(parameters if weights else []), *self._module.buffers()], self._optimizers)
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._keep(self._module, "self")
        self._gradients = [(parameter, parameter.grad) for parameter in parameters] if weights else []
        self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        for optimizer in self._optimizers:
            self._keep(optimizer, "an optimizer")
        for config in trainer.lr_scheduler_configs if weights else []:  # stepped by hand within a training step
            self._keep(vars(config.scheduler), "a scheduler")
        for _, gradient in self._gradients:
            self._keep(gradient, "a gradient")
        # Lightning counts optimizer steps and zeroed gradients here; checkpoints hold it.
        self._keep(trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress, "progress")
        self._keep(trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress, "progress")
        self._keep(batch, "the batch")
        scaler = getattr(trainer.precision_plugin, "scaler", None) if weights else None
        self._scaler = None if scaler is None else (scaler, dict(vars(scaler)))
        if scaler is not None:
            self._keep(vars(scaler), "the scaler")
        self._outside = outside_of(self._module.modules())
        self._random = random_state()
        updates = [installed(optimizer) for optimizer in self._optimizers]
        self._updates = [(update, update.counted()) for update in updates if isinstance(update, FunctionalUpdate)]

    @property
    def lost(self) -> str | None:
        """What would be lost if a step were run that does not count; None where everything can be put back."""
        found = ", ".join(dict.fromkeys(self.cannot_restore))
        return f"a step may use up {found}, which cannot be put back" if found else None

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
        for owner, name, value in self._outside:
            if isinstance(owner, dict):
                owner[name] = value
            elif getattr(owner, name, self) is not value:
                setattr(owner, name, value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, trained in self._trained:
            if parameter.requires_grad is not trained:
                parameter.requires_grad_(trained)
        if self._scaler is not None:
            scaler, attributes = self._scaler
            vars(scaler).clear()
            vars(scaler).update(attributes)
        for _, put_back in self._kept.values():
            put_back()
        for iterator, places in self._iterators.values():
            again = copied(iterator)
            for place in places:
                assert place.put is not None
                place.put(again)
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

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, on the host where the device has no room for many."""
        return tensor.detach().to("cpu", copy=True) if self._offload else tensor.detach().clone()

    def _keep(self, value: Any, name: str) -> None:
        """Remember the contents of ``value``, which ``name`` calls, and of all that is inside it."""
        waiting: deque[Held] = deque([Held(value, name)])
        while waiting:
            waiting.extend(self._keep_one(waiting.popleft()))

    def _keep_one(self, held: Held) -> list[Held]:
        """Remember one object; returns what it holds. A container comes back before what is put into it."""
        value = held.value
        if not self._weights and isinstance(value, _WEIGHTS):
            return []
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, self.copy(value)
            return []
        if is_iterator(value):
            if id(value) in self._iterators:
                self._iterators[id(value)][1].append(held)
            elif (kept := copied(value)) is not None and held.put is not None:
                self._iterators[id(value)] = kept, [held]
            else:
                self.cannot_restore.append(f"{held.name} ({type(value).__name__})")
            return []
        if id(value) in self._kept:
            return []
        if isinstance(value, nn.Module):
            attributes = {name: one for name, one in vars(value).items() if name not in _SKIPPED}
            self._attributes.append((value, attributes))
            self._kept[id(value)] = value, nothing
            return [*items_of(vars(value), attributes, held.name), *held_by_module(value, held.name)]
        found = restorer(value)
        if found is None:
            return []
        self._kept[id(value)] = value, found  # before going deeper: a list may hold itself
        return held_by(held)


_WEIGHTS = (nn.Parameter, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)


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
