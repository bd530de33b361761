"""The parity gate: steps of eager and of the compiled program on one batch, from one state, before the first step.

Three steps in a row, each arm with the optimizer state that it made itself. Before the second and the third one all
weights are moved by a quarter of themselves, and the learning rate is raised for the last update: what was frozen at
the first call shows, and what is too small to show while the learning rate has hardly begun.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies import Program
from strategies.base import eager
from strategies.loop import Loop
from strategies.regions import leave_undefined
from trainer.guards.compare import (
    MULTIPLES,
    TENSOR_FLOOR,
    Comparison,
    Distances,
    ParityError,
    Tensors,
    around_steps,
    displaced,
    doubled,
    gradient_of,
    moved_since,
    parameters_of,
    perturb,
    rounding_unit,
    without_autocast,
)
from trainer.guards.eager import LIMITS, SAYS_NOTHING, SEED, Draws, compare_evaluation, floating_buffers, region_draws
from trainer.guards.snapshot import Snapshot, drew_random_numbers, random_state, set_random_state

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
ROUGH_UNIT = 2.0**-9
"""Rounding of gradients, relative, by which optimizers are calibrated that may work in bfloat16, as Muon does."""
EXACT, ROUGH = 5e-5, TENSOR_FLOOR
"""Relative tolerance of an update in single precision: by torch's formulas, or by unknown ones, which may work in a
lower precision inside. Where a beta of 0.999 is a tensor in single precision, 1 - beta alone is 1.3e-5 off."""
See = Callable[[int, Tensor, list[Tensor]], None]
"""Is shown the number of a step, its losses and gradients."""


class ParityGate:
    """Compares compiled steps with eager's.

    Every arm's optimizers are given the gradients that the reference's took. Forward and backward round in the
    precision of autocast; the update does in that of the weights, so that errors show there that would drown in the
    noise of gradients. Every arm begins from ``snapshot``.
    """

    def __init__(self, mode: str, loop: Loop, program: Program, snapshot: Snapshot) -> None:
        self._mode, self._loop, self._program, self._snapshot = mode, loop, program, snapshot
        self._unit, self._multiple = rounding_unit(program.precision, loop.device, loop.module), MULTIPLES[mode]
        self._steps = [Comparison(self._multiple) for _ in range(STEPS)]
        """Loss and gradients of each step."""
        self._left = Comparison(self._multiple)
        """Weights, optimizer state and buffers after the last one."""
        self._named: dict[str, Tensor] = {
            name: one for name, one in loop.module.named_parameters() if one.requires_grad
        }
        self._parameters = list(self._named.values())
        self._giving: Iterator[dict[Tensor, Tensor]]
        self._taken: list[dict[Tensor, Tensor]] = []
        """Gradients that the reference's optimizers took."""
        exact = all(strategy.is_exact(program) for strategy in program.strategies)
        self._rough = not exact or any(map(_rough, loop.optimizers))
        """Whether an optimizer may work in a lower precision than that of the weights."""
        self._random_states: list[Any] = []
        self._zeros: dict[Tensor, None] = {}
        """Parameters that eager gives no gradient, and the program one of zeros."""
        alone = loop.world_size == 1  # a higher precision may need more memory than one of the processes has
        self._lowered = alone and program.precision.endswith("-mixed")
        """Whether eager without autocast says how much it rounds."""
        self._single = alone and program.precision.endswith("-true") and not loop.manual
        """Whether eager in double precision does."""

    def run(self, batch: Any) -> dict[str, Any]:
        """Compare on ``batch``; returns the facts for the record, ``verdict`` among them. The state afterwards is any.

        Raises ParityError, the same on all processes, with the facts as its second argument.
        """
        self._snapshot.restore()
        before = random_state()
        with eager(self._program), region_draws(self._program) as drawn:
            self._reference(batch)
        drew = drew_random_numbers(before)
        if drew:  # which numbers depends on the precision
            self._lowered = self._single = False
        may_draw = bool(drawn) or not all(strategy.is_exact(self._program) for strategy in self._program.strategies)
        draws = self._loop.anywhere(drew and may_draw)
        seen, left = self._seen(batch)
        if self._loop.anywhere(bool(self._zeros)):
            leave_undefined(self._program, self._zeros)
            self._zeros.clear()
            seen, left = self._seen(batch)
            leave_undefined(self._program, ())
        self._calibrate(batch, 0)
        complaints, figures = self._verdict(seen, left)
        across = draws and self._loop.anywhere(bool(complaints))
        if across:  # Inductor draws other random numbers than eager: then the spread between seeds is what tells
            complaints, facts = self._left.verdict({kind: left[kind] for kind in ("weights", "optimizer_state")})
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
            complaints, figures["evaluation"] = compare_evaluation(
                self._loop, self._program, self._snapshot, batch, self._multiple, self._unit
            )
            vague &= "reason" in figures["evaluation"]
        failed = self._loop.anywhere(bool(complaints))
        zeros: list[str] = []
        if names := [name for name, parameter in self._named.items() if parameter in self._zeros]:
            zeros.append(
                f"eager gives {', '.join(names[:3])}{', ...' * (len(names) > 3)} no gradient, compiled code one of "
                "zeros (the loss uses no output of theirs), by which optimizers keep state and decay weights: freeze "
                "them, requires_grad_(False)"
            )
            self._program.notes += zeros
        facts = {
            "mode": self._mode,
            "verdict": "failed" if failed else "not compared" if vague else "passed",
            **figures,
            "updated_tensors": self._updated,
            "draws_random_numbers": drew,
        }
        if failed:
            reason = facts["reason"] = "; ".join([*complaints, *zeros]) or "another process found it so"
            raise ParityError(
                f"parity={self._mode}: the compiled step is not eager's: {reason}. Nothing was trained. Leave "
                "out strategies to find the one at fault; parity=off continues in spite of it",
                facts,
            )
        if vague:
            why = "under other random numbers" if across else "when it is repeated a rounding off"
            facts["reason"] = f"a step of eager differs so much from itself {why} that errors would not show"
        return facts

    # ---- the arms --------------------------------------------------------------------------------------------------

    def _reference(self, batch: Any) -> None:
        buffers = {name: buffer.clone() for name, buffer in self._loop.module.named_buffers()}
        moved = torch.zeros(len(self._parameters))

        def see(number: int, losses: Tensor, gradients: list[Tensor]) -> None:
            slack = LATER_SLACK if number else 1.0  # the weights are far from any of a training; gross errors show
            self._steps[number].keep_step(losses, dict(zip(self._named, gradients, strict=True)), self._unit, slack)

        for number in range(STEPS):
            self._unsettle(number)
            self._random_states.append(random_state())
            before = [self._snapshot.copy(one) for one in self._parameters]
            self._step(batch, number, see, take=True)
            moved += moved_since(before, self._parameters)
        self._updated = int((moved != 0).sum())
        rate = ROUGH if self._rough else EXACT
        for kind, tensors in self._current().items():
            starts = [buffers.get(name) if kind == "buffers" else None for name in tensors]
            least = max(TENSOR_FLOOR, 16 * self._unit) if kind == "buffers" else rate
            since = moved if kind == "weights" else starts
            self._left.keep_stored(kind, tensors, since, least, STEPS, self._snapshot.copy)

    def _current(self) -> Tensors:
        """By kind and name, what steps leave."""
        names = {parameter: name for name, parameter in self._named.items()}
        return {
            "weights": {name: parameter.detach() for name, parameter in self._named.items()},
            "optimizer_state": {
                f"{key} of {names[parameter]}" + (f" in optimizer {number}" if number else ""): value
                for number, optimizer in enumerate(self._loop.optimizers)
                for parameter, state in optimizer.state.items()
                if parameter in names
                for key, value in state.items()
                if isinstance(value, Tensor) and value.numel()
            },
            "buffers": {name: buffer for name, buffer in self._loop.module.named_buffers() if buffer.numel()},
        }

    def _seen(self, batch: Any, **how: Any) -> tuple[list[Distances], Distances]:
        """How far the same steps as the program is are from the reference's, and what they leave; ``how`` is what
        ``_step`` takes for eager's."""
        found: list[Distances] = []

        def see(number: int, losses: Tensor, gradients: list[Tensor]) -> None:
            found.append(self._steps[number].distances_of_step(losses, dict(zip(self._named, gradients, strict=True))))

        self._snapshot.restore()
        self._giving = iter(self._taken)
        for number in range(STEPS):
            self._unsettle(number)
            set_random_state(self._random_states[number])
            self._step(batch, number, see, **how)
        return found, self._left.distances(self._current())

    def _calibrate(self, batch: Any, sample: int) -> None:
        """Add to the noise how far eager is from itself with weights a rounding off; the first sample under autocast,
        and the second one without, are in a higher precision."""
        noise: Any = None
        with eager(self._program):
            if (self._lowered and sample == 0) or (self._single and sample == 1):
                # There may be less memory than it needs, or a kernel for one precision alone.
                with contextlib.suppress(Exception):
                    noise = self._seen(batch, exact=True)
            found, left = noise or self._seen(batch, noise=sample)
        for comparison, one in zip([*self._steps, self._left], [*found, left], strict=True):
            comparison.noise.append(one)

    @torch.no_grad()
    def _give(self, of: list[Tensor], blurred_by: int | None, *, ours: bool) -> None:
        """Replace the gradients that an optimizer is about to take by those of the reference; ``ours`` are the
        program's."""
        given, taken = [], next(self._giving, None)
        if ours and taken is not None:  # a step under another seed has no reference
            more = [one for one in of if one.grad is not None and one not in taken]
            self._zeros |= dict.fromkeys(one for one in more if not one.grad.any())  # type: ignore[union-attr]
        for parameter, gradient in (taken or {}).items():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad.layout is torch.strided:  # a sparse one is as it is, and its optimizer is not compiled
                parameter.grad.copy_(gradient)
                given.append(parameter.grad)
        if blurred_by is not None:
            perturb(given, ROUGH_UNIT, blurred_by)

    def _step(
        self,
        batch: Any,
        number: int,
        see: See,
        *,
        take: bool = False,
        noise: int | None = None,
        exact: bool = False,
    ) -> None:
        """A whole step, whose optimizers take the reference's gradients once ``see`` has been shown the step's own.
        Forward and backward have weights a rounding off, with ``noise``, and a higher precision where ``exact``."""
        parameters, apart = self._parameters, contextlib.ExitStack()
        seed = SEED + (noise or 0) * STEPS + number
        blurred_by = seed if (exact or noise is not None) and self._rough else None

        def enter() -> None:
            if noise is not None:
                apart.enter_context(displaced(parameters, self._unit, seed))
            if exact:
                apart.enter_context(without_autocast() if self._lowered else doubled(self._loop.module))

        def exchange(of: list[Tensor]) -> None:
            if take:
                self._taken.append({one: self._snapshot.copy(gradient_of(one)) for one in of if one.grad is not None})
            else:
                self._give(of, blurred_by, ours=noise is None and not exact)

        if self._loop.manual:
            losses: list[Tensor] = []
            used: dict[Tensor, Tensor] = {}  # by an optimizer's first step: the noise grows in those that follow it

            def about_to_step(optimizer: torch.optim.Optimizer) -> None:
                of = parameters_of(optimizer)  # clipped and unscaled, if the module does that
                used.update({one: gradient_of(one).clone() for one in of if one not in used})
                exchange(of)

            with around_steps(self._loop.optimizers, about_to_step), apart:
                enter()
                returned = self._loop.step(batch, lambda loss: losses.append(loss.float().sum()))
            gradients = [used[one] if one in used else gradient_of(one).clone() for one in parameters]
            see(number, torch.stack(losses) if losses else returned, gradients)
            return
        calls = 0

        def inspect(loss: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls == 1 and not take:
                see(number, loss, [gradient_of(one) for one in parameters])
            apart.close()
            exchange(parameters)
            if calls == 1 and take:
                taken = self._taken[-1]
                own = [taken[one] if one in taken else self._snapshot.copy(torch.zeros_like(one)) for one in parameters]
                see(number, loss, own)

        if exact and not self._lowered:
            batch = pytree.tree_map_only(Tensor, lambda one: one.double() if one.is_floating_point() else one, batch)
        with apart:
            enter()
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

    def _verdict(self, seen: list[Distances], left: Distances) -> tuple[list[str], dict[str, Any]]:
        """Complaints of the first step that has some, and its figures; else those of the first one."""
        found = [comparison.verdict(one) for comparison, one in zip(self._steps, seen, strict=True)]
        more, facts = self._left.verdict(left)
        # After a wrong optimizer step, later ones differ in everything.
        updated = not self._left.verdict({kind: left[kind] for kind in ("weights", "optimizer_state")})[0]
        wrong = next((number for number, (complaints, _) in enumerate(found) if complaints and updated), 0)
        complaints, figures = found[wrong]
        if wrong:
            complaints = [f"in step {wrong + 1} of {STEPS}, {complaints[0]}", *complaints[1:]]
        return [*complaints, *more], {**figures, **facts, "compared_step": wrong + 1}

    def _across_seeds(self, batch: Any) -> tuple[list[str], dict[str, Any]]:
        moving = floating_buffers(self._loop.module)
        draws = Draws([*self._named, *moving], self._unit)
        with eager(self._program):
            self._draw(batch, draws, "eager", moving, 0)
        number, most = 1, max(LIMITS)
        complaints: list[str] = []
        figures: dict[str, Any] = {}
        for steps, limit in LIMITS.items():
            while number <= steps:
                with eager(self._program):
                    self._draw(batch, draws, "eager", moving, number)
                self._draw(batch, draws, "compiled", moving, most + number)
                number += 1
            loss = max(one.tolerance("loss") for one in self._steps)
            gradients = torch.stack([one.tolerances("gradients") for one in self._steps]).amax(0)
            complaints, figures = draws.complaints(limit, loss, gradients)
            if steps == most or not self._loop.anywhere(bool(complaints)):
                break
            for sample in range(MORE_SAMPLES):
                self._calibrate(batch, 1 + sample)
        return complaints, figures

    def _draw(self, batch: Any, draws: Draws, arm: str, moving: dict[str, Tensor], seed: int) -> None:
        def see(_: int, losses: Tensor, gradients: list[Tensor]) -> None:
            moved = [buffer - self._snapshot.of(buffer) for buffer in moving.values()]
            draws.add(arm, math.fsum(losses.detach().flatten().tolist()), [*gradients, *moved])

        self._snapshot.restore()
        self._unsettle(1)
        torch.manual_seed(SEED + seed)
        self._giving = iter(())
        self._step(batch, 1, see)

    def _vague(self, figures: dict[str, Any], across: bool) -> bool:
        """Whether neither loss nor gradients can say much."""
        if across:
            return figures["draws"].get("loss", {"tolerance": math.inf})["tolerance"] > SAYS_NOTHING
        return min(figures[kind]["tolerance"] for kind in ("gradient_norm", "loss") if kind in figures) > SAYS_NOTHING


def _rough(optimizer: torch.optim.Optimizer) -> bool:
    on_device = any(group.get("capturable") for group in optimizer.param_groups)  # its bias corrections are single
    # unwrap: each class's step is decorated anew, the function inside tells whose mathematics it is.
    step = inspect.unwrap(type(optimizer).step)
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return on_device or step not in [inspect.unwrap(kind.step) for kind in known]
