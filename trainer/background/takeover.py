"""Takeover: the training begins in eager, and compiled regions take it over between steps as they become ready.

Before a region's code is used it runs beside eager's on the inputs of a real step. Outputs and gradients of that call
are compared within a tolerance that eager sets itself: inputs and weights changed by one rounding, under another seed.
Nothing of it reaches the training: gradients are kept apart, buffers and random numbers are put back, and the call
itself is eager's.
"""

from __future__ import annotations

import contextlib
import time
from statistics import median
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from strategies.base import Program, Region, compiler_settings
from strategies.errors import one_line
from strategies.loop import Loop
from strategies.modules import Background as Options
from strategies.optimizer import Optimizer
from strategies.prepare import collected_later
from strategies.regions import give_up, guard_calls, switch_off, switch_on
from trainer.background.calls import Background, Key
from trainer.background.trial import Trial
from trainer.background.update import UpdateTakeover
from trainer.loops.processes import Agreement
from trainer.telemetry.meter import shape_of
from trainer.telemetry.record import Event
from trainer.telemetry.telemetry import Telemetry

CHANCES = 10
"""Optimizer steps within which a region that is ready has to be called."""
LAPS = 4000
"""Steps of each phase of which the seconds are kept."""
NO_NEW_SHAPE = 200
"""Steps without a new shape of batch after which none is waited for, where the data do not tell how many there are."""
SHAPES = (
    "background: batches differ in shape. The helper compiles for the first one; the training waits while others are "
    "compiled. dynamic or buckets in the list lets the helper do that"
)


class Takeover:
    """Of one training; the owner calls ``before_batch`` and ``after_batch`` until ``over``, and ``close`` at its end:
    until then, the helper may be compiling what validation runs. ``settings`` takes the compiler's settings until the
    run ends."""

    def __init__(
        self,
        options: Options,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        settings: contextlib.ExitStack,
        parity: str,
    ) -> None:
        self._options, self._loop, self._program = options, loop, program
        self._telemetry, self._settings, self._parity = telemetry, settings, parity
        self.helper = Background(options, program)
        self._outer = self.helper.outer
        self._pending = list(self._outer)
        self._trial: Trial | None = None
        self._uncollected = contextlib.ExitStack()
        self._shapes: dict[tuple[Any, ...], set[Key]] = {}
        """What regions are called with in batches of each shape, where they take over shape by shape."""
        self._tried: set[tuple[str, Any]] = set()
        self._batch: tuple[Any, ...] = ()
        self._new_at = 0
        self._update: UpdateTakeover | None = None
        self._waited: dict[str, int] = {}
        self._imported = False
        self._between_steps = False  # so that the first step is begun in eager
        self.over = False
        """Whether nothing will be switched any more."""
        self.vague = False
        """Whether a region could not be compared well, so that a whole step has to be."""
        self._switched: dict[str, int] = {}
        self._laps: dict[str, list[float]] = {"eager": [], "switching": []}
        self._last = 0.0
        self._agreement: Agreement | None = None
        self._agreed: list[int] | None = None

    def start(self) -> None:
        """Training begins, in eager; every process has a helper of its own, because device numbers are part of keys."""
        if self._loop.world_size > 1:
            if self.helper.by_shape:
                raise ValueError(
                    "compile.background: with buckets on several devices, each would take over at steps of its own; "
                    "leave one of them out"
                )
            self._agreement = Agreement()
        for strategy in self._program.strategies:
            if isinstance(strategy, Optimizer):
                self._update = UpdateTakeover(strategy, self._program, self.helper.calls, self._parity)
        self.helper.start()
        how = "come from an earlier run's cache" if self.helper.warm else "are compiled by another process"
        self._program.notes.append(f"background: eager at first; {len(self._outer)} regions {how} and take over")
        self._report()

    # ---- around each batch -----------------------------------------------------------------------------------------

    def before_batch(self, batch: Any) -> None:
        """``batch`` is on the device. Let the next regions be tried in its step."""
        before, self._batch = self._batch, shape_of(batch)
        if before not in ((), self._batch) and self._program.padding is None and SHAPES not in self._program.notes:
            self._program.notes.append(SHAPES)
        if not self._between_steps:
            return
        self._between_steps = False
        due = self._options.at_step
        if due is not None:
            if self._loop.steps_done + 2 < due:
                return
            self.helper.wait()
        if not self._imported and self.helper.imported(wait=due is not None):
            self._imported = True
            self._settings.enter_context(compiler_settings(self._program.settings))
        known = self.helper.ready() if self._imported else set()
        if self.helper.by_shape:
            self._try_shapes(known)
        elif (region := self._next({path for path, _ in known})) is not None:
            self._trial = Trial(program=self._program, region=region, parity=self._parity)
            switch_off(self._program, region, self._trial)
        if self._trial is not None:
            self._uncollected.enter_context(collected_later())

    def _try_shapes(self, known: set[Key]) -> None:
        """Let a region be tried that is ready for batches of this shape, each kind of region once for each shape."""
        for region in self._outer:
            if region.path in self._program.eager_parts:
                continue
            gate = self.helper.gates[region.path]
            for shapes, number in gate.numbers.items():
                key = region.path, number
                if key not in known or number in gate.ready or key not in self._shapes.get(self._batch, ()):
                    continue
                if gate.ready and (region.kind, shapes) in self._tried:
                    gate.ready[number] = self._loop.steps_done + 1
                elif self._trial is None:
                    self._trial = gate.trials[number] = Trial(
                        program=self._program, region=region, parity=self._parity, gate=gate, shapes=shapes
                    )

    def _next(self, known: set[str]) -> Region | None:
        """The region to try in this step; several processes try the same one, once all of them can."""
        pending = self._pending
        if self._agreement is not None:
            settled = [one not in self._pending or one.path in known for one in self._outer] + [False]
            left = [one.path in self._program.eager_parts for one in self._outer]
            behind = len(settled) - settled.index(False)
            asked, *answer = self._agreement.exchange(True, behind, self._waits, *left)
            if asked:  # what comes back is of the step before, and nothing at first
                self._agreed = answer
            for region, elsewhere in zip(self._outer, answer[2:], strict=True):
                if elsewhere and region.path not in self._program.eager_parts:
                    self._leave(region, "it stays eager on another process")
            there = 0 if self._agreed is None else len(settled) - self._agreed[0]
            pending = [one for one in pending if one in self._outer[:there]]
        return next((one for one in pending if one.path in known), None)

    def after_batch(self, *, stepped: bool) -> None:
        """A batch is through; between two steps, regions that passed their trial are switched."""
        self._telemetry.disturb()
        if not stepped:
            return
        self._between_steps = True
        self._time()
        self._uncollected.close()  # what a trial has left costs the next step
        for path, gate in self.helper.gates.items():
            if self._batch not in self._shapes:
                self._shapes[self._batch], self._new_at = set(), self._loop.steps_done
            self._shapes[self._batch] |= {(path, number) for number in gate.called}
            gate.called.clear()
        ready = {path for path, _ in self.helper.ready()}
        if self._trial is not None:
            self._judge(self._trial)
            self._trial = None
        for region in list(self._pending):
            reason = self.helper.refused.get(region.path, None if region.path in ready else self.helper.failed)
            if reason is not None:
                self._leave(region, reason)
        if not self._pending and self._update is not None and not self._update.over:
            update_failed = self.helper.failed if self._switched else "no region runs compiled"
            self._update.advance(ready, self.helper.refused, update_failed)
        waits = self._waits if self._agreement is None else self._agreed is None or bool(self._agreed[1])
        if not waits and (not self.helper.by_shape or self._has_all_shapes()):
            self._finish()

    @property
    def _waits(self) -> bool:
        return bool(self._pending) or (self._update is not None and not self._update.over)

    def _has_all_shapes(self) -> bool:
        """Whether every shape that has come is taken over, and no other one is to come soon."""
        gates = [self.helper.gates[path] for path in self._switched]
        if any(len(gate.ready) < len(gate.numbers) for gate in gates) and self.helper.failed is None:
            return False
        padding = self._program.padding
        expected = 0 if padding is None else sum(map(len, padding.batch_sizes.values()))
        complete = 0 < expected <= len(self._shapes)
        return complete or self._loop.steps_done - self._new_at >= NO_NEW_SHAPE

    def _judge(self, trial: Trial) -> None:
        region, gate = trial.region, trial.gate
        if gate is None:
            switch_off(self._program, region)
        else:
            gate.trials.pop(gate.numbers[trial.shapes], None)
        if not trial.over:
            self._waited[region.path] = waited = self._waited.get(region.path, 0) + 1
            if waited >= CHANCES:
                self._leave(region, f"it was not called in {CHANCES} steps")
            return
        if trial.failed is not None:
            self._leave(region, trial.failed)
            return
        self.vague |= trial.vague
        step = self._loop.steps_done + 1
        if gate is not None:
            self._tried.add((region.kind, trial.shapes))
            gate.ready[gate.numbers[trial.shapes]] = step
            if region not in self._pending:
                return
        self._pending.remove(region)
        switch_on(self._program, region)
        for inner in self._inside(region) if gate is None else ():
            switch_on(self._program, inner)
        guard_calls(self._program, self._failed)
        self._switched[region.path] = step
        line = f"{region.path} runs compiled from step {step} on"
        self._telemetry.compiler.events.append(Event(kind="switch", reason=line, step=step))

    def _failed(self, region: Region, error: Exception) -> None:
        """Another shape of input does not compile, before the guards are there: eager runs it from here on."""
        reason = one_line(error)
        rank_zero_warn(f"compile.background: {region.path} runs eager from here on: {reason}")
        give_up(self._program, [region, *self._inside(region)], reason)

    def _inside(self, region: Region) -> list[Region]:
        return [one for one in self._program.regions if one.path.startswith(f"{region.path}.")]

    def _leave(self, region: Region, reason: str) -> None:
        if region in self._pending:
            self._pending.remove(region)
        self._switched.pop(region.path, None)
        if reason not in self._program.eager_parts.values():
            rank_zero_warn(f"compile.background: the run continues in eager: {region.path}: {reason}")
        give_up(self._program, [region, *self._inside(region)], reason)

    def _time(self) -> None:
        now = time.perf_counter()
        laps = self._laps["switching" if self._trial is not None or self._switched else "eager"]
        if self._last and len(laps) < LAPS:
            laps.append(now - self._last)
        self._last = now

    def _finish(self) -> None:
        self.over = True
        self._uncollected.close()
        if self.helper.by_shape:
            self.helper.close()  # a shape that comes later stays eager
        self._report()
        if self._switched:
            where = self._program.report["background"]["switched"]
            rank_zero_info(
                f"compile: background: {len(self._switched)} of {len(self._outer)} regions compiled, switched {where}"
            )

    def _report(self) -> None:
        eager, switching = self._laps["eager"], self._laps["switching"]
        steps = sorted(self._switched.values())
        self._program.report["background"] = {
            "switched_at_step": dict(self._switched),
            "switched": f"in steps {steps[0]} to {steps[-1]}" if steps else None,
            "regions": len(self._outer),
            "shapes": self._shape_facts() if self.helper.by_shape else None,
            "helper_seconds": self.helper.seconds,
            "helper_failed": self.helper.failed,
            "eager_step_seconds_median": median(eager) if eager else None,
            "longest_eager_step_seconds": max(eager, default=None),
            "longest_switching_step_seconds": max(switching, default=None),
        }

    def _shape_facts(self) -> dict[str, dict[str, int]]:
        """By shapes of batch: regions that run compiled, and the step from which the last of them does."""
        gates = self.helper.gates
        found: dict[str, dict[str, int]] = {}
        for batch, keys in self._shapes.items():
            name = " ".join("x".join(map(str, shape)) for shape in batch)
            taken = [gates[path].ready[number] for path, number in keys if number in gates[path].ready]
            found[name] = {"regions": len(taken), "from_step": max(taken, default=0)}
        return found

    def close(self) -> None:
        """The training is over: end the helper, and note what did not take over in time."""
        self.helper.close()
        self._uncollected.close()
        if not self.over:
            self.over = True
            if self._update is not None:
                self._update.leave("the run ended before it was compiled")
            for region in self._pending:
                give_up(self._program, [region, *self._inside(region)], "the run ended before it was compiled")
        self._report()
