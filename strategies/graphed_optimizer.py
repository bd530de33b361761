"""What an optimizer needs so that its step can stand in a CUDA graph, without the user seeing a difference.

A graph replays the numbers it was captured with. The learning rate therefore becomes a device tensor while the step is
captured, and is refreshed from ``param_groups`` before each replay; schedulers, checkpoints and the user go on seeing
plain floats. Hyperparameters that a kernel takes by value are part of the graph's key (``constants``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.step_graphs import CannotCapture


class GraphedOptimizer:
    """One optimizer, ready for capture.

    Args:
        optimizer: One of ``torch.optim`` with ``capturable`` or ``fused``; another one as long as no rate changes.

    Raises:
        CannotCapture: For optimizers that call their closure several times.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise CannotCapture("LBFGS evaluates its closure as often as the loss demands")
        self._optimizer = optimizer
        self._by_tensor = [
            not isinstance(group["lr"], Tensor) and (_has_capturable(group) or bool(group.get("fused")))
            for group in optimizer.param_groups
        ]
        self._rates: list[Tensor | None] = [None] * len(optimizer.param_groups)
        self._shown: list[float | None] = [None] * len(optimizer.param_groups)
        self._hook = optimizer.register_state_dict_post_hook(_steps_on_host)

    def refresh(self) -> None:
        """Bring the device's learning rates up to date. Waits for nothing."""
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if self._by_tensor[index] and rate != self._shown[index]:
                tensor = self._rates[index]
                if tensor is None:
                    device = group["params"][0].device
                    tensor = self._rates[index] = torch.empty((), dtype=torch.float32, device=device)
                tensor.fill_(rate)
                self._shown[index] = rate

    def constants(self) -> tuple[Any, ...]:
        """Hyperparameters that kernels take by value."""
        return tuple(
            tuple(value for name, value in group.items() if name != "params" and not (name == "lr" and by_tensor))
            for group, by_tensor in zip(self._optimizer.param_groups, self._by_tensor, strict=True)
        )

    @contextlib.contextmanager
    def capturable(self) -> Iterator[None]:
        """Let steps inside take the learning rate from the device and keep their step counts there."""
        self.refresh()
        groups = self._optimizer.param_groups
        before = [(group["lr"], group.get("capturable")) for group in groups]
        self._steps_to_device()
        for group, rate, by_tensor in zip(groups, self._rates, self._by_tensor, strict=True):
            if by_tensor:
                group["lr"] = rate
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
