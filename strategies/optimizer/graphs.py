"""An optimizer's step and CUDA graphs: graphs of the update alone, and what a step needs to stand in a larger one.

A graph repeats the addresses and the numbers that it was captured with. ``Replays`` keeps one for each set of addresses
that recurs. Within a captured training step, numbers of the host become device tensors and are refreshed before each
replay; schedulers, checkpoints and the user still see plain floats. What a kernel takes by value is part of the key.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from strategies.base import CannotCapture
from strategies.errors import first_line
from strategies.graph_engine import Engine
from strategies.optimizer.functional import FunctionalUpdate
from strategies.optimizer.step import DeviceScalar, installed

MAX_GRAPHS = 4
"""Graphs that are kept; the one that has not been used for longest gives way."""
MAX_CAPTURES = 16
"""Captures of one training: each waits for the device and empties the cache of its memory."""
MAX_SEEN = 64
"""Sets of addresses that are remembered to tell whether they recur."""


class Replays:
    """Runs launches from CUDA graphs, of which there is one for each set of addresses that recurs.

    A graph reads and writes fixed addresses, whoever lies there. Backward makes new gradients at each step; in a
    training whose steps are alike they come to lie at the same few sets of addresses again and again.

    Args:
        engine: Captures and replays.
        report: Is given a line for the user when graphs are given up.
        wanted: Whether launches may be captured at this moment.
    """

    def __init__(self, engine: Engine, *, report: Callable[[str], None], wanted: Callable[[], bool]) -> None:
        self._engine, self._report, self._wanted = engine, report, wanted
        self._graphs: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused = False
        self.captures = 0
        """Graphs captured so far."""
        self.replayed = 0
        """Steps replayed so far."""

    @property
    def active(self) -> bool:
        """Whether a key is worth making."""
        return not self._refused and self._wanted()

    def run(self, key: Hashable, launch: Callable[[], None]) -> bool:
        """Replay the graph of ``key``, capturing it when the key recurs; False where the caller has to launch itself.

        Args:
            key: All that a graph of ``launch`` has taken by value, addresses among them.
            launch: The device's part of a step. Nothing that it does on the host may matter.
        """
        if key not in self._graphs and not self._capture(key, launch):
            return False
        self._graphs.move_to_end(key)
        self._graphs[key]()
        self.replayed += 1
        return True

    def free(self) -> None:
        """Give the graphs back; what they work on may go."""
        self._graphs.clear()
        self._seen.clear()

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> bool:
        if key not in self._seen:
            # The first launch also loads and tunes its kernels, which a capture may not.
            self._seen[key] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            return False
        if self.captures == MAX_CAPTURES:
            return False
        try:
            self._graphs[key], _ = self._engine.capture(launch)
        except Exception as error:
            # The engine does not promise that graphs from before may still be replayed.
            self.free()
            self._refused = True
            self._report(f"the update is launched kernel by kernel, it could not be captured: {first_line(error)}")
            return False
        self.captures += 1
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        if self.captures == MAX_CAPTURES:
            self._report(
                f"gradients lay at {MAX_CAPTURES} sets of addresses: further ones are launched kernel by kernel"
            )
        return True


class GraphedStep:
    """An optimizer's step within a graph of a whole training step; here one that needs nothing."""

    def prepare(self) -> None:
        """Before every step, captured or not. Waits for nothing."""

    def count(self) -> None:
        """The host's part of a step that is replayed; one that runs does it itself."""

    def constants(self) -> Hashable:
        """What a graph has taken by value."""
        return None

    def capturable(self) -> AbstractContextManager[None]:
        """Steps inside may be captured."""
        return contextlib.nullcontext()

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


class CompiledStep(GraphedStep):
    """The step that ``compile=optimizer`` has put in place: it reads every hyperparameter from the device."""

    def __init__(self, update: FunctionalUpdate) -> None:
        self._update = update

    def count(self) -> None:
        self._update.refresh()

    def constants(self) -> Hashable:
        return self._update.plan_number  # a new plan works on other tensors


class OwnStep(GraphedStep):
    """Torch's own step, which counts on the device.

    Args:
        optimizer: One of ``torch.optim`` with ``capturable`` or ``fused``; another one as long as no rate changes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rates = [_rate_on_device(group) for group in optimizer.param_groups]
        self._hook = optimizer.register_state_dict_post_hook(_steps_on_host)

    def prepare(self) -> None:
        """Bring the device's learning rates up to date: outside of the graph, which would repeat it."""
        for group in self._optimizer.param_groups[len(self._rates) :]:  # added since
            self._rates.append(_rate_on_device(group))
        for group, rate in self._groups():
            if rate is not None:
                rate.write(group["lr"])

    def constants(self) -> Hashable:
        return tuple(
            tuple(value for name, value in group.items() if name != "params" and (name != "lr" or rate is None))
            for group, rate in self._groups()
        )

    @contextlib.contextmanager
    def capturable(self) -> Iterator[None]:
        """Let steps inside take the learning rate from the device and keep their step counts there."""
        before = [(group, group["lr"], group.get("capturable")) for group in self._optimizer.param_groups]
        for group, rate in self._groups():
            if _has_capturable(group):
                if _keeps_steps_on_host(group):
                    self._move_steps(group, to=None)
                group["capturable"] = True
            if rate is not None:
                group["lr"] = rate.tensor
        try:
            yield
        finally:
            for group, rate, capturable in before:
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable

    def release(self) -> None:
        """Put the step counts back to where the optimizer keeps them without graphs."""
        self._hook.remove()
        for group in self._optimizer.param_groups:
            if _keeps_steps_on_host(group):
                self._move_steps(group, to="cpu")

    def _groups(self) -> Iterator[tuple[dict[str, Any], DeviceScalar | None]]:
        return zip(self._optimizer.param_groups, self._rates, strict=True)

    def _move_steps(self, group: dict[str, Any], *, to: str | None) -> None:
        """Move the step counts of ``group`` to a device; None = that of their parameter."""
        for parameter in group["params"]:
            step = self._optimizer.state[parameter].get("step") if parameter in self._optimizer.state else None
            if isinstance(step, Tensor):
                self._optimizer.state[parameter]["step"] = step.to(to or parameter.device)


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
