"""Host effects: what a training step does beside launching kernels, which a CUDA graph would not repeat.

A replay calls no Python. What a step logs is written again after each replay; what it reads is observed before it is
captured, and compared before each replay; whatever else it does on the host is a reason not to capture it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from strategies import Program
from strategies.as_capturing import as_capturing
from strategies.host_recorder import HostRecorder
from strategies.host_state import HostState, Names, entries_of
from strategies.step_graphs import Observation
from trainer.guards.rollback import eager
from trainer.guards.snapshot import Snapshot
from trainer.loops.lightning import LightningLoop
from trainer.reasons import one_line

LOG_METHODS = frozenset({"log", "log_dict"})
"""Stood in for while a step runs."""
SILENT_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks within a step; a replay would not call them."""
REPLACED_METHODS = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")


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


def observed(trainer: L.Trainer, program: Program, batch: Any, run: Callable[[], Any]) -> Observation:
    """What ``run``, a step's forward on ``batch``, reads on the host: it runs once in eager, and all is put back.

    Compiled code calls no Python either, so that eager code tells what it depends on. Where memory is short, the
    forward runs without gradients.
    """
    assert program.device is not None
    if problems := list(_hooks(trainer.lightning_module)):
        return Observation(HostState(), problems)
    for gradients in (contextlib.nullcontext(), torch.no_grad()):
        recorder = HostRecorder(program.device, {Logger: "which a replay would not call: use self.log"}, LOG_METHODS)
        snapshot = Snapshot(LightningLoop(trainer), batch, weights=False)
        if snapshot.lost is not None:
            return Observation(HostState(), [snapshot.lost])
        try:
            with eager(program), as_capturing(), gradients, recorder.recording(trainer.lightning_module):
                run()
        except torch.OutOfMemoryError:
            problems = ["could not be observed: out of memory"]
            continue
        except Exception as error:
            return Observation(recorder.state(), [f"could not be observed: {one_line(error)}"])
        finally:
            snapshot.restore()
        return Observation(recorder.state(), recorder.problems)
    return Observation(HostState(), problems)


def _hooks(module: nn.Module) -> Iterator[str]:
    """Hooks that run on the host in a backward, where nothing observes them."""
    for path, submodule in module.named_modules():
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            yield f"a backward hook on {path or 'the module'} runs on the host"
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"a hook on the parameter {path} runs on the host"


def optimizer_state(optimizer: torch.optim.Optimizer) -> HostState:
    """The tensors that a captured step of ``optimizer`` works on, its hooks and its parameters."""
    states = [Names(state, "optimizer.state.", expected=dict(state)) for state in optimizer.state.values()]
    held = [optimizer.state, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    held += [group["params"] for group in optimizer.param_groups]
    return HostState(states, [(each, "the optimizer's state", entries_of(each)) for each in held])


class Used(BaseException):
    """A step made use of what ``Unused`` stands for. No Exception: a step may catch those."""


class Unused:
    """Stands for a number that a step is given; any use of it raises ``Used``."""

    def __getattribute__(self, name: str) -> Any:
        """No attribute is there, not even a class for ``isinstance``."""
        raise Used


def _use(*_: Any) -> Any:
    raise Used


_DUNDERS = """bool index int float complex eq ne lt le gt ge hash repr str format len iter contains getitem call add
radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow neg pos abs and rand or ror
xor rxor lshift rlshift rshift rrshift invert round trunc floor ceil reduce_ex"""
for _name in _DUNDERS.split():
    setattr(Unused, f"__{_name}__", _use)


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
