"""By hand: the steps of a module that optimizes by hand (``automatic_optimization=False``), on a batch at hand.

Such a module's ``training_step`` runs backward and steps the optimizers itself, one or several, once or more, or only
for every so many batches. A step of it is therefore training steps in a row, from ``batch_idx=0`` on, until every
optimizer has stepped: what accumulates gradients for four batches is compared and timed over four, and a generator that
steps once for five steps of its critic is not left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from trainer.guards.compare import gradient_of, perturb

MOST_BATCHES = 32
"""Training steps after which no optimizer is waited for that has not stepped yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long a step by hand is."""

    batches: int
    """Training steps until every optimizer has stepped that does so within ``MOST_BATCHES``."""
    steps: int
    """Training steps among them in which ``trainer.global_step`` grew: the steps that training is timed by."""


class ByHand:
    """Steps one module.

    The pieces are those of Lightning's manual loop, some of them private to it: optimizers count into its progress,
    from which ``trainer.global_step`` is read, and a gradient scaler scales. See ``_ManualOptimization`` in
    https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/loops/optimization/manual.py

    Args:
        arguments: Makes the arguments of a training step from a batch and its index, after the hook before the batch.
    """

    def __init__(self, trainer: L.Trainer, arguments: Callable[[Any, int], Any]) -> None:
        self._trainer, self._arguments = trainer, arguments
        self._loop = trainer.fit_loop.epoch_loop.manual_optimization
        self.span: Span | None = None
        """Known after the first step, which goes on until every optimizer has stepped."""

    def step(
        self, batch: Any, see: Callable[[Tensor], None] | None, apart: Callable[[], AbstractContextManager[Any]]
    ) -> list[Tensor] | None:
        """Take a step; returns the numbers that the training steps returned, None if they took no step and no backward.

        ``see`` is called after every ``manual_backward`` with the loss that it was given, before any scaling. Every
        training step runs in an ``apart()`` of its own: after each one, Lightning tells DDP to reduce again.
        """
        stepped: set[int] = set()
        returned: list[Tensor] = []
        grown, news = [0], 0
        with self._backwards(see) if see is not None else contextlib.nullcontext():
            for number in range(MOST_BATCHES if self.span is None else self.span.batches):
                counted, seen = self._trainer.global_step, len(stepped)
                with apart():
                    returned += _numbers(self._training_step(batch, number, stepped))
                grown.append(grown[-1] + (self._trainer.global_step > counted))
                if len(stepped) > seen:
                    news = number + 1
                if self.span is None and len(stepped) == len(self._trainer.optimizers):
                    break
        if not stepped and all(parameter.grad is None for parameter in self._trainer.lightning_module.parameters()):
            return None
        if self.span is None:
            self.span = Span(batches=max(1, news), steps=max(1, grown[max(1, news)]))
        return returned

    def _training_step(self, batch: Any, number: int, stepped: set[int]) -> dict[str, Any]:
        """One ``training_step`` as the loop runs it; the numbers of the optimizers that step go into ``stepped``."""
        arguments = self._arguments(batch, number)
        self._loop.on_run_start()
        try:
            with contextlib.ExitStack() as hooks:
                for place, optimizer in enumerate(self._trainer.strategy._lightning_optimizers):
                    optimizer._on_after_step = _marking(stepped, place, optimizer._on_after_step)
                    # A step past Lightning counts as well, for instance of self.optimizers(use_pl_optimizer=False).
                    hooks.callback(optimizer.optimizer.register_step_post_hook(_marking(stepped, place)).remove)
                with contextlib.suppress(StopIteration):
                    self._loop.advance(arguments)
        finally:  # after an error too, which Lightning's own loop does not outlive
            outputs = self._loop.on_run_end()
        return outputs

    @contextlib.contextmanager
    def _backwards(self, see: Callable[[Tensor], None]) -> Iterator[None]:
        strategy: Any = self._trainer.strategy
        backward, before = strategy.backward, vars(strategy).get("backward")

        def seen(loss: Tensor, *arguments: Any, **named: Any) -> Any:
            result = backward(loss, *arguments, **named)
            see(loss.detach())
            return result

        strategy.backward = seen
        try:
            yield
        finally:
            del strategy.backward
            if before is not None:
                strategy.backward = before


def _marking(stepped: set[int], place: int, then: Callable[[], Any] | None = None) -> Callable[..., None]:
    def mark(*_: Any) -> None:
        stepped.add(place)
        if then is not None:
            then()

    return mark


def _numbers(outputs: Mapping[str, Any]) -> list[Tensor]:
    """The loss among what a training step returned; without one, every single number that is no integer."""
    found = [outputs["loss"]] if "loss" in outputs else [outputs[name] for name in sorted(outputs, key=str)]
    tensors = [torch.as_tensor(value).detach() for value in found if isinstance(value, float | Tensor)]
    return [tensor.float().cpu() for tensor in tensors if tensor.is_floating_point() and tensor.numel() == 1]


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
