"""The mathematics of Adam, AdamW and SGD over lists of tensors, each as one function that compiles to one kernel.

What depends on the hyperparameters and the count of steps alone is computed on the host in double precision, as torch's
own uncompiled optimizers do, and reaches the function as 0-D tensors. So nothing in it is a constant that could change.
"""

from __future__ import annotations

import inspect
import itertools
import math
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

Group = dict[str, Any]


class Each:
    """A list of tensors that one operator works on together: Inductor makes one kernel of a chain of such operators.

    Source: https://docs.pytorch.org/tutorials/recipes/compiling_optimizer.html
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __add__(self, other: Each) -> Each:
        return Each(torch._foreach_add(self.tensors, other.tensors))

    def __sub__(self, other: Each) -> Each:
        return Each(torch._foreach_sub(self.tensors, other.tensors))

    def __mul__(self, other: Each) -> Each:
        return Each(torch._foreach_mul(self.tensors, other.tensors))

    def __truediv__(self, other: Each) -> Each:
        return Each(torch._foreach_div(self.tensors, other.tensors))

    def __neg__(self) -> Each:
        return Each(torch._foreach_neg(self.tensors))

    def sqrt(self) -> Each:
        return Each(torch._foreach_sqrt(self.tensors))

    def maximum(self, other: Each) -> Each:
        return Each(torch._foreach_maximum(self.tensors, other.tensors))

    def become(self, other: Each) -> None:
        """Overwrite these tensors in place."""
        torch._foreach_copy_(self.tensors, other.tensors)


class Formula:
    """One optimizer. Scalars are named once, in ``scalars``, and arrive in ``update`` in that order."""

    flags: ClassVar[tuple[str, ...]] = ("maximize",)
    """Entries of a parameter group that decide which operators there are; whoever changes one recompiles."""
    counted: ClassVar[bool] = True
    """Whether torch keeps a ``step`` tensor in the state of each parameter."""

    def states(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors that have their parameter's shape; all begin as zeros."""
        raise NotImplementedError

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Numbers of the step with this number (1 is the first), in double precision."""
        raise NotImplementedError

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """New parameters and states; ``g`` is the gradient, ``s`` the scalars."""
        raise NotImplementedError

    def steps_in(self, state: Group) -> int:
        """Steps made with the ``state`` of a parameter; of SGD, whether one was, which is all that matters."""
        return int(state.get("step", 0) if self.counted else state.get("momentum_buffer") is not None)

    def create_state(self, state: Group, parameter: Tensor, group: Group) -> None:
        """Fill in what torch would create in the first step."""
        if self.counted and "step" not in state:
            on_device = group.get("capturable") or group.get("fused")
            # As torch counts: in float32, unless the default type is float64 and the optimizer is not fused.
            precise = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            dtype = torch.float64 if precise else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        for name in self.states(group):
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def flags_of(self, group: Group) -> Group:
        return {name: group["momentum"] != 0 if name == "has_momentum" else bool(group[name]) for name in self.flags}


class Adam(Formula):
    """Adam and AdamW: https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html."""

    flags = ("maximize", "amsgrad", "decoupled_weight_decay")

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        if group["decoupled_weight_decay"]:
            decay = 1 - lr * decay  # the share of the parameter that is kept
        size, correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        return decay, 1 - beta1, beta2, 1 - beta2, size, correction, group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        decay, grown1, kept2, grown2, size, correction, eps = s
        p, g = (p * decay, g) if flags["decoupled_weight_decay"] else (p, g + p * decay)
        mean, square = states[0] + (g - states[0]) * grown1, states[1] * kept2 + g * g * grown2
        new = [mean, square]
        if flags["amsgrad"]:
            square = states[2].maximum(square)
            new.append(square)
        return p - mean / (square.sqrt() / correction + eps) * size, new


class SGD(Formula):
    """Stochastic gradient descent with momentum: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html."""

    flags = ("maximize", "nesterov", "has_momentum")
    counted = False

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        grown = 1.0 if step == 1 else 1 - group["dampening"]  # dampening leaves the first gradient alone
        return group["weight_decay"], group["lr"], group["momentum"], grown

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        decay, lr, momentum, grown = s
        g = g + p * decay
        if not flags["has_momentum"]:
            return p - g * lr, []
        buffer = states[0] * momentum + g * grown
        return p - (g + buffer * momentum if flags["nesterov"] else buffer) * lr, [buffer]


def formula_of(optimizer: torch.optim.Optimizer) -> Formula | None:
    """The formula of one of torch's optimizers, or None; a subclass with a step of its own has none."""
    # unwrap: each class's step is decorated anew, the function inside tells whose mathematics it is.
    step = inspect.unwrap(type(optimizer).step)
    formulas = ((torch.optim.Adam, Adam), (torch.optim.AdamW, Adam), (torch.optim.SGD, SGD))
    return next((formula() for kind, formula in formulas if inspect.unwrap(kind.step) is step), None)


def numbers_of(group: Group) -> Group:
    """The group with numbers for the tensors that live on the host."""
    # A learning rate may be a tensor on the host, which schedulers then fill.
    return {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items()}


def _update_chunk(
    formula: Formula,
    flags: Group,
    which: tuple[int, ...],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    scalars: list[list[Tensor]],
    scale: Tensor,
) -> None:
    """Update the tensors of one chunk; the i-th takes the scalars of clock ``which[i]``."""
    g = Each(grads) * Each([scale] * len(grads))
    if flags["maximize"]:
        g = -g
    parameters, old = Each(params), [Each(state) for state in states]
    each_scalar = [Each([scalars[clock][number] for clock in which]) for number in range(len(scalars[0]))]
    new_parameters, new = formula.update(flags, parameters, g, old, each_scalar)
    # What is computed from most comes first: Inductor gives a buffer of its own to what still has to read a tensor that
    # is overwritten, and copies it later.
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/graph.py (GraphLowering.mark_buffer_mutated)
    parameters.become(new_parameters)
    for before, after in zip(reversed(old), reversed(new), strict=True):
        before.become(after)


_serial = itertools.count()


def fresh_function(formula: Formula, flags: Group, which: tuple[int, ...], *, name: str) -> Callable[..., None]:
    """``_update_chunk`` for one kind of chunk, as a function with a code object of its own.

    Dynamo keeps compiled code by code object: the kinds of chunks would be recompiles of each other, count against its
    limit and be told apart by guards (``isolate_recompiles`` of torch 2.13 does the same for wrappers).
    """

    def update(*tensors: Any) -> None:
        _update_chunk(formula, flags, which, *tensors)

    code = update.__code__.replace(co_name=f"{name}_{next(_serial)}")
    return types.FunctionType(code, globals(), code.co_name, None, update.__closure__)
