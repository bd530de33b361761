"""What an optimizer needs so that its step can stand in a CUDA graph, without the user seeing a difference.

A graph replays the numbers it was captured with. The learning rate therefore becomes a device tensor while the step is
captured, and is refreshed from ``param_groups`` before each step; schedulers, checkpoints and the user go on seeing
plain floats. Hyperparameters that a kernel takes by value are part of the graph's key (``constants``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.base import CannotCapture
from strategies.hyperparameters import DeviceScalar
from strategies.optimizer_step import installed
from strategies.optimizer_update import FunctionalUpdate


class GraphedStep(Protocol):
    """An optimizer's step within a graph."""

    def prepare(self) -> None:
        """Before every step, captured or not. Waits for nothing."""

    def count(self) -> None:
        """The host's part of a step that is replayed; one that runs does it itself."""

    def constants(self) -> Hashable:
        """What a graph has taken by value."""

    def capturable(self) -> AbstractContextManager[None]:
        """Steps inside may be captured."""

    def release(self) -> None:
        """Leave the optimizer as it is without graphs."""


def graphed(optimizer: Optimizer) -> GraphedStep:
    """The step of ``optimizer``, compiled or torch's own, ready for capture. Raises CannotCapture."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CannotCapture("LBFGS evaluates its closure as often as the loss demands")
    update = installed(optimizer)
    if update is None:
        return OwnStep(optimizer)
    if isinstance(update, FunctionalUpdate):
        return CompiledStep(update)
    raise CannotCapture(f"the {update.form} form of the compiled step reads the host")


class CompiledStep:
    """The step that ``compile=optimizer`` has put in place: it reads every hyperparameter from the device."""

    def __init__(self, update: FunctionalUpdate) -> None:
        self._update = update

    def prepare(self) -> None:
        """Nothing to do."""

    def count(self) -> None:
        """Count the step and write the numbers that have changed."""
        self._update.refresh()

    def constants(self) -> Hashable:
        """The plan: a new one works on other tensors."""
        return self._update.plan_number

    def capturable(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Nothing to do."""


class OwnStep:
    """Torch's own step.

    Args:
        optimizer: One of ``torch.optim`` with ``capturable`` or ``fused``; another one as long as no rate changes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rates = [_rate_on_device(group) for group in optimizer.param_groups]
        self._hook = optimizer.register_state_dict_post_hook(_steps_on_host)

    def count(self) -> None:
        """Nothing to do: steps are counted on the device."""

    def prepare(self) -> None:
        """Bring the device's learning rates up to date: outside of the graph, which would repeat it."""
        for group in self._optimizer.param_groups[len(self._rates) :]:  # added since
            self._rates.append(_rate_on_device(group))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                rate.write(group["lr"])

    def constants(self) -> Hashable:
        """Hyperparameters that kernels take by value."""
        return tuple(
            tuple(
                value for name, value in group.items() if name != "params" and not (name == "lr" and rate is not None)
            )
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True)
        )

    @contextlib.contextmanager
    def capturable(self) -> Iterator[None]:
        """Let steps inside take the learning rate from the device and keep their step counts there."""
        groups = self._optimizer.param_groups
        before = [(group["lr"], group.get("capturable")) for group in groups]
        self._steps_to_device()
        for group, rate in zip(groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate.tensor
            if _has_capturable(group):
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable

    def release(self) -> None:
        """Put the step counts back to where the optimizer keeps them without graphs."""
        self._hook.remove()
        for group, parameter in self._parameters():
            state = self._optimizer.state[parameter]
            if _keeps_steps_on_host(group) and isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()

    def _steps_to_device(self) -> None:
        for group, parameter in self._parameters():
            step = self._optimizer.state[parameter].get("step")
            if not _has_capturable(group) or not isinstance(step, Tensor):
                continue
            if _keeps_steps_on_host(group) and step.device != parameter.device:
                self._optimizer.state[parameter]["step"] = step.to(parameter.device)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._optimizer.state:
                    yield group, parameter


def _rate_on_device(group: dict[str, Any]) -> DeviceScalar | None:
    """The learning rate as a tensor, for kernels that take one; None where it is one already or is taken by value."""
    if isinstance(group["lr"], Tensor) or not (_has_capturable(group) or group.get("fused")):
        return None
    return DeviceScalar(group["lr"], device=group["params"][0].device)


def _has_capturable(group: dict[str, Any]) -> bool:
    return "capturable" in group and group["params"][0].device.type == "cuda"


def _keeps_steps_on_host(group: dict[str, Any]) -> bool:
    return "capturable" in group and not group["capturable"] and not group.get("fused")


def _steps_on_host(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State dicts hold step counts where an optimizer without graphs keeps them, so that it can load them."""
    host = {index for group in state_dict["param_groups"] if _keeps_steps_on_host(group) for index in group["params"]}
    state = {
        index: {name: value.cpu() if name == "step" and index in host else value for name, value in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
