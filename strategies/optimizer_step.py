"""Put a compiled update in the place of an optimizer's step, and take it out again.

The step stays a method of the same optimizer object: schedulers, gradient scalers, hooks and trainers that hold the
optimizer call it as before. The closure runs before the update and is not compiled.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

ATTRIBUTE = "_compiled_update"
"""Attribute of the optimizer: the update and the attribute ``step`` that was there before, or None."""
UNSCALES = "_unscaled_before_compiled_update"


class NothingCompiled(RuntimeError):
    """The step was handed to the compiler and was not compiled."""


class Update(Protocol):
    """What stands in for the step."""

    form: str
    max_norm: float | None

    def __call__(self) -> None:
        """Update parameters and state from the gradients."""

    def release(self) -> None:
        """Leave the optimizer as torch's own step expects it."""

    def facts(self) -> dict[str, Any]:
        """Figures for the record."""


def install(optimizer: torch.optim.Optimizer, update: Update, *, after_first: Callable[[], None]) -> None:
    """Let ``optimizer.step`` call ``update``; ``after_first`` runs once, after the first step."""
    first = True

    @torch.optim.Optimizer.profile_hook_step  # runs the step's hooks and names it in profiles
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        nonlocal first
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if first:
                first = False
                _call_first(update)
                after_first()
            else:
                update()
        self._opt_called = True  # type: ignore[attr-defined]
        return loss

    # Schedulers mark the step that they have wrapped, to see later that it was called; ours tells them itself.
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/optim/lr_scheduler.py (patch_track_step_called)
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    setattr(optimizer, ATTRIBUTE, (update, vars(optimizer).get("step")))
    # Fused optimizers unscale gradients themselves under a GradScaler; the update leaves that to the scaler.
    setattr(optimizer, UNSCALES, vars(optimizer).get("_step_supports_amp_scaling"))
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    # A bound method of this object, because schedulers take its __func__.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def installed(optimizer: torch.optim.Optimizer) -> Update | None:
    """The update that stands in for the step of ``optimizer``, or None."""
    update, _ = vars(optimizer).get(ATTRIBUTE, (None, None))
    return update


def uninstall(optimizer: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` its own step back; it goes on from the state as it is."""
    if installed(optimizer) is None:
        return
    update, step = vars(optimizer).pop(ATTRIBUTE)
    update.release()
    for name, value in (("step", step), ("_step_supports_amp_scaling", vars(optimizer).pop(UNSCALES))):
        if value is None:
            delattr(optimizer, name)
        else:
            setattr(optimizer, name, value)


def _call_first(update: Update) -> None:
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    update()
    if update.form != "eager" and counters["stats"]["unique_graphs"] == graphs and _has_gradients(update):
        raise NothingCompiled(
            "optimizer: the step was handed to the compiler and was not compiled (is TORCHDYNAMO_DISABLE set?)"
        )


def _has_gradients(update: Any) -> bool:
    return any(parameter.grad is not None for group in update.optimizer.param_groups for parameter in group["params"])


@contextlib.contextmanager
def own_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``optimizer`` takes torch's own step, whatever was installed in its place."""
    attributes = vars(optimizer)
    if ATTRIBUTE not in attributes:
        yield
        return
    kept, step = attributes.pop(ATTRIBUTE), attributes.pop("step")
    _, before = kept
    if before is not None:
        attributes["step"] = before
    try:
        yield
    finally:
        attributes[ATTRIBUTE], attributes["step"] = kept, step
