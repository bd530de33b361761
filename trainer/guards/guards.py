"""Guards: what is checked before the first step and after it; and a captured step beside its replays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from strategies import Program
from strategies.base import eager, holds
from strategies.errors import is_compile_error, is_double_backward, one_line
from strategies.loop import Loop, MicroBatch
from strategies.regions import give_up, outermost
from trainer.guards import CompiledNothing, Guarding
from trainer.guards.compare import (
    MULTIPLES,
    TENSOR_FLOOR,
    Comparison,
    ParityError,
    Tensors,
    gradient_of,
    rounding_unit,
)
from trainer.guards.preflight import Lock, Preflight
from trainer.guards.rollback import Rollback
from trainer.guards.slowdown import Slowdown
from trainer.guards.snapshot import Snapshot
from trainer.telemetry import hardware
from trainer.telemetry.files import number
from trainer.telemetry.machine import now
from trainer.telemetry.record import Event, RunRecord
from trainer.telemetry.telemetry import Telemetry

CHANCES = 10
"""Optimizer steps within which a region has to be called: what joins later, or a first batch without a loss, is no
mistake."""
NEVER_CALLED = "never called (a module has to be called itself, not its forward or another method)"
CALLED_IN_VAIN = "called, and nothing in it was compiled"


class Guards:
    """The guards of one training; the owner calls the methods named after the moments of the loop.

    After ``CHANCES`` optimizer steps it is an error that nothing was compiled. ``chosen`` strategies are what
    ``compile=auto`` tries: eager takes over where they fail, and they are timed on the training's own steps. Where
    every region was ``compared`` with eager already, there is no preflight. ``trained``: steps are done already.
    """

    def __init__(
        self,
        guarding: Guarding,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        record: RunRecord,
        *,
        chosen: bool = False,
        compared: bool = False,
        trained: bool = False,
    ) -> None:
        self._guarding = dataclasses.replace(guarding, on_compile_error="eager") if chosen else guarding
        self._loop, self._program, self._telemetry, self._record = loop, program, telemetry, record
        self._chosen = chosen
        self._steps = 0
        self._lazy = ""
        self._begun = self._verified = False
        self._eagerly = contextlib.ExitStack()
        self.rollback = Rollback(self._guarding.on_compile_error, loop, program, telemetry.compiler)
        self.rollback.trained = trained
        self._preflight = Preflight(self._guarding, loop, program, telemetry, self.rollback, timed=not chosen)
        self._preflight.wanted &= not compared
        self._compared = compared
        self._slowdown: Slowdown | None = None
        self._lock: Lock | None = None
        holders = {path.rpartition(".")[0] for path in (region.path for region in program.regions) if path}
        held = ((path, program.module.get_submodule(path)) for path in holders)
        self._holders = {path: (holder, set(holder.children())) for path, holder in held}

    def before_batch(self, batch: Any) -> None:
        """A batch is on the device: preflight on the first one; later, time it where the run is under suspicion."""
        program, preflight, slowdown = self._program, self._preflight, self._slowdown
        if not self._begun:
            if (preflight.wanted or program.regions) and self._waits_for_parameters():
                return
            self._begun = True
            if preflight.wanted:
                with self._telemetry.preflight():
                    self._run_preflight(batch)
            if preflight.times and (preflight.sample is not None or self._compared or program.step is not None):
                self._slowdown = Slowdown(self._loop, self._telemetry, preflight.sample)
            if preflight.warmed and program.padding is not None:
                if program.step is not None:
                    program.step.warmed = True
                self._lock = Lock(program.padding, program, self._telemetry.compiler)
        elif slowdown is not None and slowdown.wanted and not program.captures_steps:
            self._time(slowdown, batch)

    def resume(self) -> None:
        """The program is again the one that was guarded so far; meanwhile others were compiled."""
        if self._lock is not None:
            self._lock.close()
            if self._program.step is not None:
                self._program.step.warmed = True

    def around_micro_batch(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[dict[str, Any]] | None:
        """What times it once more after it has run, by replays where it was replayed, where that is wanted."""
        slowdown = self._slowdown
        if slowdown is None or not slowdown.wanted or not self._program.captures_steps:
            return None
        return self._timing_replays(slowdown, micro_batch)

    @contextlib.contextmanager
    def _timing_replays(self, slowdown: Slowdown, micro_batch: MicroBatch) -> Iterator[dict[str, Any]]:
        graphs = self._program.step
        assert graphs is not None
        replays = graphs.replays
        yield {}
        if not (micro_batch.begins and micro_batch.ends):
            slowdown.take(None)
        elif (replayed := graphs.replays) > replays:
            self._time(slowdown, micro_batch.batch, lambda: micro_batch.run(micro_batch.batch), within_step=True)
            graphs.replays = replayed  # those were no steps of the training
        elif self._loop.everywhere(graphs.settled):  # steps like it are not captured
            self._time(slowdown, micro_batch.batch, within_step=True)

    def _time(
        self, slowdown: Slowdown, batch: Any, own: Callable[[], Any] | None = None, *, within_step: bool = False
    ) -> None:
        self._telemetry.pause("timing eager", within_step=within_step)
        began = now()
        try:
            sample = self._preflight.time_again(batch, own, eager_first=len(slowdown.later) % 2 == 0)
        except Exception as error:
            if own is None or self._loop.world_size > 1:  # the others are waiting in the middle of that step
                raise
            sample = None  # eager beside graphs: no reason to end a run that goes well
            self._program.notes.append(f"replays could not be timed beside eager: {one_line(error)}")
        slowdown.take(sample, seconds=now() - began)
        self._judge(slowdown)
        if within_step:
            self._telemetry.batch_start()

    def after_batch(self, *, stepped: bool) -> None:
        """A training batch is through. Raises CompiledNothing after the first step, RecompileError after warming."""
        self._eagerly.close()
        stepped = stepped and self._begun
        self._steps += stepped
        if stepped and self._steps in (1, CHANCES) and self._record.regions:  # which is the same on all processes
            self.rollback.check()
            self._verify(last=self._steps == CHANCES)
        if stepped and self._steps == 1:
            self.rollback.trained = True
            if self._lock is not None:
                self._lock.close()
                self._telemetry.compiler.reports_recompiles = False
        elif self._lock is not None:
            self._lock.check(f"in training step {self._loop.steps_done}")
        if stepped and self._loop.steps_done % self._loop.log_every_n_steps == 0:  # the telemetry reads its clock
            self.rollback.check()
            self._check_joined()
            if self._slowdown is not None:
                self._slowdown.check()

    def after_validation_batch(self) -> None:
        """A validation batch is through. Raises RecompileError after warming."""
        if self._lock is not None:
            self._lock.check(f"in the validation after step {self._loop.steps_done}")

    def finish(self) -> None:
        """The training is over, one way or another: note what was to be compiled and was not."""
        self._eagerly.close()
        if self._lazy and not self._begun:
            reason = f"{self._lazy} got no shape in this training"
            self._preflight.skip(reason)
            if self._program.regions:
                self.rollback.give_up(list(self._program.regions), reason, because="nn.Lazy modules")
        if not self._steps:
            return
        self.rollback.check()
        self._check_joined()
        if self._slowdown is not None and self._slowdown.short_of_time:
            self._program.report.setdefault("slowdown", {})["short_of_time"] = True
        there = dict(self._program.module.named_modules(remove_duplicate=False))
        if gone := [one.path for one in self._program.regions if there.get(one.path) is not one.module]:
            self.rollback.warn(f"{', '.join(gone)}: no longer in the module; what took the place of a region ran eager")
        missing = self._not_compiled()
        self._program.eager_parts.update(missing)
        if missing and not self._verified:
            self._warn_missing(missing)
        events = self._telemetry.compiler.events
        for part, reason in self._program.eager_parts.items():
            if not any(event.kind == "fallback" and reason in event.reason for event in events):
                events.append(Event(kind="fallback", reason=f"{part}: {reason}"))

    def fail(self, error: BaseException) -> None:
        """Explain a compile that has failed in the middle of a step which could not be run again."""
        if self.rollback.trained and (is_compile_error(error) or is_double_backward(error)):
            self._program.notes.append(
                "this compile failed in a step that cannot be repeated in eager (several processes, manual "
                "optimization, transformers' Trainer, captured steps or accumulated gradients): leave the part out, or "
                "warm all shapes with compile=buckets"
            )

    def _run_preflight(self, batch: Any) -> None:
        try:
            self._preflight.run(batch)
        except ParityError as error:
            if not self._chosen:
                raise
            self.rollback.give_up(list(self._program.regions), one_line(error), because="compile=auto")
            self._preflight.sample = None
            if self.rollback.anything_left:
                self._preflight.run(batch)

    def _waits_for_parameters(self) -> bool:
        """Whether parameters have no shape yet (``nn.LazyLinear``): batches run eager until one has made them."""
        lazy = [name for name, parameter in self._program.module.named_parameters() if is_lazy(parameter)]
        if not lazy:
            return False
        if not self._lazy:
            self._lazy = f"{', '.join(lazy[:3])}{' ...' if len(lazy) > 3 else ''}"
            line = f"{self._lazy}: no shape before the first call (nn.Lazy modules), so the first batch runs eager"
            self._program.notes.append(line)
        self._eagerly.enter_context(eager(self._program))
        return True

    # ---- slower than eager -----------------------------------------------------------------------------------------

    def _judge(self, slowdown: Slowdown) -> None:
        facts = slowdown.facts()
        self._program.report.setdefault("slowdown", {}).update(facts)
        if (found := slowdown.slower) is None:
            return
        line = (
            f"slower than eager: a step takes {number(found.compiled_median * 1e3)} ms compiled against "
            f"{number(found.eager_median * 1e3)} ms eager on the same batches"
        )
        if self._guarding.on_slower == "eager" and found.replayed:
            line += "; on_slower=eager leaves captured steps as they are"
        elif self._guarding.on_slower == "eager":
            undone = [region.path for region in self._program.regions]
            give_up(self._program, list(self._program.regions), f"{line}; on_slower=eager")
            line += f"; on_slower=eager: {len(undone)} regions go on eager"
            self._program.report["slowdown"]["rolled_back"] = undone
            self._telemetry.compiler.events.append(Event(kind="fallback", reason=line, step=self._loop.steps_done))
        self.rollback.warn(line)

    # ---- nothing compiled ------------------------------------------------------------------------------------------

    def _check_joined(self) -> None:
        """Say which blocks the training has put beside regions."""
        for path, (holder, known) in self._holders.items():
            for name, child in holder.named_children():
                if child not in known and any(True for _ in child.parameters()):
                    part = f"{path}.{name}".lstrip(".")
                    reason = "joined the module while it trained and runs eager: what is compiled is chosen before"
                    self._program.eager_parts[part] = reason
                    self.rollback.warn(f"{part}: {reason}")
                known.add(child)

    def _verify(self, *, last: bool) -> None:
        """Raise CompiledNothing where that is certain: all regions were called, or had all their chances."""
        missing = self._not_compiled()
        nothing = bool(missing) and len(missing) == len(self._program.regions)
        certain = last or NEVER_CALLED not in missing.values()
        if self._loop.everywhere(nothing and certain):
            self._verified = True
            line = (
                f"{self._record.label}: the compiler was handed {len(missing)} regions and compiled none of them"
                + "".join(f"; {event.reason}" for event in self._telemetry.compiler.events[:1])
                + f" (in {self._steps} optimizer steps: {_by_reason(missing)})"
            )
            if self._guarding.on_compile_error == "fail":
                raise CompiledNothing(f"{line}; on_compile_error=eager trains all the same")
            self.rollback.give_up(list(self._program.regions), line)
        elif certain and not self._verified:
            self._verified = True
            if missing:
                self._warn_missing(missing)

    def _not_compiled(self) -> dict[str, str]:
        """Regions of which nothing was compiled so far, with the reason; a region within another is that one's part."""
        compiler, program = self._telemetry.compiler, self._program
        missing: dict[str, str] = {}
        for outer in outermost(program):
            if outer.called and compiler.compiled(outer.module):
                continue
            inside = [one.path for one in program.regions if holds(outer.path, one.path)]
            missing.update(dict.fromkeys(inside, CALLED_IN_VAIN if outer.called else NEVER_CALLED))
        if self._record.regions is not None:
            done = len(program.regions) - len(missing)
            self._record.regions_compiled = max(self._record.regions_compiled or 0, done)
        return missing

    def _warn_missing(self, missing: dict[str, str]) -> None:
        self.rollback.warn(
            f"{self._record.label}: not compiled in {self._steps} optimizer steps, {_by_reason(missing)}"
        )


def _by_reason(missing: dict[str, str]) -> str:
    reasons = dict.fromkeys(missing.values())
    return "; ".join(f"{', '.join(p for p, why in missing.items() if why == one)}: {one}" for one in reasons)


# ---- a captured step beside its replays ------------------------------------------------------------------------------

REPLAY_SAMPLES = 3
"""Further runs by which the tolerance is calibrated once a replay is not equal at first."""


class ReplayParity:
    """Compares the first replay of the first graph (``mode`` ``on``) or of every graph (``strict``) with its step.

    Before a step is captured it runs once without a graph, and everything is put back; its first replay then has to
    leave the same loss, gradients, weights and buffers. Both run the same kernels, so that they are equal to the last
    bit where no kernel adds up in an order of its own; where they are not, further runs show how far such a step is
    from itself.
    """

    def __init__(self, mode: str, loop: Loop, program: Program) -> None:
        self._mode, self._loop, self._program = mode, loop, program
        self._unit = rounding_unit(program.precision, loop.device, loop.module)
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
            left = self._left(run())
            if left["loss"]:
                self._reference = snapshot, self._kept(left, snapshot), run, batch
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
        seen = comparison.distances(self._left(results))
        complaints, figures = comparison.verdict(seen)
        if self._loop.anywhere(bool(complaints)):
            replayed = Snapshot(self._loop, batch, self._program)
            for _ in range(REPLAY_SAMPLES):
                snapshot.restore()
                comparison.noise.append(comparison.distances(self._left(run())))
            replayed.restore()
            complaints, figures = comparison.verdict(seen)
        self.facts["compared"].append(self._name)
        verdict = "failed" if complaints else "passed"
        self.facts.update(verdict=verdict, calibration_steps=len(comparison.noise), **figures)
        del snapshot, comparison
        hardware.count_peak_from(self._loop.device, self._peak)
        if self._loop.anywhere(bool(complaints)):
            complaints = complaints or ["another process found a difference"]
            raise ParityError(
                f"parity={self._mode}: the replay of {self._name} is not the step it was captured from: "
                f"{'; '.join(complaints)}. Leave cuda_graph out; parity=off continues in spite of it",
                self.facts,
            )

    def _left(self, results: Any) -> Tensors:
        """What a step leaves, by kind and name; it returned ``results``, its outputs and what it logged."""
        module, (outputs, *_) = self._loop.module, results
        loss = outputs.get("loss")
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        return {
            "loss": {"loss": loss.detach().flatten()} if isinstance(loss, Tensor) else {},
            "gradients": {name: gradient_of(one) for name, one in named.items()},
            "weights": {name: one.detach() for name, one in named.items()},
            "buffers": {name: one for name, one in module.named_buffers() if one.is_floating_point()},
        }

    def _kept(self, left: Tensors, snapshot: Snapshot) -> Comparison:
        comparison = Comparison(MULTIPLES[self._mode])
        named: dict[str, Tensor] = dict([*self._loop.module.named_parameters(), *self._loop.module.named_buffers()])
        for kind, tensors in left.items():
            stored = kind in ("weights", "buffers")
            starts = [snapshot.of(named[name]) if stored else None for name in tensors]
            least = max(TENSOR_FLOOR, (1 if kind == "loss" else 16) * self._unit)
            comparison.keep_stored(kind, tensors, starts, least, copy=torch.clone)
        return comparison
