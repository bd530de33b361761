"""What compiles and measures a training, whoever's loop it is: the core of ``Compile``.

``CompiledTraining`` applies strategies to a module, begins them in a ``Loop``, guards and measures the steps, fills in
the record and undoes what must not outlive the run. A framework's binding calls its methods at the moments of the
framework's own loop: ``trainer.callback.Compile`` for Lightning. It imports nothing of Lightning's loop.

A binding calls ``apply_to`` once model and device are known, and ``begin`` once optimizers and restored state are
there. ``batch_begins`` and ``batch_ends`` come around each micro-batch, ``pause`` before what belongs to no step,
``finish`` or ``fail`` at the end, then ``close``.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from strategies import Program, Ragged, Stage, Strategy
from strategies.base import apply, begin, compiler_settings, end, give_up_others, label, ordered
from strategies.loop import Loop, MicroBatch
from strategies.prepare import Preparation
from strategies.regions import give_up, uncompile
from trainer.guards import Guarding
from trainer.telemetry import PROFILE, hardware
from trainer.telemetry.record import Event, RunRecord
from trainer.telemetry.telemetry import BatchCounter, Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages

if TYPE_CHECKING:
    from strategies.cuda_graph.steps import StepCapture
    from trainer.auto.chooser import Chooser
    from trainer.background.takeover import Takeover
    from trainer.guards.audits import Audits
    from trainer.guards.compare import ParityError
    from trainer.guards.guards import Guards
    from trainer.script import OwnRun

NOT_STARTED = "not started"
"""Status of a record whose training is still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """What a framework's binding knows of a training beside its ``Loop``."""

    folder: Path | None
    """Where the training's logs go; None for no file."""
    shared: bool = False
    """Whether other trainings log into the same folder."""
    batch_size: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Options of the framework's trainer that a step depends on."""
    resumed_from: str | None = None
    seed: int | None = None


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
        on_compile_error: str = "fail",
        on_slower: str = "warn",
        on_difference: str = "fail",
        profile: str = "off",
    ) -> None:
        self._guarding = Guarding(
            parity=parity, on_compile_error=on_compile_error, on_slower=on_slower, on_difference=on_difference
        )
        self.strategies = ordered(strategies)
        for strategy in self.strategies:
            strategy.check()
        self._choosing = next((strategy for strategy in self.strategies if strategy.chooser is not None), None)
        self._given = self.strategies, self._choosing
        self._taking_over = next((one for one in self.strategies if one.takeover and one.helper), None)
        needed = self._taking_over is None and any(strategy.needs_inductor for strategy in self.strategies)
        self._preparation = Preparation() if needed else None
        self._own: OwnRun | None = None
        if record is None:
            from trainer.script import OwnRun  # which needs what prints and judges a run

            self._own = OwnRun(self.strategies, save=save, verbose=verbose)
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
        self._guards: Guards | None = None
        self._chooser: Chooser | None = None
        self._step_begins = True
        self._capture: StepCapture | None = None
        self._audits: Audits | None = None
        self._taken = contextlib.ExitStack()
        """What gives the loop its own steps back."""
        self._takeover: Takeover | None = None
        self._open, self._notes_logged = False, 0
        self._built: dict[str, nn.Module] = {}
        self.telemetry = self._measuring()

    # ---- before training -------------------------------------------------------------------------------------------

    def apply_to(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        precision: str,
        sharded: bool = False,
        trains: bool = True,
        print_line: Callable[[str], None] | None = None,
    ) -> Program:
        """Apply the strategies to ``module``, once; their settings hold until ``close``.

        It has its weights, and may still lie on another device than the ``device`` where it is going to run.
        ``precision`` and ``sharded`` are those of ``Program``. ``trains``: what follows is measured anew.
        ``print_line`` prints a line of progress without harm to a progress bar; None = without.
        """
        self._open = True
        if trains and not sharded and any(one.helper for one in self.strategies):
            from trainer.background import early

            self._settings.enter_context(early(self.strategies))  # it imports the compiler while the training begins
        if new := self._built != (built := dict(module.named_modules())):
            if self.program is not None and self.program.module is module:
                uncompile(self.program)
            self.strategies, self._choosing = self._given  # auto has chosen for other blocks
        if trains and self._own is not None:
            self.record = RunRecord(task="", label=label(self.strategies), status=NOT_STARTED)
            self._own.prepare(print_line, lambda: self.telemetry)
        if new or self.program is None:
            if self._preparation is not None:
                self._preparation.wait_for_imports()
            self.program = Program(
                module=module,
                strategies=tuple(self.strategies),
                device=device,
                precision=precision,
                sharded=sharded,
                outlined=self._taking_over is not None and not sharded,
                **self._declared,
            )
            apply(self.strategies, self.program)
            self._built, self._notes_logged = built, 0
            self._log_notes(self.program)
            if self._preparation is not None:
                self._preparation.wait()
                self.record.preparation_seconds = self._preparation.cost_seconds
        self.record.regions = len(self.program.regions) if self.strategies else None
        self._cuda_graphs = self.program.uses_cuda_graphs
        if self._taking_over is None or self.program.sharded:  # else once Inductor is imported
            self._settings.enter_context(compiler_settings(self.program.settings))
        if trains:
            self.telemetry = self._measuring()
            self.telemetry.compiler.start()
        return self.program

    def begin(self, loop: Loop, logs: Logs | None = None) -> None:
        """Model, optimizer and restored state are in place: begin to measure what trains in ``loop``. Raises ValueError
        where the strategies cannot train there."""
        assert self.program is not None
        if self._cuda_graphs and loop.micro_batches > 1:
            # https://github.com/pytorch/pytorch/issues/169545, https://github.com/pytorch/pytorch/issues/96693
            raise ValueError(
                f"trainer.accumulate_grad_batches={loop.micro_batches}: CUDA graphs "
                "(mode reduce-overhead or max-autotune) may overwrite accumulated gradients without a word; "
                "use mode=max-autotune-no-cudagraphs or default"
            )
        loop.cuda_graphs = self._cuda_graphs
        self.program.optimizers = tuple(loop.optimizers)
        self.program.loop = self._loop = loop
        later = self._taking_over is not None and not self.program.sharded and bool(self.program.regions)
        begin([one for one in self.strategies if one.stage is not Stage.OPTIMIZER or not later], self.program)
        if self._own is not None:
            self._own.begin(self.record, self.program.module, loop, logs)
        if later:
            assert self._taking_over is not None
            make: Any = pkgutil.resolve_name(str(self._taking_over.takeover))
            parity = self._guarding.parity
            self._takeover = make(self._taking_over, loop, self.program, self.telemetry, self._settings, parity)
            self._takeover.start()
        self._log_notes(self.program)
        self._pages = TensorBoardPages(loop)
        self._pages.begin(self.record)
        if self._takeover is None:
            self._guard(loop, self.program)
        self.telemetry.start(loop, self._pages)
        self._step_begins = True
        if self._choosing is not None:
            assert self._choosing.chooser is not None
            make_chooser: Any = pkgutil.resolve_name(self._choosing.chooser)
            self._chooser = make_chooser(
                *(self._choosing, loop, self.program, self.telemetry, self._settings, self.switch, self._guards),
                self._guarding.parity,
            )

    def switch(self, strategies: Iterable[Strategy], guards: Guards | None, compared: bool) -> Guards | None:
        """Between two optimizer steps: train under ``strategies``, whose regions are in place, from the step that
        begins. Steps so far become warm-up. A step that was captured is captured anew.

        ``guards`` are those of the same program, if it was guarded before; else it is compared with eager on the batch
        at hand, unless each region was ``compared``, and eager takes over where it fails. Returns the guards; None for
        nothing to guard.
        """
        program, loop = self.program, self._loop
        assert program is not None
        assert loop is not None
        self.telemetry.restart()
        self._release()
        before, captured = program.strategies, program.step is not None
        program.strategies = tuple(ordered(strategies))
        for strategy in before:
            if strategy.captures_step and captured:
                strategy.end(program)
        for strategy in program.strategies:
            if strategy.captures_step and (captured or strategy not in before):
                strategy.begin(program)
        hardware.give_back(loop.device)
        self.record.regions, self.record.regions_compiled = len(program.regions), None
        self._guards = None
        if guards is not None:
            guards.resume()
        self._guard(loop, program, guards, chosen=True, compared=compared)
        return self._guards

    def _guard(self, loop: Loop, program: Program, guards: Guards | None = None, **how: Any) -> None:
        """Capture steps where a strategy says so, and guard what the strategies do as ``how`` says."""
        if all(strategy.chooser is not None for strategy in program.strategies):
            return
        from trainer.guards.guards import Guards, ReplayParity

        if program.step is not None:
            if self._guarding.parity != "off":
                program.step.verifier = ReplayParity(self._guarding.parity, loop, program)
            self._capture = program.step.take_over(loop, program)
            self._taken.callback(self._capture.release)
        self._guards = guards or Guards(self._guarding, loop, program, self.telemetry, self.record, **how)
        if self._guarding.parity == "off":
            if program.step is not None:
                self._taken.callback(loop.around_micro_batches(self._guards.around_micro_batch))
        else:
            from trainer.guards.audits import Audits

            assert self._pages is not None
            self._audits = Audits(
                self._guarding.parity,
                loop,
                program,
                self.telemetry,
                self._pages,
                capture=self._capture,
                unaudited=self._guards.around_micro_batch,
                trained=self._takeover is not None or self._chooser is not None,
                differs=self._differs,
            )
            self._taken.callback(self._audits.release)
            self.record.audits = self._audits.facts

    def _differs(self, error: ParityError) -> None:
        """An audited step is not eager's: end the run, or continue in eager."""
        if self._guarding.on_difference != "eager":
            raise error
        assert self._audits is not None
        assert self.program is not None
        self._audits.facts.verdict = "went eager"
        self._release()
        give_up(self.program, list(self.program.regions), str(error))
        give_up_others(self.program, str(error))
        line = f"on_difference=eager: the run continues in eager. {error}"
        rank_zero_warn(line)
        self.program.notes.append(line)
        self.telemetry.compiler.events.append(Event(kind="fallback", reason=line, step=self.telemetry.steps_done + 1))

    def _release(self) -> None:
        """Give the loop its own steps back, in the opposite order."""
        self._taken.close()
        self._audits = self._capture = None

    # ---- the hot path ----------------------------------------------------------------------------------------------

    def batch_begins(self, batch: Any) -> None:
        """``batch`` is on the device and its step begins; on the first one, run the preflight."""
        program, loop = self.program, self._loop
        assert program is not None
        assert loop is not None
        if self._chooser is not None and not self._chooser.decided and self._step_begins:
            self._chooser.before_step(batch, lambda: self._check_before(batch))
        if self._takeover is not None and self._guards is None:
            if self._takeover.over:
                self._guard(loop, program, trained=True, compared=not loop.anywhere(self._takeover.vague))
            else:
                self._takeover.before_batch(batch)
        self._check_before(batch)
        self._log_notes(program)
        self.mark_step()
        self.telemetry.batch_start()

    def _check_before(self, batch: Any) -> None:
        if self._guards is not None:
            self._guards.before_batch(batch)

    def batch_ends(self, loss: Any, batch: Any) -> None:
        """``batch`` is through; ``loss`` is one detached number in any shape, divided by the micro-batches of a step;
        anything else is not recorded. After the first optimizer step, verify the compile."""
        if self._capture is not None and not self._capture.settled:
            self.telemetry.disturb()
        number = isinstance(loss, torch.Tensor) and loss.numel() == 1
        stepped = self.telemetry.batch_end(loss.reshape(()) if number else None, batch)
        if self._takeover is not None and not self._takeover.over:
            self._takeover.after_batch(stepped=stepped)
        if self._guards is not None:
            self._guards.after_batch(stepped=stepped)
        self._step_begins = stepped
        if stepped and self._chooser is not None and not self._chooser.decided:
            self._chooser.after_step()

    def run_micro_batch(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """A micro-batch, within all that captures or audits it; for a loop that lets itself be taken over."""
        guards = self._guards
        return micro_batch.run(micro_batch.batch) if guards is None else guards.rollback.run(micro_batch)

    def mark_step(self) -> None:
        """A step or an evaluation batch begins. Without a backward, only this mark tells CUDA graphs which outputs
        still belong together: one region's output would be overwritten by the next region of the same step."""
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def validation_batch_ends(self) -> None:
        """Once all shapes are warmed, validation compiles nothing either."""
        if self._guards is not None:
            self._guards.after_validation_batch()

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
        if self._takeover is not None:
            self._takeover.close()
        if self._chooser is not None:
            self.record.chosen_strategies = [strategy.facts() for strategy in self._chooser.finish()]
        if self._guards is not None:
            self._guards.finish()
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
        if self._own is not None:
            self._own.failed(self.record, error)
        if self._guards is not None:
            self._guards.fail(error)
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
            if self._takeover is not None:
                self._takeover.close()
                self._takeover = None
            self._release()
            if self.program is not None and self._open:
                self._open = False
                try:
                    end(self.strategies, self.program)
                finally:
                    self._log_notes(self.program)
        self._guards = self._loop = None  # another training has its own
        self.telemetry.compiler.stop()
        if self._own is not None:
            self._own.end(self.record, self.close_pages)

    def close_pages(self, summary: dict[str, str]) -> None:
        """Write the last TensorBoard pages once the record is complete."""
        if self._pages is not None:
            self._pages.finish(self.record, summary)

    def _log_notes(self, program: Program) -> None:
        for note in program.notes[self._notes_logged :]:
            self.record.notes.append(note)
            rank_zero_info(f"compile: {note}")
        self._notes_logged = len(program.notes)
