"""Inference: one run of the forward alone, from configuration to record; the counterpart of ``trainer.run.Training``.

Warm-up, comparison with eager, then timed runs of batches. Lightning builds, moves, converts and tears down as for
``Trainer.predict``; its loop is left out because its hooks, progress counters and data fetching take several hundred
microseconds of the host for each batch, which a small model on a GPU would be measured by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies import Program
from strategies.base import CannotCapture
from strategies.compose import begin
from strategies.cuda_graph.capture import StateChanges
from strategies.cuda_graph.steps import observed
from strategies.errors import is_compile_error, is_out_of_memory, one_line
from strategies.regions import give_up
from trainer.build import batch_counter, callback_arguments, lightning_trainer, require_memory_of
from trainer.callback import Compile
from trainer.checkpoints import WEIGHTS, find_checkpoint, step_of
from trainer.console import ProgressView, announce
from trainer.guards import Guarding
from trainer.guards.compare import MULTIPLES, TENSOR_FLOOR, ParityError, rounding_unit
from trainer.guards.draws import Outputs, compare_forwards
from trainer.guards.guards import Guards
from trainer.guards.preflight import REPLAYED_FROM
from trainer.guards.slowdown import take_sample
from trainer.guards.snapshot import random_state, set_random_state
from trainer.loops.lightning import LightningLoop
from trainer.loops.processes import evaluating
from trainer.loops.training import note_machine
from trainer.process import StopRequest
from trainer.run import Job
from trainer.settings import Inference
from trainer.telemetry import hardware
from trainer.telemetry.files import number
from trainer.telemetry.profile import profile_calls
from trainer.telemetry.record import AuditFacts, Event
from trainer.telemetry.telemetry import BatchCounter, Telemetry
from trainer.telemetry.tensorboard import TensorBoardPages


class Inferring(Job):
    """The parts of one inference."""

    def go(self, stop: StopRequest) -> None:
        """Build everything and measure to the end, to an error or to a stop."""
        config, record, mode = self._config, self._record, self._config.run
        assert isinstance(mode, Inference)
        self._stop = stop
        checkpoint = None if config.resume is None else find_checkpoint(config.resume)
        if checkpoint is not None:
            step_of(checkpoint, parts=WEIGHTS)  # refuses a file that is no checkpoint
            record.resumed_from = str(checkpoint.resolve())
        compile_ = self._compile = CompileForInference(
            **callback_arguments(config, record), count=batch_counter(config.task, config.task.inference_flops)
        )
        L.seed_everything(config.seed, verbose=False)
        # No checkpoints, and a loop of our own.
        trainer = lightning_trainer(config, self._run_dir, callbacks=[compile_], enable_checkpointing=False)
        note_machine(record, LightningLoop(trainer))
        announce(self._console, record, self._run_dir)
        with ProgressView(
            self._console,
            style=config.trainer.progress,
            total=mode.batches * mode.repeats,
            telemetry=lambda: compile_.telemetry,
        ):
            data = config.task.build_data(seed=config.seed)
            module = config.task.build_module(max_steps=config.trainer.max_steps)
            if not (is_overridden("predict_step", module) or is_overridden("forward", module)):
                raise ValueError(f"run=inference: {type(module).__name__} defines no predict_step and no forward")
            require_memory_of(module, trainer, record.command, trains=False)
            loop = InferenceLoop(mode, trainer, compile_, stop)
            # Data modules open the set that the stage is for, and Lightning asks for a validation step where it
            # validates.
            validates = loader_name(data) == "val_dataloader" and is_overridden("validation_step", module)
            # Attributes of these objects, because Lightning offers no way to bring a loop of one's own.
            trainer.predict_loop.run = trainer.validate_loop.run = loop.run  # type: ignore[method-assign]
            try:
                with self._loading(checkpoint), warnings.catch_warnings():
                    # Only the weights are taken from it.
                    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
                    if validates:
                        trainer.validate(module, datamodule=data, ckpt_path=checkpoint, verbose=False)
                    else:
                        trainer.predict(module, datamodule=data, ckpt_path=checkpoint, return_predictions=False)
            finally:
                record.skipped_items = config.task.skipped_items(data)


class CompileForInference(Compile):
    """``Compile`` whose owner is the inference loop instead of Lightning's training loop."""

    _stages = ("predict", "validate")

    def _new_telemetry(self) -> Telemetry:
        # The profile is taken apart: timed runs may be shorter.
        telemetry = Telemetry(**{**self._measured, "warmup_steps": 0, "profile_steps": None})
        telemetry.units, telemetry.work = ("batch", "batches"), "measuring"
        return telemetry

    def begin_inference(self, loop: LightningLoop) -> Guards:
        """Model and weights are in place; returns the guards."""
        assert self.program is not None
        begin(self.strategies, self.program)
        self._log_notes(self.program)
        self._loop, self._pages = loop, TensorBoardPages(loop)
        self._pages.begin(self.record)
        if self.strategies and self._guarding.parity != "off":
            self.record.audits = AuditFacts(verdict="not audited", reason="nothing is trained")
        self.telemetry.start(loop, self._pages)
        guarding = dataclasses.replace(self._guarding, on_compile_error="fail")  # the loop rolls back
        self._guards = Guards(guarding, loop, self.program, self.telemetry, self.record, chances=1)
        return self._guards


class BatchLoop(LightningLoop):
    """What telemetry and guards see of an inference: its steps are batches, without a backward."""

    steps_done = 0
    log_every_n_steps = sys.maxsize

    def around_fetch(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Batches are on the device before the first step."""
        return lambda: None


class InferenceLoop:
    """Runs one inference; ``run`` stands in for that of Lightning's predict or validation loop."""

    def __init__(self, mode: Inference, trainer: L.Trainer, compile_: CompileForInference, stop: StopRequest) -> None:
        self._mode, self._trainer, self._compile, self._stop = mode, trainer, compile_, stop
        self._guarding: Guarding = compile_._guarding

    def run(self) -> list[Any]:
        """Measure, and fill in the record, whatever ends it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        self._loop, self._telemetry = BatchLoop(trainer), self._compile.telemetry
        self._stop.install()  # Lightning has set handlers of its own
        self._stop.promise = "stopping after this batch"
        self._stop.in_training = True
        self._guards = self._compile.begin_inference(self._loop)
        assert self._compile.program is not None
        self._program = self._compile.program
        call = trainer.strategy.predict_step
        takes_index = is_param_in_hook_signature(module.predict_step, "batch_idx", min_args=2)
        self._plain: Callable[[Any], Any] = (lambda batch: call(batch, 0)) if takes_index else call
        try:
            with evaluating(module), self._loop.quiet(), torch.inference_mode():
                self._measure()
        finally:
            self._stop.in_training = False
        self._compile.finish()
        return []

    def _measure(self) -> None:
        distinct = distinct_batches(self._mode, self._trainer, self._telemetry.count)
        batches = itertools.cycle(distinct)
        rounds = REPLAYED_FROM if self._program.uses_cuda_graphs or self._program.step is not None else 1
        count = torch.tensor(max(self._mode.warmup_batches, rounds * len(distinct)))
        first = self._warm_up(batches, int(self._loop.reduced(count, "max")))  # all processes agree on each of them
        if self._stop.agreed(self._loop.world_size):
            return
        self._check(first)
        if (steps := self._compile.profile_steps) is not None:  # a few batches, apart from the timed ones
            self._telemetry.phase = "profiling"
            directory = Path(self._loop.directory) if self._loop.is_first_process else None
            self._telemetry.profiled = profile_calls(
                lambda: self._run(next(batches)), steps, self._loop.device, directory
            )
        del first
        hardware.reset_peaks(self._loop.device)  # what compiling and comparing with eager took is not the model's
        for _ in range(self._mode.repeats):
            if self._stop.signum is None:
                self._timed_run(batches)

    def _timed_run(self, batches: Iterator[Any]) -> None:
        """One timed run; the record takes its speed."""
        telemetry, record = self._telemetry, self._compile.record
        steady, before = telemetry.meter.steady, dataclasses.replace(telemetry.meter.steady)
        try:
            for _ in range(self._mode.batches):
                if self._stop.signum is not None:
                    break
                self._timed(batches, self._run)
        finally:
            telemetry.pause("measuring")
            telemetry.flush(everything=True)
            if steady.steps > before.steps:
                record.repeats, speeds = (record.repeats or 0) + 1, record.repeat_samples_per_second
                if steady.samples is not None and before.samples is not None:
                    speeds.append((steady.samples - before.samples) / (steady.seconds - before.seconds))
                    record.repeat_spread = (max(speeds) - min(speeds)) / statistics.median(speeds)

    def _warm_up(self, batches: Iterator[Any], count: int) -> Any:
        """Run ``count`` batches; returns the first one. What does not compile is an error, or goes on eager."""
        first: Any = None
        self._telemetry.meter.warmup_steps = count
        for place in range(count):
            if self._stop.agreed(self._loop.world_size):
                break
            batch = self._timed(batches, self._attempt)
            if place == 0:
                first = batch
                self._guards.after_batch(stepped=True)
        self._telemetry.pause("warming up")
        self._telemetry.flush(everything=True)
        self._compile._log_notes(self._program)
        return first

    def _timed(self, batches: Iterator[Any], run: Callable[[Any], Any]) -> Any:
        telemetry, graphs = self._telemetry, self._program.step
        batch = next(batches)
        telemetry.batch_start()
        run(batch)
        if graphs is not None and not graphs.given_up and not graphs.settled:
            telemetry.disturb()
        self._loop.steps_done += 1
        telemetry.batch_end(None, batch)
        return batch

    def _run(self, batch: Any) -> Any:
        self._compile.mark_step()
        graphs = self._program.step
        if graphs is None or graphs.given_up:
            return self._plain(batch)
        try:
            return graphs.run(
                "predict",
                batch,
                self._plain,
                name="predict",
                before_replay=lambda: None,  # the host has no part in a replayed forward
                observe=lambda: observed(self._loop, self._program, batch, lambda: self._plain(batch)),
            )
        except CannotCapture as error:
            graphs.refuse(str(error))
            if isinstance(error, StateChanges):
                graphs.give_up()
            return self._plain(batch)

    def _attempt(self, batch: Any) -> None:
        """Run; where it does not compile and the user asked for that, uncompile everything and run again."""
        failed: Exception | None = None
        try:
            self._run(batch)
        except Exception as error:
            if not is_compile_error(error) or self._guarding.on_compile_error != "eager":
                raise
            failed = error
        if self._loop.anywhere(failed is not None):
            self._go_eager(
                f"on_compile_error=eager: {'another process' if failed is None else one_line(failed)}; all of it runs "
                "eager"
            )
            self._run(batch)

    def _check(self, batch: Any) -> None:
        """Compare with eager, and time it beside eager, on one batch."""
        program, parity = self._program, self._guarding.parity
        compiled = bool(program.regions)
        captured = program.step is not None and program.step.captures > 0
        if parity != "off" and (compiled or captured):
            self._telemetry.phase = "comparing with eager"
            with self._within_memory("parity"):
                run, plain = (lambda: self._run(batch)), (lambda: self._plain(batch))
                program.report["parity"] = facts = compare_outputs(parity, self._loop, program, run, plain)
                if facts["verdict"] == "failed":
                    seen, tolerance = facts["outputs"]["difference"], facts["outputs"]["tolerance"]
                    raise ParityError(
                        f"parity={parity}: the compiled outputs are not eager's: {seen:.2e} of eager's largest away "
                        f"from them, tolerance {tolerance:.2e}. Nothing was timed. Leave out strategies to find the "
                        "one at fault; parity=off continues in spite of it",
                        facts,
                    )
        # A batch from its graph cannot be timed in turns with eager.
        if compiled and not captured and (parity != "off" or self._guarding.on_slower == "eager"):
            self._telemetry.phase = "timing eager"
            with self._within_memory("slowdown"):
                sample = take_sample(self._loop, program, lambda: self._run(batch))
                slower = self._loop.anywhere(sample.slower)
                program.report["slowdown"] = {"before_the_first_step": sample.facts(), "slower": slower}
                line = (
                    f"slower than eager: a batch takes {number(sample.compiled_median * 1e3)} ms compiled against "
                    f"{number(sample.eager_median * 1e3)} ms eager"
                )
                if slower and self._guarding.on_slower == "eager":
                    self._go_eager(f"{line}; on_slower=eager: all of it runs eager")
                    self._run(batch)
                elif slower:
                    program.notes.append(line)
        hardware.give_back(self._loop.device)
        self._compile._log_notes(self._program)

    def _go_eager(self, line: str) -> None:
        give_up(self._program, list(self._program.regions), line)
        self._program.notes.append(line)
        self._telemetry.compiler.events.append(Event(kind="fallback", reason=line, phase="preflight"))

    @contextlib.contextmanager
    def _within_memory(self, what: str) -> Iterator[None]:
        """Eager may need more memory than there is beside what is compiled, which is no reason to end the run."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error) or self._trainer.world_size > 1:
                raise
            reason = "eager needs more memory than there is"
            self._program.report[what] = {"mode": self._guarding.parity, "verdict": "skipped", "reason": reason}
            self._program.notes.append(f"{what}: skipped, {reason}")


def distinct_batches(mode: Inference, trainer: L.Trainer, count: BatchCounter | None) -> list[Any]:
    """The first batches of the loader, on the device; ones smaller than the first are left out where ``count`` tells.

    Raises ValueError where there is no loader, or it yields nothing.
    """
    loop, data = LightningLoop(trainer), trainer.datamodule  # type: ignore[attr-defined]
    loader: Any = getattr(data, loader_name(data))()
    loader = trainer.strategy.process_dataloader(loader[0] if isinstance(loader, list | tuple) else loader)
    found: list[Any] = []
    rows = 0
    for batch in loader:
        own = 0 if count is None else count(batch)[0]
        rows = rows or own
        if own >= rows:
            found.append(loop.to_device(batch))
        if len(found) == mode.distinct_batches:
            break
    if not found:
        raise ValueError("run=inference: the loader of this task's data yields no batch")
    return found


def loader_name(data: L.LightningDataModule) -> str:
    """The loader of ``data`` that is taken. Raises ValueError when it has none."""
    names = [f"{what}_dataloader" for what in ("predict", "val", "train")]
    for name in names:
        if is_overridden(name, data, L.LightningDataModule):
            return name
    raise ValueError(f"run=inference: {type(data).__name__} has none of {', '.join(names)}")


def compare_outputs(
    mode: str, loop: LightningLoop, program: Program, compiled: Callable[[], Any], plain: Callable[[], Any]
) -> dict[str, Any]:
    """Run ``compiled``, and ``plain`` eagerly, on one batch and compare; returns the facts for the record, of which the
    verdict is the same on all processes."""
    began, unit = time.perf_counter(), rounding_unit(program.precision, loop.device)
    allowed: dict[str, Any] = {"least": TENSOR_FLOOR, "multiple": MULTIPLES[mode], "unit": unit, "seed": 2**31 - 1}
    runs = itertools.chain([plain, compiled], itertools.repeat(plain))
    restore = partial(set_random_state, random_state())
    found = compare_forwards(loop, program, lambda: _outputs(next(runs)()), restore, **allowed)
    if "reason" in found:
        return {"mode": mode, "verdict": "skipped", "reason": found["reason"]}
    failed = loop.anywhere(not found["difference"] <= found["tolerance"])
    return {
        "mode": mode,
        "verdict": "failed" if failed else "passed",
        "outputs": {name: found[name] for name in ("difference", "tolerance", "noise", "tensors")},
        "multiple": MULTIPLES[mode],
        "rounding_unit": unit,
        "calibration_passes": found["passes"],
        "seconds": round(time.perf_counter() - began, 3),
    }


def _outputs(results: Any) -> Outputs:
    leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
    found = [leaf.detach().clone() for leaf in leaves if leaf.is_floating_point() and leaf.numel()]
    return {f"output {at}": one for at, one in enumerate(found)}, (
        "" if found else "the step returns no floating-point tensor"
    )
