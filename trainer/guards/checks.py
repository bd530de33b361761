"""Checks: when regions, the optimizer and captured steps are compared with eager, and what follows where they differ.

Each kind of region is checked at its first call (``strategies.region``). Audits are the same check on later steps: in
rounds that begin at steps 2, 4, 8, ..., after a checkpoint, before the last step, and for what was compiled since; one
kind a step. What does not compile, or differs twice, runs eager from the next step on, on all processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from strategies import Program
from strategies.compile_errors import is_recompile_limit
from strategies.loop_protocol import Loop, StepHook, gathered
from strategies.optimizer.step import installed
from strategies.region import NEVER_SETTLES, Check, Kind, Region, is_ancestor, paths_in_words, submodules
from strategies.tolerance import Difference
from trainer.advice import as_typed
from trainer.guards import CompiledNothing, CompileFailed, Guarding, ParityError
from trainer.telemetry import hardware
from trainer.telemetry.record import AuditDifference, AuditFacts, Event, RunRecord
from trainer.telemetry.source_lines import line_at
from trainer.telemetry.telemetry import Telemetry
from trainer.wording import first_few

if TYPE_CHECKING:
    from strategies.cuda_graph.network import Network
    from strategies.cuda_graph.step_capture import StepCapture
    from strategies.optimizer.step import Update

SHARE = 0.01
"""Of the run's seconds, at most, that audits beyond the first rounds may take."""
FULL_ROUNDS = 32
"""Optimizer steps up to which a round of audits looks at every signature of a kind, whatever that takes."""
WAITS = 16
"""Optimizer steps after which a round that waits for its share of the time is looked at again."""
FIRST_STEPS = 3
"""Optimizer steps after which processes agree in any case on what does not compile."""
CHANCES = 10
"""Optimizer steps within which a region has to be called: what joins later is no mistake."""
NEVER_CALLED = (
    "never called (a module has to be called itself, not its forward or another method, and not within a torch.compile "
    "of your own)"
)
IN_COMPILED_FUNCTION = "never called as a module: it may be part of {}, which a torch.compile of your own compiles"
WAITING = "was never called, and holds nothing that is trained"
OWN_CALL = "never called by torch's own call: its class has a __call__ that goes around it, and stays eager"
CALLED_BESIDE = "called by another thread than the one that trains, and runs eager there"
COPIES_CALLED = "copies of it are called in its place (a meta-learner's clones, DataParallel's replicas), and run eager"
UNDER_A_MODE = (
    "called only where something looks at what runs (FlopCounterMode, a tracer, torch.func), and runs eager there"
)
CALLED_IN_VAIN = "called, and nothing in it was compiled"
JOINED = "was added to the module while it trained and runs eager: what is compiled is chosen before"
SHARDED = "its parameters are sharded: nothing is compared"
CHECKED_BEFORE = "what is compiled was checked in an earlier training of this module"
NOT_AUDITED = "the run ended before a step was audited"


class Checks(StepHook):
    """The checks of one training."""

    def __init__(
        self,
        guarding: Guarding,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        record: RunRecord,
        capture: StepCapture | None = None,
    ) -> None:
        self._capture = capture
        self._guarding, self._loop, self._program = guarding, loop, program
        self._compares = not program.sharded or program.checking.mode != "off"
        """Whether parameters are such that a region can run twice."""
        self._telemetry, self._record = telemetry, record
        self._steps, self._began = 0, time.perf_counter()
        self._next_round = 2
        self._round: deque[Any] = deque()
        self._asked_at = self._round_at = 0
        self._reported: set[str] = set()
        self._evaluations_fell: list[Kind] = []
        """Kinds of which evaluations run eager now."""
        self._fell: list[Update] = []
        """Optimizers whose steps run eager now."""
        self._peak, self._checked, self._repetitions = 0, False, 0
        self.warned: set[str] = set()
        """Lines that were printed as warnings."""
        self._checkpoints: dict[str, int] = {}
        self._saved, self._last_round, self._first_rounds = False, True, 0.0
        self._forget = loop.around_save(self._note_checkpoint)
        self.facts = AuditFacts(verdict="not audited", reason=NOT_AUDITED if self._compares else SHARDED)
        self.first: list[Check] = []
        """The first ones of all kinds; those of an arm of ``auto`` that trained before come with what it compiled."""
        self._news = True
        """Whether the record's facts on the first checks are not what was found since."""
        self._copies, self._peak_without = 0, 0
        self._in_step = False
        if program.step is not None:
            program.step.holds_copies = self._hold_copies
        checking = program.checking
        checking.begin, checking.report, checking.clock = self._begin, self._report, time.perf_counter
        checking.may_spend = self._has_time
        holders = {one.path.rpartition(".")[0] for one in submodules(program.regions) if one.path}
        held = ((path, program.module.get_submodule(path)) for path in holders)
        self._holders = {path: (holder, set(holder.children())) for path, holder in held}
        compiles = any(one.compiles for one in program.strategies)
        record.audits = self.facts if (compiles or capture is not None) and guarding.parity != "off" else None

    # ---- around a step ---------------------------------------------------------------------------------------------

    def before(self, batch: Any) -> None:
        """Ask for another look at all that is proven where a round of audits is due; a step takes one at most."""
        self._in_step = True
        if self._guarding.parity == "off" or not self._compares:
            return
        step = self._steps + 1
        planned = self._loop.steps_planned
        last = planned is not None and self._loop.steps_done + max(len(self._program.kinds), 1) >= planned
        late = step - self._next_round
        if late >= 0 and (step <= FULL_ROUNDS or (late % WAITS == 0 and self._may_spend())):
            self._next_round = 2 * step
            self._begin_round(step)
        elif self._last_round and last:
            self._last_round = False
            self._begin_round(step)
        elif self._saved and step > self._round_at + len(self._program.kinds) and self._may_spend():
            self._begin_round(step)
        if self._round and step != self._asked_at:
            self._asked_at = step
            self._round.popleft()()

    def _begin_round(self, step: int) -> None:
        self._saved, self._round_at = False, step
        for kind in self._program.kinds.values():
            kind.request_checks(of_all=step <= FULL_ROUNDS or not self._last_round)
        if self._round:
            return
        self._round.extend(update.check_next_step for update in self._updates())
        if self._capture is not None and self._program.captures:
            self._round.append(self._capture.audit_next)

    def _updates(self) -> list[Update]:
        """What stands in for the optimizers' steps."""
        return [update for update in map(installed, self._loop.optimizers) if update is not None]

    def _may_spend(self) -> bool:
        """The same on all processes."""
        return self._loop.all_ranks(self._has_time())

    def _has_time(self) -> bool:
        """Whether audits after the first rounds have taken no more than their share so far."""
        return self.facts.seconds - self._first_rounds <= SHARE * (time.perf_counter() - self._began)

    def after(self, *, stepped: bool) -> None:
        """Between two steps: what the step's checks found comes into force."""
        self._in_step = False
        self._steps += stepped
        self.apply_results(agreeing=stepped and self._agrees())
        if stepped and self._steps == 2 * FULL_ROUNDS - 1:
            self._first_rounds = self.facts.seconds
        if stepped and self._steps in (1, CHANCES) and self._record.regions:
            self._verify(last=self._steps == CHANCES)
        if stepped and self._loop.steps_done % self._loop.log_every_n_steps == 0:
            self._check_joined()

    def _agrees(self) -> bool:
        """Whether the processes look at each other's failures after this step; all know it alike."""
        every = self._loop.steps_done % self._loop.log_every_n_steps == 0
        audited = 0 <= self._steps - self._round_at <= max(len(self._program.kinds), 1)
        return self._loop.world_size > 1 and (self._steps <= FIRST_STEPS or audited or every)

    def apply_results(self, *, agreeing: bool = False) -> None:
        """Take what checks have found, this process's own and, where all are ``agreeing``, the others'."""
        telemetry, program = self._telemetry, self._program
        telemetry.compiler.collect()
        for module_class, guard in list(telemetry.compiler.beyond_limit.items()):
            telemetry.compiler.beyond_limit.pop(module_class)
            for kind in program.kinds.values():
                if any(type(one.module) is module_class for one in kind.regions):
                    if kind.error is not None and is_recompile_limit(kind.error):
                        kind.failure = None  # torch's error does not name the guard
                    kind.fail(_beyond_limit(guard), kind.error)
        kinds, updates = list(program.kinds.values()), self._updates()
        for kind in kinds:
            if kind.failure == NEVER_SETTLES:
                recompiles = [one.reason for one in telemetry.compiler.events if one.kind == "recompile"]
                kind.failure = _with_guard(NEVER_SETTLES, recompiles[-1] if recompiles else "")
        if agreeing:
            self._take_from_others(kinds, updates)
        compiled = False
        for kind in kinds:
            kind.apply_remedy()
            new = kind.update_states()
            # Steps before ran eager: their memory is no compiled one's.
            compiled |= any(one.state == "compiled" for one in new)
            if kind.failure is not None and new:
                self._news = True
                self._fell_back(kind, new)
            elif kind.remedies and new:
                self._healed(kind)
            if kind.eager_evaluations and kind.failure is None and kind not in self._evaluations_fell:
                self._evaluations_fell.append(kind)
                self._news = True
                self._evaluations_fell_back(kind)
        for update in updates:
            if update.reason and update not in self._fell:
                self._fell.append(update)
                self._news = True
                self._step_fell_back(update)
        while program.network is not None and program.network.differs:
            network, reason, _, trusted = program.network.differs.pop(0)
            self._graph_differs(network.named, reason, trusted)
        if self._capture is not None and self._capture.differs is not None and "step" not in self._reported:
            self._reported.add("step")
            self._graph_differs("the captured step", *self._capture.differs)
        if self._checked:
            self._checked = False
            hardware.count_peak_from(self._loop.device, 0 if compiled else self._peak)
        self._count_repetitions()
        self._tell_others()
        if self._news:
            self._news = False
            self._write_parity()

    def _take_from_others(self, kinds: list[Kind], updates: list[Update]) -> None:
        """What runs eager on one process does so on all, for the same reason, and is as good as the worst says."""
        own = [(place, one.failure, one.differs) for place, one in enumerate(kinds) if one.failure]
        own_steps = [(place, one.reason, one.differs) for place, one in enumerate(updates) if one.reason]
        own_evaluations = [
            (place, one.eager_evaluations, one.evaluations_differ, one.evaluations_trusted)
            for place, one in enumerate(kinds)
            if one.eager_evaluations
        ]
        every = gathered((own, own_steps, own_evaluations, self._clean_step()))
        for theirs, their_steps, their_evaluations, _ in every:
            for place, reason, differs in theirs:
                kinds[place].fail(f"on another process: {reason}", differs=differs)
            for place, reason, differs in their_steps:
                updates[place].fail(f"on another process: {reason}", differs=differs)
            for place, reason, differs, trusted in their_evaluations:
                kinds[place].run_evaluations_eager(f"on another process: {reason}", differs=differs, trusted=trusted)
        if any(one.differs for one in kinds) or any(one.differs for one in updates):
            clean = [one for *_, one in every if one is not None]
            self.facts.last_clean_step = min(clean) if len(clean) == len(every) else None

    def _tell_others(self) -> None:
        """What the optimizer and captured steps fell back for."""
        for name, reason in self._program.given_up.items():
            if name not in self._reported and name in ("optimizer", "step"):
                self._reported.add(name)
                self._event(f"{name} runs eager: {reason}")

    def _fell_back(self, kind: Kind, regions: list[Region]) -> None:
        line = f"{kind.name}: {paths_in_words(regions)} eager from step {self._loop.steps_done + 1} on: {kind.failure}"
        if kind.remedies:
            line = f"{line}; compiled with {', '.join(one.name for one in kind.remedies)}, too"
        if kind.differs:
            culprit = kind.culprit
            trained = any(one.proven for one in kind.proofs.values()) if culprit is None else culprit.ran
            self._differs(line, audited=trained)
        elif self._guarding.on_compile_error == "fail":
            raise CompileFailed(as_typed(f"on_compile_error=fail: {line}", self._record.script)) from kind.error
        self.warn(line)
        self._event(line)
        done = self._program.report.setdefault("rollback", {"rolled_back": []})["rolled_back"]
        done.append({"parts": [one.path for one in regions], "reason": kind.failure, "step": self._loop.steps_done})

    def _evaluations_fell_back(self, kind: Kind) -> None:
        """What trains is checked by itself, and goes on compiled."""
        line = kind.evaluations_line
        if kind.evaluations_trusted:
            line = f"{line}; figures of earlier evaluations may be wrong by it, weights are not"
            self.facts.verdict, self.facts.reason = "went eager", line
        if kind.evaluations_differ and self._guarding.on_difference == "fail":
            self._write_parity()
            raise ParityError(as_typed(f"on_difference=fail: {line}", self._record.script))
        if line not in self._program.notes:  # of an evaluation before the training
            self.warn(line)
        self._event(line)

    def _healed(self, kind: Kind) -> None:
        line = f"{kind.name}: {kind.first_failure}; compiled with {kind.remedies[-1]} it passes, from step"
        line = f"{line} {self._loop.steps_done + 1} on"
        if line not in self.warned:
            self.warn(line)
            self._event(line)

    def _step_fell_back(self, update: Update) -> None:
        """Its line is among the notes already."""
        line = f"{update.kind}'s step runs eager from step {self._loop.steps_done + 1} on: {update.reason}"
        if update.differs:
            self._differs(line, audited=update.trusted)
        elif update.error is not None and self._guarding.on_compile_error == "fail":
            raise CompileFailed(as_typed(f"on_compile_error=fail: {line}", self._record.script)) from update.error

    def _graph_differs(self, named: str, reason: str, trusted: bool) -> None:
        """A step, or a module that the steps call, whose graph did not repeat it."""
        line = f"{named} runs without a graph from step {self._loop.steps_done + 1} on: {reason}"
        self._event(line)
        self._differs(line, audited=trusted)

    def _differs(self, line: str, *, audited: bool) -> None:
        clean = self.facts.last_clean_step = self._clean_step()
        if audited:
            since = f"since step {clean}, the last one that was audited clean" if clean is not None else "since step 2"
            line = f"{line}; it may have been so {since}. Last good checkpoint: {self._good_checkpoint(clean)}"
            self.facts.verdict, self.facts.reason = "went eager", line
        if self._guarding.on_difference == "fail":
            self.facts.verdict = "failed" if audited else self.facts.verdict
            self._write_parity()
            raise ParityError(as_typed(f"on_difference=fail: {line}", self._record.script))
        if audited:
            self.warn(line)

    def _clean_step(self) -> int | None:
        """The last step that audits found clean, of what differs now the last one in which it was found equal."""
        culprits = [one.culprit for one in self._program.kinds.values() if one.culprit is not None and one.culprit.ran]
        steps = [self.facts.last_clean_step, *(one.clean_step for one in culprits)]
        return None if None in steps else min(step for step in steps if step is not None)

    def _good_checkpoint(self, clean: int | None) -> str:
        until = 1 if clean is None else clean
        there = [(step, path) for path, step in self._checkpoints.items() if step <= until and Path(path).exists()]
        return f"{max(there)[1]} (step {max(there)[0]})" if there else "none yet"

    def _note_checkpoint(self, path: str) -> None:
        self._checkpoints[path] = self._loop.steps_done
        self._saved = True

    def warn(self, line: str) -> None:
        """Say ``line``, and keep it for the record."""
        self.warned.add(line)
        self._program.notes.append(line)
        rank_zero_warn(as_typed(line, self._record.script))

    def _event(self, line: str) -> None:
        events = self._telemetry.compiler.events
        events.append(Event(kind="fallback", reason=line, step=self._loop.steps_done, phase="training"))

    # ---- one check -------------------------------------------------------------------------------------------------

    def _begin(self, checked: Region | Update | Network) -> None:
        if self._telemetry.phase in ("training", "starting"):
            self._telemetry.phase = f"checking {checked.kind}"
        self._telemetry.leave_out()
        if not self._checked:  # in the step under way, whose memory is none of the compiled code's
            self._checked, self._peak = True, hardware.peak_bytes(self._loop.device)

    def _report(self, check: Check) -> None:
        if self._telemetry.phase.startswith("checking "):
            self._telemetry.phase = "training"
        if check.outcome.unseen:
            self._telemetry.disturb()
            return
        if check.proof is not None and check.outcome.how and not check.outcome.wrong:
            check.proof.clean_step = self._loop.steps_done + self._in_step
        if not check.audit:
            self._telemetry.disturb()
            self.first.append(check)
            self._news = True
            return
        facts, step = self.facts, self._loop.steps_done + self._in_step
        facts.seconds = round(facts.seconds + check.seconds, 4)
        if step not in facts.steps:
            facts.steps.append(step)
        if check.outcome.skipped is not None:
            facts.not_compared[check.kind] = check.outcome.skipped
            return
        self.count_audit(check.outcome.differences, step, finite=check.outcome.finite)

    def count_audit(self, differences: list[Difference], step: int, *, finite: bool = True) -> None:
        """Write down what an audit of ``step`` compared; where eager's results are not ``finite``, it shows nothing."""
        facts = self.facts
        for one in differences:
            known = facts.worst.get(one.kind)
            if known is None or known.share <= one.share:
                found = AuditDifference(what=one.name, difference=one.difference, tolerance=one.tolerance, step=step)
                facts.worst[one.kind] = found
        if finite and not any(one.share > 1 for one in differences):
            if facts.verdict == "not audited":
                facts.verdict, facts.reason = "clean", None
            if facts.verdict == "clean":
                facts.last_clean_step = step
        if (pages := self._telemetry.pages) is not None and differences:
            worst = max(one.share for one in differences)
            scalars = {"usage/audit_worst_of_tolerance": worst if worst < float("inf") else None}
            pages.scalars({**scalars, "usage/audit_seconds": facts.seconds}, step)

    def _hold_copies(self, holds: bool) -> None:
        """Copies for a graph to repeat a step are made, or freed: their memory is no part of the run's own."""
        if holds and not self._copies:
            self._peak_without = hardware.peak_bytes(self._loop.device)
        self._copies = max(self._copies + (1 if holds else -1), 0)
        if not self._copies and not holds:
            hardware.count_peak_from(self._loop.device, self._peak_without)

    def _count_repetitions(self) -> None:
        """Steps that a graph has repeated since: those of a graph that is not new are audits."""
        if self._capture is None or self._guarding.parity == "off":
            return
        step = self._loop.steps_done
        for audit in self._capture.audits[self._repetitions :]:
            if not audit.first:
                self.facts.seconds = round(self.facts.seconds + audit.seconds, 4)
                if step not in self.facts.steps:
                    self.facts.steps.append(step)
                self.count_audit(audit.differences, step)
        self._repetitions = len(self._capture.audits)

    def _write_parity(self) -> None:
        """The first checks of all kinds, for the record."""
        if self._guarding.parity == "off" or not any(one.compiles for one in self._program.strategies):
            return
        checks, kinds = self.first, list(self._program.kinds.values())
        compared = [one for one in checks if one.outcome.how]
        different = [str(kind.failure) for kind in kinds if kind.differs]
        different += [kind.evaluations_line for kind in kinds if kind.evaluations_differ]
        different += [update.reason for update in self._fell if update.differs]
        facts: dict[str, Any] = {"mode": self._guarding.parity, "checks": len(compared)}
        if not self._compares:
            facts |= {"verdict": "skipped", "reason": SHARDED}
        elif different:
            facts |= {"verdict": "failed", "reason": "; ".join(different)}
        elif compared:
            facts |= {"verdict": "passed"}
        elif kinds or checks:
            reasons = [one.outcome.skipped or "" for one in checks] + [kind.failure or "" for kind in kinds]
            nothing = CHECKED_BEFORE if any(kind.is_proven for kind in kinds) else "no region was called"
            facts |= {"verdict": "not compared", "reason": next(filter(None, reasons), nothing)}
        else:
            facts |= {"verdict": "skipped", "reason": "nothing compiled"}
        worst: dict[str, Difference] = {}
        for check in compared:
            for one in check.outcome.differences:
                if one.kind not in worst or worst[one.kind].share <= one.share:
                    worst[one.kind] = one
        facts["worst"] = {
            kind: {"what": one.name, "difference": one.difference, "tolerance": one.tolerance}
            for kind, one in worst.items()
        }
        facts["how"] = sorted({one.outcome.how for one in compared})
        facts["seconds"] = round(sum(one.seconds for one in checks), 3)
        self._program.report["parity"] = facts

    # ---- nothing compiled ------------------------------------------------------------------------------------------

    def _check_joined(self) -> None:
        """Say which blocks the training has put beside regions."""
        for path, (holder, known) in self._holders.items():
            for name, child in holder.named_children():
                if child not in known and any(True for _ in child.parameters()):
                    part = f"{path}.{name}".lstrip(".")
                    self._program.given_up[part] = JOINED
                    self.warn(f"{part}: {JOINED}")
                known.add(child)

    def _verify(self, *, last: bool) -> None:
        """Say, once that is certain, which regions compiled nothing."""
        missing = self._not_compiled()
        nothing = bool(missing) and all(one.path in missing or _is_waiting_copy(one) for one in self._program.regions)
        if self._loop.all_ranks(nothing and last) and self._guarding.on_compile_error == "fail":
            raise CompiledNothing(
                as_typed(
                    f"on_compile_error=fail: {self._record.label}: of {len(missing)} regions nothing was compiled in "
                    f"{self._steps} optimizer steps: {_by_reason(missing)}",
                    self._record.script,
                )
            )
        if last and missing:
            self._warn_missing(missing)

    def _not_compiled(self) -> dict[str, str]:
        """Regions of which nothing was compiled so far, with the reason."""
        compiler, program = self._telemetry.compiler, self._program
        missing = {
            one.path: one.reason
            if one.state == "failed"
            else _why_not_called(one, compiler.of_the_user) or CALLED_IN_VAIN
            for one in program.regions
            if one.state == "failed"
            or not (one.called or _is_waiting_copy(one))
            or (
                one.called
                and not compiler.compiled(one.module, held=one.has_code, splits=not one.arguments.get("fullgraph"))
            )
        }
        if self._record.regions is not None:
            done = len(program.regions) - len(missing) - sum(map(_is_waiting_copy, program.regions))
            self._record.regions_compiled = max(self._record.regions_compiled or 0, done)
        return missing

    def _warn_missing(self, missing: dict[str, str]) -> None:
        failed = {one.path for one in self._program.regions if one.state == "failed"}
        new = {path: reason for path, reason in missing.items() if path not in failed and path not in self._reported}
        if new:
            self._reported |= new.keys()
            self.warn(f"{self._record.label}: not compiled in {self._steps} optimizer steps, {_by_reason(new)}")

    def close(self) -> None:
        """The training is over: note what was to be compiled and was not."""
        self._forget()
        if not self._steps:
            return
        self._check_joined()
        there = dict(self._program.module.named_modules(remove_duplicate=False))
        regions, present = submodules(self._program.regions), set(there.values())
        if gone := [one.path for one in regions if one.module not in present]:
            replaced = not {one.module for one in regions}.issuperset(there[path] for path in gone if path in there)
            what = "; what took the place of a region ran eager" if replaced else ""
            self.warn(f"{', '.join(gone)}: no longer in the module{what}")
        missing = self._not_compiled()
        for path, reason in missing.items():
            if not any(is_ancestor(one.path, path) and one.state == "failed" for one in self._program.regions):
                self._program.given_up[path] = reason
        self._warn_missing(missing)
        if waiting := [one.path for one in self._program.regions if _is_waiting_copy(one)]:
            self._program.notes.append(f"{self._record.label}: {', '.join(waiting)}: {WAITING}")
            self._record.regions = len(self._program.regions) - len(waiting)
        self._write_parity()


def _is_waiting_copy(region: Region) -> bool:
    """Whether nobody has called it, and nothing of it is trained: averaged weights that wait for an evaluation."""
    weights = [] if region.called or region.state == "failed" else list(region.module.parameters())
    return bool(weights) and not any(one.requires_grad for one in weights)


def _why_not_called(region: Region, users_compiled: Iterable[str]) -> str | None:
    if region.called:
        return None
    if region.called_beside_a_step:
        return CALLED_BESIDE
    if region.copy_called:
        return COPIES_CALLED
    if region.called_under_a_mode:
        return UNDER_A_MODE
    if type(region.module).__call__ is not nn.Module.__call__:
        return OWN_CALL
    places = [line for line in map(line_at, users_compiled) if line is not None]
    if not places:
        return NEVER_CALLED
    return IN_COMPILED_FUNCTION.format(
        first_few([f"{one.function} ({Path(one.file).name}:{one.number})" for one in places])
    )


def _by_reason(missing: dict[str, str]) -> str:
    reasons = dict.fromkeys(missing.values())
    return "; ".join(f"{', '.join(p for p, why in missing.items() if why == one)}: {one}" for one in reasons)


def _beyond_limit(recompile_reason: str) -> str:
    """Why code may not be compiled once more, with the guard that failed last."""
    line = "one piece of its code was compiled as often as torch._dynamo.config.recompile_limit allows"
    return _with_guard(line, recompile_reason)


def _with_guard(line: str, recompile_reason: str) -> str:
    guard = " ".join(recompile_reason.strip().partition("\n")[0].split())
    return f"{line}; the guard that failed last: {guard}" if guard else line
