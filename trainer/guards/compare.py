"""Compare: loss, gradients and weights of a step with eager's, within a tolerance that eager sets itself.

One step of the compiled program and one of eager run on the same batch from the same state. How far apart they may be
is calibrated by eager against itself, with parameters changed by one rounding of the run's precision. Where the step
draws random numbers of which a compiler may draw others, eager runs under other seeds as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
from torch import Tensor

MULTIPLES = {"on": 6.0, "strict": 3.0}
"""How many times eager's own noise the compiled step may be away."""

UNITS = {"bf16": 2.0**-9, "16": 2.0**-12, "64": 2.0**-53}
"""Rounding error of one operation, relative, by how Lightning's name of the precision begins; else ``SINGLE``."""
SINGLE, TF32 = 2.0**-24, 2.0**-11
BY_CUDNN = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)

LOSS_FLOOR, TENSOR_FLOOR = 1e-5, 1e-4
"""Least tolerances in any precision: sums in another order."""
ROUNDINGS = 4
"""Roundings that a stored value may be off after each step."""


class ParityError(RuntimeError):
    """The compiled program computes something else than eager; ``facts`` are the figures, for the record."""

    def __init__(self, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = facts or {}


def rounding_unit(precision: str, device: torch.device, module: torch.nn.Module) -> float:
    """Largest relative rounding error of one operation of ``module`` in a run in ``precision`` on ``device``.

    Whatever matrix products do, cuDNN may round to TF32, and need not in another memory format, as compilers choose it:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    lower_or_double = UNITS.get(precision.partition("-")[0])
    if lower_or_double is not None or device.type != "cuda":
        return lower_or_double or SINGLE
    tf32 = torch.get_float32_matmul_precision() != "highest" or (
        torch.backends.cudnn.allow_tf32 and any(isinstance(one, BY_CUDNN) for one in module.modules())
    )
    return TF32 if tf32 else SINGLE


KINDS = {
    "loss": "loss",
    "gradient_norm": "gradient norm",
    "gradients": "gradient of",
    "weights": "update of",
    "optimizer_state": "optimizer state",
    "buffers": "buffer",
    "outputs": "output or gradient",
}
"""What is compared, in the order in which it is reported, in words."""

Distances = dict[str, Tensor]
"""``(tensors,)`` by kind: norms of the differences, relative to what eager's tensors are or how far they moved."""
Tensors = dict[str, dict[str, Tensor]]
"""By kind and name."""


@dataclass(frozen=True, slots=True)
class _Kept:
    tensors: dict[str, Tensor]
    sizes: Tensor
    least: Tensor


class Comparison:
    """What eager left, by kind, and how far others may be from it.

    They may be ``multiple`` times as far as eager is from itself (``noise``), the median tensor's noise at least.
    """

    def __init__(self, multiple: float) -> None:
        self._multiple = multiple
        self._kept: dict[str, _Kept] = {}
        self.noise: list[Distances] = []

    def keep(self, kind: str, tensors: Mapping[str, Tensor], *, least: Tensor | float, sizes: Tensor) -> None:
        """Keep eager's ``tensors``, which nobody writes to. Differences are relative to ``sizes``, ``(tensors,)``; of
        what is no number there, none counts. ``least``, ``(tensors,)``, are the least tolerances, relative."""
        sizes = sizes.double()
        self._kept[kind] = _Kept(dict(tensors), sizes, torch.as_tensor(least).double().expand(sizes.shape))

    def keep_stored(
        self,
        kind: str,
        tensors: Mapping[str, Tensor],
        moved: Tensor | Sequence[Tensor | None],
        tolerance: Tensor | float,
        steps: int = 1,
        copy: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Keep a ``copy`` of what steps have left; differences are relative to how far it ``moved``: ``(tensors,)``, or
        the tensors that it began as. At least ``tolerance`` is allowed, and what ``steps`` roundings of the stored
        values may come to. What did not move may differ by those alone."""
        held = list(tensors.values())
        moved = (moved if isinstance(moved, Tensor) else moved_since(moved, held)).double()
        sizes, still = norms(held, of_finite=True).double(), moved == 0
        epsilon = torch.tensor([torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0 for one in held])
        of = torch.where(still, sizes, moved)
        rounding = steps * ROUNDINGS * epsilon.double() * sizes / of.clamp(min=1e-300)
        copies = {name: copy(one) for name, one in tensors.items()}
        self.keep(kind, copies, sizes=of, least=torch.where(still, 0.0, tolerance) + rounding)

    def keep_step(self, losses: Tensor, gradients: Mapping[str, Tensor], unit: float, slack: float = 1.0) -> None:
        """Keep loss and gradients of a step, as they are between backward and optimizer.

        Several ``losses``, ``(losses,)``, are compared as a vector; none are no kind. A gradient whose elements are
        smaller than ``unit`` (rounding, relative) times all gradients' elements (root mean squares) is made of
        rounding, and measured by that size. ``slack`` multiplies what rounding allows.
        """
        losses = losses.detach().flatten().cpu()
        if losses.numel():
            self.keep("loss", {"loss": losses}, **loss_sizes([losses], slack * unit))
        sizes, numbers = norms(gradients.values()), [one.numel() for one in gradients.values()]
        norm = sizes.norm()[None]
        size = norms([norm], of_finite=True)
        self.keep("gradient_norm", {"norm": norm}, least=max(TENSOR_FLOOR, slack * 4 * unit), sizes=size)
        made_of_rounding = unit * norm.nan_to_num(posinf=0.0) / math.sqrt(sum(numbers) or 1)
        floors = made_of_rounding * torch.tensor(numbers, dtype=norm.dtype).sqrt()
        sizes = torch.where(sizes.isfinite(), sizes.maximum(floors), sizes)
        self.keep("gradients", gradients, least=max(TENSOR_FLOOR, slack * 16 * unit), sizes=sizes)

    def distances_of_step(self, losses: Tensor, gradients: Mapping[str, Tensor]) -> Distances:
        """The same of another step."""
        norm = norms(gradients.values()).norm()[None]
        losses = losses.detach().flatten().cpu()
        return self.distances({"loss": {"loss": losses}, "gradient_norm": {"norm": norm}, "gradients": dict(gradients)})

    @torch.no_grad()
    def distances(self, tensors: Tensors) -> Distances:
        """How far ``tensors`` are from eager's, of the kinds that were kept."""
        found = {}
        for kind in (one for one in self._kept if one in tensors):  # in one order in all processes: they add up norms
            kept, given = self._kept[kind], tensors[kind]
            pairs = [(given.get(name), one) for name, one in kept.tensors.items()]
            far = torch.tensor(math.inf)
            away = norms(apart_of(one, other) if _alike(one, other) else far for one, other in pairs).double()
            relative = (away / kept.sizes).nan_to_num(nan=math.inf, posinf=math.inf)
            found[kind] = torch.where((away == 0) | ~kept.sizes.isfinite(), torch.zeros_like(away), relative)
        return found

    def tolerances(self, kind: str) -> Tensor:
        """``(tensors,)``, relative."""
        kept = self._kept[kind]
        noise = torch.stack([torch.zeros_like(kept.sizes), *(one[kind] for one in self.noise)]).amax(0)
        return kept.least.maximum(self._multiple * noise.clamp(min=float(noise.nanmedian())))

    def tolerance(self, kind: str) -> float:
        """Of the one tensor of its ``kind``; 0 without any."""
        return float(self.tolerances(kind)[0]) if kind in self._kept else 0.0

    def worst(self, kind: str, apart: Tensor) -> tuple[str, float, float, int]:
        """Of a kind's tensors, ``apart`` from eager's: name, difference and tolerance of the one that is nearest to its
        tolerance or beyond it most, and how many are beyond theirs."""
        tolerances = self.tolerances(kind)
        beyond = (apart / tolerances).nan_to_num(nan=math.inf, posinf=math.inf)
        beyond[apart == 0] = 0.0
        worst = int(beyond.argmax())
        name = list(self._kept[kind].tensors)[worst]
        return name, float(apart[worst]), float(tolerances[worst]), int((beyond > 1).sum())

    def verdict(self, seen: Distances) -> tuple[list[str], dict[str, Any]]:
        """What is beyond its tolerance, in words, and figures of each kind for the record."""
        complaints: list[str] = []
        figures: dict[str, Any] = {}
        for kind in [kind for kind in KINDS if kind in seen and len(seen[kind])]:
            name, difference, tolerance, beyond = self.worst(kind, seen[kind])
            figures[kind] = {"difference": difference, "tolerance": tolerance}
            away = f"away from it, tolerance {tolerance:.2e}"
            if kind in ("loss", "gradient_norm"):
                value = self._kept[kind].tensors[name]
                figures[kind]["eager"] = eager = float(value) if value.numel() == 1 else float(value.norm())
                complaint = f"{KINDS[kind]} {difference:.2e} of eager's {eager:.6g} {away}"
            else:
                tensors = len(seen[kind])
                figures[kind] |= {"worst": name, "tensors": tensors, "beyond": beyond}
                complaint = (
                    f"{KINDS[kind]} {name!r} {difference:.2e} of eager's {away} "
                    f"({beyond} of {tensors} tensors are beyond theirs)"
                )
            complaints += [complaint] if beyond else []
        return complaints, figures


def _alike(one: Tensor | None, other: Tensor) -> TypeGuard[Tensor]:
    return one is not None and one.shape == other.shape


def apart_of(one: Tensor, other: Tensor) -> Tensor:
    """Their difference; none where both are the same infinity, or no number."""
    one, other = _wide(one), _wide(other).to(one.device)
    return torch.where((one == other) | (one.isnan() & other.isnan()), torch.zeros_like(one), one - other)


@torch.no_grad()
def moved_since(starts: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Tensor:
    """``(tensors,)``: how far ``tensors`` moved since ``starts``; their own size where there was none."""
    pairs = zip(starts, tensors, strict=True)
    return norms(apart_of(one, before) if _alike(before, one) else one for before, one in pairs)


def loss_sizes(losses: Iterable[Tensor], unit: float) -> dict[str, Tensor]:
    """``(losses,)``: what differences of each are relative to, and the least tolerance: ``unit``, and some roundings
    of 1. Cross entropy takes logarithms of numbers near 1, whose roundings do not shrink with the loss."""
    losses = list(losses)
    epsilon = torch.tensor([min(2 * SINGLE, torch.finfo(one.dtype).eps) for one in losses]).double()
    sizes = norms(losses, of_finite=True).double().maximum(epsilon)
    return {"sizes": sizes, "least": max(LOSS_FLOOR, unit) + ROUNDINGS * epsilon / sizes}


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
    return tensor if tensor.is_complex() or tensor.dtype == torch.double else tensor.float()


def local(tensor: Tensor) -> Tensor:
    """What this process holds of ``tensor``, a shard (DTensor) or all of it; in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_host(numbers: Sequence[Tensor]) -> Tensor:
    """``(numbers,)``, of all shards where they are of one (DTensor); every process calls this."""
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in numbers]
    alike = len({one.device for one in whole}) == 1
    return torch.stack(whole if alike else [one.cpu() for one in whole]).cpu() if whole else torch.empty(0)


@torch.no_grad()
def norms(tensors: Iterable[Tensor], *, of_finite: bool = False) -> Tensor:
    """``(tensors,)`` on the host: their norms (or of what is finite), over all shards; every process calls this."""
    found = []
    for tensor in tensors:  # one at a time: differences of all parameters are as large as the model
        held = _wide(tensor.detach())
        found.append(torch.linalg.vector_norm(held.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if of_finite else held))
    return on_host(found)


@contextlib.contextmanager
def displaced(parameters: Sequence[Tensor], unit: float, seed: int) -> Iterator[None]:
    """Inside, weights are one rounding off, by ``unit``, relative; see ``perturb``.

    A weight is put right by adding what was taken from it. If nobody has touched it since, this is exact: of two
    floating-point numbers within a factor of two, the difference is one too (Sterbenz). If a step has changed it, it
    is exact but for about a rounding of what is stored.
    """
    back = [parameter.detach().clone() for parameter in parameters]
    perturb(parameters, unit, seed)
    for parameter, before in zip(parameters, back, strict=True):
        before.sub_(parameter.detach())
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, difference in zip(parameters, back, strict=True):
                parameter.add_(difference)


@contextlib.contextmanager
@torch.no_grad()
def doubled(module: torch.nn.Module) -> Iterator[None]:
    """Inside, weights and buffers are in double precision; gradients end with it."""
    kept = [(one, one.data) for one in [*module.parameters(), *module.buffers()] if one.is_floating_point()]
    try:
        for tensor, _ in kept:
            tensor.grad, tensor.data = None, tensor.data.double()
        yield
    finally:
        for tensor, data in kept:
            tensor.grad, data[...] = None, tensor.data
            tensor.data = data


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, autocast lowers no precision, whoever enters it."""
    entering: Any = {"__enter__": lambda autocast: autocast, "__exit__": lambda *_: None}
    with patch.multiple(torch.autocast, **entering):
        yield


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that a step of ``optimizer`` changes: those with a gradient."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in given if parameter.grad is not None]


@contextlib.contextmanager
def around_steps(
    optimizers: Iterable[torch.optim.Optimizer],
    before: Callable[[torch.optim.Optimizer], Any],
    after: Callable[[], Any] = lambda: None,
) -> Iterator[None]:
    """Inside, ``before`` is called when an optimizer is about to change its parameters, and ``after`` once it has.

    An optimizer that is given a closure evaluates it within its step: ``before`` then comes after that. Not by hooks:
    gradients are clipped elsewhere for an optimizer that has some.
    """

    def observed(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        stepped: Callable[..., Any] = optimizer.step

        @functools.wraps(stepped)  # with the mark by which schedulers know it
        def step(*given: Any, **named: Any) -> Any:
            closure = given[0] if given else named.get("closure")

            def evaluated() -> Any:
                result = closure() if closure is not None else None
                before(optimizer)
                return result

            if closure is None:
                evaluated()
            elif given:
                given = (evaluated, *given[1:])
            else:
                named = {**named, "closure": evaluated}
            result = stepped(*given, **named)
            after()
            return result

        return step

    with contextlib.ExitStack() as steps:
        for optimizer in optimizers:
            steps.enter_context(patch.object(optimizer, "step", observed(optimizer)))
        yield
