"""The parity gate: steps of eager and of the compiled program on one batch, from one state, before the first step.

Three steps in a row, each arm with the optimizer state that it made itself. Before the second and the third one all
weights are moved by a quarter of themselves, and the learning rate is raised for the last update: what was frozen at
the first call shows, and what is too small to show while the learning rate has hardly begun.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strategies import Program
from strategies.compose import eager
from strategies.loop import Loop
from trainer.guards.compare import (
    Comparison,
    Differences,
    Displaced,
    Judge,
    ParityError,
    StepRecorder,
    around_steps,
    gradient_of,
    no_noise,
    parameters_of,
    perturb,
    rounding_unit,
)
from trainer.guards.draws import CERTAIN, FEW, MANY, SUSPECT, Draws, region_draws
from trainer.guards.forward import Evaluation
from trainer.guards.snapshot import Snapshot, drew_random_numbers, random_state, set_random_state
from trainer.guards.state import StateComparison
from trainer.telemetry import hardware

STEPS = 3
SHAKE = 0.25
"""By how much weights are moved before the second and the third step, relative."""
MIN_RATE, RATE_FACTOR = 0.01, 10
"""The learning rate of the last update: weight decay is then beyond the rounding of single-precision weights."""
LATER_SLACK = 16.0
"""Times the first step's least tolerances that those of later steps are. Eager rounds each operation and fused kernels
do not, by which gradients of a 277 M parameter captioner under bf16 came out 0.8% apart."""
MORE_SAMPLES = 4
"""Runs by which the calibration is widened before a difference counts: one sample may be small by chance."""
SAYS_NOTHING = 0.05
"""Tolerance, relative, beyond which a comparison of losses is none."""
ROUGH_UNIT = 2.0**-9
"""Rounding of gradients, relative, by which optimizers are calibrated that may work in bfloat16, as Muon does."""
SEED = 2**31 - 1
"""Seeds of the calibration count from here, far from the seeds that people choose."""

REPLAY_SAMPLES = 3
"""Further runs by which the tolerance is calibrated once a replay is not equal at first recorder."""


class ParityGate:
    """Compares compiled steps with eager's.

    Args:
        mode: ``on`` or ``strict``.
        snapshot: State that every arm begins from.
    """

    def __init__(self, mode: str, loop: Loop, program: Program, snapshot: Snapshot) -> None:
        self._loop, self._program, self._snapshot = loop, program, snapshot
        unit = rounding_unit(program.precision, loop.device)
        # After the first step the weights are far from any that training has; what does not follow them shows still.
        self._judges = [Judge(mode, unit, slack=LATER_SLACK if number else 1.0) for number in range(STEPS)]
        self._judge = self._judges[0]
        self._comparisons = [Comparison(loop.module, snapshot.of, unit=unit) for _ in range(STEPS)]
        self._parameters = self._comparisons[0].parameters
        self._state = StateComparison(loop.module, loop.optimizers, program, snapshot.copy, unit, STEPS)
        self._random_states: list[Any] = []

    def run(self, batch: Any) -> dict[str, Any]:
        """Compare on ``batch``; returns the facts for the record, ``verdict`` among them. The state afterwards is any.

        Raises ParityError, the same on all processes, with the facts as its second argument.
        """
        began = time.perf_counter()
        self._snapshot.restore()
        before = random_state()
        with eager(self._program), region_draws(self._program) as drawn:
            self._reference(batch)
        drew = drew_random_numbers(before)
        may_draw = bool(drawn) or not all(strategy.is_exact(self._program) for strategy in self._program.strategies)
        draws = self._loop.anywhere(drew and may_draw)
        seen, left = self._arm(batch)
        self._calibrate(batch, 0)
        complaints, figures = self._verdict(seen, left)
        across = False
        if draws and self._loop.anywhere(bool(complaints)):
            # Inductor draws other random numbers than eager: then the spread between seeds is what tells.
            across = True
            complaints, facts = self._state.verdict(left, self._judge.multiple, ("weights", "optimizer_state"))
            different, spread = self._across_seeds(batch)
            complaints += different
            figures.update(facts, draws=spread)
        for sample in range(MORE_SAMPLES):
            if across or not self._loop.anywhere(bool(complaints)):
                break
            self._calibrate(batch, 1 + sample)
            complaints, figures = self._verdict(seen, left)
        vague = self._loop.anywhere(self._vague(figures, across))
        if not self._loop.anywhere(bool(complaints)) and (vague or self._loop.validates):
            evaluation = Evaluation(self._loop, self._program, self._snapshot, self._judge, SEED)
            complaints, figures["evaluation"] = evaluation.run(batch, SAYS_NOTHING)
            vague &= "reason" in figures["evaluation"]
        failed = self._loop.anywhere(bool(complaints))
        facts = {
            "mode": self._judge.mode,
            "verdict": "failed" if failed else "not compared" if vague else "passed",
            **figures,
            "steps": STEPS,
            "updated_tensors": self._state.updated,
            "multiple": self._judge.multiple,
            "rounding_unit": self._judge.unit,
            "calibration_steps": len(self._judge.noise),
            "draws_random_numbers": drew,
            "across_seeds": across,
            "seconds": round(time.perf_counter() - began, 3),
        }
        if failed:
            reason = facts["reason"] = "; ".join(complaints) or "another process found it so"
            raise ParityError(
                f"parity={self._judge.mode}: the compiled step is not eager's: {reason}. Nothing was trained. Leave "
                "out strategies to find the one at fault; parity=off continues in spite of it",
                facts,
            )
        if vague:
            why = "under other random numbers" if across else "when it is repeated a rounding off"
            facts["reason"] = f"a step of eager differs so much from itself {why} that errors would not show"
        return facts

    # ---- the arms --------------------------------------------------------------------------------------------------

    def _reference(self, batch: Any) -> None:
        state = self._state

        def see(number: int, loss: Tensor, gradients: list[Tensor]) -> None:
            self._comparisons[number].see_reference(loss, gradients)

        for number in range(STEPS):
            self._unsettle(number)
            self._random_states.append(random_state())
            with around_steps(self._loop.optimizers, before=[state.before], after=[state.after]):
                self._step(batch, number, see, take=True)
        state.end_reference()

    def _arm(self, batch: Any, noise: int | None = None) -> tuple[list[Differences], dict[str, Tensor]]:
        """The same steps as the program is; with ``noise``, weights are a rounding off in forward and backward."""
        self._snapshot.restore()
        self._state.begin()
        found: list[Differences] = []

        def see(number: int, loss: Tensor, gradients: list[Tensor]) -> None:
            found.append(self._comparisons[number].see(loss, gradients))

        for number in range(STEPS):
            self._unsettle(number)
            set_random_state(self._random_states[number])
            self._step(batch, number, see, noise=noise)
        return found, self._state.end()

    def _calibrate(self, batch: Any, sample: int) -> None:
        with eager(self._program):
            found, left = self._arm(batch, sample)
        for judge, one in zip(self._judges, found, strict=True):
            judge.noise.append(one)
        self._state.noise.append(left)

    def _step(
        self,
        batch: Any,
        number: int,
        see: Callable[[int, Tensor, list[Tensor]], None],
        *,
        take: bool = False,
        noise: int | None = None,
    ) -> None:
        """A whole step, whose optimizers take the reference's gradients once ``see`` has been shown the step's own."""
        state, parameters = self._state, self._parameters
        seed = SEED + (noise or 0) * STEPS + number
        displaced = None if noise is None else Displaced(parameters, self._judge.unit, seed)
        blurred = None
        if noise is not None and state.rough:
            blurred = lambda gradients: perturb(gradients, ROUGH_UNIT, seed)  # noqa: E731

        def exchange(of: list[Tensor]) -> dict[Tensor, Tensor]:
            return state.take(of) if take else state.give(blurred)

        if self._loop.manual:
            recorder = StepRecorder(parameters)
            before: list[Any] = [recorder.see_step, lambda optimizer: exchange(parameters_of(optimizer))]
            after: list[Any] = []
            if displaced is not None:
                before.insert(0, displaced.before)
                after.append(displaced.after)
            with around_steps(self._loop.optimizers, before=before, after=after), displaced or contextlib.nullcontext():
                returned = self._loop.step(batch, recorder.see_loss)
            see(number, recorder.losses(returned), recorder.gradients())
            return
        calls = 0

        def inspect(loss: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls == 1 and not take:
                see(number, loss, [gradient_of(one) for one in parameters])
            if calls == 1 and displaced is not None:
                displaced.__exit__()
            taken = exchange(parameters)
            if calls == 1 and take:
                own = [taken[one] if one in taken else self._snapshot.copy(torch.zeros_like(one)) for one in parameters]
                see(number, loss, own)

        if displaced is not None:
            displaced.__enter__()
        self._loop.step(batch, inspect)

    def _unsettle(self, number: int) -> None:
        """Move the weights before each step but the first one, and raise the learning rate of the last."""
        if number == 0:
            return
        perturb([one for one in self._parameters if one.is_floating_point()], SHAKE, SEED - number)
        if number < STEPS - 1:
            return
        for group in [group for optimizer in self._loop.optimizers for group in optimizer.param_groups]:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                rate.fill_(max(MIN_RATE, RATE_FACTOR * float(rate)))
            elif isinstance(rate, float | int):
                group["lr"] = max(MIN_RATE, RATE_FACTOR * float(rate))

    # ---- the verdict -----------------------------------------------------------------------------------------------

    def _verdict(self, seen: list[Differences], left: dict[str, Tensor]) -> tuple[list[str], dict[str, Any]]:
        """Complaints of the first step that has some, and its figures; else those of the first one."""
        found = [
            judge.verdict(one, comparison)
            for judge, one, comparison in zip(self._judges, seen, self._comparisons, strict=True)
        ]
        multiple = self._judge.multiple
        misstepped, facts = self._state.verdict(left, multiple, ("weights", "optimizer_state"))
        more, buffers = self._state.verdict(left, multiple, ("buffers",))
        # After a wrong optimizer step, later ones differ in everything.
        wrong = next((number for number, (complaints, _) in enumerate(found) if complaints and not misstepped), 0)
        complaints, figures = found[wrong]
        if wrong:
            complaints = [f"in step {wrong + 1} of {STEPS}, {complaints[0]}", *complaints[1:]]
        return [*complaints, *misstepped, *more], {**figures, **facts, **buffers, "compared_step": wrong + 1}

    def _across_seeds(self, batch: Any) -> tuple[list[str], dict[str, Any]]:
        buffers = dict(self._loop.module.named_buffers())
        moving = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        draws = Draws([*self._comparisons[0].names, *moving], self._judge.unit)
        with eager(self._program):
            self._draw(batch, draws, "eager", moving, 0)
        number = 1
        complaints: list[str] = []
        figures: dict[str, Any] = {}
        for many, limit in ((FEW, SUSPECT), (MANY, CERTAIN)):
            while number <= many:
                with eager(self._program):
                    self._draw(batch, draws, "eager", moving, number)
                self._draw(batch, draws, "compiled", moving, MANY + number)
                number += 1
            losses = [judge.loss_tolerance() for judge in self._judges]
            tensors_T = [judge.tensor_tolerances(lambda one: one.gradients) for judge in self._judges]
            complaints, figures = draws.complaints(limit, max(losses), torch.stack(tensors_T).amax(0))
            if many == MANY or not self._loop.anywhere(bool(complaints)):
                break
            for sample in range(MORE_SAMPLES):
                self._calibrate(batch, 1 + sample)
        return complaints, figures

    def _draw(self, batch: Any, draws: Draws, arm: str, moving: dict[str, Tensor], seed: int) -> None:
        self._snapshot.restore()
        self._unsettle(1)
        torch.manual_seed(SEED + seed)
        seen: list[tuple[Tensor, list[Tensor]]] = []
        if self._loop.manual:
            recorder = StepRecorder(self._parameters)
            with around_steps(self._loop.optimizers, before=[recorder.see_step], after=[]):
                returned = self._loop.step(batch, recorder.see_loss)
            seen.append((recorder.losses(returned), recorder.gradients()))
        else:
            self._loop.train(batch, lambda loss: seen.append((loss, [gradient_of(one) for one in self._parameters])))
        loss, gradients = seen[0]
        moved = [buffer - self._snapshot.of(buffer) for buffer in moving.values()]
        losses = loss.detach().flatten().tolist()
        draws.add(arm, math.fsum(losses) if losses else 0.0, [*gradients, *moved])

    def _vague(self, figures: dict[str, Any], across: bool) -> bool:
        """Whether neither loss nor gradients can say much."""
        if across:
            return figures["draws"].get("loss", {"tolerance": math.inf})["tolerance"] > SAYS_NOTHING
        shown = [self._judge.norm_tolerance(), *([self._judge.loss_tolerance()] if "loss" in figures else [])]
        return min(shown) > SAYS_NOTHING


class ReplayParity:
    """Compares the first replay of the first graph (``mode`` ``on``) or of every graph (``strict``) with its step.

    Before a step is captured it runs once without a graph, and everything is put back; its first replay then has to
    leave the same loss, gradients, weights and buffers. Both run the same kernels, so that they are equal to the last
    bit where no kernel adds up in an order of its own; where they are not, further runs show how far such a step is
    from itself.
    """

    def __init__(self, mode: str, loop: Loop, program: Program) -> None:
        self._mode, self._loop, self._program = mode, loop, program
        self._unit = rounding_unit(program.precision, loop.device)
        self.facts: dict[str, Any] = {"mode": mode, "verdict": "none compared", "compared": []}
        self._name = ""
        self._peak = 0
        self._reference: tuple[Snapshot, Comparison, Callable[[], Any], Any] | None = None

    def wants(self, name: str) -> bool:
        """Whether the graph ``name`` is to be compared."""
        self._name = name
        return self._mode == "strict" or not self.facts["compared"]

    def reference(self, run: Callable[[], Any], batch: Any) -> None:
        """Run the step as it is and take everything back; a step without a loss has nothing to compare."""
        self._peak = hardware.peak_bytes(self._loop.device)
        snapshot = Snapshot(self._loop, batch, self._program)
        try:
            comparison = Comparison(self._loop.module, snapshot.of, buffers=True)
            loss = _loss(run())
            if loss is not None:
                comparison.see_reference(loss)
                comparison.end_reference()
                self._reference = snapshot, comparison, run, batch
        except torch.OutOfMemoryError:
            self.facts["verdict"] = "skipped, there is no memory for a second copy of the state"
        finally:
            snapshot.restore()
        if not self._loop.everywhere(self._reference is not None):  # the processes judge together
            self._reference = None

    def compare(self, results: Any) -> None:
        """Compare what the replay left. Raises ParityError."""
        if self._reference is None:
            return
        (snapshot, comparison, run, batch), self._reference = self._reference, None
        loss = _loss(results)
        assert loss is not None
        seen = comparison.end(comparison.see(loss))
        judge = Judge(self._mode, self._unit, [no_noise(seen)])
        complaints, figures = judge.verdict(seen, comparison)
        if self._loop.anywhere(bool(complaints)):
            replayed = Snapshot(self._loop, batch, self._program)
            for _ in range(REPLAY_SAMPLES):
                snapshot.restore()
                again = _loss(run())
                judge.noise.append(comparison.end(comparison.see(loss if again is None else again)))
            replayed.restore()
            complaints, figures = judge.verdict(seen, comparison)
        del snapshot, comparison
        hardware.resume(self._loop.device, self._peak)
        self.facts["compared"].append(self._name)
        self.facts.update(
            verdict="failed" if complaints else "passed", calibration_steps=len(judge.noise) - 1, **figures
        )
        if self._loop.anywhere(bool(complaints)):
            complaints = complaints or ["another process found a difference"]
            raise ParityError(
                f"parity={self._mode}: the replay of {self._name} is not the step it was captured from: "
                f"{'; '.join(complaints)}. Leave cuda_graph out; parity=off continues in spite of it",
                self.facts,
            )


def _loss(results: Any) -> Tensor | None:
    """The loss in what a captured step returns: its outputs and what it logged."""
    outputs, *_ = results
    loss = outputs.get("loss")
    return loss.detach() if isinstance(loss, Tensor) else None
