"""Compare: loss, gradients and weights of a step with eager's, within a tolerance that eager sets itself.

One step of the compiled program and one of eager run on the same batch from the same state. How far apart they may be
is calibrated by eager against itself: its parameters changed by one rounding of the run's precision and, where the step
draws random numbers of which a compiler may draw others, eager under other seeds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLES = {"on": 6.0, "strict": 3.0}
"""How many times eager's own noise the compiled step may be away."""

UNITS = {
    "bf16-mixed": 2.0**-9,
    "bf16-true": 2.0**-9,
    "16-mixed": 2.0**-12,
    "16-true": 2.0**-12,
    "64-true": 2.0**-53,
}
"""Rounding error of one operation, relative, by Lightning's name of the precision; otherwise ``SINGLE``."""
SINGLE, TF32 = 2.0**-24, 2.0**-11

LOSS_FLOOR, TENSOR_FLOOR = 1e-5, 1e-4
"""Least tolerances in any precision: sums in another order."""


class ParityError(RuntimeError):
    """The compiled program computes something else than eager; ``facts`` are the figures, for the record."""

    def __init__(self, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = facts or {}


def rounding_unit(precision: str, device: torch.device) -> float:
    """Largest relative rounding error of one operation of a run in ``precision`` on ``device``."""
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return UNITS.get(precision, TF32 if tf32 else SINGLE)


@dataclass(slots=True, kw_only=True)
class Differences:
    """How far one step is from the reference step, each relative to the reference."""

    loss: float
    gradient_norm: float
    gradients: Tensor
    """``(tensors,)``: norm of the difference over the norm, for each parameter."""
    weights: Tensor
    """``(tensors,)``: difference of the updates over the update, both summed over the elements with the gradient's
    size as weight, for each parameter: to first order what the loss would notice. Adam's first steps go a full learning
    rate up or down wherever a gradient is all but zero, which is noise."""


def no_noise(like: Differences) -> Differences:
    """No difference at all."""
    gradients, weights = torch.zeros_like(like.gradients), torch.zeros_like(like.weights)
    return Differences(loss=0.0, gradient_norm=0.0, gradients=gradients, weights=weights)


class Comparison:
    """The reference step, and the distance of others from it.

    Args:
        module: Whose trainable parameters are compared.
        start: Gives what a parameter held before the step.
        buffers: Compare floating-point buffers as well, the running statistics of batch norms for instance.
        unit: Rounding of the run, relative: a gradient whose elements are smaller than this times all gradients'
            elements (root mean squares) is made of rounding, and measured by that size instead of its own.
    """

    def __init__(
        self, module: nn.Module, start: Callable[[Tensor], Tensor], *, buffers: bool = False, unit: float = 0.0
    ) -> None:
        named: dict[str, Tensor] = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if buffers:
            named |= {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
        self.names, self.parameters = list(named), list(named.values())
        self._start, self._unit = start, unit
        self.loss: float | None = None
        self.gradient_norm = math.nan
        self._losses: list[float] = []
        self._gradients: list[Tensor] = []
        self._weights: list[Tensor] = []
        self.updated = 0
        """Tensors that the reference step changed."""

    def see_reference(self, losses: Tensor, gradients: Sequence[Tensor] | None = None) -> None:
        """Keep loss and gradients of the reference, between backward and optimizer step or as they were kept there;
        several losses, ``(losses,)``, are compared as a vector, whose length is then ``loss``."""
        self._losses = losses.flatten().tolist()
        if self._losses:
            self.loss = self._losses[0] if len(self._losses) == 1 else math.hypot(*self._losses)
        self._gradients = list(gradients or [gradient_of(each).clone() for each in self.parameters])
        self.gradient_norm = _norm(self._gradients)

    @torch.no_grad()
    def end_reference(self) -> None:
        """Keep the weights of the reference, after the optimizer step."""
        self._weights = [parameter.detach().clone() for parameter in self.parameters]
        pairs = zip(self._weights, self.parameters, strict=True)
        self.updated = int((norms([weight - self._start(one) for weight, one in pairs]) != 0).sum())

    @torch.no_grad()
    def see(self, losses: Tensor, gradients: Sequence[Tensor] | None = None) -> Differences:
        """Compare loss and gradients of another step, of the same moment."""
        seen = [gradient_of(parameter) for parameter in self.parameters] if gradients is None else list(gradients)
        numbers = sum(kept.numel() for kept in self._gradients)
        least = self._unit * self.gradient_norm / math.sqrt(numbers or 1) if math.isfinite(self.gradient_norm) else 0.0
        kept = [reference.to(gradient.device) for gradient, reference in zip(seen, self._gradients, strict=True)]
        floors = torch.tensor([least * math.sqrt(reference.numel()) for reference in kept])
        apart = norms([gradient - reference for gradient, reference in zip(seen, kept, strict=True)])
        return Differences(
            loss=distance(losses.flatten().tolist(), self._losses),
            gradient_norm=distance([_norm(seen)], [self.gradient_norm]),
            gradients=_relative(apart, norms(kept).maximum(floors)),
            weights=torch.empty(0),
        )

    @torch.no_grad()
    def end(self, seen: Differences) -> Differences:
        """Add the weights of that step to what ``see`` found, after the optimizer step."""
        updates, apart, plain_updates, plain_apart = [], [], [], []
        for parameter, gradient, weight in zip(self.parameters, self._gradients, self._weights, strict=True):
            update = local(weight - self._start(parameter)).abs()
            difference = local(parameter.detach() - weight).abs()
            size = _wide(local(gradient)).abs()
            updates.append((size * update).sum())
            apart.append((size * difference).sum())
            plain_updates.append(update.sum())
            plain_apart.append(difference.sum())
        of = self.parameters
        weighted = added_up(updates, of)
        size, away = (
            torch.where(weighted > 0, one, other)
            for one, other in (
                (weighted, added_up(plain_updates, of)),
                (added_up(apart, of), added_up(plain_apart, of)),
            )
        )
        return replace(seen, weights=_relative(away, size))


@dataclass(slots=True)
class Judge:
    """Keeps eager's own noise and finds what is beyond it."""

    mode: str
    unit: float
    noise: list[Differences] = field(default_factory=list)
    slack: float = 1.0
    """Times that the least tolerances are allowed."""

    @property
    def multiple(self) -> float:
        """How many times eager's own noise is allowed."""
        return MULTIPLES[self.mode]

    def loss_tolerance(self) -> float:
        """Relative, of the loss."""
        return max(LOSS_FLOOR, self.slack * self.unit, self.multiple * max(one.loss for one in self.noise))

    def norm_tolerance(self) -> float:
        """Relative, of the norm of all gradients."""
        return max(
            TENSOR_FLOOR, self.slack * 4 * self.unit, self.multiple * max(one.gradient_norm for one in self.noise)
        )

    def tensor_tolerances(self, of: Callable[[Differences], Tensor]) -> Tensor:
        """Relative, for each parameter: its own noise or the median parameter's, the larger one."""
        own = torch.stack([of(one) for one in self.noise]).amax(0)
        noise = own.clamp(min=float(own.nanmedian()) if len(own) else 0.0)
        return (self.multiple * noise).clamp(min=max(TENSOR_FLOOR, self.slack * 16 * self.unit))

    def verdict(self, seen: Differences, comparison: Comparison) -> tuple[list[str], dict[str, Any]]:
        """What is beyond its tolerance, in words, and all figures for the record."""
        # A loss or gradient that is the same kind of no number on both sides counts as equal (_distance, _relative).
        complaints: list[str] = []
        figures: dict[str, Any] = {}
        for name, apart, tolerance, reference in (
            ("loss", seen.loss, self.loss_tolerance(), comparison.loss),
            ("gradient norm", seen.gradient_norm, self.norm_tolerance(), comparison.gradient_norm),
        ):
            if reference is None:  # a step under manual optimization that shows no loss
                continue
            figures[name.replace(" ", "_")] = {"eager": reference, "difference": apart, "tolerance": tolerance}
            if not apart <= tolerance:
                complaints.append(
                    f"{name} {apart:.2e} of eager's {reference:.6g} away from it, tolerance {tolerance:.2e}"
                )
        kinds: list[tuple[str, str, Callable[[Differences], Tensor]]] = [
            ("weights", "update of", lambda one: one.weights),
            ("gradients", "gradient of", lambda one: one.gradients),
        ]
        for name, what, of in kinds:
            if len(of(seen)):
                complaint, figures[name] = worst_of(what, comparison.names, of(seen), self.tensor_tolerances(of))
                complaints += complaint
        figures["updated_tensors"] = comparison.updated
        return complaints, figures


def worst_of(what: str, names: Sequence[str], apart: Tensor, tolerances: Tensor) -> tuple[list[str], dict[str, Any]]:
    """The complaint about the tensor farthest beyond its tolerance, if one is, and the figures; all ``(tensors,)``."""
    beyond = (apart / tolerances).nan_to_num(nan=math.inf, posinf=math.inf)
    beyond[apart == 0] = 0.0
    worst = int(beyond.argmax())
    figures = {
        "worst": names[worst],
        "difference": float(apart[worst]),
        "tolerance": float(tolerances[worst]),
        "tensors": len(apart),
        "beyond": int((beyond > 1).sum()),
    }
    complaint = (
        f"{what} {names[worst]!r} {figures['difference']:.2e} of eager's away from it, tolerance "
        f"{figures['tolerance']:.2e} ({figures['beyond']} of {len(apart)} tensors are beyond theirs)"
    )
    return [complaint] if beyond[worst] > 1 else [], figures


@torch.no_grad()
def perturb(parameters: Iterable[Tensor], unit: float, seed: int) -> None:
    """Change every element by about one rounding, up or down, without touching the run's random numbers."""
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in map(local, parameters):
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
        sign = torch.empty(parameter.shape, device=parameter.device)
        sign.bernoulli_(0.5, generator=generators[parameter.device]).mul_(2).sub_(1)
        # Stored in the precision of the run, half a step would be rounded away: take the neighbour.
        step = max(unit, torch.finfo(parameter.dtype).eps) if parameter.dtype.is_floating_point else 0.0
        parameter.mul_((1 + step * sign).to(parameter.dtype))


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient as a plain tensor, zeros where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of ``tensor``, a shard (DTensor) or all of it; in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def added_up(sums: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """``(tensors,)`` on the host: ``sums`` over what this process holds of ``tensors``, added up over all that hold a
    shard; every process calls this."""
    if not sums:
        return torch.empty(0)
    alike = len({one.device for one in sums}) == 1
    found = torch.stack([one if alike else one.cpu() for one in sums])
    spread: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if hasattr(tensor, "device_mesh"):
            spread.setdefault((tensor.device_mesh, tensor.placements), []).append(place)  # type: ignore[attr-defined]
    for (mesh, placements), places in spread.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        partial = [Partial() if placement.is_shard() else Replicate() for placement in placements]
        shares = found[places].to(local(tensors[places[0]]).device)
        found[places] = DTensor.from_local(shares, mesh, partial, run_check=False).full_tensor().to(found.device)
    return found.cpu()


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Tensor:
    """``(tensors,)`` on the host: their norms, over all shards; every process calls this."""
    own = [torch.linalg.vector_norm(_wide(local(one))) for one in tensors]
    if not any(hasattr(one, "device_mesh") for one in tensors):
        return added_up(own, tensors)
    return added_up([one.double() ** 2 for one in own], tensors).sqrt()


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(norms(gradients)))


def distance(values: Sequence[float], reference: Sequence[float]) -> float:
    """Length of the difference over that of ``reference``; what is no number on both sides counts as equal."""
    if [math.isfinite(value) for value in values] != [math.isfinite(value) for value in reference]:
        return math.inf
    pairs = [(value, other) for value, other in zip(values, reference, strict=True) if math.isfinite(other)]
    apart, length = math.hypot(*(value - other for value, other in pairs)), math.hypot(*(other for _, other in pairs))
    return apart / length if apart and length else (math.inf if apart else 0.0)


def _relative(difference: Tensor, reference: Tensor) -> Tensor:
    """``difference / reference``; no difference where both are nothing, or the reference is no number."""
    ratio = (difference / reference).nan_to_num(nan=math.inf)
    return torch.where((difference == 0) | ~reference.isfinite(), torch.zeros_like(ratio), ratio)


Around = Callable[[torch.optim.Optimizer], None]


class StepRecorder:
    """Losses and gradients of one step under manual optimization, where nobody else stands between backward and step.

    Hooks around the steps of the optimizers stand there instead (``around_steps``). Kept are the losses that
    ``manual_backward`` was given, or else the numbers that ``training_step`` returned, and the gradients of
    ``parameters`` that their optimizer took in its first step: the noise of a step grows in those that follow it.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._losses: list[Tensor] = []
        self._gradients: dict[Tensor, Tensor] = {}

    def see_loss(self, loss: Tensor) -> None:
        """Keep a loss that was given to ``manual_backward``."""
        self._losses.append(loss.float().sum())

    def see_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients that ``optimizer`` has just taken: clipped and unscaled, if the module does that."""
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
    weights round: an update may be smaller than their last digit. Under manual optimization, forwards and backwards
    come before, between and after the optimizers' steps. So a weight is put right just before its optimizer changes it,
    when no graph can need it any more, and displaced anew just after.

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
