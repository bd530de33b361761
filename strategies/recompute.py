"""Recompute: a module whose activations are not kept for the backward but computed again, in place, without a wrapper.

The module gets a ``forward`` of its own that calls its class's under ``torch.utils.checkpoint`` (the non-reentrant
kind, https://docs.pytorch.org/docs/stable/checkpoint.html). Hooks, state-dict keys and class stay what they were, and a
compiler that traces the call decides in the graph what is computed again.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from strategies.graph_engine import CannotCapture

_FORWARDS: weakref.WeakKeyDictionary[type[nn.Module], types.FunctionType] = weakref.WeakKeyDictionary()
"""The recomputing forward of each class, made once: blocks of a class share their compiled code by it."""


def recompute(module: nn.Module) -> None:
    """Let ``module`` compute its activations again in the backward. Raises ValueError where its forward is patched."""
    if "forward" in vars(module):
        raise ValueError(f"the forward of this {type(module).__name__} has been replaced on the object itself")
    # A bound method of this object, as the class's own forward is: copies of the module then have their own, too.
    module.forward = types.MethodType(_forward_of(type(module)), module)


def keep_activations(module: nn.Module) -> None:
    """Undo ``recompute``; other modules are left alone."""
    if recomputes(module):
        del module.forward


def recomputes(module: nn.Module) -> bool:
    """Whether ``recompute`` is in force on ``module``."""
    forward = vars(module).get("forward")
    return getattr(forward, "__func__", None) is _forward_of(type(module))


def _forward_of(kind: type[nn.Module]) -> types.FunctionType:
    """The recomputing forward of one class: one piece of code for each, so that a compiler tells them apart."""
    if kind not in _FORWARDS:
        _FORWARDS[kind] = _make_forward(kind)
    return _FORWARDS[kind]


def _make_forward(kind: type[nn.Module]) -> types.FunctionType:
    own = kind.forward
    drew: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(self, *args, **kwargs)
        if torch.compiler.is_compiling() or not torch.cuda.is_initialized():

            def call(*args: Any, **kwargs: Any) -> Any:
                return own(self, *args, **kwargs)

            return checkpoint(call, *args, use_reentrant=False, **kwargs)
        return _on_cuda(own, self, args, kwargs, drew)

    # Of its own name: a compiler keeps what it knows of a piece of code by file, line and name, and so do its messages.
    code = forward.__code__.replace(co_name=f"{kind.__name__}.forward")
    return types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)


def _on_cuda(own: Any, module: nn.Module, args: Any, kwargs: Any, drew: weakref.WeakSet[nn.Module]) -> Any:
    """Where a CUDA graph may be being captured: torch cannot read and restore the generator's state within one."""
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing and module in drew:
        raise CannotCapture(
            f"checkpointing: {type(module).__name__} draws random numbers, which its second computation can repeat "
            "within a CUDA graph only where it is compiled: compile=[checkpointing,regional,cuda_graph]"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        before = None if capturing else _random_offset(module)
        results = own(module, *args, **kwargs)
        if before is not None and _random_offset(module) != before:
            drew.add(module)
        return results

    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=not capturing, **kwargs)


def _random_offset(module: nn.Module) -> int | None:
    """How far the generator of the module's device is, known on the host; None off a GPU."""
    device = next((parameter.device for parameter in module.parameters()), None)
    if device is None or device.type != "cuda":
        return None
    offset: int = torch.cuda.default_generators[device.index].get_offset()
    return offset
