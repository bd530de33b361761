"""Audits: is the step still eager's? Asked again on real steps, while the training continues.

The parity gate compares once, at the first batch and at freshly drawn weights. An audit compares the step under way.
Its loss and buffers are held against an eager forward on its own batch, weights and random state; the update of a few
parameters against torch's own step. A difference counts once it is beyond what eager differs from itself on that batch
and shows again when the step is repeated.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strategies import Program
from strategies.errors import one_line
from strategies.loop import Around, Loop, MicroBatch
from strategies.torch_patches import settle_shards
from trainer.guards.compare import MULTIPLES, Distances, ParityError, Tensors, around_steps, perturb, rounding_unit
from trainer.guards.eager import EagerSeen, UpdateSample, eager_forward, left_by_forward
from trainer.guards.preflight import shapes_of
from trainer.guards.snapshot import Snapshot
from trainer.telemetry import hardware
from trainer.telemetry.record import AuditDifference, AuditFacts
from trainer.telemetry.telemetry import Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages

if TYPE_CHECKING:
    from strategies.cuda_graph.steps import StepCapture

SAMPLES, REPEATS = 4, 3
"""Eager forwards by which the tolerance is widened before a difference counts; steps in which it has to show again."""
MAX_TOLERANCE = {"loss": 0.05, "buffers": 0.5}
"""Relative, beyond which a comparison says nothing."""
SEED = 2**31 - 1001
ALWAYS = 8
"""Optimizer steps up to which audits double, whatever they cost."""
SHAPES, SHAPES_WITHIN = 8, 64
"""Shapes of batch whose first step is audited too, and the optimizer steps within which they are looked for."""
SHARE = 0.005
"""Of the run's seconds, at most, that all audits together may take."""

NO_STEP = "the run ended before its first step, or training_step takes an iterator of batches"


@dataclass(slots=True)
class Pair:
    """A step, and what it was compared with."""

    outputs: dict[str, Any]
    eager: EagerSeen | None = None
    step: Tensors | None = None
    update: list[AuditDifference] | None = None


class Audits:
    """Stands around every micro-batch of ``loop`` until ``release``; ``unaudited`` is what else does, of those that are
    not audited.

    Hooks within steps that ``capture`` replays are not called. ``differs`` is called with the error once a step is not
    eager's; it returns when the run continues, in eager.
    """

    def __init__(
        self,
        mode: str,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        pages: TensorBoardPages,
        *,
        capture: StepCapture | None,
        unaudited: Around,
        trained: bool,
        differs: Callable[[ParityError], None],
    ) -> None:
        self._loop, self._program, self._telemetry, self._pages = loop, program, telemetry, pages
        self._capture, self._unaudited, self._differs = capture, unaudited, differs
        self._mode, self._multiple = mode, MULTIPLES[mode]
        self._unit = rounding_unit(program.precision, loop.device, loop.module)
        self._noise: list[Distances] = []
        """How far eager was from itself, a rounding off, when that was last looked into."""
        self._gradients = trained and capture is None and loop.world_size == 1
        """Whether eager's forward is run with what gradients need: once a difference was looked into, and where eager
        ``trained``, whose kernels are there. Those of a forward without may take a second to be chosen."""
        self._can_do_without = self._gradients
        self._undo = contextlib.ExitStack()
        self._checkpoints: dict[str, int] = {}
        """Those that the training writes, and the one that it was resumed from, with their steps."""
        self._undo.callback(loop.around_save(lambda path: self._checkpoints.update({path: loop.steps_done})))
        self._never: dict[str, str] = {}
        self._settles: bool | None = None
        why_not = "manual optimization" if loop.manual else loop.why_not_apart()
        self.facts = AuditFacts(verdict="not audited", reason=why_not or NO_STEP)
        if why_not is not None:
            return
        settle_shards(loop.module)  # a validation may have left gathered parameters in the place of those that train
        names = {id(parameter): name for name, parameter in loop.module.named_parameters()}
        self._optimizer = loop.optimizers[0]
        self._update = UpdateSample(self._optimizer, names, program)
        if capture is not None:
            capture.sample = self._update.parameters
        if self._update.reason is not None:
            self._never["update"] = self._update.reason
        self._schedule = Schedule(loop)
        self._undo.callback(loop.around_micro_batches(self._around))

    def release(self) -> None:
        self._undo.close()

    def _around(self, micro_batch: MicroBatch) -> AbstractContextManager[dict[str, Any]] | None:
        """What audits a micro-batch that ends an optimizer step, when one is due."""
        recording = self._telemetry.phase == "profiling" and self._loop.world_size == 1
        if micro_batch.ends and self._schedule.due(micro_batch.batch, later=recording):
            program = self._program
            if program.regions or program.step is not None or program.compiled_beside_regions:
                return self._audit(micro_batch)
            self.facts.reason = "nothing is compiled or captured"
        return self._unaudited(micro_batch)

    @contextlib.contextmanager
    def _audit(self, micro_batch: MicroBatch) -> Iterator[dict[str, Any]]:
        """Inside, the micro-batch is run, and its outputs go into the dictionary."""
        peak = hardware.peak_bytes(self._loop.device)
        if self._loop.optimizers[0] is not self._optimizer:
            self._leave_out(("update",), "the training has replaced its optimizer")
        self.facts.not_compared = dict(self._never)
        with self._paired(micro_batch, update=True) as pair:
            yield pair.outputs
        with self._telemetry.auditing():
            found = self._judged(pair, micro_batch)
            if pair.update:
                found["update"] = max(pair.update, key=lambda one: one.share)
            for kind in ("loss", "buffers"):  # whose forward all processes run, or none
                if self._loop.anywhere(kind in self._never):
                    self._leave_out((kind,), "another process cannot compare it")
            complaints = [_complaint(kind, one) for kind, one in found.items() if one.share > 1]
            wrong = self._loop.anywhere(bool(complaints))
        hardware.count_peak_from(self._loop.device, peak)
        self._write_down(found, complaints, wrong=wrong)
        self._schedule.next(self._telemetry.audit_seconds)
        if wrong:
            self._differs(self._error(complaints))

    @contextlib.contextmanager
    def _paired(self, micro_batch: MicroBatch, *, update: bool = False) -> Iterator[Pair]:
        """Inside, the step is run, and eager's forward before its ``training_step``; where the step is replayed, which
        calls no Python, before all of it."""
        pair, calls = Pair({}), 0
        update = update and "update" not in self._never
        auditing = self._telemetry.auditing

        def before(arguments: Mapping[str, Any]) -> None:
            nonlocal calls
            calls += 1
            if calls == 1 and not {"loss", "buffers"} <= self._never.keys():
                with auditing():
                    try:
                        pair.eager = self._eager_forward(arguments)
                    except Exception as error:
                        reason = f"eager cannot run the step's forward beside it: {one_line(error)}"
                        self._leave_out(("loss", "buffers"), reason)

        def after(loss: Tensor | None) -> None:
            if calls == 1:  # a closure may be called again, at other weights
                with auditing():
                    pair.step = left_by_forward(loss if isinstance(loss, Tensor) else None, self._loop.module)

        def before_update(_: Any = None) -> None:
            with auditing():
                self._update.keep()

        def after_update() -> None:
            with auditing():
                self._compare_update(pair)

        if self._program.captures_steps:
            before(micro_batch.arguments)
            if update:
                before_update()
                self._prepare_captured(pair, micro_batch)
            yield pair
            # It may be given up within this step, whose optimizer may evaluate the loss again.
            if self._program.captures_steps:
                after(pair.outputs.get("loss"))
                if update:
                    after_update()
            return
        optimizers = [self._optimizer] if update else []
        with self._loop.around_training_step(before, after), around_steps(optimizers, before_update, after_update):
            yield pair
        if update and pair.update is None and self._loop.scaler is not None:
            self.facts.not_compared.setdefault("update", "no step of the optimizer was seen under the gradient scaler")

    def _eager_forward(self, arguments: Mapping[str, Any]) -> EagerSeen:
        seen = functools.partial(eager_forward, self._loop, self._program, arguments, self._update.parameters)
        try:
            return seen(gradients=self._gradients)
        except torch.OutOfMemoryError:
            if not self._can_do_without:
                raise
        self._gradients = self._can_do_without = False
        return seen(gradients=False)

    # ---- the update ------------------------------------------------------------------------------------------------

    def _prepare_captured(self, pair: Pair, micro_batch: MicroBatch) -> None:
        if self._loop.scaler is not None:
            self._leave_out(("update",), "a gradient scaler decides after a captured step what the optimizer is given")
        if pair.eager is None or pair.eager.wrote:
            self._leave_out(("update",), "training_step itself may change weights, within a captured step")
        if micro_batch.begins:
            for parameter in self._update.parameters:  # as zero_grad does next; a replay leaves old ones where they are
                parameter.grad = None

    def _compare_update(self, pair: Pair) -> None:
        overflowed = getattr(self._optimizer, "found_inf", None)  # a fused step is called with it, and does nothing
        if "update" in self._never or (overflowed is not None and overflowed.item()):
            return
        captures = self._program.captures_steps
        kept = self._capture.gradients if captures and self._capture is not None else None
        given = [parameter.grad for parameter in self._update.parameters] if kept is None else kept
        if all(gradient is None for gradient in given):
            where = "a captured step keeps its gradients to itself" if captures else "they were cleared"
            self.facts.not_compared["update"] = f"there are no gradients after the step, {where}"
            return
        try:
            pair.update = self._update.compare(given)
        except Exception as error:
            self._leave_out(("update",), f"torch's own step of a sample failed: {one_line(error)}")
        if pair.update == []:
            self.facts.not_compared["update"] = "rounding of the weights is larger than their update"

    # ---- the verdict -----------------------------------------------------------------------------------------------

    def _judged(self, pair: Pair, micro_batch: MicroBatch) -> dict[str, AuditDifference]:
        """The differences of loss and buffers, looked into where one is beyond its tolerance, on every process."""
        found = self._differences(pair)
        if self._program.captures_steps and self._settles is None and pair.eager is not None:
            # What changes buffers after the forward (one that is computed again in the backward) cannot be seen later.
            self._settles = "buffers" not in found or found["buffers"].share <= 1
            if not self._settles:
                self._leave_out(("buffers",), "they change after the forward, within a captured step")
                found.pop("buffers")
        if self._beyond(found):
            try:
                found = self._repeated(pair, micro_batch)
            except Exception as error:
                self._leave_out(("loss", "buffers"), f"a difference could not be looked into: {one_line(error)}")
                found = {}
        return found

    def _beyond(self, found: dict[str, AuditDifference]) -> bool:
        return self._loop.anywhere(any(one.share > 1 for one in found.values()))

    def _repeated(self, pair: Pair, micro_batch: MicroBatch) -> dict[str, AuditDifference]:
        """The differences within tolerances of this very batch; those that do not show again are left out."""
        loop, unit = self._loop, self._unit
        # A queue of features that are kept only if they want gradients; several processes would wait for a backward.
        self._gradients, self._can_do_without = loop.world_size == 1, False
        try:
            after: Snapshot | None = Snapshot(loop, micro_batch.batch, self._program)
        except torch.OutOfMemoryError:
            after = None
        eager = pair.eager
        if loop.anywhere(after is None or eager is None) or after is None or eager is None:
            raise RuntimeError("there is no memory for a copy of the state")
        weights = [one for one in loop.module.parameters() if one.requires_grad and one.is_floating_point()]
        random = loop.anywhere(eager.drew)

        def set_off(number: int) -> None:
            after.restore()
            eager.before.restore()
            perturb(weights, unit * (1, 4)[number % 2], SEED + number)
            if random:  # what one mask alone shows is not to show again
                torch.manual_seed(SEED + number)

        with loop.quiet(), contextlib.ExitStack() as at_end:
            at_end.callback(after.restore)
            eager.before.restore()
            base, self._noise = self._eager_forward(micro_batch.arguments), []
            for number in range(SAMPLES):
                set_off(number)
                again = self._eager_forward(micro_batch.arguments)
                self._noise.append(base.comparison(self._multiple, unit).distances(again.left))
            found = self._differences(pair)
            for number in range(SAMPLES, SAMPLES + REPEATS):
                if not self._beyond(found):
                    break
                set_off(number)
                with self._paired(micro_batch) as repeated:
                    repeated.outputs.update(micro_batch.run(micro_batch.batch))
                shown = self._differences(repeated)
                for kind in [kind for kind, one in found.items() if one.share > 1]:
                    if kind not in shown or shown[kind].share <= 1:
                        del found[kind]
                        self.facts.not_compared[kind] = "a difference was gone when the step was repeated"
                        self.facts.unrepeated_steps.append(self._number)
        return found

    def _differences(self, pair: Pair) -> dict[str, AuditDifference]:
        """By kind, the difference that is nearest to its tolerance or beyond it; those that say nothing left out."""
        step, eager = pair.step, pair.eager
        if step is None or eager is None:
            return {}
        found: dict[str, AuditDifference] = {}
        comparison = eager.comparison(self._multiple, self._unit)
        apart = comparison.distances(step)
        shapes = {kind: one.shape for kind, one in apart.items()}
        comparison.noise = [one for one in self._noise if {kind: one[kind].shape for kind in one} == shapes]
        if "loss" not in apart:
            self.facts.not_compared.setdefault("loss", "training_step returned no loss")
        for kind in [kind for kind in apart if kind not in self._never and len(apart[kind])]:
            what, difference, tolerance, _ = comparison.worst(kind, apart[kind])
            found[kind] = AuditDifference(what=what, difference=difference, tolerance=tolerance)
        for kind, most in MAX_TOLERANCE.items():
            if kind in found and not found[kind].tolerance <= most:
                why = "compiled code may draw other random numbers" if eager.drew else "eager differs from itself"
                self._leave_out((kind,), f"{why}, which makes the tolerance {found.pop(kind).tolerance:.1%}")
        return found

    def _error(self, complaints: list[str]) -> ParityError:
        reason = "; ".join(complaints) or "another process found it so"
        clean = self.facts.last_clean_step
        since = f"the audit of step {clean} was clean" if clean is not None else "no audit before was clean"
        until = self._schedule.first if clean is None else clean
        there = [(step, path) for path, step in self._checkpoints.items() if step <= until and Path(path).exists()]
        good = f"{max(there)[1]} (step {max(there)[0]})" if there else "none yet"
        return ParityError(
            f"parity={self._mode}: step {self._number} is not eager's: {reason}; {since}. Last good checkpoint: "
            f"{good}. Resume from it without the strategy at fault, or with on_difference=eager; "
            "parity=off audits nothing"
        )

    @property
    def _number(self) -> int:
        """The step under way, counted as ``steps_done`` is."""
        return self._schedule.first + self._schedule.steps

    def _leave_out(self, kinds: Sequence[str], reason: str) -> None:
        self._never = {**dict.fromkeys(kinds, reason), **self._never}
        self.facts.not_compared |= self._never

    def _write_down(self, found: dict[str, AuditDifference], complaints: list[str], *, wrong: bool) -> None:
        facts = self.facts
        for kind, one in found.items():
            one.step = self._number
            if kind not in facts.worst or facts.worst[kind].share <= one.share:
                facts.worst[kind] = one
        facts.steps.append(self._number)
        facts.seconds = round(self._telemetry.audit_seconds, 4)
        facts.verdict, facts.reason = ("failed", "; ".join(complaints) or None) if wrong else ("clean", None)
        if not wrong and found:
            facts.last_clean_step = self._number
        elif not wrong and facts.last_clean_step is None:
            facts.verdict, facts.reason = "not audited", "; ".join(sorted(set(facts.not_compared.values())))
        worst = max((one.share for one in found.values()), default=math.inf)
        scalars = {"usage/audit_worst_of_tolerance": worst if worst < math.inf else None}
        self._pages.scalars({**scalars, "usage/audit_seconds": facts.seconds}, self._number)


def _complaint(kind: str, one: AuditDifference) -> str:
    what = {"loss": "loss", "update": f"update of {one.what!r}", "buffers": f"buffer {one.what!r}"}[kind]
    return f"{what} {one.difference:.2e} of eager's away from it, tolerance {one.tolerance:.2e}"


class Schedule:
    """Which optimizer steps are audited: the first, 2nd, 4th and 8th, then as many as a share of the run's time allows.
    The first process decides for all."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.first = loop.steps_done
        self.steps = 0
        """Optimizer steps begun in this training, the one under way included."""
        self._next = 1.0
        self._began = self._started = 0.0
        self._before = (0, 0.0, 0.0)
        self._shapes: set[str] = set()

    def due(self, batch: Any, *, later: bool = False) -> bool:
        """Count a step on ``batch`` that begins; returns whether it is to be audited, which ``later`` puts off. On one
        device, so is the first step of each shape; several devices may be given different shapes."""
        self.steps += 1
        if later:
            return False
        known, due = len(self._shapes), self.steps >= self._next
        if self.steps <= SHAPES_WITHIN and known < SHAPES and self._loop.world_size == 1:
            self._shapes.add(shapes_of(batch))
            due |= len(self._shapes) > max(1, known)
        if due:
            self._started = time.perf_counter()
            self._began = self._began or self._started
        return due

    def next(self, spent: float) -> None:
        """An audit is over, all of them have taken ``spent`` seconds; every process calls this."""
        steps, now = self.steps, time.perf_counter()
        last, at, before = self._before
        self._before = steps, now, spent
        if steps < ALWAYS:
            self._next = 1 << steps.bit_length()
            return
        cost, step_seconds = spent - before, max(1e-9, (self._started - at) / max(1, steps - last))
        left, planned = SHARE * (now - self._began) - spent, self._loop.steps_planned
        remaining = -1 if planned is None else planned - self.first - steps
        if remaining >= 0:
            left += SHARE * remaining * step_seconds
            # Evenly over what remains, but sooner at first: most of what goes wrong goes wrong early.
            gap = min(steps, remaining * cost / left) if left > cost else math.inf
        else:
            gap = max(steps, (cost - left) / SHARE / step_seconds)
        self._next = self._loop.broadcast(steps + max(ALWAYS, gap))
