"""Preflight: passes on the first batch, before the first step, that leave no trace in the training.

In order: everything compiles (what cannot is rolled back or ends the run), one step is compared with eager's, a few are
timed against eager's, and every other shape of batch is warmed. Then model, optimizer, gradients, scaler and random
numbers are put back. The loader is not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies import Program
from strategies.errors import is_out_of_memory
from strategies.loop import Loop, SkippedStep
from strategies.torch_patches import as_capturing
from trainer.guards import Guarding
from trainer.guards.compare import ParityError, rounding_unit
from trainer.guards.eager import loss_of_padding
from trainer.guards.parity import ParityGate
from trainer.guards.rollback import Rollback
from trainer.guards.slowdown import FIRST_PAIRS, Sample, take_sample
from trainer.guards.snapshot import Snapshot
from trainer.telemetry import hardware
from trainer.telemetry.compiler import CompilerMonitor
from trainer.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from strategies.padding import Padding

Value = TypeVar("Value")

NOT_COMPARED = "the compiled step was not compared with eager's"

REPLAYED_FROM = 3
"""Passes until Inductor's CUDA graphs are replayed: one to warm up, one to record, one to replay."""


class Preflight:
    """The passes of one training; ``timed``: whether steps of eager may be timed."""

    def __init__(
        self,
        guarding: Guarding,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        rollback: Rollback,
        *,
        timed: bool = True,
    ) -> None:
        self._guarding, self._loop, self._program, self._telemetry = guarding, loop, program, telemetry
        self._rollback = rollback
        self._passes = REPLAYED_FROM if loop.cuda_graphs else 1
        self.sample: Sample | None = None
        """Seconds of steps of eager and compiled, when they were timed."""
        self.warmed = False
        """Whether every shape has been compiled."""
        padding = program.padding
        self._warms = padding is not None and padding.warm and bool(padding.edges)
        compiles = any(strategy.compiles for strategy in program.strategies)
        timed = timed and (guarding.parity != "off" or guarding.on_slower == "eager")
        self.times = timed and loop.why_not_apart() is None
        """Whether steps of eager are timed."""
        self.wanted = compiles and (
            timed or guarding.parity != "off" or self._warms or guarding.on_compile_error == "eager"
        )
        """Whether there is anything to do; eager has nothing."""

    def run(self, batch: Any) -> None:
        """Do all of it on ``batch`` and restore everything. Raises ParityError, or the compiler's error where it is not
        to be rolled back."""
        if (reason := self._loop.why_not_apart()) is not None:
            self.skip(reason)
            return
        try:
            with self._apart(batch) as snapshot:
                if lost := snapshot.lost:
                    reason = f"{lost}, so that nothing may be run before the first step"
                    self._report_parity("not compared", reason)
                    self._rollback.warn(f"{NOT_COMPARED}: {reason}")
                    return
                self._run(batch, snapshot)
        except SkippedStep as skipped:
            self.skip(str(skipped))

    @contextlib.contextmanager
    def _apart(self, batch: Any, *, captures: bool = True, frees: bool = True) -> Iterator[Snapshot]:
        """Inside, steps leave no trace: everything is put back at the end. Memory, too, where that ``frees``."""
        loop = self._loop
        with loop.quiet(), as_capturing(self._program.captures_steps and captures):
            snapshot = Snapshot(loop, batch, self._program)
            try:
                yield snapshot
            finally:
                snapshot.restore()
                vars(snapshot).clear()  # the caller still holds it
                if frees:
                    hardware.give_back(loop.device)

    def time_again(self, batch: Any, own: Callable[[], Any] | None = None, *, eager_first: bool) -> Sample | None:
        """Time a step of eager and one of the run (``own``, where that is no step apart from the training) on ``batch``
        in the middle of the training, and restore everything. None where a step would use up what cannot be put back,
        asks for no backward, or eager has too little memory."""
        loop, sample = self._loop, None
        peak = hardware.peak_bytes(loop.device)
        # Memory is not given back, which takes longer than a step: a capture asks for it, and so does who lacks some.
        timed = functools.partial(take_sample, loop, self._program, batch, own=own, eager_first=eager_first)
        with contextlib.suppress(SkippedStep), self._apart(batch, captures=own is None, frees=False) as snapshot:
            if not snapshot.lost:
                sample = self._within_memory("slowdown", functools.partial(timed, restore=snapshot.restore))
        hardware.count_peak_from(loop.device, peak)
        return sample

    def _run(self, batch: Any, snapshot: Snapshot) -> None:
        loop, program, rollback = self._loop, self._program, self._rollback
        restore, parity = snapshot.restore, self._guarding.parity
        self._telemetry.phase = "preflight"

        def first_steps() -> None:
            for _ in range(2):  # the first one makes the optimizer's state, with which it may compile anew
                rollback.together(lambda: loop.step(batch))

        rollback.attempt("first forward and backward", functools.partial(self._pass, batch), restore)
        if program.compiled_beside_regions:
            rollback.attempt("first optimizer step", first_steps, restore)
        if not rollback.anything_left:
            self._report_parity("skipped", "nothing compiled")
            return
        of_batch = shapes_of(batch)
        earlier = earlier_findings(loop, program, self._telemetry.compiler, of_batch) if parity == "on" else None
        if earlier is not None:
            for name, facts in earlier.items():
                self._report(name, facts)
            self.sample = Sample(**earlier["slowdown"]["before_the_first_step"])
        else:
            if parity != "off":
                self._telemetry.phase = "comparing with eager"
                self._within_memory("parity", lambda: self._compare(batch, snapshot))
                restore()
                unit = rounding_unit(program.precision, loop.device, loop.module)
                if program.padding is not None and (losses := loss_of_padding(loop, program, batch, unit)):
                    remedy = "attention, recurrent layers and the loss have to leave it out"
                    rollback.warn(f"padding changes the loss ({losses}): {remedy}")
            restore()
            if self.times and self.sample is None:
                self._telemetry.phase = "timing eager"
                first_pairs = functools.partial(take_sample, loop, program, batch, pairs=FIRST_PAIRS)
                self.sample = self._within_memory("slowdown", first_pairs)
            if self.sample is not None:
                self._report("slowdown", {"before_the_first_step": dataclasses.asdict(self.sample)})
            keep_findings(program, of_batch)
        if self._warms:
            self._warm(batch, restore)

    def _compare(self, batch: Any, snapshot: Snapshot) -> None:
        try:
            facts = ParityGate(self._guarding.parity, self._loop, self._program, snapshot).run(batch)
        except ParityError as error:
            self._report("parity", error.facts)
            raise
        self._report("parity", facts)
        if facts["verdict"] == "not compared":
            self._rollback.warn(f"{NOT_COMPARED}: {facts['reason']}")

    def _warm(self, batch: Any, restore: Callable[[], None]) -> None:
        padding = self._program.padding
        assert padding is not None
        wanted = [(f"{kind} {rows} x {edge}", kind, rows, edge) for kind, rows, edge in shapes(padding)]
        for number, (name, kind, rows, edge) in enumerate(wanted, 1):
            self._telemetry.phase = f"warming {len(wanted)} shapes {number}/{len(wanted)}"
            one_pass = functools.partial(self._pass, padding.resized(batch, rows, edge), training=kind == "training")
            self._rollback.attempt(f"warming {name}", one_pass, restore)
            if self._loop.manual:  # so many optimizer steps in a row on made-up batches lead anywhere
                restore()
        self.warmed = True
        self._report("warming", {"shapes": [name for name, *_ in wanted]})

    def _pass(self, batch: Any, *, training: bool = True) -> None:
        for _ in range(self._passes):
            if training:
                self._loop.train(batch, together=False)
            else:
                self._loop.evaluate(batch)

    def _within_memory(self, what: str, run: Callable[[], Value]) -> Value | None:
        """An eager step may need more memory than a compiled one, which is no reason to end the run."""
        try:
            return run()
        except Exception as error:
            if not is_out_of_memory(error) or self._loop.world_size > 1:
                raise
        self._report(what, {"verdict": "skipped", "reason": "eager needs more memory than there is"})
        self._program.notes.append(f"{what}: skipped, an eager step needs more memory than there is")
        self._loop.module.zero_grad(set_to_none=True)
        hardware.give_back(self._loop.device)
        return None

    def skip(self, reason: str) -> None:
        self._program.notes.append(f"no preflight, so that nothing was compared with eager or warmed: {reason}")
        self._report_parity("skipped", reason)

    def _report_parity(self, verdict: str, reason: str) -> None:
        if self._guarding.parity != "off":
            self._report("parity", {"mode": self._guarding.parity, "verdict": verdict, "reason": reason})

    def _report(self, name: str, facts: dict[str, Any]) -> None:
        self._program.report.setdefault(name, {}).update(facts)


# ---- every shape of batch compiled before the first step, and after it a lock on the compiler --------------------


def shapes(padding: Padding) -> Iterator[tuple[str, int, int]]:
    """Every shape that the loaders will bring, ``(training or validation, rows, edge)``, smaller last batches included;
    longest first, so that what memory the run needs is known at once."""
    for edge, sizes in sorted(padding.batch_sizes.items(), reverse=True):
        for rows in sizes:
            yield "training", rows, edge
    for rows in padding.validation_batch_sizes:
        for edge in sorted(padding.edges, reverse=True):
            yield "validation", rows, edge


class RecompileError(RuntimeError):
    """Something was compiled after all shapes had been warmed."""


class Lock:
    """After warming and the first optimizer step, whatever is compiled is an error or a warning, as the strategy says
    that asked for ``padding``."""

    def __init__(self, padding: Padding, program: Program, watch: CompilerMonitor) -> None:
        self._padding, self._program, self._watch = padding, program, watch
        self._compilations: int | None = None
        self._known = 0
        self._warned: set[str] = set()

    def close(self) -> None:
        """From here on nothing should be compiled."""
        self._watch.collect()
        self._compilations, self._known = self._watch.compilations, len(self._watch.events)

    def check(self, where: str) -> None:
        """After a batch, which ``where`` names. Raises RecompileError under ``on_recompile=fail``."""
        if self._compilations is None or self._watch.compilations == self._compilations:
            return
        known = self._known
        self.close()
        recompiles = [event for event in self._watch.events[known:] if event.kind == "recompile"]
        reason = "; ".join(f"{event.reason} ({event.location})" for event in recompiles) or "code that had never run"
        line = f"compiled again after all shapes were warmed, {where}: {reason}"
        facts: dict[str, Any] = self._program.report.setdefault("warming", {})
        facts["recompiles_after"] = facts.get("recompiles_after", 0) + 1
        mode, name = self._padding.on_recompile, self._padding.name
        if mode == "fail":
            raise RecompileError(f"compile.{name}.on_recompile=fail: {line}")
        if reason not in self._warned:
            self._warned.add(reason)
            self._program.notes.append(f"{name}: {line}")
            rank_zero_warn(f"compile.{name}.on_recompile=warn: {line}")


# ---- what an earlier run that compiled the very same code found out about it -------------------------------------


def earlier_findings(loop: Loop, program: Program, watch: CompilerMonitor, shapes: str) -> dict[str, Any] | None:
    """Facts of parity and timing of an earlier run on a batch of these ``shapes``, so that a warm start need not
    compare and time anew: if the comparison passed and nothing of this run was compiled anew.

    A run whose graphs all came from ``compile=cached`` executes what the run before it compiled, compared with eager
    and timed. Its own comparison would cost more than its compiling; the verdict is kept beside the artifacts instead.
    Artifacts hold graphs for more shapes than a run uses; what was found holds for the shapes of its batch.

    Each process has a cache of its own, and comparing takes steps that all of them take together: None unless all
    processes, each of which calls this after everything has been compiled, have them.
    """
    found = program.findings.get(shapes) or {}
    whole = found.get("parity", {}).get("verdict") == "passed" and "before_the_first_step" in found.get("slowdown", {})
    return found if loop.everywhere(whole and watch.figures().cache == "warm") else None


def keep_findings(program: Program, shapes: str) -> None:
    """Leave what this run reported to later ones."""
    parity, timed = program.report.get("parity"), program.report.get("slowdown", {})
    if parity is None or "before_the_first_step" not in timed or parity["verdict"] != "passed":
        return
    if any(getattr(one.module._compiled_call_impl, "undefined", None) for one in program.regions):
        return  # only a comparison tells the regions which weights eager gives no gradient
    figures = [leaf for leaf in pytree.tree_leaves([parity, timed]) if isinstance(leaf, float)]
    if all(map(math.isfinite, figures)):  # the signature of a bundle allows no others
        compared = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
        program.findings[shapes] = {"parity": {**parity, "compared": compared}, "slowdown": dict(timed)}


def shapes_of(batch: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return " ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
