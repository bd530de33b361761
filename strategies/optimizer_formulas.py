"""The mathematics of torch's optimizers over lists of tensors, each as one function that compiles to one kernel.

What depends on the hyperparameters and the count of steps alone is computed on the host in double precision, as torch's
own uncompiled optimizers do, and reaches the function as 0-D tensors. So nothing in it is a constant that could change.
"""

from __future__ import annotations

import inspect
import math
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

    def __abs__(self) -> Each:
        return Each(torch._foreach_abs(self.tensors))

    def sqrt(self) -> Each:
        """Square root."""
        return Each(torch._foreach_sqrt(self.tensors))

    def maximum(self, other: Each) -> Each:
        """The larger one, element by element."""
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
        """Names of the state tensors that have their parameter's shape."""
        raise NotImplementedError

    def initial(self, name: str, group: Group) -> float:
        """What a state tensor is filled with before the first step."""
        return 0.0

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Numbers of the step with this number (1 is the first), in double precision."""
        raise NotImplementedError

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """New parameters and states; ``g`` is the gradient, ``s`` the scalars."""
        raise NotImplementedError


class Adam(Formula):
    """Adam and AdamW: https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html."""

    flags = ("maximize", "amsgrad", "decoupled_weight_decay")

    def states(self, group: Group) -> tuple[str, ...]:
        """Both moments; with ``amsgrad`` the largest second one so far."""
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Weight decay (for decoupled decay: the share that is kept), moments' factors, step size and denominator."""
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        if group["decoupled_weight_decay"]:
            decay = 1 - lr * decay
        size, correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        return decay, 1 - beta1, beta2, 1 - beta2, size, correction, group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """One step."""
        decay, grown1, kept2, grown2, size, correction, eps = s
        p, g = _decayed(flags, p, g, decay)
        mean, square = _moments(states, g, grown1, kept2, grown2)
        new = [mean, square]
        if flags["amsgrad"]:
            square = states[2].maximum(square)
            new.append(square)
        return p - mean / (square.sqrt() / correction + eps) * size, new


def _decayed(flags: Group, p: Each, g: Each, decay: Each) -> tuple[Each, Each]:
    """Parameters and gradients after weight decay, decoupled (``decay`` is the share that is kept) or not."""
    return (p * decay, g) if flags["decoupled_weight_decay"] else (p, g + p * decay)


def _moments(states: list[Each], g: Each, grown1: Each, kept2: Each, grown2: Each) -> tuple[Each, Each]:
    """Adam's running means of the gradients and of their squares."""
    return states[0] + (g - states[0]) * grown1, states[1] * kept2 + g * g * grown2


class RAdam(Formula):
    """Rectified Adam: https://docs.pytorch.org/docs/stable/generated/torch.optim.RAdam.html."""

    flags = ("maximize", "decoupled_weight_decay")

    def states(self, group: Group) -> tuple[str, ...]:
        """Both moments."""
        return ("exp_avg", "exp_avg_sq")

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """As Adam's, and the sizes of the step without and with the second moment, of which one is 0."""
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        if group["decoupled_weight_decay"]:
            decay = 1 - lr * decay
        size, remaining = lr / (1 - beta1**step), 1 - beta2**step
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * step * beta2**step / remaining
        plain, rectified = size, 0.0
        if rho > 5.0:
            share = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
            plain, rectified = 0.0, size * math.sqrt(share) * math.sqrt(remaining)
        return decay, 1 - beta1, beta2, 1 - beta2, plain, rectified, group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """One step."""
        decay, grown1, kept2, grown2, plain, rectified, eps = s
        p, g = _decayed(flags, p, g, decay)
        mean, square = _moments(states, g, grown1, kept2, grown2)
        return p - mean * plain - mean / (square.sqrt() + eps) * rectified, [mean, square]


class Adamax(Formula):
    """Adam with the infinity norm: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adamax.html."""

    def states(self, group: Group) -> tuple[str, ...]:
        """First moment and norm."""
        return ("exp_avg", "exp_inf")

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Weight decay, factors and step size."""
        beta1, beta2 = group["betas"]
        return group["weight_decay"], 1 - beta1, beta2, group["lr"] / (1 - beta1**step), group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """One step."""
        decay, grown1, kept2, size, eps = s
        g = g + p * decay
        mean = states[0] + (g - states[0]) * grown1
        norm = (states[1] * kept2).maximum(abs(g) + eps)
        return p - mean / norm * size, [mean, norm]


class SGD(Formula):
    """Stochastic gradient descent with momentum: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html."""

    flags = ("maximize", "nesterov", "has_momentum")
    counted = False

    def states(self, group: Group) -> tuple[str, ...]:
        """The momentum where there is one; torch creates it in the first step."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Weight decay, learning rate, momentum and the gradient's share, which dampening leaves alone at first."""
        grown = 1.0 if step == 1 else 1 - group["dampening"]
        return group["weight_decay"], group["lr"], group["momentum"], grown

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """One step."""
        decay, lr, momentum, grown = s
        g = g + p * decay
        if not flags["has_momentum"]:
            return p - g * lr, []
        buffer = states[0] * momentum + g * grown
        return p - (g + buffer * momentum if flags["nesterov"] else buffer) * lr, [buffer]


class RMSprop(Formula):
    """RMSprop: https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html."""

    flags = ("maximize", "centered", "has_momentum")

    def states(self, group: Group) -> tuple[str, ...]:
        """Mean square; momentum and mean gradient where asked for."""
        return (
            "square_avg",
            *(["momentum_buffer"] if group["momentum"] > 0 else []),
            *(["grad_avg"] if group["centered"] else []),
        )

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Weight decay, learning rate, smoothing, momentum and eps."""
        return group["weight_decay"], group["lr"], group["alpha"], 1 - group["alpha"], group["momentum"], group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """One step."""
        decay, lr, kept, grown, momentum, eps = s
        g = g + p * decay
        square = states[0] * kept + g * g * grown
        new = [square]
        spread = square
        if flags["centered"]:
            mean = states[-1] + (g - states[-1]) * grown
            spread = square - mean * mean
        step = g / (spread.sqrt() + eps)
        if flags["has_momentum"]:
            step = states[1] * momentum + step
            new.append(step)
        if flags["centered"]:
            new.append(mean)
        return p - step * lr, new


class Adagrad(Formula):
    """Adagrad: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adagrad.html."""

    def states(self, group: Group) -> tuple[str, ...]:
        """Sum of squares; torch creates it with the optimizer."""
        return ("sum",)

    def initial(self, name: str, group: Group) -> float:
        """The optimizer's ``initial_accumulator_value``."""
        return float(group["initial_accumulator_value"])

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Weight decay, decayed learning rate and eps."""
        return group["weight_decay"], group["lr"] / (1 + (step - 1) * group["lr_decay"]), group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """One step."""
        decay, lr, eps = s
        g = g + p * decay
        total = states[0] + g * g
        return p - g / (total.sqrt() + eps) * lr, [total]


class Adadelta(Formula):
    """Adadelta: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adadelta.html."""

    def states(self, group: Group) -> tuple[str, ...]:
        """Mean squares of gradients and of steps."""
        return ("square_avg", "acc_delta")

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        """Weight decay, learning rate, smoothing and eps."""
        return group["weight_decay"], group["lr"], group["rho"], 1 - group["rho"], group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        """One step."""
        decay, lr, kept, grown, eps = s
        g = g + p * decay
        square = states[0] * kept + g * g * grown
        step = (states[1] + eps).sqrt() / (square + eps).sqrt() * g
        return p - step * lr, [square, states[1] * kept + step * step * grown]


def formula_of(optimizer: torch.optim.Optimizer) -> Formula | None:
    """The formula of one of torch's optimizers, or None; a subclass with a step of its own has none."""
    torchs: dict[type[torch.optim.Optimizer], type[Formula]] = {
        torch.optim.Adam: Adam,
        torch.optim.AdamW: Adam,
        torch.optim.RAdam: RAdam,
        torch.optim.Adamax: Adamax,
        torch.optim.SGD: SGD,
        torch.optim.RMSprop: RMSprop,
        torch.optim.Adagrad: Adagrad,
        torch.optim.Adadelta: Adadelta,
    }
    # unwrap: each class's step is decorated anew, the function inside tells whose mathematics it is.
    step = inspect.unwrap(type(optimizer).step)
    return next((formula() for kind, formula in torchs.items() if inspect.unwrap(kind.step) is step), None)
