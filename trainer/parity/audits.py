"""Audits: is the step still eager's? Asked again on real steps, while the training continues.

The gate looks once, at the first batch and at freshly drawn weights. An audit looks at the step under way: its loss and
buffers against an eager forward on its own batch, weights and random state, and the optimizer's update of a few
parameters against torch's own step. A difference counts once it is beyond what eager differs from itself on that batch
and shows again when the step is repeated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from strategies import Program
from strategies.optimizer_step import installed
from trainer.parity import draws, forward
from trainer.parity.audit_schedule import Schedule
from trainer.parity.comparison import Judge, ParityError, perturb, rounding_unit
from trainer.parity.forward import EagerForward, EagerSeen, Seen, copied, distances, floating_buffers, no_noise
from trainer.parity.saved import SavedCheckpoints, replaced
from trainer.parity.update_sample import UpdateSample
from trainer.passes import Passes, why_not
from trainer.reasons import one_line
from trainer.snapshot import Snapshot, drew_random_numbers
from trainer.telemetry import hardware as memory
from trainer.telemetry.record import AuditDifference, AuditFacts
from trainer.telemetry.telemetry import Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages

SAMPLES, REPEATS = 4, 3
"""Eager forwards by which the tolerance is widened before a difference counts; steps in which it has to show again."""
MOST = {"loss": 0.05, "buffers": 0.5}
"""Tolerance, relative, beyond which a comparison says nothing."""
SEED = 2**31 - 1001

Gradients = Callable[[], Sequence[Tensor | None] | None]


@dataclass(slots=True)
class Pair:
    """A step, and what it was compared with."""

    outputs: dict[str, Any]
    eager: EagerSeen | None = None
    step: Seen | None = None
    draws_alike: bool = False
    """Whether the step took its random numbers from where eager took them."""
    update: list[AuditDifference] | None = None


class Audits:
    """Stands around ``run`` of Lightning's automatic optimization until ``release``.

    Args:
        mode: ``on`` or ``strict``.
        captured: Whether steps may be captured, so that hooks within them are not called.
        gradients: Those that the last step gave the optimizer for ``sample``, where a captured step keeps them to
            itself; None where they are the parameters' own.
        differs: Called with what to say once a step is not eager's; returns when the run continues, in eager.
    """

    def __init__(
        self,
        mode: str,
        trainer: L.Trainer,
        program: Program,
        telemetry: Telemetry,
        pages: TensorBoardPages,
        *,
        captured: Callable[[], bool],
        gradients: Gradients,
        differs: Callable[[ParityError], None],
        cuda_graphs: bool,
    ) -> None:
        self._trainer, self._program, self._telemetry, self._pages = trainer, program, telemetry, pages
        self._captured, self._gradients, self._differs = captured, gradients, differs
        assert program.device is not None
        self._device = program.device
        self._judge = Judge(mode, rounding_unit(program.precision, program.device))
        self._module = trainer.lightning_module
        self.facts = AuditFacts(verdict="not audited")
        self.sample: list[torch.nn.Parameter] = []
        """Parameters whose update is compared."""
        self._never: dict[str, str] = {}
        self._shares: list[float] = []
        self._settles: bool | None = None
        self._automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        self._instead = contextlib.ExitStack()
        self.facts.reason = self._why_not()
        if self.facts.reason is not None:
            return
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        self._update = UpdateSample(trainer.optimizers[0], names, multiple=self._judge.multiple)
        self.sample = self._update.parameters
        if self._update.reason is not None:
            self._never["update"] = self._update.reason
        self._passes = Passes(trainer, cuda_graphs=cuda_graphs)
        self._forward = EagerForward(trainer, program, self._passes)
        self._first, self._schedule = trainer.global_step, Schedule(trainer)
        self.facts.reason = "the run ended before its first step"
        self._original = self._instead.enter_context(replaced(self._automatic, "run", self._run))
        self._checkpoints = self._instead.enter_context(SavedCheckpoints(trainer))

    def release(self) -> None:
        """Give Lightning its own methods back."""
        self._instead.close()

    def _why_not(self) -> str | None:
        return why_not(self._trainer) if self._module.automatic_optimization else "the module optimizes by hand"

    def _run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Run one micro-batch; audit the one that ends an optimizer step when one is due."""
        recording = self._telemetry.phase == "profiling" and self._trainer.world_size == 1
        if self._trainer.fit_loop._should_accumulate() or not self._schedule.due(kwargs.get("batch"), later=recording):
            return self._original(optimizer, batch_idx, kwargs)
        reason = self._nothing_to_audit(kwargs)
        if reason is not None:
            self.facts.reason = reason
            self._schedule.stop()
            return self._original(optimizer, batch_idx, kwargs)
        return self._audit(optimizer, batch_idx, kwargs)

    def _nothing_to_audit(self, kwargs: Any) -> str | None:
        if "batch" not in kwargs:
            return "training_step takes an iterator of batches"
        compiled = self._program.regions or self._program.step is not None
        if not compiled and all(installed(each) is None for each in self._program.optimizers):
            return "nothing is compiled or captured"
        return None

    def _audit(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        peak = memory.peak_bytes(self._device)
        self.facts.not_compared, self._shares = dict(self._never), []
        pair = self._pair(optimizer, batch_idx, kwargs, update=True)
        with self._telemetry.auditing():
            complaints = self._judged(pair, optimizer, batch_idx, kwargs)
            update = max(pair.update or (), key=lambda one: one.share, default=None)
            if update is not None:
                complaints += self._note("update", update)
            for kind in ("loss", "buffers"):  # whose forward all processes run, or none
                if self._anywhere(kind in self._never):
                    self._leave_out((kind,), "another process cannot compare it")
            wrong = self._anywhere(bool(complaints))
        memory.resume(self._device, peak)
        self._write_down(complaints, wrong=wrong)
        self._schedule.next(self._telemetry.audit_seconds)
        if wrong:
            self._differs(self._error(complaints))
        return pair.outputs

    def _pair(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any, *, update: bool = False) -> Pair:
        """Run the step, and eager's forward before it: where ``training_step`` is called and Python runs it, else
        before all of it, because of a captured step nothing else is known to Python."""
        pair = Pair({})
        update = update and "update" not in self._never
        if self._captured():
            with self._telemetry.auditing():
                self._look(pair, kwargs)
                if update:
                    self._prepare_captured(pair, batch_idx)
            pair.outputs = self._original(optimizer, batch_idx, kwargs)
            with self._telemetry.auditing():
                self._left(pair, pair.outputs.get("loss"))
                if update:
                    self._compare_update(pair, self._gradients)
            return pair
        automatic, plugin = self._automatic, self._trainer.precision_plugin
        with contextlib.ExitStack() as places:

            def training_step(arguments: Any) -> Any:
                first = pair.eager is None and pair.step is None
                if first:
                    with self._telemetry.auditing():
                        self._look(pair, arguments)
                result = step(arguments)
                if first:  # a closure may be called again, at other weights
                    with self._telemetry.auditing():
                        self._left(pair, result.loss)
                return result

            def after_closure(*given: Any) -> None:
                after(*given)
                with self._telemetry.auditing():
                    self._update.keep()

            def optimizer_step(*given: Any, **named: Any) -> Any:
                scaler: Any = getattr(plugin, "scaler", None)
                scale = None if scaler is None else scaler.get_scale()
                result = stepped(*given, **named)
                with self._telemetry.auditing():
                    if scale is not None and scaler.get_scale() < scale:
                        self.facts.not_compared["update"] = "the gradient scaler left this step out"
                    else:
                        self._compare_update(pair, lambda: None)
                return result

            step = places.enter_context(replaced(automatic, "_training_step", training_step))
            if update:
                after = places.enter_context(replaced(plugin, "_after_closure", after_closure))
                stepped = places.enter_context(replaced(plugin, "optimizer_step", optimizer_step))
            pair.outputs = self._original(optimizer, batch_idx, kwargs)
        return pair

    def _look(self, pair: Pair, arguments: Mapping[str, Any]) -> None:
        if {"loss", "buffers"} <= self._never.keys():
            return
        try:
            pair.eager = self._forward.look(arguments)
        except Exception as error:
            self._leave_out(("loss", "buffers"), f"eager cannot run the step's forward beside it: {one_line(error)}")

    def _left(self, pair: Pair, loss: Any) -> None:
        """See what the step has left."""
        loss = loss.detach() if isinstance(loss, Tensor) else None
        pair.step = Seen(loss=loss, buffers=copied(floating_buffers(self._module)))
        alike = pair.eager is not None and not drew_random_numbers(pair.eager.drawn)
        pair.draws_alike = alike and draws.draws_as_eager(self._program)

    # ---- the update ------------------------------------------------------------------------------------------------

    def _prepare_captured(self, pair: Pair, batch_idx: int) -> None:
        self._update.keep()
        if getattr(self._trainer.precision_plugin, "scaler", None) is not None:
            self._leave_out(("update",), "a gradient scaler decides after a captured step what the optimizer is given")
        if pair.eager is None or pair.eager.wrote:
            self._leave_out(("update",), "training_step itself may change weights, within a captured step")
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            for parameter in self.sample:  # as zero_grad does next; a replay leaves old ones where they are
                parameter.grad = None

    def _compare_update(self, pair: Pair, gradients: Gradients) -> None:
        if "update" in self._never:
            return
        given = gradients()
        given = [parameter.grad for parameter in self.sample] if given is None else given
        if all(gradient is None for gradient in given):
            where = "a captured step keeps its gradients to itself" if self._captured() else "they were cleared"
            self.facts.not_compared["update"] = f"there are no gradients after the step, {where}"
            return
        try:
            pair.update = self._update.compare(given)
        except Exception as error:
            self._leave_out(("update",), f"torch's own step of a sample failed: {one_line(error)}")
            return
        if not pair.update:
            self.facts.not_compared["update"] = "rounding of the weights is larger than their update"

    # ---- the verdict -----------------------------------------------------------------------------------------------

    def _judged(self, pair: Pair, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> list[str]:
        """What of loss and buffers is beyond its tolerance, in words; every process calls this."""
        found = self._differences(pair.step, pair.eager)
        if self._captured() and self._settles is None and pair.eager is not None:
            # What changes buffers after the forward (one that is computed again in the backward) cannot be seen later.
            self._settles = all(one.share <= 1 for kind, one in found.items() if kind == "buffers")
            if not self._settles:
                self._leave_out(("buffers",), "they change after the forward, within a captured step")
                found.pop("buffers")
        if self._anywhere(any(one.share > 1 for one in found.values())):
            try:
                found = self._looked_closer(pair, optimizer, batch_idx, kwargs)
            except Exception as error:
                self._leave_out(("loss", "buffers"), f"a difference could not be looked into: {one_line(error)}")
                found = {}
        return [complaint for kind, one in found.items() for complaint in self._note(kind, one)]

    def _looked_closer(
        self, pair: Pair, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any
    ) -> dict[str, AuditDifference]:
        """The differences within tolerances of this very batch; those that do not show again are left out."""
        unit = self._judge.unit
        weights = [one for one in self._module.parameters() if one.requires_grad and one.is_floating_point()]
        results = self._trainer.fit_loop.epoch_loop._results
        try:
            after: Snapshot | None = Snapshot(self._trainer, kwargs["batch"])
        except torch.OutOfMemoryError:
            after = None
        if self._anywhere(after is None or pair.eager is None) or after is None or pair.eager is None:
            raise RuntimeError("there is no memory for a copy of the state")
        with self._passes.quiet(), replaced(results, "log", lambda *_, **__: None), contextlib.ExitStack() as at_end:
            at_end.callback(after.restore, same_plan=True)
            random = self._anywhere(pair.eager.drew and not pair.draws_alike)
            base = self._again(pair.eager, kwargs)
            for number in range(SAMPLES):
                after.restore(same_plan=True)
                perturb(weights, unit * (1, 4)[number % 2], SEED + number)
                seen = self._again(pair.eager, kwargs, seed=SEED + number if random else None)
                self._judge.noise.append(distances(seen, base))
            found = self._differences(pair.step, pair.eager)
            for _ in range(REPEATS):
                if not self._anywhere(any(one.share > 1 for one in found.values())):
                    break
                number += 1
                after.restore(same_plan=True)
                pair.eager.before.restore()
                perturb(weights, unit, SEED + number)
                again = self._pair(optimizer, batch_idx, kwargs)
                seen_again = self._differences(again.step, again.eager)
                gone = [
                    kind
                    for kind, one in found.items()
                    if one.share > 1 and (kind not in seen_again or seen_again[kind].share <= 1)
                ]
                for kind in gone:
                    del found[kind]
                    self.facts.not_compared[kind] = "a difference was gone when the step was repeated"
                    self.facts.unrepeated_steps.append(self._number)
        return found

    def _again(self, eager: EagerSeen, arguments: Mapping[str, Any], seed: int | None = None) -> EagerSeen:
        eager.before.restore()
        if seed is not None:
            torch.manual_seed(seed)
        return self._forward.look(arguments)

    def _differences(self, step: Seen | None, eager: EagerSeen | None) -> dict[str, AuditDifference]:
        """By kind, the difference that is nearest to its tolerance or beyond it; those that say nothing left out."""
        if step is None or eager is None:
            return {}
        found: dict[str, AuditDifference] = {}
        apart = distances(step, eager)
        names = sorted(step.buffers.keys() & eager.buffers.keys())
        noise = [one for one in self._judge.noise[-SAMPLES:] if len(one.weights) == len(apart.weights)]
        self._judge.noise = noise or [no_noise(apart)]
        if "loss" not in self._never:
            if step.loss is None or eager.loss is None:
                self.facts.not_compared["loss"] = "training_step returned no loss"
            else:
                found["loss"] = AuditDifference(
                    what="loss", difference=apart.loss, tolerance=self._judge.loss_tolerance()
                )
        if "buffers" not in self._never and names:
            tolerances = forward.buffer_tolerances(self._judge, eager, names)
            each = [
                AuditDifference(what=name, difference=float(apart.weights[place]), tolerance=float(tolerances[place]))
                for place, name in enumerate(names)
            ]
            found["buffers"] = max(each, key=lambda one: one.share)
        for kind, most in MOST.items():
            if kind in found and not found[kind].tolerance <= most:
                why = "compiled code draws other random numbers" if eager.drew else "eager differs from itself"
                tolerance = found.pop(kind).tolerance
                self._leave_out((kind,), f"{why}, which makes the tolerance {tolerance:.1%}")
        return found

    def _note(self, kind: str, one: AuditDifference) -> list[str]:
        """Keep the worst of its kind; returns what is to be said of it."""
        one.step = self._number
        self._shares.append(one.share)
        if kind not in self.facts.worst or self.facts.worst[kind].share <= one.share:
            self.facts.worst[kind] = one
        if one.share <= 1:
            return []
        what = {"loss": "loss", "update": f"update of {one.what!r}", "buffers": f"buffer {one.what!r}"}[kind]
        return [f"{what} {one.difference:.2e} of eager's away from it, tolerance {one.tolerance:.2e}"]

    def _error(self, complaints: list[str]) -> ParityError:
        reason = "; ".join(complaints) or "another process found it so"
        clean = self.facts.last_clean_step
        since = f"the audit of step {clean} was clean" if clean is not None else "no audit before was clean"
        good = self._checkpoints.last(self._first if clean is None else clean)
        return ParityError(
            f"parity={self._judge.mode}: step {self._number} is not eager's: {reason}; {since}. Last good checkpoint: "
            f"{good or 'none yet'}. Resume from it without the strategy at fault, or with on_difference=eager; "
            "parity=off audits nothing"
        )

    # ---- bookkeeping -----------------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """The step under way, as ``global_step`` counts."""
        return self._first + self._schedule.steps

    def _anywhere(self, found: bool) -> bool:
        return self._trainer.strategy.reduce_boolean_decision(found, all=False)

    def _leave_out(self, kinds: Sequence[str], reason: str) -> None:
        self._never = {**dict.fromkeys(kinds, reason), **self._never}
        self.facts.not_compared |= self._never

    def _write_down(self, complaints: list[str], *, wrong: bool) -> None:
        facts = self.facts
        facts.steps.append(self._number)
        facts.seconds = round(self._telemetry.audit_seconds, 4)
        facts.verdict, facts.reason = ("failed", "; ".join(complaints) or None) if wrong else ("clean", None)
        if not wrong and self._shares:
            facts.last_clean_step = self._number
        elif not wrong and facts.last_clean_step is None:
            facts.verdict, facts.reason = "not audited", "; ".join(sorted(set(facts.not_compared.values())))
        worst = max(self._shares, default=math.inf)
        scalars = {"audit/worst_of_tolerance": worst if worst < math.inf else None, "audit/seconds": facts.seconds}
        self._pages.scalars(scalars, self._number)
