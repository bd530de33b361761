"""The parity gate: steps of eager and of the compiled program on one batch, from one state, before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from strategies import Program
from trainer.eager import eager
from trainer.parity.comparison import Comparison, Differences, Judge, ParityError, perturb, rounding_unit
from trainer.parity.draws import may_draw_in_step, region_draws
from trainer.parity.sight import Displaced, Sight, around_steps
from trainer.passes import Passes
from trainer.snapshot import Snapshot, drew_random_numbers, random_state

MORE_SAMPLES = 4
"""Steps by which the calibration is widened before a difference counts: one sample may be small by chance."""
SEED = 2**31 - 1
"""Seeds of the calibration count from here, far from the seeds that people choose."""


class ParityGate:
    """Compares one compiled step with eager's.

    Args:
        mode: ``on`` or ``strict``.
        snapshot: State that every step begins from.
    """

    def __init__(self, mode: str, trainer: L.Trainer, program: Program, passes: Passes, snapshot: Snapshot) -> None:
        self._trainer, self._program, self._passes, self._snapshot = trainer, program, passes, snapshot
        assert program.device is not None
        self._judge = Judge(mode, rounding_unit(program.precision, program.device))
        self._comparison = Comparison(trainer.lightning_module, snapshot.of)
        self._random = False

    def run(self, batch: Any) -> dict[str, Any]:
        """Compare on ``batch``; returns the facts for the record. The state afterwards is any.

        Raises ParityError, the same on all processes, with the facts as its second argument.
        """
        began = time.perf_counter()
        comparison, judge = self._comparison, self._judge
        self._snapshot.restore()
        before = random_state()
        with eager(self._program), region_draws(self._program) as drawn:
            self._look(batch, comparison.see_reference)
        comparison.end_reference()
        drew = drew_random_numbers(before)
        self._random = drew and (bool(drawn) or may_draw_in_step(self._program))
        self._snapshot.restore()
        self._look(batch, comparison.see)
        seen = comparison.end()
        judge.noise.append(self._eager_again(batch, SEED, reseed=False))
        complaints, figures = judge.verdict(seen, comparison)
        for sample in range(MORE_SAMPLES):
            if not self._anywhere(bool(complaints)):
                break
            # Inductor draws other random numbers than eager: then the spread between seeds is what tells.
            judge.noise.append(self._eager_again(batch, SEED + 1 + sample, reseed=self._random))
            if sample == MORE_SAMPLES - 1 or not self._random:
                complaints, figures = judge.verdict(seen, comparison)
        failed = self._anywhere(bool(complaints))
        facts = {
            "mode": judge.mode,
            "verdict": "failed" if failed else "passed",
            **figures,
            "multiple": judge.multiple,
            "rounding_unit": judge.unit,
            "calibration_steps": len(judge.noise),
            "draws_random_numbers": drew,
            "across_seeds": self._random and len(judge.noise) > 1,
            "seconds": round(time.perf_counter() - began, 3),
        }
        if failed:
            reason = "; ".join(complaints) or "another process found it so"
            raise ParityError(
                f"parity={judge.mode}: the compiled step is not eager's: {reason}. Nothing was trained. Leave out "
                "strategies to find the one at fault; parity=off goes on in spite of it",
                facts,
            )
        return facts

    def _look(self, batch: Any, see: Callable[..., None], displaced: Displaced | None = None) -> None:
        """A step of which loss and gradients are shown to ``see``; ``displaced`` is for a step by hand."""
        if not self._passes.by_hand:
            self._passes.step(batch, see)
            return
        sight = Sight(self._comparison.parameters)
        before, after = [], [sight.see_step]
        if displaced is not None:
            before.append(displaced.before)
            after.append(displaced.after)
        with around_steps(self._trainer.optimizers, before=before, after=after):
            returned = self._passes.step(batch, sight.see_loss)
        see(sight.losses(returned), sight.gradients())

    def _eager_again(self, batch: Any, seed: int, *, reseed: bool) -> Differences:
        """A step of eager, every weight one rounding off in forward and backward, under another seed if asked."""
        comparison = self._comparison
        self._snapshot.restore()
        if reseed:
            torch.manual_seed(seed)
        if self._passes.by_hand:
            displaced = Displaced(comparison.parameters, self._judge.unit, seed)
            with eager(self._program), displaced:
                self._look(batch, comparison.see, displaced)
            return comparison.end()
        perturb(comparison.parameters, self._judge.unit, seed)

        def see(loss: torch.Tensor) -> None:
            comparison.see(loss)
            with torch.no_grad():  # the optimizer steps from where the others did
                for parameter in comparison.parameters:
                    parameter.copy_(self._snapshot.of(parameter))

        with eager(self._program):
            self._passes.step(batch, see)
        return comparison.end()

    def _anywhere(self, found: bool) -> bool:
        return self._trainer.strategy.reduce_boolean_decision(found, all=False)
