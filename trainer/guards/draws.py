"""Draws: whether what is compiled draws random numbers, and whether it draws them as eager does.

What the training step draws outside of it (the noise that a generator begins with, the time steps of a diffusion) is
the same in eager and compiled, because both begin from the same state of the generators; it takes nothing from the
sharpness of a comparison. Where regions draw, a compiler may draw other numbers: steps of both arms under several seeds
are then compared as samples. Their means may differ by what the spread between seeds explains; the spreads are alike.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strategies import Program
from strategies.options import file_of_backend
from trainer.guards.compare import added_up, local, norms
from trainer.guards.snapshot import drew_random_numbers, random_state

FEW, MANY = 4, 16
"""Steps of each arm that are looked at first, and before a difference counts."""
SUSPECT, CERTAIN = 6.0, 7.0
"""Standard errors that two means may be apart, of few and of many steps: with 30 degrees of freedom, a difference of 7
comes by chance once in ten million."""
MAX_SPREAD = 8.0
"""Times that the variance of one arm's losses may be the other's: by chance once in 10,000 steps of 16 seeds."""


@dataclass(slots=True)
class Draws:
    """Losses and gradients of steps under several seeds, of eager and compiled, each as a few numbers.

    Of every tensor (gradients, and what buffers moved) these are its length, its projection on that of a first eager
    step, and its distance from it: scale, direction and spread.
    """

    names: Sequence[str]
    unit: float
    losses: dict[str, list[float]] = field(default_factory=lambda: {"eager": [], "compiled": []})
    figures: dict[str, list[Tensor]] = field(default_factory=lambda: {"eager": [], "compiled": []})
    """``(tensors, 3)`` of each step."""
    _first: list[Tensor] | None = None
    _sizes: Tensor = field(default_factory=lambda: torch.empty(0))
    _least: Tensor | None = None

    @torch.no_grad()
    def add(self, arm: str, loss: float, tensors: Sequence[Tensor]) -> None:
        """A step of ``arm``; the very first one, of eager, is what the others are measured by."""
        if self._first is None:
            self._first = [tensor.detach().float().clone() for tensor in tensors]
            self._sizes = sizes = norms(self._first)
            counts = torch.tensor([float(tensor.numel()) for tensor in self._first])
            self._least = float(sizes.norm()) / math.sqrt(max(1.0, float(counts.sum()))) * counts.sqrt()
            return
        now = [tensor.detach().float() for tensor in tensors]
        pairs = list(zip(now, self._first, strict=True))
        along = added_up([(local(one) * local(first)).sum() for one, first in pairs], now)
        lengths = along / torch.where(self._sizes > 0, self._sizes, torch.ones_like(self._sizes))
        found = torch.stack([norms(now), lengths, norms([one - first for one, first in pairs])], dim=1)
        self.losses[arm].append(loss)
        self.figures[arm].append(found.double().reshape(-1, 3))

    def complaints(self, limit: float, loss: float, gradients: Tensor) -> tuple[list[str], dict[str, Any]]:
        """What cannot be chance, in words, and figures for the record.

        Args:
            limit: In standard errors.
            loss: Relative difference of the loss that rounding alone explains, which more seeds do not average out.
            gradients: ``(parameters,)``: the same of each gradient; buffers are allowed the median.
        """
        eager, compiled = self.losses["eager"], self.losses["compiled"]
        found: list[str] = []
        figures: dict[str, Any] = {"steps": len(eager)}
        if all(map(math.isfinite, [*eager, *compiled])):
            spread = _standard_error(eager, compiled)
            mean, other = statistics.fmean(eager), statistics.fmean(compiled)
            allowed = limit * spread + max(16 * self.unit, loss) * abs(mean)
            figures["loss"] = {"eager": mean, "compiled": other, "tolerance": allowed / (abs(mean) or 1.0)}
            if abs(mean - other) > allowed:
                found.append(f"mean loss {other:.6g} under {len(eager)} seeds, eager's is {mean:.6g} +- {spread:.2g}")
            if len(set(compiled)) == 1 < len(set(eager)):
                found.append("its loss does not depend on the random numbers, eager's does")
            elif len(eager) >= MANY and (ratio := _ratio(eager, compiled)) > MAX_SPREAD:
                found.append(f"the variance of its loss between seeds is {ratio:.1f} times eager's, or that part of it")
        one, two = (torch.stack(self.figures[arm]) for arm in ("eager", "compiled"))
        apart, scale = (one.mean(0) - two.mean(0)).abs(), torch.maximum(one.abs().mean(0), two.abs().mean(0))
        error = ((one.var(0) + two.var(0)) / 2 * (2 / len(one))).sqrt()
        assert self._least is not None
        buffers = len(self.names) - len(gradients)
        rounding = torch.cat([gradients, gradients.nanmedian().expand(buffers)]) if len(gradients) else gradients
        rounding = rounding.double().nan_to_num(nan=math.inf).clamp(min=16 * self.unit)[:, None]
        floor = rounding * torch.maximum(scale, self._least[:, None].double())
        beyond = apart / (limit * error + floor).clamp(min=1e-300)
        beyond = torch.where(apart == 0, torch.zeros_like(beyond), beyond.nan_to_num(nan=0.0))
        if beyond.numel() and float(beyond.max()) > 1:
            worst = int(beyond.amax(1).argmax())
            what = ("length", "direction", "spread")[int(beyond[worst].argmax())]
            found.append(f"{what} of the gradient or the change of {self.names[worst]!r} is not eager's under any seed")
        return found, figures


def _standard_error(one: list[float], other: list[float]) -> float:
    return math.sqrt((statistics.variance(one) + statistics.variance(other)) / len(one))


def _ratio(one: list[float], other: list[float]) -> float:
    smaller, larger = sorted((statistics.variance(one), statistics.variance(other)))
    return larger / smaller if smaller else (math.inf if larger else 1.0)


@contextlib.contextmanager
def region_draws(program: Program) -> Iterator[list[str]]:
    """Inside, which has to be eager, the paths of the regions that drew in a forward are added to the list."""
    regions = {id(program.module.get_submodule(region.path)): region.path for region in program.regions}
    drawn: list[str] = []
    before: list[tuple[int, tuple[Any, ...]]] = []

    def enters(module: nn.Module, _: Any) -> None:
        if id(module) in regions and not drawn and not before:
            before.append((id(module), random_state()))

    def leaves(module: nn.Module, *_: Any) -> None:
        if before and before[0][0] == id(module) and drew_random_numbers(before.pop()[1]):
            drawn.append(regions[id(module)])

    # Not on the modules: what is compiled from them is guarded against hooks that come and go.
    handles = [
        nn.modules.module.register_module_forward_pre_hook(enters),
        nn.modules.module.register_module_forward_hook(leaves),
    ]
    try:
        yield drawn
    finally:
        for handle in handles:
            handle.remove()


def draws_as_eager(program: Program) -> bool:
    """Whether compiled code that leaves the generators where eager does has drawn eager's numbers.

    A dropout that is taken apart draws others, in double precision as many of them. Torch's own backends, all but
    two, may take operations apart.
    """
    return not any(
        strategy.needs_inductor or _takes_apart(getattr(strategy, "backend", "eager"))
        for strategy in program.strategies
    )


def _takes_apart(backend: str) -> bool:
    if backend in ("eager", "aot_eager"):
        return False
    try:
        return file_of_backend(backend) is None
    except ValueError:  # nobody knows whose it is
        return True
