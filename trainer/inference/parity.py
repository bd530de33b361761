"""Parity of outputs: is what the compiled forward returns what eager returns, within what eager differs from itself?

Eager's own noise is that of its outputs when every weight changes by one rounding of the run's precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies import Program
from trainer.guards.compare import MULTIPLES, TENSOR_FLOOR, ParityError, perturb, rounding_unit
from trainer.guards.rollback import eager
from trainer.guards.snapshot import drew_random_numbers, random_state, set_random_state

SAMPLES = 5
"""Perturbed passes of eager by which a difference is judged before it counts; the first one is enough for most."""
SEED = 2**31 - 1


def compare_outputs(
    mode: str, trainer: L.Trainer, program: Program, compiled: Callable[[], Any], plain: Callable[[], Any]
) -> dict[str, Any]:
    """Run ``compiled``, and ``plain`` eagerly, on one batch and compare; returns the facts for the record.

    Raises ParityError, the same on all processes, with the facts as its second argument.
    """
    began, before = time.perf_counter(), random_state()
    assert program.device is not None
    with eager(program):
        reference = _outputs(plain())
    if trainer.strategy.reduce_boolean_decision(not reference or drew_random_numbers(before), all=False):
        set_random_state(before)
        reason = "the step draws random numbers" if reference else "the step returns no floating-point tensor"
        return {"mode": mode, "verdict": "skipped", "reason": reason}
    seen = _distance(_outputs(compiled()), reference)
    unit, multiple, noise = rounding_unit(program.precision, program.device), MULTIPLES[mode], 0.0
    for sample in range(SAMPLES):
        with eager(program), _Perturbed(trainer.lightning_module, unit, SEED + sample):
            noise = max(noise, _distance(_outputs(plain()), reference))
        tolerance = max(TENSOR_FLOOR, 4 * unit, multiple * noise)
        if trainer.strategy.reduce_boolean_decision(seen <= tolerance, all=True):
            break
    failed = trainer.strategy.reduce_boolean_decision(not seen <= tolerance, all=False)
    facts = {
        "mode": mode,
        "verdict": "failed" if failed else "passed",
        "outputs": {"difference": seen, "tolerance": tolerance, "noise": noise, "tensors": len(reference)},
        "multiple": multiple,
        "rounding_unit": unit,
        "calibration_passes": sample + 1,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if failed:
        raise ParityError(
            f"parity={mode}: the compiled outputs are not eager's: {seen:.2e} of eager's largest away from them, "
            f"tolerance {tolerance:.2e}. Nothing was timed. Leave out strategies to find the one at fault; parity=off "
            "goes on in spite of it",
            facts,
        )
    return facts


class _Perturbed:
    """Inside, every parameter is one rounding off."""

    def __init__(self, module: torch.nn.Module, unit: float, seed: int) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.is_floating_point()]
        self._unit, self._seed = unit, seed

    @torch.no_grad()
    def __enter__(self) -> None:
        self._kept = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
        perturb(self._parameters, self._unit, self._seed)

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            parameter.copy_(kept)


def _outputs(results: Any) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
    return [leaf.detach() for leaf in leaves if leaf.is_floating_point() and leaf.numel()]


def _distance(outputs: list[Tensor], reference: list[Tensor]) -> float:
    """Largest difference over the largest value of the reference, of the worst tensor."""
    if [one.shape for one in outputs] != [one.shape for one in reference]:
        return float("inf")
    worst = 0.0
    for one, other in zip(outputs, reference, strict=True):
        wrong = (one - other).abs_()
        # What is the same on both sides is no difference, infinities and no numbers included.
        wrong.masked_fill_((one == other) | (one.isnan() & other.isnan()), 0.0)
        size = float(other.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
        difference = float(wrong.max())
        if difference:
            worst = max(worst, difference / size if size and difference == difference else float("inf"))
    return worst
