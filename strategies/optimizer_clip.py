"""Clip in the compiled update, which scales the gradients that it reads; Lightning would write them once more."""

from __future__ import annotations

from typing import Any

from torch import nn

from strategies.optimizer_step import installed
from strategies.optimizer_update import FunctionalUpdate

LIGHTNING = ("lightning.", "pytorch_lightning.")


def fold_clipping(module: nn.Module) -> bool:
    """Let clipping by norm under Lightning happen inside the compiled updates; returns whether it will.

    It does not where it would not be the same: a module with gradient clipping of its own, manual optimization, or a
    precision or sharding plug-in that clips in its own way. The gradients themselves stay unclipped, which only code
    that looks at them between the step and ``zero_grad`` can see; an optimizer with step hooks is clipped as before.
    """
    plugin = _plugin(module)
    if plugin is None:
        return False
    clip = plugin.clip_grad_by_norm

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        update = installed(optimizer)
        hooked = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        if isinstance(update, FunctionalUpdate) and not hooked:
            update.max_norm = float(clip_val)
        else:
            clip(optimizer, clip_val)

    # An attribute of this one plug-in object: Lightning has no hook that could leave the gradients as they are.
    plugin.clip_grad_by_norm = clip_grad_by_norm

    return True


def unfold_clipping(module: nn.Module) -> None:
    """Let Lightning clip by itself again."""
    plugin = getattr(getattr(module, "_trainer", None), "precision_plugin", None)
    if plugin is not None and "clip_grad_by_norm" in vars(plugin):
        del plugin.clip_grad_by_norm


def _plugin(module: nn.Module) -> Any:
    configure = getattr(type(module), "configure_gradient_clipping", None)
    if configure is None or not configure.__module__.startswith(LIGHTNING):
        return None
    if not getattr(module, "automatic_optimization", False):
        return None
    plugin = getattr(getattr(module, "_trainer", None), "precision_plugin", None)
    clip = getattr(type(plugin), "clip_grad_by_norm", None)
    # The base class's: torch's clip_grad_norm_ over the parameters of the optimizer.
    return plugin if clip is not None and clip.__qualname__ == "Precision.clip_grad_by_norm" else None
