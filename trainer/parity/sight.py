"""Sight: what is looked at in a step that a module takes by hand, where nobody else stands between backward and step.

Hooks around the steps of the optimizers stand there instead. What is compared are the losses that ``manual_backward``
was given, or else the numbers that ``training_step`` returned; the gradients that each parameter's optimizer took in
its first step; and the weights that the whole step leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.parity.comparison import gradient_of, perturb

Around = Callable[[torch.optim.Optimizer], None]


class Sight:
    """The losses and gradients of one step.

    Args:
        parameters: Whose gradients are kept.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._losses: list[Tensor] = []
        self._gradients: dict[Tensor, Tensor] = {}

    def see_loss(self, loss: Tensor) -> None:
        """Keep a loss that was given to ``manual_backward``."""
        self._losses.append(loss.float().sum())

    def see_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients that ``optimizer`` has just taken: clipped and unscaled, if the module does that.

        Of its first step only: the noise of a step grows in those that follow it.
        """
        for parameter in parameters_of(optimizer):
            if parameter not in self._gradients:
                self._gradients[parameter] = gradient_of(parameter).clone()

    def losses(self, returned: Tensor) -> Tensor:
        """``(losses,)`` in their order; where no backward was seen, what was ``returned``."""
        return torch.stack(self._losses) if self._losses else returned

    def gradients(self) -> list[Tensor]:
        """A gradient for each parameter; of one whose optimizer did not step, what has been accumulated."""
        return [
            self._gradients[parameter] if parameter in self._gradients else gradient_of(parameter).clone()
            for parameter in self._parameters
        ]


class Displaced:
    """Weights that are one rounding off wherever the model looks at them, and exact wherever an optimizer steps.

    The calibration asks how far the rounding of forward and backward carries. It must not ask how far the stored
    weights round: an update may be smaller than their last digit, and from another weight it would then come out as
    another one. In a step by hand, forwards and backwards come before, between and after the optimizers' steps. So a
    weight is put right just before its optimizer changes it, a moment at which no graph can need it any more, and
    displaced anew just after. What comes second then sees what the noise has made of what came first, as it does in the
    compiled step.

    A weight is put right by adding what was taken from it. If nobody has touched it since, this is exact: of two
    floating-point numbers within a factor of two, the difference is one too (Sterbenz). If ``training_step`` has
    changed it itself (it clamps a critic's weights, or averages them), it is exact but for about a rounding.

    Args:
        parameters: What is displaced; entered once.
        unit: By how much, relative; see ``perturb``.
    """

    def __init__(self, parameters: Sequence[Tensor], unit: float, seed: int) -> None:
        self._parameters, self._unit, self._seed = parameters, unit, seed
        self._known = set(parameters)
        self._back: dict[Tensor, Tensor] = {}
        """What puts each weight right that is displaced."""

    def __enter__(self) -> Displaced:
        self._displace(self._parameters)
        return self

    def __exit__(self, *_: object) -> None:
        self._put_right(self._parameters)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` is about to change its parameters."""
        self._put_right(parameters_of(optimizer))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """It has."""
        self._displace(parameter for parameter in parameters_of(optimizer) if parameter in self._known)

    @torch.no_grad()
    def _displace(self, parameters: Iterable[Tensor]) -> None:
        exact = {parameter: parameter.detach().clone() for parameter in parameters if parameter not in self._back}
        self._seed += 1
        perturb(exact, self._unit, self._seed)
        for parameter, before in exact.items():
            self._back[parameter] = before.sub_(parameter)

    @torch.no_grad()
    def _put_right(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter in self._back:
                parameter.add_(self._back.pop(parameter))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that a step of ``optimizer`` changes: those with a gradient."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in given if parameter.grad is not None]


@contextlib.contextmanager
def around_steps(
    optimizers: Iterable[torch.optim.Optimizer], *, before: Sequence[Around], after: Sequence[Around]
) -> Iterator[None]:
    """Inside, ``before`` is called when an optimizer is about to change its parameters, and ``after`` when it has.

    An optimizer that is given a closure evaluates it within its step: ``before`` then comes after that.
    """

    def about_to_step(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> Any:
        step, *given = arguments
        closure = given[0] if given else named.get("closure")

        def evaluated() -> Any:
            result = closure()
            for call in before:
                call(optimizer)
            return result

        if closure is None:
            for call in before:
                call(optimizer)
            return None
        return ((step, evaluated, *given[1:]), named) if given else (arguments, {**named, "closure": evaluated})

    def has_stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for call in after:
            call(optimizer)

    with contextlib.ExitStack() as hooks:
        for optimizer in optimizers:
            hooks.callback(optimizer.register_step_pre_hook(about_to_step).remove)
            hooks.callback(optimizer.register_step_post_hook(has_stepped).remove)
        yield
