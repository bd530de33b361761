"""What stands in for an optimizer's step: an update compiled as it is written, or a step that a CUDA graph can hold.

The step stays a method of the same optimizer object: schedulers, gradient scalers, hooks and trainers that hold the
optimizer call it as before. The closure runs before the update and is not compiled.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.symbolic_convert import SpeculationLogDivergence
from torch._dynamo.utils import counters

from strategies.base import CannotCapture, has_another_step
from strategies.optimizer import ATTRIBUTE, installed

NOT_COUNTING = (torch.optim.SGD, torch.optim.Muon)
"""Torch's optimizers whose steps are all alike."""
COUNTS = ("step", "mu_product")
"""What an optimizer keeps of its steps, on the host unless it is ``capturable``; the last is NAdam's."""


class GraphedStep:
    """An optimizer's step within a CUDA graph of a whole training step; here one that needs nothing."""

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


class Update(GraphedStep):
    """What stands in for the step of ``optimizer``."""

    optimizer: torch.optim.Optimizer
    form: str
    exact = False
    """Whether it computes torch's formulas in the precision of the weights and draws no random numbers."""
    clips = False
    """Whether it clips by norm itself, in a step before which ``max_norm`` was set."""
    adopted = False
    """Whether its functions were compiled before."""
    max_norm: float | None = None
    """Largest norm of all gradients together, in the next step."""

    def __call__(self) -> None:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def scale_on(self, device: torch.device) -> Tensor | float:
        """What the last step multiplied gradients by to clip them, ``()``; 1 where it did not."""
        return 1.0

    def take(self) -> Callable[[], None]:
        return lambda: None


def install(optimizer: torch.optim.Optimizer, update: Update, *, after_first: Callable[[dict[str, Any]], None]) -> None:
    """Let ``optimizer.step`` call ``update``; ``after_first`` is given its facts once, after the first step."""
    first = True

    def call(_: torch.optim.Optimizer) -> None:
        nonlocal first
        graphs = counters["stats"]["unique_graphs"]
        update()
        if first:
            first = False
            compiled = update.form == "eager" or update.adopted or counters["stats"]["unique_graphs"] > graphs
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if not compiled and any(parameter.grad is not None for parameter in parameters):
                raise RuntimeError(
                    "optimizer: the step was handed to the compiler and was not compiled (is TORCHDYNAMO_DISABLE set?)"
                )
            after_first(update.facts())

    setattr(optimizer, ATTRIBUTE, update)
    replace_step(optimizer, call)


def replace_step(optimizer: torch.optim.Optimizer, update: Callable[[torch.optim.Optimizer], None]) -> None:
    """Let ``optimizer.step`` call ``update`` on it, without gradients and after its closure, between the hooks of the
    step; to be called in ``Strategy.begin``. When the training is over, the optimizer gets its own step back."""

    @torch.optim.Optimizer.profile_hook_step  # runs the step's hooks and names it in profiles
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            update(self)
        self._opt_called = True  # type: ignore[attr-defined]
        return loss

    # Schedulers mark the step that they have wrapped, to see later that it was called; ours tells them itself.
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/optim/lr_scheduler.py (patch_track_step_called)
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # Fused optimizers unscale gradients themselves under a GradScaler; the update leaves that to the scaler.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    # A bound method of this object, because schedulers take its __func__.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def not_torchs_own(optimizer: torch.optim.Optimizer) -> str | None:
    """Why it is not known what a step of ``optimizer`` does on the host; None for a step of ``torch.optim``."""
    if has_another_step(optimizer):
        return "its step has been replaced already"
    if not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
        return "its step is not torch's own, and what it does on the host is not known"
    return None


def clip_inside(optimizer: torch.optim.Optimizer, largest: float) -> bool:
    """Let the next compiled update scale the gradients that it reads, where it can; a loop would write them once more.

    The gradients themselves stay unclipped, which only code that looks at them between the step and ``zero_grad`` can
    see; an optimizer with step hooks is clipped as before.
    """
    update = installed(optimizer)
    hooked = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    if update is None or not update.clips or hooked:
        return False
    update.max_norm = largest
    return True


class DeviceScalar:
    """One number of the host as a 0-D tensor of the device, so that no change of it recompiles.

    A learning rate that is a Python float is a constant of compiled code, and is baked into a CUDA graph. The floats
    stay where users, schedulers and state dicts look for them, in ``param_groups``.
    """

    __slots__ = ("_value", "tensor")

    def __init__(self, value: Any, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.tensor = torch.empty((), device=device, dtype=dtype)
        self._value = float("nan")
        self.write(value)

    def write(self, value: Any) -> None:
        """Let the tensor have ``value``, a number or 0-D tensor. Waits for nothing; launches at most one kernel."""
        if isinstance(value, Tensor):
            self.tensor.copy_(value.detach(), non_blocking=True)
            self._value = float("nan")
        elif value != self._value:  # not-a-number is never equal to itself: it is written each time, without harm
            self.tensor.fill_(value)
            self._value = float(value)


class GenericUpdate(Update):
    """Compiles ``type(optimizer).step`` whole: one graph of all tensors, however many there are, and that takes long.

    A step that creates state differs from later ones, so that there may be a second graph. The learning rate is a
    tensor, so that no schedule of it recompiles; another number that changes does so once, and is an input then.
    One that takes no tensor for its rate, cannot be compiled, or not often enough, runs eager: ``form`` says so, and
    ``report`` gets a line.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, compiler: Callable[..., Any], report: Callable[[str], None]
    ) -> None:
        self.optimizer, self.form = optimizer, "generic"
        self._report = report
        self._rates: list[DeviceScalar] = []
        self._raw: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
        self._compiled: Callable[[], None] = compiler(self._step)

    def __call__(self) -> None:
        if self.form == "generic":
            try:
                self._attempt()
                return
            except BackendCompilerFailed:
                raise
            except (TorchDynamoException, FailOnRecompileLimitHit, SpeculationLogDivergence) as error:
                # Nothing has been executed: the whole step is one graph, and it is traced before it runs.
                self.form = "eager"
                reason = str(error).strip().splitlines()[0]
                self._report(f"{type(self.optimizer).__name__} cannot be compiled and runs eager: {reason}")
        self._step()

    def facts(self) -> dict[str, Any]:
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return {"form": self.form, "tensors": count, "chunks": 1, "graphs": None}

    def _step(self) -> None:
        self._raw(self.optimizer)

    def _attempt(self) -> None:
        groups = self.optimizer.param_groups
        for group in groups[len(self._rates) :]:  # all at first, later those that were added since
            first = next(one for each in (group, *groups) for one in each["params"])  # a group may be empty
            dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
            self._rates.append(DeviceScalar(group["lr"], device=first.device, dtype=dtype))
        with _groups_kept(self.optimizer):
            for group, rate in zip(groups, self._rates, strict=True):
                rate.write(group["lr"])
                group["lr"] = rate.tensor
                if not group["params"] and "capturable" in group:  # up to 2.13 torch sets it, and traces each step anew
                    group["capturable"] = True
            self._compiled()


@contextlib.contextmanager
def _groups_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Afterwards the groups have the learning rates that they had before, and their ``capturable``, which compiling
    also sets up to torch 2.13: https://github.com/pytorch/pytorch/issues/182706"""
    before = [(group, dict(group)) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, values in before:
            group.update({name: values[name] for name in ("lr", "capturable") if name in values})


# ---- within a captured training step ---------------------------------------------------------------------------------
# A graph repeats the addresses and the numbers that it was captured with. Numbers of the host become device tensors and
# are refreshed before each replay; schedulers, checkpoints and the user still see plain floats. What a kernel takes by
# value is part of the graph's key.


def graphed(optimizer: torch.optim.Optimizer) -> GraphedStep:
    """The step of ``optimizer``, compiled or torch's own, ready for capture. Raises CannotCapture."""
    update = installed(optimizer)
    if update is None:
        if (reason := not_torchs_own(optimizer)) is not None:
            raise CannotCapture(reason)
        if not isinstance(optimizer, NOT_COUNTING) and not all(
            "capturable" in group or group.get("fused") for group in optimizer.param_groups
        ):
            raise CannotCapture(f"{type(optimizer).__name__} counts its steps on the host")
        return OwnStep(optimizer)
    if update.form == "functional":
        return update
    raise CannotCapture(f"the {update.form} form of the compiled step reads the host")


class OwnStep(GraphedStep):
    """Torch's own step, which counts on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: list[DeviceScalar | None] = []
        """Of each group; None where the rate is a tensor already, or kernels take it by value."""
        self._hook = optimizer.register_state_dict_post_hook(_steps_on_host)

    def prepare(self) -> None:
        """Bring the device's learning rates up to date: outside of the graph, which would repeat it."""
        for group in self._optimizer.param_groups[len(self._rates) :]:  # all at first, later those added since
            takes_tensor = group["params"] and (_has_capturable(group) or group.get("fused"))
            moves = takes_tensor and not isinstance(group["lr"], Tensor)
            self._rates.append(DeviceScalar(group["lr"], device=group["params"][0].device) if moves else None)
        for group, rate in self._groups():
            if rate is not None:
                rate.write(group["lr"])

    def constants(self) -> Hashable:
        return tuple(
            tuple(value for name, value in group.items() if name != "params" and (name != "lr" or rate is None))
            for group, rate in self._groups()
            if group["params"]  # nothing of an empty group is in a kernel
        )

    @contextlib.contextmanager
    def capturable(self) -> Iterator[None]:
        """Let steps inside take the learning rate from the device and keep their step counts there."""
        with _groups_kept(self._optimizer):
            for group, rate in self._groups():
                if _has_capturable(group):
                    if _keeps_steps_on_host(group):
                        self._move_steps(group, to=None)
                    group["capturable"] = True
                if rate is not None:
                    group["lr"] = rate.tensor
            yield

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
            state = self._optimizer.state.get(parameter, {})
            state.update({name: one.to(to or parameter.device) for name, one in state.items() if name in COUNTS})


def _has_capturable(group: dict[str, Any]) -> bool:
    return "capturable" in group and any(one.device.type == "cuda" for one in group["params"][:1])


def _keeps_steps_on_host(group: dict[str, Any]) -> bool:
    return "capturable" in group and not group["capturable"] and not group.get("fused")


def _steps_on_host(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """State dicts hold step counts where an optimizer without graphs keeps them, so that it can load them."""
    host = {index for group in state_dict["param_groups"] if _keeps_steps_on_host(group) for index in group["params"]}
    state = {
        index: {name: value.cpu() if name in COUNTS and index in host else value for name, value in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
