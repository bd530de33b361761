"""What stands in for an optimizer's step: an update compiled as it is written, or a step that a CUDA graph can hold.

The step stays a method of the same optimizer object: schedulers, gradient scalers, hooks and trainers that hold the
optimizer call it as before. The closure runs before the update and is not compiled.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

from strategies.base import has_another_step
from strategies.compile_errors import CannotCapture, is_compile_error, one_line
from strategies.optimizer.update_check import NO_MEMORY, fits_memory, in_float64
from strategies.region import Check, Checking, State
from strategies.region_check import Outcome
from strategies.tolerance import MULTIPLES, Difference, Unlowered, compare, exceeding

NOT_COUNTING = (torch.optim.SGD, torch.optim.Muon)
"""Torch's optimizers whose steps are all alike."""
ATTRIBUTE = "_compiled_update"
"""Attribute of an optimizer that holds what stands in for its step."""
_Kept = list[tuple[Tensor, dict[str, Any]]]
"""Weights and entries of an optimizer's state, by parameter."""
COUNTS = ("step", "mu_product")
"""What an optimizer keeps of its steps, on the host unless it is ``capturable``; the last is NAdam's."""


def installed(optimizer: torch.optim.Optimizer) -> Update | None:
    """The update that stands in for the step of ``optimizer``, or None."""
    return vars(optimizer).get(ATTRIBUTE)


class GraphedStep:
    """An optimizer's step within a CUDA graph of a whole training step; here one that needs nothing."""

    def prepare(self) -> None:
        """Before every step, captured or not. Waits for nothing."""

    def count(self) -> None:
        """The host's part of a step that is replayed; one that runs does it itself."""

    def constants(self) -> Hashable:
        """What a graph has taken by value."""
        return None

    def scalars(self) -> list[Tensor]:
        """Numbers on the device that ``prepare`` writes and a replay reads."""
        return []

    def capturable(self) -> AbstractContextManager[None]:
        """Steps inside may be captured."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Leave the optimizer as it is without graphs."""

    @property
    def ready(self) -> bool:
        """Whether the next step may be captured; one that is compared with torch's own may not."""
        return True


class Update(GraphedStep):
    """What stands in for the step of ``optimizer``; compiled only after it did what torch's own step did.

    Args:
        names: Names of parameters by identity.
        checking: Whether and how strictly it is compared with torch's own step.
        report: Called with a line that the user should read.
        gave_up: Called with the reason once torch's own step runs for good.
        changed: Called when it is proven, and when it fails.
    """

    form: str
    checks: list[Difference]
    """What the last check found."""
    reason = ""
    """Why torch's own step runs for good; empty while it does not."""
    error: Exception | None = None
    """What the compiler raised, where that is the reason."""
    differs: list[Difference]
    """What is not torch's, where that is the reason."""
    looked = 0
    """Checks so far."""
    trusted = False
    """Whether one of them was clean: those that follow are audits."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        names: Callable[[], Mapping[int, str]] = dict,
        checking: Checking | None = None,
        report: Callable[[str], Any] = lambda line: None,
        gave_up: Callable[[str], Any] = lambda reason: None,
        changed: Callable[[], Any] = lambda: None,
    ) -> None:
        self.optimizer, self.names = optimizer, names
        self.checks, self.differs = [], []
        self._checking = Checking() if checking is None else checking
        self.report, self._gave_up, self._changed = report, gave_up, changed
        self._asked = False
        self._suspected = 0

    @property
    def kind(self) -> str:
        """Class name of the optimizer."""
        return type(self.optimizer).__name__

    @property
    def state(self) -> State:
        if self.reason:
            return State.FAILED
        return State.CHECKING if self._checks() and (self._asked or not self.proven) else State.COMPILED

    @property
    def proven(self) -> bool:
        """Whether a check of the step as it is now was clean; without checks, whether it ran."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        return self.state is not State.CHECKING

    @property
    def multiple(self) -> float:
        return MULTIPLES.get(self._checking.mode, MULTIPLES["on"])

    def __call__(self) -> None:
        raise NotImplementedError

    def own_step(self) -> None:
        """Torch's."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def check_next_step(self) -> None:
        """Compare the next step with torch's own, which that step then is."""
        self._asked = True

    def check(self, compare: Callable[[], Outcome]) -> bool:
        """Take torch's own step within ``compare``, and what that finds; returns whether the compiled step is as it. A
        difference counts when it shows twice."""
        checking = self._checking
        began = checking.clock()
        checking.begin(self)
        outcome = compare()
        self._asked = False
        self.looked += 1
        self.checks = outcome.differences
        wrong = outcome.wrong
        self._suspected = self._suspected + 1 if wrong else 0
        if outcome.error is not None:
            self.fail(f"it does not compile: {one_line(outcome.error)}", outcome.error)
        elif outcome.skipped is not None:
            self.fail(f"it cannot be checked, {outcome.skipped}")
        elif self._suspected > 1:
            self.fail(f"the compiled step differs from torch's: {wrong[0]}", differs=wrong)
        elif wrong:
            self._asked = True
        seconds, audit = checking.clock() - began, self.trusted
        checking.report(Check(path=self.kind, kind=self.kind, outcome=outcome, seconds=seconds, audit=audit))
        clean = not self.reason and not wrong
        self.trusted |= clean
        return clean

    def fail(self, reason: str, error: Exception | None = None, *, differs: Iterable[Difference] = ()) -> None:
        """Torch's own step runs from now on."""
        if not self.reason:
            self.reason, self.error, self.differs = reason, error, list(differs)
            self.report(f"{self.kind} runs eager: {reason}")
            self._gave_up(f"{self.kind}: {reason}")
            self._changed()

    def _checks(self) -> bool:
        return self._checking.mode != "off"


class NotCompiled(RuntimeError):
    """Python runs what was to be compiled."""

    def __init__(self) -> None:
        super().__init__("the step was handed to the compiler and was not compiled (is TORCHDYNAMO_DISABLE set?)")


def install(optimizer: torch.optim.Optimizer, update: Update) -> None:
    """Let ``optimizer.step`` call ``update``."""
    setattr(optimizer, ATTRIBUTE, update)
    replace_step(optimizer, lambda _: update())


def looked_into() -> bool:
    """Whether somebody traces, counts or transforms what runs, or has switched the compiler off for a while."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or eval_frame._stance.stance == "force_eager"
    )


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
        if isinstance(value, Tensor) and value.is_cpu:  # schedulers fill it
            value = float(value)
        if isinstance(value, Tensor):
            self.tensor.copy_(value.detach().reshape(()), non_blocking=True)
            self._value = float("nan")
        elif value != self._value:  # not-a-number is never equal to itself: it is written each time, without harm
            self.tensor.fill_(value)
            self._value = float(value)


class GenericUpdate(Update):
    """Compiles ``type(optimizer).step`` whole: one graph of all tensors, however many there are, and that takes long.

    A step that creates state differs from later ones, and is torch's own. The learning rate is a tensor, so that no
    schedule of it recompiles; another number that changes does so once, and is an input then. It cannot run on copies,
    as it is compiled for these very parameters. So a step that is checked runs compiled first, everything is put back,
    and torch's own step is taken.
    """

    form = "generic"

    def __init__(self, optimizer: torch.optim.Optimizer, *, compiler: Callable[..., Any], **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._rates: list[DeviceScalar] = []
        self._raw: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
        self._compiled: Callable[[], None] = compiler(self.own_step)
        self._members: list[Any] = []
        """Of each group at the last check, its parameters and flags, and the state's tensors, by identity."""
        self._proven = self._stateless = False

    @property
    def proven(self) -> bool:
        return self._proven

    def __call__(self) -> None:
        if self.reason or looked_into():
            self.own_step()
            return
        if not self._stateless and self._lacks_state():  # a step that creates state would be compiled for itself
            self.own_step()
            self._stateless = self._lacks_state()
            return
        if (members := self._as_now()) != self._members:
            self._members, self._proven = members, False
        if self.state is State.CHECKING:
            if not self._trained():
                self.own_step()
            elif self.check(self._compared):
                self._prove()
            return
        graphs = counters["stats"]["unique_graphs"]
        try:
            self._attempt()
        except Exception as error:
            if not is_compile_error(error):
                raise
            # Nothing has been executed: the whole step is one graph, and it is traced before it runs.
            self.own_step()
            self.fail(f"it does not compile once more: {one_line(error)}", error)
            return
        self._asked = counters["stats"]["unique_graphs"] != graphs
        if not self._proven:
            self._prove()

    def _prove(self) -> None:
        self._proven = True
        self._changed()

    def own_step(self) -> None:
        self._raw(self.optimizer)

    def facts(self) -> dict[str, Any]:
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return {"form": "eager" if self.reason else self.form, "tensors": count, "chunks": 1, "graphs": None}

    def _as_now(self) -> list[Any]:
        return [
            [
                (id(one), one.shape, one.grad is None, tuple(map(id, self.optimizer.state.get(one, {}).values())))
                for one in group["params"]
            ]
            for group in self.optimizer.param_groups
        ]

    def _lacks_state(self) -> bool:
        return any(not self.optimizer.state.get(one) for one in self._trained())

    def _trained(self) -> list[Tensor]:
        return [one for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None]

    def _compared(self) -> Outcome:
        trained = self._trained()
        if not fits_memory([*trained, *(one for entry in self._entries() for one in entry.values())]):
            self.own_step()
            return Outcome(skipped=NO_MEMORY)
        before, graphs = self._kept(trained), counters["stats"]["unique_graphs"]
        error: Exception | None = None
        try:
            self._attempt()
            if not self.looked and counters["stats"]["unique_graphs"] == graphs:
                raise NotCompiled
        except Exception as raised:
            error = raised
        seen = self._kept(trained)
        self._restore(before)
        self.own_step()
        if error is not None:
            return Outcome(error=error)
        names, expected = self.names(), self._kept(trained)

        def differences(exact: _Kept) -> list[Difference]:
            found = []
            for kind in ("weight", "optimizer state"):
                arms = (_of_kind(kind, arm, trained, names) for arm in (expected, seen, exact, before))
                eager, compiled, more, starts = arms
                found += compare(kind, eager, compiled, more, starts=starts, multiple=self.multiple)
            return found

        found, how = differences([]), "rounding"
        if exceeding(found) and (exact := self._exactly(trained, before)):
            found, how = differences(exact), "exact"
        return Outcome(differences=found, how=how)

    @torch.no_grad()
    def _exactly(self, parameters: list[Tensor], before: _Kept) -> _Kept:
        """What torch's own step leaves of ``before`` in double precision. Nothing where it fails, and of an optimizer
        of the user's own, which is not run again."""
        if not_torchs_own(self.optimizer) is not None:
            return []
        try:
            twin, doubles = copy.copy(self.optimizer), {}
            state: dict[Tensor, dict[str, Any]] = {}
            for parameter, (weight, entry) in zip(parameters, before, strict=True):
                double = doubles[id(parameter)] = weight.double().requires_grad_()
                double.grad = in_float64(parameter.grad)
                state[double] = {
                    name: value.double()
                    if isinstance(value, Tensor) and value.is_floating_point()
                    else copy.copy(value)
                    for name, value in entry.items()
                }
            twin.state = collections.defaultdict(dict, state)
            twin.param_groups = [
                {**group, "params": [doubles[id(one)] for one in group["params"] if id(one) in doubles]}
                for group in self.optimizer.param_groups
            ]
            with Unlowered():
                self._raw(twin)
        except Exception:  # a kernel for one precision alone, or too little memory
            return []
        return [(one.detach(), twin.state[one]) for one in doubles.values()]

    def _entries(self) -> list[dict[str, Any]]:
        return list(self.optimizer.state.values())

    def _kept(self, parameters: list[Tensor]) -> _Kept:
        """Copies of weights and state."""
        state = self.optimizer.state
        return [
            (
                one.detach().clone(),
                {
                    name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                    for name, value in state.get(one, {}).items()
                },
            )
            for one in parameters
        ]

    def _restore(self, before: _Kept) -> None:
        for parameter, (weight, entry) in zip(self._trained(), before, strict=True):
            parameter.detach().copy_(weight)
            if parameter not in self.optimizer.state:
                continue
            now = self.optimizer.state[parameter]
            for name in [name for name in now if name not in entry]:
                del now[name]
            for name, value in entry.items():
                if isinstance(value, Tensor) and isinstance(now.get(name), Tensor) and now[name].device == value.device:
                    now[name].copy_(value)
                else:
                    now[name] = value
            if not now:
                del self.optimizer.state[parameter]

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


def _of_kind(kind: str, states: _Kept, parameters: list[Tensor], names: Mapping[int, str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for parameter, (weight, entry) in zip(parameters, states, strict=False):  # of no exact run there is nothing
        name = names.get(id(parameter), "a parameter that is not the module's")
        if kind == "weight":
            found[name] = weight
        else:
            found |= {f"{name} ({each})": one for each, one in entry.items() if isinstance(one, Tensor)}
    return found


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
    if update is None or update.reason:
        if update is None and (reason := not_torchs_own(optimizer)) is not None:
            raise CannotCapture(reason)
        if not isinstance(optimizer, NOT_COUNTING) and not all(
            "capturable" in group or group.get("fused") for group in optimizer.param_groups
        ):
            raise CannotCapture(f"{type(optimizer).__name__} counts its steps on the host")
        return OwnStep(optimizer)
    if update.form == "functional":
        return update
    raise CannotCapture(f"the {update.form} form of the compiled step reads the host")


def by_value(value: Any) -> Hashable:
    """A hyperparameter to tell graphs apart by; betas may be a list, a rate a tensor on the CPU that schedules fill."""
    if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple):
        return tuple(map(by_value, value))
    if isinstance(value, dict):
        return tuple((name, by_value(one)) for name, one in value.items())
    return value if isinstance(value, Hashable) else id(value)


class OwnStep(GraphedStep):
    """Torch's own step, which counts on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: list[DeviceScalar | None] = []
        """Of each group; None where the rate is on the device already, or kernels take it by value."""
        self._hook = optimizer.register_state_dict_post_hook(_steps_on_host)

    def prepare(self) -> None:
        """Bring the device's learning rates up to date: outside of the graph, which would repeat it."""
        for group in self._optimizer.param_groups[len(self._rates) :]:  # all at first, later those added since
            takes_tensor = group["params"] and (_has_capturable(group) or group.get("fused"))
            on_device = isinstance(group["lr"], Tensor) and not group["lr"].is_cpu
            moves = takes_tensor and not on_device
            self._rates.append(DeviceScalar(group["lr"], device=group["params"][0].device) if moves else None)
        for group, rate in self._groups():
            if rate is not None:
                rate.write(group["lr"])

    def constants(self) -> Hashable:
        return tuple(
            tuple(
                by_value(value) for name, value in group.items() if name != "params" and (name != "lr" or rate is None)
            )
            for group, rate in self._groups()
            if group["params"]  # nothing of an empty group is in a kernel
        )

    def scalars(self) -> list[Tensor]:
        return [rate.tensor for rate in self._rates if rate is not None]

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
