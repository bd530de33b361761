"""What compiles and measures a training, whoever's loop it is: the core of ``Compile``.

``CompiledTraining`` applies strategies to a module, begins them in a ``Loop``, makes the ``Session`` that runs its
steps, fills in the record and undoes what must not outlive the run. A framework's binding calls its methods at the
moments of the framework's own loop: ``trainer.callback.Compile`` for Lightning. It imports nothing of Lightning's loop.

A binding calls ``apply_to`` once model and device are known, and ``begin`` once optimizers and restored state are
there. ``batch_begins`` and ``batch_ends`` come around each micro-batch, ``evaluation_begins`` and ``evaluation_ends``
around each batch of an evaluation, ``pause`` before what belongs to no step, ``finish`` or ``fail`` at the end, then
``close``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from strategies import Auto, Program, Ragged, Stage, Strategy
from strategies.base import (
    apply,
    begin,
    compiler_settings,
    disable_other_strategies,
    end,
    label,
    list_complaint,
    ordered,
)
from strategies.compiler_warmup import Preparation
from strategies.loop_protocol import Loop, StepHook
from strategies.regions import compiled_already, exclude_user_compiled, uncompile
from strategies.tolerance import rounding_unit
from strategies.torch_patches import static_marks_removed
from trainer.advice import in_python, refuse_unknown, speaking_python
from trainer.guards import Guarding
from trainer.telemetry import PROFILE, hardware
from trainer.telemetry.record import NOT_STARTED, RunRecord, TrainingInfo
from trainer.telemetry.telemetry import BatchCounter, Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages
from trainer.wording import first_few

if TYPE_CHECKING:
    from strategies.cuda_graph.step_capture import StepCapture
    from strategies.region import Check, Kind, Region
    from trainer.auto.chooser import Chooser
    from trainer.guards.checks import Checks
    from trainer.guards.first_calls import FirstCalls
    from trainer.guards.recompiles import RecompileGuard
    from trainer.guards.timing import Timing
    from trainer.run_end import ScriptRun


@dataclass(slots=True, kw_only=True)
class Hooks:
    """What stands around a step, the outermost first; None for what has nothing to do."""

    chooser: Chooser | None = None
    recompiles: RecompileGuard | None = None
    first_calls: FirstCalls | None = None
    checks: Checks | None = None
    timing: Timing | None = None
    capture: StepCapture | None = None

    def in_order(self) -> list[StepHook]:
        """Those that are there."""
        hooks = (self.chooser, self.recompiles, self.first_calls, self.checks, self.timing, self.capture)
        return [one for one in hooks if one is not None]


class Session:
    """One training of ``program`` in ``loop``, with ``hooks`` around its steps.

    A batch begins by ``before`` once it is on the device, and ``after`` comes once it is through. In between the loop
    runs its own step; where steps are captured, it hands the step to ``hooks.capture`` instead. Nothing of the user's
    is called more often by that.
    """

    def __init__(self, program: Program, loop: Loop) -> None:
        self.program, self.loop = program, loop
        self.hooks = Hooks()
        self._around: list[StepHook] = []
        self._unwrap_step: Callable[[], None] = lambda: None
        self.set_aside: dict[int, tuple[list[Region], dict[Any, Kind], list[Check]]] = {}
        """What strategies have compiled that a chooser tried, by their identity."""

    def put_around(self, hooks: Hooks) -> None:
        """From the next step on, ``hooks`` stand around it."""
        self.unwrap_step()
        self.hooks, self._around = hooks, hooks.in_order()
        if hooks.capture is not None and not self.loop.manual:
            self._unwrap_step = self.loop.wrap_step(hooks.capture.run)

    def unwrap_step(self) -> None:
        """The loop runs its own steps again."""
        self._unwrap_step()
        self._unwrap_step = lambda: None

    def before(self, batch: Any) -> None:
        """``batch`` is on the device and its step begins: regions are in force until it is through."""
        for hook in self._around:
            hook.before(batch)
        self.program.activate(True)

    def after(self, *, stepped: bool) -> None:
        """The batch is through, and an optimizer step is done where it ``stepped``: modules are plain again."""
        self.program.activate(False)
        for hook in reversed(self._around):
            hook.after(stepped=stepped)

    def close(self) -> None:
        """The training is over, finished or broken."""
        self.program.activate(False)
        for hook in reversed(self._around):
            hook.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a ``CompiledTraining`` was given, for good."""

    arguments: dict[str, Any]
    """All, for another one."""
    strategies: list[Strategy]
    """In the order of their stages."""
    declared: dict[str, Any]
    """As ``Program`` takes it."""
    guarding: Guarding
    measuring: Callable[[], Telemetry]
    """Makes what measures one training."""


class CompiledTraining:
    """``trainer.callback.Compile`` without Lightning; it says what the arguments mean.

    For good it has what it was given, the ``_preparation`` that imports Inductor meanwhile where a strategy needs it,
    and the ``_script_run`` that begins and ends records where nobody else does. Of a module it has the ``program``,
    with the ``strategies`` that are applied to it: those that were given, or what ``auto`` has chosen. Each training
    has a ``record``, a ``telemetry`` and, from ``begin`` to ``close``, a ``session``. From ``apply_to`` to ``close``
    ``_settings`` of the process are in force.
    """

    def __init__(
        self,
        strategies: Iterable[Strategy] = (),
        *more: Never,
        whole: Iterable[str] = (),
        blocks: Iterable[str] = (),
        parts: Iterable[str] = (),
        ragged: Iterable[tuple[str | int, int] | tuple[str | int, int, float] | tuple[str | int, int, float, int]] = (),
        count: BatchCounter | None = None,
        warmup_steps: int = 5,
        measure_peak: bool | None = None,
        record: RunRecord | None = None,
        save: bool = True,
        verbose: bool = True,
        parity: str = "on",
        on_compile_error: str = "eager",
        on_slower: str = "warn",
        on_difference: str = "eager",
        profile: str = "off",
        **unknown: Never,
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "more", "unknown", "__class__")
        }
        name = type(self).__name__
        refuse_unknown(name, unknown, CompiledTraining)
        if more:
            raise TypeError(
                f"{name}() takes one list of strategies, {name}([Regional(), Cached()]), and options by name"
            )
        # An iterator serves once.
        kept: dict[str, Any] = {name: list(one) if isinstance(one, Iterator) else one for name, one in given.items()}
        for name in ("whole", "blocks", "parts"):
            if complaint := list_complaint(kept[name]):
                raise ValueError(f"{name}={kept[name]!r} {complaint}")
        for entry in kept["ragged"]:
            pair = not isinstance(entry, str) and isinstance(entry, Sequence) and 2 <= len(entry) <= 4
            if not pair or not isinstance(entry[1], int):
                raise ValueError(
                    f"ragged={kept['ragged']!r}: each is (name, dimension, padding, extra), the last two optional"
                )
        if count is not None and not callable(count):
            raise ValueError(f"count={count!r} is not a function of a batch")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be at least 0")
        if profile not in PROFILE:
            raise ValueError(f"profile={profile!r} is not one of {PROFILE}")
        self._given = Given(
            arguments=kept,
            strategies=ordered(kept["strategies"]),
            declared={
                **{name: tuple(kept[name]) for name in ("whole", "blocks", "parts")},
                "ragged": tuple(Ragged(str(entry[0]), *entry[1:]) for entry in kept["ragged"]),
            },
            guarding=Guarding(
                parity=parity, on_compile_error=on_compile_error, on_slower=on_slower, on_difference=on_difference
            ),
            measuring=functools.partial(
                Telemetry, count=count, warmup_steps=warmup_steps, measure_peak=measure_peak, profile=profile == "on"
            ),
        )
        self.strategies = self._given.strategies
        with speaking_python(record is None or record.script is not None):
            for strategy in self.strategies:
                strategy.check()
        needed = any(strategy.needs_inductor for strategy in self.strategies)
        self._preparation = Preparation() if needed else None
        self._script_run: ScriptRun | None = None
        if record is None:
            from trainer.run_end import ScriptRun  # which needs what prints and judges a run

            self._script_run = ScriptRun(self.strategies, save=save, verbose=verbose)
        self.record = record or RunRecord(task="", label=label(self.strategies), status=NOT_STARTED)
        self.program: Program | None = None
        self._notes_logged = 0
        """Of the program's."""
        self.telemetry = self._given.measuring()
        self.session: Session | None = None
        self._settings = contextlib.ExitStack()
        """Of the process, from ``apply_to`` to ``close``."""
        self._open = False
        """Between these two."""

    @property
    def auto(self) -> Auto | None:
        """The strategy that stands for a choice which is not made yet."""
        return next((strategy for strategy in self.strategies if isinstance(strategy, Auto)), None)

    @property
    def _in_script(self) -> bool:
        """Whether options are those of Python, not of our command line."""
        return self._script_run is not None or self.record.script is not None

    def _words(self, text: str) -> str:
        """``text`` with options as the user writes them."""
        return in_python(text) if self._in_script else text

    # ---- before training -------------------------------------------------------------------------------------------

    def apply_to(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        precision: str,
        sharded: bool = False,
        compared: bool = True,
        trains: bool = True,
        print_line: Callable[[str], None] | None = None,
    ) -> Program:
        """Apply the strategies to ``module``, once; their settings hold until ``close``.

        It has its weights, and may still lie on another device than the ``device`` where it is going to run.
        ``precision`` and ``sharded`` are those of ``Program``. ``compared``: whether a region may run twice.
        ``trains``: what follows is measured anew. ``print_line`` prints a line of progress without harm to a progress
        bar; None = without.
        """
        self._open = True
        built = dict(module.named_modules())
        if new := self.program is None or self.program.built != built:
            if self.program is not None and self.program.module is module:
                uncompile(self.program)
            self.strategies = self._given.strategies  # auto has chosen for other blocks
        if trains and self._script_run is not None:
            self.record = RunRecord(task="", label=label(self.strategies), status=NOT_STARTED)
            self._script_run.prepare(print_line, lambda: self.telemetry)
            if not new and self.program is not None:
                self._report_anew(self.program)
        if new or self.program is None:
            if self._preparation is not None:
                self._preparation.wait_for_imports()
            self.program = Program(
                module=module,
                strategies=tuple(self.strategies),
                device=device,
                precision=precision,
                sharded=sharded,
                **self._given.declared,
            )
            if self.strategies:  # evaluations may come before a training begins, and without one
                self.program.checking.mode = self._given.guarding.parity if compared else "off"
                self.program.checking.unit = rounding_unit(precision, device, module)
            with speaking_python(self._in_script):
                apply(self.strategies, self.program)
            if theirs := [path or type(module).__name__ for path in compiled_already(module)]:
                self.program.notes.append(f"compiled by torch.compile already, in eager steps too: {first_few(theirs)}")
            self.program.built, self._notes_logged = built, 0
            self._log_notes(self.program)
            if self._preparation is not None:
                self._preparation.wait()
                self.record.preparation_seconds = self._preparation.cost_seconds
        self.record.regions = len(self.program.regions) if self.strategies else None
        self._settings.enter_context(static_marks_removed(module))
        self._settings.enter_context(compiler_settings(self.program.settings))
        if trains:
            self.telemetry = self._given.measuring()
            self.telemetry.compiler.start()
        return self.program

    def _report_anew(self, program: Program) -> None:
        """Another training of ``program`` begins: its record says what the strategies did to the program, as the first
        one's does, and has measured nothing yet. The first one's stays as it is."""
        for one in self._given.strategies:
            if one.stage is not Stage.CACHE:  # which begin anew
                self.record.notes += map(self._words, program.applied_notes.get(one.name, ()))
        names = {strategy.name for strategy in (*self._given.strategies, *self.strategies)}
        program.report = {name: copy.deepcopy(facts) for name, facts in program.report.items() if name in names}

    def begin(self, loop: Loop, logs: TrainingInfo | None = None) -> None:
        """Model, optimizer and restored state are in place: begin to measure what trains in ``loop``. Raises ValueError
        where the strategies cannot train there."""
        assert self.program is not None
        if self.program.uses_cuda_graphs and loop.micro_batches > 1:
            # https://github.com/pytorch/pytorch/issues/169545, https://github.com/pytorch/pytorch/issues/96693
            raise ValueError(
                f"trainer.accumulate_grad_batches={loop.micro_batches}: CUDA graphs "
                "(mode reduce-overhead or max-autotune) may silently overwrite accumulated gradients; "
                "use mode=max-autotune-no-cudagraphs or default"
            )
        exclude_user_compiled(self.program)
        self.record.regions = len(self.program.regions) if self.strategies else None
        loop.cuda_graphs = self.program.uses_cuda_graphs
        self.program.optimizers = tuple(loop.optimizers)
        self.program.loop = loop
        with speaking_python(self._in_script):
            begin(self.strategies, self.program)
        if self._script_run is not None:
            self._script_run.begin(self.record, self.program.module, loop, logs or TrainingInfo(folder=None))
        self._log_notes(self.program)
        pages = TensorBoardPages(loop)
        self.session = session = Session(self.program, loop)
        pages.begin(self.record)
        self.telemetry.start(loop, pages)
        self.telemetry.compiler.expect(self.program.graphs_expected)
        chooser: Chooser | None = None
        if (auto := self.auto) is not None:
            from trainer.auto.chooser import Chooser

            chooser = Chooser(auto, loop, self.program, self.telemetry, self.switch)
        session.put_around(self._hooks(session, chooser))

    def _hooks(self, session: Session, chooser: Chooser | None, checked: Sequence[Check] = ()) -> Hooks:
        """What stands around a step; nothing where there is nothing to guard. ``checked``: first checks of what is
        compiled already."""
        if not self.strategies:
            return Hooks()
        from trainer.guards.checks import Checks
        from trainer.guards.first_calls import FirstCalls
        from trainer.guards.recompiles import RecompileGuard
        from trainer.guards.timing import Timing

        loop, program, guarding, padding = session.loop, session.program, self._given.guarding, session.program.padding
        hooks = Hooks(chooser=chooser, recompiles=session.hooks.recompiles)
        if program.step is not None:
            from strategies.cuda_graph.step_capture import StepCapture

            hooks.capture = StepCapture(loop, program, program.step, parity=guarding.parity)
        program.checking.one_kind_a_step = chooser is not None
        hooks.checks = Checks(guarding, loop, program, self.telemetry, self.record, hooks.capture)
        hooks.checks.first += checked
        asked = guarding.parity != "off" or guarding.on_slower == "eager"
        timed = asked and chooser is None
        hooks.timing = Timing(loop, program, self.telemetry, self._found_slower, wanted=timed)
        if padding is not None and padding.warm and padding.edges:
            hooks.recompiles = RecompileGuard(padding, program, loop, self.telemetry.compiler, words=self._words)
        if program.found is not None:
            hooks.first_calls = FirstCalls(loop, program, self.telemetry, self.record)
        return hooks

    def switch(self, strategies: Sequence[Strategy]) -> None:
        """Between two optimizer steps: train under ``strategies``, and those beside ``auto``, from the step that
        begins. Steps so far become warm-up. Raises ValueError where one does not fit this module."""
        session = self.session
        assert session is not None
        program, loop, chooser = session.program, session.loop, session.hooks.chooser
        checks = session.hooks.checks
        assert checks is not None
        checked: list[Check] = []
        self.telemetry.restart()
        for hook in session.hooks.in_order():
            if hook is not chooser:
                hook.close()
        end([one for one in program.strategies if one.captures_step], program)
        program.activate(False)
        for strategy in program.strategies:
            if strategy.stage is Stage.MODULE and not isinstance(strategy, Auto):
                session.set_aside[id(strategy)] = program.regions[:], program.kinds, checks.first
        program.regions, program.kinds, program.found = [], {}, None
        others = [one for one in self.strategies if not isinstance(one, Auto)]
        program.strategies = tuple(ordered([*others, *strategies]))
        program.given_up.pop("step", None)
        settings = dict(program.settings)
        try:
            for strategy in ordered(strategies):
                if id(strategy) in session.set_aside:  # what it compiled is still proven
                    regions, program.kinds, checked = session.set_aside[id(strategy)]
                    program.regions = regions[:]
                else:
                    strategy.apply(program)
            if program.settings != settings:
                self._settings.enter_context(compiler_settings(program.settings))
            begin([one for one in strategies if one.captures_step], program)
        finally:
            hardware.free_unused_memory(loop.device)
            self.record.regions, self.record.regions_compiled = len(program.regions), None
            self.telemetry.compiler.expect(program.graphs_expected)
            session.put_around(self._hooks(session, chooser, checked))

    def _found_slower(self, line: str) -> None:
        """Steps of the run are slower than eager's."""
        assert self.session is not None
        program, checks = self.session.program, self.session.hooks.checks
        assert checks is not None
        gives_up = self._given.guarding.on_slower == "eager"
        if gives_up and not program.captures:
            for kind in program.kinds.values():
                kind.fail(f"{line}; on_slower=eager")
            disable_other_strategies(program, f"{line}; on_slower=eager")
            program.report["slowdown"]["rolled_back"] = [one.path for one in program.regions]
        elif gives_up:
            line += "; on_slower=eager leaves captured steps as they are"
        checks.warn(line)

    # ---- the hot path ----------------------------------------------------------------------------------------------

    def batch_begins(self, batch: Any) -> None:
        """``batch`` is on the device and its step begins."""
        assert self.session is not None
        self.session.before(batch)
        self._log_notes(self.session.program)
        self.mark_step()
        self.telemetry.batch_start()

    def batch_ends(self, loss: Any, batch: Any) -> None:
        """``batch`` is through; ``loss`` is one detached number in any shape, divided by the micro-batches of a step;
        anything else is not recorded."""
        assert self.session is not None
        capture = self.session.hooks.capture
        if capture is not None and not capture.done_capturing:
            self.telemetry.disturb()
        number = isinstance(loss, torch.Tensor) and loss.numel() == 1
        stepped = self.telemetry.batch_end(loss.reshape(()) if number else None, batch)
        self.session.after(stepped=stepped)

    def mark_step(self) -> None:
        """A step or an evaluation batch begins. Without a backward, only this mark tells CUDA graphs which outputs
        still belong together: one region's output would be overwritten by the next region of the same step."""
        if self.program is not None and self.program.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def evaluation_begins(self, batch: Any) -> None:
        """A batch of an evaluation is on the device, in a training or outside of one."""
        if self.program is None:
            return
        if self._hooks_now.recompiles is not None:
            self._hooks_now.recompiles.before_evaluation(batch)
        self.program.activate(True)
        self.mark_step()

    def evaluation_ends(self) -> None:
        """It is through."""
        if self.program is None:
            return
        self.program.activate(False)
        hooks = self._hooks_now
        if hooks.checks is not None:
            hooks.checks.apply_results()
        else:
            for kind in self.program.kinds.values():
                if kind.update_states() and kind.failure is not None:
                    line = f"{kind.name} runs eager: {kind.failure}"
                    rank_zero_warn(self._words(line))
                if (line := kind.evaluations_line) and line not in self.program.notes:
                    self.program.notes.append(line)
        if hooks.recompiles is not None:
            hooks.recompiles.after_evaluation()

    def evaluation_over(self) -> None:
        """A whole evaluation within the training is over: its shapes have all come."""
        if (recompiles := self._hooks_now.recompiles) is not None:
            recompiles.validated()

    @property
    def _hooks_now(self) -> Hooks:
        """Those of the training under way; none outside of one."""
        return Hooks() if self.session is None else self.session.hooks

    def pause(self, phase: str) -> None:
        """``validating``, ``saving`` or something else begins that is not part of any step."""
        self.telemetry.pause(phase)

    # ---- after training --------------------------------------------------------------------------------------------

    def finish(self, *, together: bool = True) -> None:
        """Read what is still on its way and fill in the record; ``together`` as in ``Telemetry.fill``."""
        self.telemetry.compiler.collect()
        session = self.session
        if session is None:  # it failed before training started
            return
        self.telemetry.finish()
        chooser = session.hooks.chooser
        if chooser is not None:
            self.record.chosen_strategies = [strategy.facts() for strategy in chooser.finish()]
        elif any(isinstance(one, Auto) for one in self._given.strategies):  # an earlier training chose
            chosen = [one for one in self.strategies if all(one is not given for given in self._given.strategies)]
            self.record.chosen_strategies = [strategy.facts() for strategy in chosen]
        session.close()
        self.telemetry.fill(self.record, session.program, together=together)
        if chooser is not None:
            # What was chosen is chosen for good: another fit continues with it.
            self.strategies = chooser.restore()
            session.program.strategies = tuple(self.strategies)
            session.hooks.chooser = None
        if self.telemetry.pages is not None and (self.strategies or "auto" in self.record.report):
            self.telemetry.pages.events(self.record.events, self.telemetry.steps_done)

    def fail(self, error: BaseException) -> None:
        """Keep what was measured of a run that ends early; a broken device must not hide the first error."""
        if self._script_run is not None:
            self._script_run.failed(self.record, error)
        fill = functools.partial(self.telemetry.fill, self.record, self.program)  # as far as a broken device was read
        for read in (self.finish, self.finish, fill):
            # Twice: where a signal to the group has killed data workers, torch's signal handler raises for each one,
            # wherever the main thread is, and so perhaps in here.
            with contextlib.suppress(Exception):
                read(together=False)
                break
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Let the strategies undo what must not outlive the run; restore the process-wide compiler settings."""
        with self._settings:
            if self.session is not None:
                self.session.unwrap_step()
            if self.program is not None and self._open:
                self._open = False
                try:
                    end(self.strategies, self.program)
                finally:
                    self._log_notes(self.program)
        self.session = None
        self.telemetry.compiler.stop()
        if self._script_run is not None:
            self._script_run.end(self.record, self.close_pages)

    def close_pages(self, summary: dict[str, str]) -> None:
        """Write the last TensorBoard pages once the record is complete."""
        if self.telemetry.pages is not None:
            self.telemetry.pages.finish(self.record, summary)

    def _log_notes(self, program: Program) -> None:
        for note in program.notes[self._notes_logged :]:
            said = self._words(note)
            self.record.notes.append(said)
            checks = self._hooks_now.checks
            if checks is None or note not in checks.warned:
                rank_zero_info(f"compile: {said}")
        self._notes_logged = len(program.notes)
