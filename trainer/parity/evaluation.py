"""Evaluation: is the compiled model eager's in eval mode, where no dropout hides a wrong forward?

Losses are compared: those that ``validation_step`` logs or returns where the run validates, or that of
``training_step``'s forward. Other metrics may count (an accuracy), and jump where a loss moves by a rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from strategies import Program
from trainer.eager import eager
from trainer.parity.comparison import LOSS_FLOOR, Judge
from trainer.parity.draws import region_draws
from trainer.parity.sight import Displaced
from trainer.passes import Passes
from trainer.snapshot import Snapshot

SAMPLES = 5
"""Passes of eager that are a rounding off, before a difference counts; the first two are enough for most."""


class Evaluation:
    """Compares passes in eval mode; every pass begins from the snapshot."""

    def __init__(
        self, trainer: L.Trainer, program: Program, passes: Passes, snapshot: Snapshot, judge: Judge, seed: int
    ) -> None:
        self._trainer, self._program, self._passes, self._snapshot = trainer, program, passes, snapshot
        self._judge, self._seed = judge, seed
        self._module = trainer.lightning_module
        self.validates = bool(trainer.enable_validation) and is_overridden("validation_step", self._module)
        """Whether the run does."""

    def run(self, batch: Any, says_nothing: float) -> tuple[list[str], dict[str, Any]]:
        """Complaints and facts; ``reason`` among these says why nothing was compared."""
        reasons = []
        for step in self._steps():
            with eager(self._program), region_draws(self._program) as drawn:
                reference, why = self._losses(batch, step)
            why = why or ("it draws random numbers in eval mode too" if drawn else "")
            if self._anywhere(bool(why)):
                reasons.append(f"{step}: {why or 'not possible in another process'}")
                continue
            seen, why = self._losses(batch, step)
            if self._anywhere(bool(why)):
                reasons.append(f"{step}, compiled: {why or 'not possible in another process'}")
                continue
            return self._judged(batch, step, reference, seen, says_nothing)
        return [], {"reason": "; ".join(reasons) or "the module optimizes by hand and has no validation"}

    def _steps(self) -> Iterator[str]:
        if self.validates:
            yield "validation_step"
        if self._module.automatic_optimization:
            yield "training_step"

    def _judged(
        self, batch: Any, step: str, reference: dict[str, float], seen: dict[str, float], says_nothing: float
    ) -> tuple[list[str], dict[str, Any]]:
        noise, worst, apart, tolerance = 0.0, "", 0.0, 0.0
        for sample in range(SAMPLES):
            parameters = [one for one in self._module.parameters() if one.is_floating_point()]
            with eager(self._program):
                again, _ = self._losses(batch, step, Displaced(parameters, self._judge.unit, self._seed + sample))
            noise = max([noise, *(_relative(again.get(name), value) for name, value in reference.items())])
            tolerance = max(LOSS_FLOOR, self._judge.unit, self._judge.multiple * noise)
            distances = {name: _relative(seen.get(name), value) for name, value in reference.items()}
            worst = max(distances, key=distances.__getitem__)
            apart = distances[worst]
            if sample and not self._anywhere(apart > tolerance):
                break
        facts: dict[str, Any] = {
            "step": step,
            "loss": {"name": worst, "eager": reference[worst], "difference": apart, "tolerance": tolerance},
        }
        if self._anywhere(tolerance > says_nothing):
            return [], {"reason": f"{step} differs by {noise:.0%} from itself in eager", **facts}
        if apart > tolerance:
            return [
                f"in eval mode, {worst} of {step} is {apart:.2e} of eager's {reference[worst]:.6g} away from it, "
                f"tolerance {tolerance:.2e}"
            ], facts
        return [], facts

    def _losses(self, batch: Any, step: str, displaced: Displaced | None = None) -> tuple[dict[str, float], str]:
        """Losses by name, or why there are none: a user's step may not take this batch, or not at this moment."""
        self._snapshot.restore()
        found: dict[str, float] = {}
        try:
            with self._logged(found), displaced or contextlib.nullcontext():
                returned = self._passes.evaluate(batch, step)
        except Exception as error:
            self._snapshot.restore()
            return {}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        _add(found, "the returned loss", loss)
        return found, "" if found else "it shows no loss"

    @contextlib.contextmanager
    def _logged(self, found: dict[str, float]) -> Iterator[None]:
        """Inside, losses that the module logs are kept."""
        before = {name: vars(self._module).get(name) for name in ("log", "log_dict")}

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            if "loss" in name.lower():
                _add(found, name, value)

        def log_dict(values: Any, *_: Any, **__: Any) -> None:
            for name, value in values.items():
                log(name, value)

        vars(self._module).update(log=log, log_dict=log_dict)
        try:
            yield
        finally:
            for name, value in before.items():
                vars(self._module).pop(name, None)
                if value is not None:
                    vars(self._module)[name] = value

    def _anywhere(self, found: bool) -> bool:
        return self._trainer.strategy.reduce_boolean_decision(found, all=False)


def _add(found: dict[str, float], name: str, value: Any) -> None:
    if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1):
        found[name] = float(value)


def _relative(value: float | None, reference: float) -> float:
    if value is None or math.isfinite(value) != math.isfinite(reference):
        return math.inf
    apart = abs(value - reference) if math.isfinite(reference) else 0.0
    return apart / abs(reference) if apart and reference else (math.inf if apart else 0.0)
