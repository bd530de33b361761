"""The inference loop: warm-up, comparison with eager, then timed runs of batches, in the place of Lightning's own loop.

Lightning builds, moves, converts and tears down as for ``Trainer.predict``; its loop is left out because its hooks,
progress counters and data fetching take several hundred microseconds of the host for each batch, which a small model
on a GPU would be measured by.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from strategies.compile_errors import is_compile_error, is_out_of_memory
from strategies.graph_engine import CannotCapture
from strategies.inplace import give_up
from strategies.step_graphs import StateChanges
from trainer.guards import Guards
from trainer.host_effects import observed
from trainer.inference.batches import Batches
from trainer.inference.callback import CompileForInference
from trainer.inference.parity import compare_outputs
from trainer.interrupt import StopRequest
from trainer.parity.comparison import ParityError
from trainer.passes import Passes
from trainer.reasons import one_line
from trainer.rehearsal import REPLAYED_FROM
from trainer.run_modes import Inference
from trainer.telemetry import hardware as memory
from trainer.telemetry.facts import number
from trainer.telemetry.profile import profile_calls
from trainer.telemetry.record import Event
from trainer.telemetry.telemetry import BatchCounter, Telemetry
from trainer.watchdog import take_sample


class InferenceLoop:
    """Runs one inference; ``run`` stands in for that of Lightning's predict or validation loop."""

    def __init__(
        self,
        mode: Inference,
        trainer: L.Trainer,
        compile_: CompileForInference,
        *,
        count: BatchCounter | None,
        stop: StopRequest,
    ) -> None:
        self._mode, self._trainer, self._compile, self._count, self._stop = mode, trainer, compile_, count, stop
        self._guarding = compile_.guarding

    def run(self) -> list[Any]:
        """Measure, and fill in the record, whatever ends it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        self._module, self._telemetry = module, self._compile.inference_telemetry
        self._stop.install()  # Lightning has set handlers of its own
        self._stop.promise = "stopping after this batch"
        self._stop.in_training = True
        flags = [(part, part.training) for part in module.modules()]
        self._program = self._compile.begin_inference(trainer)
        self._guards = Guards(
            dataclasses.replace(self._guarding, on_compile_error="fail"),  # _attempt rolls back
            trainer,
            self._program,
            cast(Telemetry, self._telemetry),  # of which it reads the compiler alone, after the first batch
            self._compile.record,
            cuda_graphs=False,
            chances=1,
        )
        step = f"{self._mode.step}_step"
        takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)
        self._arguments = (0,) if takes_index else ()
        self._call: Callable[..., Any] = getattr(trainer.strategy, step)
        try:
            module.eval()
            without = torch.inference_mode() if self._mode.grad_mode == "inference_mode" else torch.no_grad()
            with Passes(trainer, cuda_graphs=False).quiet(), without:
                if self._mode.step == "validation":
                    module.on_validation_epoch_start()
                self._measure()
        except BaseException:
            self._guards.finish()
            self._compile.finish_inference(trainer, together=False)
            raise
        finally:
            self._stop.in_training = False
            for part, training in flags:
                part.training = training
        self._guards.finish()
        self._compile.finish_inference(trainer, together=True)
        return []

    def _measure(self) -> None:
        batches = Batches(self._mode, self._trainer, count=self._count, wait=self._telemetry.wait)
        rounds = REPLAYED_FROM if self._compile.uses_cuda_graphs or self._program.step is not None else 1
        count = torch.tensor(max(self._mode.warmup_batches, rounds * max(1, len(batches.distinct))))
        strategy = self._trainer.strategy  # whose processes agree on each of these batches, and so on their number
        first = self._warm_up(batches, int(strategy.reduce(count.to(strategy.root_device), reduce_op="max")))
        if self._stop.agreed(self._trainer):
            return
        self._check(first)
        self._profile(batches)
        del first
        for _ in range(self._mode.repeats):
            if self._stop.signum is not None:
                break
            with self._telemetry.timed_run():
                for _ in range(self._mode.batches):
                    if self._stop.signum is not None:
                        break
                    self._timed(batches, self._run)

    def _warm_up(self, batches: Batches, count: int) -> Any:
        """Run ``count`` batches; returns the first one. What does not compile is an error, or goes on eager."""
        first: Any = None
        with self._telemetry.warmup(count):
            for number in range(count):
                if self._stop.agreed(self._trainer):
                    break
                batch = self._timed(batches, self._attempt)
                if number == 0:
                    first = batch
                    self._guards.after_batch(stepped=True)
        self._compile.tell()
        return first

    def _timed(self, batches: Batches, run: Callable[[Any], Any]) -> Any:
        telemetry, graphs = self._telemetry, self._program.step
        telemetry.batch_start()
        batch = next(batches)
        run(batch)
        telemetry.batch_end(batch, disturbed=graphs is not None and not graphs.given_up and not graphs.settled)
        return batch

    def _run(self, batch: Any) -> Any:
        if self._compile.uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        graphs = self._program.step
        if graphs is None or graphs.given_up:
            return self._plain(batch)
        try:
            return graphs.run(
                "predict",
                batch,
                self._plain,
                name="predict",
                before_replay=_nothing,
                observe=lambda: observed(self._trainer, self._program, batch, lambda: self._plain(batch)),
            )
        except CannotCapture as error:
            graphs.refuse(str(error))
            if isinstance(error, StateChanges):
                graphs.give_up()
            return self._plain(batch)

    def _plain(self, batch: Any) -> Any:
        return self._call(batch, *self._arguments)

    def _attempt(self, batch: Any) -> None:
        """Run; where it does not compile and the user asked for that, uncompile everything and run again."""
        failed: Exception | None = None
        try:
            self._run(batch)
        except Exception as error:
            if not is_compile_error(error) or self._guarding.on_compile_error != "eager":
                raise
            failed = error
        if self._trainer.strategy.reduce_boolean_decision(failed is not None, all=False):
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
                try:
                    facts = compare_outputs(
                        parity, self._trainer, program, lambda: self._run(batch), lambda: self._plain(batch)
                    )
                except ParityError as error:
                    program.report["parity"] = error.facts
                    raise
                program.report["parity"] = facts
        # A batch from its graph cannot be timed in turns with eager.
        if compiled and not captured and (parity != "off" or self._guarding.on_slower == "eager"):
            self._telemetry.phase = "timing eager"
            with self._within_memory("watchdog"):
                sample = take_sample(self._trainer, program, lambda: self._run(batch))
                slower = self._trainer.strategy.reduce_boolean_decision(sample.slower, all=False)
                program.report["watchdog"] = {"before_the_first_step": sample.facts(), "slower": slower}
                if slower:
                    line = (
                        f"slower than eager: a batch takes {number(sample.compiled_median * 1e3)} ms compiled against "
                        f"{number(sample.eager_median * 1e3)} ms eager"
                    )
                    if self._guarding.on_slower == "eager":
                        self._go_eager(f"{line}; on_slower=eager: all of it runs eager")
                        self._run(batch)
                    else:
                        program.notes.append(line)
        memory.give_back(self._trainer.strategy.root_device)
        self._compile.tell()

    def _profile(self, batches: Batches) -> None:
        """Record a few batches, apart from the timed ones."""
        trainer, count = self._trainer, self._compile.profile_steps
        if count is not None:
            self._telemetry.phase = "profiling"
            directory = Path(trainer.default_root_dir) if trainer.is_global_zero else None
            facts = profile_calls(lambda: self._run(next(batches)), count, trainer.strategy.root_device, directory)
            self._program.report["profile"] = facts

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


def _nothing() -> None:
    """The host has no part in a replayed forward."""
