"""Candidates of ``compile=auto``, and the helper process that compiles them while the training continues."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strategies import Program, Strategy
from strategies.base import Region, compiler_settings
from strategies.loop import Loop
from strategies.modules import TOGETHER
from strategies.modules import Background as Options
from strategies.prepare import Preparation, collected_later, is_prepared
from strategies.regions import outermost, switch_off, switch_on
from trainer.auto import Knowledge
from trainer.background import release
from trainer.background.calls import Background
from trainer.background.trial import Trial
from trainer.loops.processes import Agreement


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One strategy of the MODULE stage; what it has compiled stays with it while it is off."""

    strategy: Strategy
    refused: dict[str, str] = field(default_factory=dict)
    """Regions that stay eager because its helper cannot compile them, with the reason."""
    vague: bool = False
    """Whether a region's trial could say nothing, so that whole steps have to be compared."""
    trial_seconds: float = 0.0
    _outline: Program | None = field(default=None, init=False)
    _regions: list[Region] | None = field(default=None, init=False)
    _prepared: bool = field(default=False, init=False)

    def outline(self, program: Program) -> Program:
        """``program`` as this strategy would compile it, its regions named alone. Raises ValueError where it does not
        apply."""
        if self._outline is None:
            view = dataclasses.replace(program, outlined=True, regions=[], notes=[], settings={}, report={})
            self.strategy.apply(view)
            self._outline = view
        return self._outline

    def prepare(self, program: Program, settings: contextlib.ExitStack) -> None:
        """Let it be compiled from now on, once; compiler settings hold until ``settings`` is closed."""
        if not self._prepared:
            self._prepared = True
            if self.strategy.needs_inductor and not is_prepared():
                Preparation().wait()
            view = self.outline(program)
            settings.enter_context(compiler_settings(view.settings))

    def put_on(self, program: Program, settings: contextlib.ExitStack) -> None:
        """Let the program's modules, eager so far, run compiled in this way. Raises ValueError where it does not
        apply."""
        view = self.outline(program)
        self.prepare(program, settings)
        if self._regions is None:
            program.eager_parts.update(self.refused)
            left_out = tuple(f"{path}." for path in self.refused)
            self._regions = [one for one in view.regions if not f"{one.path}.".startswith(left_out)]
            program.notes.extend(view.notes)
        program.regions[:] = self._regions
        for region in self._regions:
            switch_on(program, region)
        program.settings.update(view.settings)


class Candidates:
    """Those of one run, by the names of their strategies; one helper at a time compiles what trains.

    Args:
        options: What a helper may use; None for no helper.
        known: Whose ``helped`` says what helpers compile, and whether they have.
    """

    def __init__(
        self,
        options: Options | None,
        loop: Loop,
        program: Program,
        settings: contextlib.ExitStack,
        parity: str,
        known: Knowledge,
    ) -> None:
        self._options, self._loop, self._program, self.known = options, loop, program, known
        self._settings, self._parity = settings, parity
        self.trying = False
        """Whether regions that the helper has compiled are tried, one a step, in steps of eager."""
        self._untried: list[Region] = []
        self._through = False
        self._trial: Trial | None = None
        self._uncollected = contextlib.ExitStack()
        self.named: dict[str, Candidate] = {}
        self._helpers: dict[str, Background] = {}
        """Of those that are compiled while the training continues."""
        self.compiling: str | None = None
        """What a helper is at work on."""
        self._recording = False
        self._agreement: Agreement | None = None

    def record_calls(self, others: Sequence[Strategy], strategies: Mapping[str, type[Strategy]]) -> None:
        """Where a helper can compile beside the ``others`` of the run, keep what each candidate, one of ``strategies``,
        is called with in this step, which is not captured."""
        self._recording = True
        options, arms = self._options, list(self.known.arms.values())
        able = self._program.padding is None or self._program.padding.dynamic is not False
        able = able and all(other.name in TOGETHER for other in others)
        if not self._loop.everywhere(able and options is not None):
            return
        assert options is not None
        for name in ("regional", "whole"):
            wanted = any(arm.module == name and not arm.failed for arm in arms)
            if not wanted or any(arm.module == name and arm.cached for arm in arms):
                continue
            candidate = Candidate(strategy=strategies[name]())
            with contextlib.suppress(Exception):  # comes up again, with its reason, when it is put on
                helper = Background(options, candidate.outline(self._program))
                helper.record()
                candidate.refused = helper.refused
                self.named[name], self._helpers[name], self.known.helped[name] = candidate, helper, False

    def compile_beside(self, name: str) -> None:
        """Start a helper; every process has its own, at the same step."""
        self.compiling = name
        if self._loop.world_size > 1:
            self._agreement = Agreement()
        self._helpers[name].start()

    def try_next(self) -> None:
        """A step of eager begins: let a region be tried in it that the helper has compiled."""
        assert self.compiling is not None
        if self._untried:
            view, region = self.named[self.compiling].outline(self._program), self._untried.pop(0)
            self._trial = Trial(program=view, region=region, parity=self._parity)
            switch_off(view, region, self._trial)
            self._uncollected.enter_context(collected_later())

    def _judge(self, name: str) -> None:
        """A step of eager is over in which a region may have been tried."""
        candidate, trial = self.named[name], self._trial
        if not self.trying:
            self.trying = True
            candidate.prepare(self._program, self._settings)
            everything = outermost(candidate.outline(self._program))
            self._untried = [one for one in everything if one.path not in candidate.refused]
        elif trial is not None:
            self._trial = None
            switch_off(trial.program, trial.region)
            candidate.vague |= trial.vague
            candidate.trial_seconds += trial.seconds
            if not trial.passed:
                candidate.refused[trial.region.path] = trial.failed or "it was not called in the step of its trial"
        self._through = not self._untried
        self.trying = not self._through or self._agreement is not None  # where each waits for the others

    def after_step(self, *, may_try: bool, pays: bool) -> bool:
        """A step is over; returns whether the helper at work is through and what it has compiled was tried, or it has
        failed, for all processes alike. ``may_try``: whether steps of eager may follow for it. ``pays``: whether the
        steps left would pay for what it compiles."""
        self._uncollected.close()  # what a trial has left costs the next step
        if self._recording:
            self._stop_recording()
        if self.compiling is None:
            return False
        candidate, helper = self.named[self.compiling], self._helpers[self.compiling]
        imported = helper.imported()  # begins with the first region, while the helper compiles the others
        too_late = not (self.trying or self._through or pays)
        failed = too_late or (helper.done and not helper.complete)
        if helper.complete and not too_late and imported and not self._through and (may_try or self.trying):
            self._judge(self.compiling)
        # Forwards in eval mode come last: only where whole steps have to be compared are they waited for.
        waits = not failed and not (self._through and (helper.done or not candidate.vague))
        if self._agreement is not None:
            waits, failed, sent = map(bool, self._agreement.exchange(waits, failed, True))
            waits = waits or not sent  # the first answer says nothing
        if waits and not failed:
            return False
        if self._agreement is not None:
            self._agreement.settle()
            self._agreement = None
        self.trying = self._through = False
        candidate.vague = self._loop.anywhere(candidate.vague)
        reason = "too few steps are left" if too_late else helper.failed
        reason = reason or next(iter(helper.refused.values()), "that of another process failed")
        for arm in [one for one in self.known.arms.values() if one.module == self.compiling]:
            arm.helper_seconds = helper.seconds
            arm.not_ready = f"not compiled by the helper: {reason}" if failed else None
        if failed:
            self._program.notes.append(f"auto: the training continues without {self.compiling}: {reason}")
        for region in outermost(candidate.outline(self._program)):
            if self._loop.anywhere(region.path in helper.refused):
                helper.refused.setdefault(region.path, "it stays eager on another process")
        self.known.helped[self.compiling], self.compiling = not failed, None
        if too_late or not (self._loop.validates or candidate.vague):
            helper.close()
        return True

    def _stop_recording(self) -> None:
        self._recording = False
        for name in reversed(list(self.known.helped)):
            self._helpers[name].stop_recording()
            if self._loop.anywhere(not self._helpers[name].calls):
                del self.known.helped[name], self._helpers[name]
                candidate = self.named[name]
                reason = next(iter(candidate.refused.values()), "another process cannot describe it to its helper")
                candidate.refused = {}
                line = f"auto: {name} compiled in the foreground: {reason}"
                candidate.outline(self._program).notes.append(line)
        if not self.known.helped:
            release()

    def close(self) -> None:
        """End the helper. May be called twice."""
        self.compiling = None
        self._uncollected.close()
        for helper in self._helpers.values():
            helper.close()
