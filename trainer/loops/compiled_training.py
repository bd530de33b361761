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
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from strategies import Program, Ragged, Stage, Strategy
from strategies.base import apply, begin, compiler_settings, disable_other_strategies, end, label, ordered
from strategies.compiler_warmup import Preparation
from strategies.loop_protocol import Loop, StepHook
from strategies.regions import uncompile
from strategies.tolerance import rounding_unit
from trainer.advice import in_python, speaking_python
from trainer.guards import Guarding
from trainer.loops.training_info import NOT_STARTED, TrainingInfo
from trainer.session import Session
from trainer.telemetry import PROFILE, hardware
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import BatchCounter, Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages

if TYPE_CHECKING:
    from strategies.cuda_graph.step_capture import StepCapture
    from strategies.region import Kind, Region
    from trainer.auto.chooser import Chooser
    from trainer.guards.checks import Checks
    from trainer.guards.recompiles import RecompileGuard
    from trainer.run_end import ScriptRun


class CompiledTraining:
    """``trainer.callback.Compile`` without Lightning; it says what the arguments mean."""

    def __init__(
        self,
        strategies: Iterable[Strategy] = (),
        *,
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
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        # An iterator serves once.
        kept: dict[str, Any] = {name: list(one) if isinstance(one, Iterator) else one for name, one in given.items()}
        strategies, whole, blocks = kept["strategies"], kept["whole"], kept["blocks"]
        parts, ragged, self._arguments = kept["parts"], kept["ragged"], kept
        self._guarding = Guarding(
            parity=parity, on_compile_error=on_compile_error, on_slower=on_slower, on_difference=on_difference
        )
        self.strategies = ordered(strategies)
        with speaking_python(record is None or record.script is not None):
            for strategy in self.strategies:
                strategy.check()
        self._choosing = next((strategy for strategy in self.strategies if strategy.chooser is not None), None)
        self._given = self.strategies, self._choosing
        needed = any(strategy.needs_inductor for strategy in self.strategies)
        self._preparation = Preparation() if needed else None
        self._script_run: ScriptRun | None = None
        if record is None:
            from trainer.run_end import ScriptRun  # which needs what prints and judges a run

            self._script_run = ScriptRun(self.strategies, save=save, verbose=verbose)
        self.record = record or RunRecord(task="", label=label(self.strategies), status=NOT_STARTED)
        self.program: Program | None = None
        self._declared: dict[str, Any] = {
            "whole": tuple(whole),
            "blocks": tuple(blocks),
            "parts": tuple(parts),
            "ragged": tuple(Ragged(str(entry[0]), *entry[1:]) for entry in ragged),
        }
        if profile not in PROFILE:
            raise ValueError(f"profile={profile!r} is not one of {PROFILE}")
        self._measuring = functools.partial(
            Telemetry, count=count, warmup_steps=warmup_steps, measure_peak=measure_peak, profile=profile == "on"
        )
        self._loop: Loop | None = None
        self._settings = contextlib.ExitStack()
        self._pages: TensorBoardPages | None = None
        self._session: Session | None = None
        self._checks: Checks | None = None
        self._capture: StepCapture | None = None
        self._chooser: Chooser | None = None
        self._recompiles: RecompileGuard | None = None
        self._unwrap_step: Callable[[], None] = lambda: None
        """Gives the loop its own steps back."""
        self._set_aside: dict[int, tuple[list[Region], dict[Any, Kind]]] = {}
        """What strategies have compiled that a chooser tried, by their identity."""
        self._open, self._notes_logged = False, 0
        self._built: dict[str, nn.Module] = {}
        self._applied_notes: tuple[str, ...] = ()
        self.telemetry = self._measuring()

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
        if new := self._built != (built := dict(module.named_modules())):
            if self.program is not None and self.program.module is module:
                uncompile(self.program)
            self.strategies, self._choosing = self._given  # auto has chosen for other blocks
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
                **self._declared,
            )
            if self.strategies:  # evaluations may come before a training begins, and without one
                self.program.checking.mode = self._guarding.parity if compared else "off"
                self.program.checking.unit = rounding_unit(precision, device, module)
            with speaking_python(self._in_script):
                apply(self.strategies, self.program)
            self._built, self._notes_logged = built, 0
            self._applied_notes = tuple(self.program.notes)
            self._log_notes(self.program)
            if self._preparation is not None:
                self._preparation.wait()
                self.record.preparation_seconds = self._preparation.cost_seconds
        self.record.regions = len(self.program.regions) if self.strategies else None
        self._cuda_graphs = self.program.uses_cuda_graphs
        self._settings.enter_context(compiler_settings(self.program.settings))
        if trains:
            self.telemetry = self._measuring()
            self.telemetry.compiler.start()
        return self.program

    def _report_anew(self, program: Program) -> None:
        """Another training of ``program`` begins: its record says what the strategies did to the program, as the first
        one's does, and has measured nothing yet. The first one's stays as it is."""
        caches = tuple(f"{one.name}: " for one in self._given[0] if one.stage is Stage.CACHE)  # which begin anew
        self.record.notes += [self._words(note) for note in self._applied_notes if not note.startswith(caches)]
        names = {strategy.name for strategy in (*self._given[0], *self.strategies)}
        program.report = {name: copy.deepcopy(facts) for name, facts in program.report.items() if name in names}

    def begin(self, loop: Loop, logs: TrainingInfo | None = None) -> None:
        """Model, optimizer and restored state are in place: begin to measure what trains in ``loop``. Raises ValueError
        where the strategies cannot train there."""
        assert self.program is not None
        if self._cuda_graphs and loop.micro_batches > 1:
            # https://github.com/pytorch/pytorch/issues/169545, https://github.com/pytorch/pytorch/issues/96693
            raise ValueError(
                f"trainer.accumulate_grad_batches={loop.micro_batches}: CUDA graphs "
                "(mode reduce-overhead or max-autotune) may silently overwrite accumulated gradients; "
                "use mode=max-autotune-no-cudagraphs or default"
            )
        loop.cuda_graphs = self._cuda_graphs
        self.program.optimizers = tuple(loop.optimizers)
        self.program.loop = self._loop = loop
        with speaking_python(self._in_script):
            begin(self.strategies, self.program)
        if self._script_run is not None:
            self._script_run.begin(self.record, self.program.module, loop, logs)
        self._log_notes(self.program)
        self._pages = TensorBoardPages(loop)
        self._pages.begin(self.record)
        self.telemetry.start(loop, self._pages)
        self.telemetry.compiler.expect(self.program.graphs_expected)
        if self._choosing is not None:
            assert self._choosing.chooser is not None
            self._set_aside.clear()
            make: Any = pkgutil.resolve_name(self._choosing.chooser)
            self._chooser = make(self._choosing, loop, self.program, self.telemetry, self.switch)
        self._session = Session(self.program, self._hooks(loop, self.program))
        if self.strategies and not loop.manual:
            self._unwrap_step = loop.wrap_step(self._session.run)

    def _hooks(self, loop: Loop, program: Program) -> list[StepHook]:
        """What stands around a step, the outermost first; nothing where there is nothing to guard."""
        if not self.strategies:
            return []
        from trainer.guards.checks import Checks
        from trainer.guards.first_calls import FirstCalls
        from trainer.guards.recompiles import RecompileGuard
        from trainer.guards.timing import Timing

        capture: StepCapture | None = None
        if program.step is not None:
            from strategies.cuda_graph.step_capture import StepCapture

            capture = StepCapture(loop, program, program.step, parity=self._guarding.parity)
        program.checking.one_kind_a_step = self._choosing is not None
        checks = Checks(self._guarding, loop, program, self.telemetry, self.record, self._pages, capture)
        asked = self._guarding.parity != "off" or self._guarding.on_slower == "eager"
        timed = asked and self._choosing is None
        timing = Timing(loop, program, self.telemetry, self._found_slower, capture, wanted=timed)
        padding = program.padding
        if padding is not None and padding.warm and padding.edges:
            self._recompiles = RecompileGuard(padding, program, loop, self.telemetry.compiler, words=self._words)
        calls = FirstCalls(loop, program, self.telemetry, self.record) if program.found is not None else None
        hooks = (self._chooser, self._recompiles, calls, checks, timing, capture)
        self._checks, self._capture = checks, capture
        return [one for one in hooks if one is not None]

    def switch(self, strategies: Sequence[Strategy]) -> None:
        """Between two optimizer steps: train under ``strategies``, and those beside ``auto``, from the step that
        begins. Steps so far become warm-up. Raises ValueError where one does not fit this module."""
        program, loop, session = self.program, self._loop, self._session
        assert program is not None
        assert loop is not None
        assert session is not None
        self.telemetry.restart()
        for hook in session.hooks[:]:
            if hook is not self._chooser:
                hook.close()
        end([one for one in program.strategies if one.captures_step], program)
        program.activate(False)
        for strategy in program.strategies:
            if strategy.stage is Stage.MODULE and strategy.chooser is None:
                self._set_aside[id(strategy)] = program.regions[:], program.kinds
        program.regions, program.kinds, program.found = [], {}, None
        others = [one for one in self.strategies if one.chooser is None]
        program.strategies = tuple(ordered([*others, *strategies]))
        program.given_up.pop("step", None)
        settings = dict(program.settings)
        try:
            for strategy in ordered(strategies):
                if id(strategy) in self._set_aside:  # what it compiled is still proven
                    regions, program.kinds = self._set_aside[id(strategy)]
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
            session.hooks[:] = self._hooks(loop, program)

    def _found_slower(self, line: str) -> None:
        """Steps of the run are slower than eager's."""
        program = self.program
        assert program is not None
        assert self._checks is not None
        if self._guarding.on_slower == "eager" and not program.captures:
            for kind in program.kinds.values():
                kind.fail(f"{line}; on_slower=eager")
            disable_other_strategies(program, f"{line}; on_slower=eager")
            program.report["slowdown"]["rolled_back"] = [one.path for one in program.regions]
        elif self._guarding.on_slower == "eager":
            line += "; on_slower=eager leaves captured steps as they are"
        self._checks.warn(line)

    # ---- the hot path ----------------------------------------------------------------------------------------------

    def batch_begins(self, batch: Any) -> None:
        """``batch`` is on the device and its step begins."""
        assert self.program is not None
        assert self._session is not None
        self._session.before(batch)
        self._log_notes(self.program)
        self.mark_step()
        self.telemetry.batch_start()

    def batch_ends(self, loss: Any, batch: Any) -> None:
        """``batch`` is through; ``loss`` is one detached number in any shape, divided by the micro-batches of a step;
        anything else is not recorded."""
        assert self._session is not None
        if self._capture is not None and not self._capture.done_capturing:
            self.telemetry.disturb()
        number = isinstance(loss, torch.Tensor) and loss.numel() == 1
        stepped = self.telemetry.batch_end(loss.reshape(()) if number else None, batch)
        self._session.after(stepped=stepped)

    def mark_step(self) -> None:
        """A step or an evaluation batch begins. Without a backward, only this mark tells CUDA graphs which outputs
        still belong together: one region's output would be overwritten by the next region of the same step."""
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def evaluation_begins(self, batch: Any) -> None:
        """A batch of an evaluation is on the device, in a training or outside of one."""
        if self.program is None:
            return
        if self._recompiles is not None:
            self._recompiles.before_evaluation(batch)
        self.program.activate(True)
        self.mark_step()

    def evaluation_ends(self) -> None:
        """It is through."""
        if self.program is None:
            return
        self.program.activate(False)
        if self._checks is not None:
            self._checks.apply_results()
        else:
            for kind in self.program.kinds.values():
                if kind.update_states() and kind.failure is not None:
                    line = f"{kind.name} runs eager: {kind.failure}"
                    rank_zero_warn(self._words(line))
        if self._recompiles is not None:
            self._recompiles.after_evaluation()

    def pause(self, phase: str) -> None:
        """``validating``, ``saving`` or something else begins that is not part of any step."""
        self.telemetry.pause(phase)

    # ---- after training --------------------------------------------------------------------------------------------

    def finish(self, *, together: bool = True) -> None:
        """Read what is still on its way and fill in the record; ``together`` as in ``Telemetry.fill``."""
        self.telemetry.compiler.collect()
        if self._pages is None or self._loop is None:  # it failed before training started
            return
        self.telemetry.finish()
        if self._chooser is not None:
            self.record.chosen_strategies = [strategy.facts() for strategy in self._chooser.finish()]
        elif self._choosing is not self._given[1]:  # an earlier training chose
            chosen = [one for one in self.strategies if all(one is not given for given in self._given[0])]
            self.record.chosen_strategies = [strategy.facts() for strategy in chosen]
        if self._session is not None:
            self._session.close()
        self.telemetry.fill(self.record, self.program, together=together)
        if self._chooser is not None and self.program is not None:
            # What was chosen is chosen for good: another fit continues with it.
            self.strategies = self._chooser.restore()
            self.program.strategies = tuple(self.strategies)
            self._chooser = self._choosing = None
        if self.strategies or "auto" in self.record.report:
            self._pages.events(self.record.events, self.telemetry.steps_done)

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
            self._unwrap_step()
            self._unwrap_step = lambda: None
            if self.program is not None and self._open:
                self._open = False
                try:
                    end(self.strategies, self.program)
                finally:
                    self._log_notes(self.program)
        # Another training has its own.
        self._session = self._loop = self._checks = self._capture = self._recompiles = None
        self.telemetry.compiler.stop()
        if self._script_run is not None:
            self._script_run.end(self.record, self.close_pages)

    def close_pages(self, summary: dict[str, str]) -> None:
        """Write the last TensorBoard pages once the record is complete."""
        if self._pages is not None:
            self._pages.finish(self.record, summary)

    def _log_notes(self, program: Program) -> None:
        for note in program.notes[self._notes_logged :]:
            said = self._words(note)
            self.record.notes.append(said)
            if self._checks is None or note not in self._checks.warned:
                rank_zero_info(f"compile: {said}")
        self._notes_logged = len(program.notes)
