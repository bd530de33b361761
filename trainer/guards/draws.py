"""Draws: whether what is compiled draws random numbers, and whether it draws them as eager does; and forwards in eval
mode, where no dropout hides a wrong one.

What the training step draws outside of it (the noise that a generator begins with, the time steps of a diffusion) is
the same in eager and compiled: both begin from the same state of the generators. So it makes no comparison less sharp.
Where regions draw, a compiler may draw other numbers: steps of both arms under several seeds are then compared as
samples. Their means may differ by what the spread between seeds explains; the spreads are alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strategies import Program
from strategies.compose import eager
from strategies.loop import Loop
from trainer.guards.compare import Comparison, displaced, loss_sizes, norms, on_host
from trainer.guards.forward import region_draws
from trainer.guards.snapshot import Snapshot, drew_random_numbers, random_state

FEW, MANY = 4, 16
"""Steps of each arm that are looked at first, and before a difference counts."""
SUSPECT, CERTAIN = 6.0, 7.0
"""Standard errors that two means may be apart, of few and of many steps: with 30 degrees of freedom, a difference of 7
comes by chance once in ten million."""
SAMPLES = 5
"""Passes of eager in eval mode, a rounding off, before a difference counts; the first two are enough for most."""


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
        along = on_host([(one * first).sum() for one, first in pairs])
        lengths = along / torch.where(self._sizes > 0, self._sizes, torch.ones_like(self._sizes))
        found = torch.stack([norms(now), lengths, norms([one - first for one, first in pairs])], dim=1)
        self.losses[arm].append(loss)
        self.figures[arm].append(found.double().reshape(-1, 3))

    def complaints(self, limit: float, loss: float, gradients: Tensor) -> tuple[list[str], dict[str, Any]]:
        """What cannot be chance (beyond ``limit`` standard errors), in words, and figures for the record.

        ``loss`` and ``gradients``, ``(parameters,)``, are the relative differences that rounding alone explains, which
        more seeds do not average out; buffers are allowed the median.
        """
        eager, compiled = self.losses["eager"], self.losses["compiled"]
        found: list[str] = []
        figures: dict[str, Any] = {"steps": len(eager)}
        if all(map(math.isfinite, [*eager, *compiled])):
            spread = math.sqrt((statistics.variance(eager) + statistics.variance(compiled)) / len(eager))
            mean, other = statistics.fmean(eager), statistics.fmean(compiled)
            allowed = limit * spread + max(16 * self.unit, loss) * abs(mean)
            figures["loss"] = {"eager": mean, "compiled": other, "tolerance": allowed / (abs(mean) or 1.0)}
            if abs(mean - other) > allowed:
                found.append(f"mean loss {other:.6g} under {len(eager)} seeds, eager's is {mean:.6g} +- {spread:.2g}")
            if len(set(compiled)) == 1 < len(set(eager)):
                found.append("its loss does not depend on the random numbers, eager's does")
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


# ---- forwards in eval mode -------------------------------------------------------------------------------------------


def compare_evaluation(
    loop: Loop,
    program: Program,
    snapshot: Snapshot,
    batch: Any,
    *,
    multiple: float,
    unit: float,
    seed: int,
    says_nothing: float,
) -> tuple[list[str], dict[str, Any]]:
    """Compare forwards in eval mode, each of which begins from ``snapshot``, on all processes alike; returns complaints
    and facts, ``reason`` among these where nothing was compared.

    Losses are compared: those that ``validation_step`` logs or returns where the run validates, or that of
    ``training_step``'s forward. Other metrics may count (an accuracy), and jump where a loss moves by a rounding. A
    loss may differ by ``multiple`` times what eager's moves by where every parameter is moved by ``unit``, relative.
    """
    reasons = []
    for step in [*(["validation_step"] if loop.validates else []), *([] if loop.manual else ["training_step"])]:
        snapshot.restore()
        before = random_state()
        with eager(program), region_draws(program) as drawn:
            reference, why = _losses(loop, batch, step)
        if drawn or (program.step is not None and drew_random_numbers(before)):
            why = why or "the step draws random numbers"
        seen: dict[str, Tensor] = {}
        if not loop.anywhere(bool(why)):
            snapshot.restore()
            seen, why = _losses(loop, batch, step)
        if loop.anywhere(bool(why)):
            reasons.append(f"{step}: {why or 'not possible in another process'}")
            continue
        comparison = Comparison(multiple)
        sizes = [loss_sizes(one.flatten().cpu(), unit) for one in reference.values()]
        least, size = (torch.cat([one[part] for one in sizes]) for part in ("least", "sizes"))
        comparison.keep("loss", reference, least=least, sizes=size)
        apart = comparison.distances({"loss": seen})["loss"]
        snapshot.restore()  # a forward may have left gathered parameters in the place of those that train
        parameters = [one for one in loop.module.parameters() if one.is_floating_point()]
        for sample in range(SAMPLES):
            snapshot.restore()
            with eager(program), displaced(parameters, unit, seed + sample):
                again, _ = _losses(loop, batch, step)
            comparison.noise.append(comparison.distances({"loss": again}))
            if sample and not loop.anywhere(bool((apart > comparison.tolerances("loss")).any())):
                break
        snapshot.restore()
        tolerances = comparison.tolerances("loss")
        worst = int((apart / tolerances).argmax())
        name, difference, tolerance = list(reference)[worst], float(apart[worst]), float(tolerances[worst])
        loss = {"name": name, "eager": float(reference[name]), "difference": difference, "tolerance": tolerance}
        facts = {"step": step, "loss": loss}
        if loop.anywhere(tolerance > says_nothing):
            return [], {"reason": f"{step} differs so much from itself in eager that errors would not show", **facts}
        line = (
            f"in eval mode, {name} of {step} is {difference:.2e} of eager's {loss['eager']:.6g} away from it, "
            f"tolerance {tolerance:.2e}"
        )
        return [line] if difference > tolerance else [], facts
    return [], {"reason": "; ".join(reasons) or "manual optimization without a validation"}


def _losses(loop: Loop, batch: Any, step: str) -> tuple[dict[str, Tensor], str]:
    """Losses that a forward shows, by name, or why it shows none: it may not take this batch, or not at this moment."""
    try:
        with loop.recording_logs() as logged:
            returned = loop.evaluate(batch, step)
    except Exception as error:
        return {}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    shown = {call.name: value for call, value in logged if "loss" in call.name.lower()}
    shown["the returned loss"] = returned.get("loss") if isinstance(returned, dict) else returned
    found = {name: torch.as_tensor(one) for name, one in shown.items() if isinstance(one, float | Tensor)}
    losses = {name: one.detach() for name, one in found.items() if one.is_floating_point() and one.numel() == 1}
    return losses, "" if losses else "it shows no loss"
