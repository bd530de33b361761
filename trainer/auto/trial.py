"""Trial: one candidate compiled, timed on the batch at hand and taken back, as often as asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import torch

from strategies import Program
from strategies.compile_errors import is_out_of_memory
from strategies.graph_engine import first_line
from strategies.prepare import Preparation, is_prepared
from trainer.auto.candidates import Candidate
from trainer.auto.estimates import GAPS, Estimates
from trainer.auto.measured import EAGER, Module
from trainer.auto.probe import captured_seconds, device_work, step_seconds
from trainer.eager import eager
from trainer.host_effects import observed
from trainer.passes import Passes, SkippedStep
from trainer.reasons import one_line
from trainer.snapshot import Snapshot
from trainer.telemetry import hardware as memory
from trainer.telemetry.telemetry import Telemetry
from trainer.timed import seconds_of

NO_MEMORY = "it needs more memory than there is"


class Trials:
    """All trials of one choice; what was compiled stays compiled, model and optimizer end as they began.

    Args:
        candidates: The ways to compile modules, by name.
        settings: Takes the compiler settings of what is compiled.
    """

    def __init__(
        self,
        candidates: dict[str, Candidate],
        trainer: L.Trainer,
        program: Program,
        telemetry: Telemetry,
        settings: contextlib.ExitStack,
    ) -> None:
        self._candidates, self._trainer, self._program = candidates, trainer, program
        self._telemetry, self._settings = telemetry, settings
        self._passes = Passes(trainer, cuda_graphs=False)
        self._worn: Candidate | None = None
        self._snapshot: Snapshot | None = None
        self.tried: list[str] = []
        self.seconds = 0.0
        """Spent on trials, Inductor's import included."""

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """When the block ends, everything that trials changed is put back."""
        with self._passes.quiet():
            try:
                yield
            finally:  # inside: the snapshot holds the module as it is while nothing is logged
                if self._snapshot is not None:
                    self._snapshot.restore()
                    self._snapshot = None

    def reasons_against_capture(self, batch: Any) -> list[str]:
        """What a step does on the host that a graph would not repeat; everything is put back."""
        with self._passes.quiet():
            snapshot = Snapshot(self._trainer, batch, weights=False)
            if snapshot.lost is not None:
                return [snapshot.lost]
            try:
                with eager(self._program), torch.no_grad(), contextlib.suppress(Exception):
                    self._passes.forward(batch)  # what only the first step does, it has done then
                return observed(self._trainer, self._program, batch, lambda: self._passes.forward(batch)).problems
            finally:
                snapshot.restore()

    def wear(self, name: str) -> None:
        """Let the program run compiled as the candidate ``name`` says; eager where there is none."""
        candidate = self._candidates.get(name)
        if candidate is self._worn:
            return
        if self._worn is not None:
            self._worn.take_off(self._program)
            self._worn = None
        if candidate is not None:
            candidate.put_on(self._program, self._settings)
        self._worn = candidate

    def run(self, module: Module, estimates: Estimates, batch: Any) -> None:
        """Try ``module`` and write what came out into it. Raises what eager itself cannot do."""
        began = time.perf_counter()
        if self._snapshot is None:
            self._snapshot = Snapshot(self._trainer, batch)
            if self._snapshot.lost is not None:
                raise SkippedStep(self._snapshot.lost)
        self._telemetry.phase = f"timing {module.name}"
        self.tried.append(module.name)
        try:
            self._try(module, estimates, batch)
        except SkippedStep:
            raise
        except Exception as error:
            if self._trainer.world_size > 1:  # the others wait within a step, or have taken it
                raise
            self._give_up(module, error)
        self._snapshot.restore()
        self.seconds += time.perf_counter() - began

    def _try(self, module: Module, estimates: Estimates, batch: Any) -> None:
        self._prepare(module, estimates)
        prepared = time.perf_counter()
        self.wear(module.name)
        second = self._first_steps(batch)
        if isinstance(second, Exception):
            self._give_up(module, second)
            return
        self._time(module, estimates, batch, second, time.perf_counter() - prepared)
        if estimates.unsure_of_capture(module):
            self._capture(module, batch)
        if estimates.unsure_of_eager(module):
            self._capture(estimates.modules[EAGER], batch)

    def _prepare(self, module: Module, estimates: Estimates) -> None:
        """Import Inductor where ``module`` is the first that needs it; no part of what its compile takes, which is
        remembered and is the measure of this machine. Data workers are there already, none is forked meanwhile."""
        candidate = self._candidates.get(module.name)
        if candidate is None or not candidate.needs_inductor:
            return
        if not is_prepared():
            Preparation().wait()
        estimates.import_seconds = 0.0

    def _step(self, batch: Any) -> None:
        """An optimizer step with all its micro-batches."""
        for _ in range(self._trainer.accumulate_grad_batches - 1):
            self._passes.train(batch)
        self._passes.step(batch)

    def _first_steps(self, batch: Any) -> float | Exception:
        """Compile everything; returns the seconds of a second step.

        Or what went wrong on any process, which alone must leave no other one waiting.
        """
        if self._trainer.world_size > 1:
            failure: Exception | None = None
            try:
                self._passes.train(batch, together=False)
            except SkippedStep:
                raise
            except Exception as error:
                failure = error
            anywhere = partial(self._trainer.strategy.reduce_boolean_decision, all=False)
            if anywhere(failure is not None):
                # What becomes of a candidate depends on the kind of error: one kind for all processes.
                other = anywhere(failure is not None and not is_out_of_memory(failure))
                if failure is not None and is_out_of_memory(failure) != other:
                    return failure
                return (RuntimeError if other else torch.OutOfMemoryError)("another process failed")
        self._step(batch)  # makes the optimizer's state
        return seconds_of(self._trainer.strategy.root_device, lambda: self._step(batch))

    def _time(self, module: Module, estimates: Estimates, batch: Any, second: float, spent: float) -> None:
        module.step_seconds = step_seconds(
            self._trainer, lambda: self._step(batch), about=second, planned_steps=estimates.steps
        )
        if estimates.capture != "no":
            work = device_work(self._trainer, lambda: self._step(batch), module.step_seconds)
            # Where the device never waits for the host, a graph has nothing to take away.
            module.device_seconds = module.step_seconds
            if work is not None:
                module.at_most = not work.exact
                if module.step_seconds > GAPS * work.seconds:
                    module.device_seconds = work.seconds
        if module.name == EAGER:
            return
        module.spent = True
        compiling = float(self._trainer.strategy.broadcast(max(0.0, spent - 2 * module.step_seconds)))
        estimates.warm = self._telemetry.compiler.figures().cache == "warm"
        if estimates.warm:
            module.warm_seconds = compiling
        else:
            module.cold_seconds = compiling
            estimates.learn_host(module)

    def _capture(self, module: Module, batch: Any) -> None:
        """Find out what a captured step of ``module`` takes by capturing one."""
        module.at_most = False
        self.wear(module.name)
        try:
            module.device_seconds = captured_seconds(self._trainer, self._passes, batch)
        except Exception as error:
            module.cannot_capture = NO_MEMORY if is_out_of_memory(error) else f"not captured, {first_line(error)}"

    def _give_up(self, module: Module, error: Exception) -> None:
        if module.name == EAGER and not is_out_of_memory(error):
            raise error  # the user's own mistake
        module.step_seconds = module.device_seconds = None
        module.failed = NO_MEMORY if is_out_of_memory(error) else one_line(error)
        self.wear(EAGER)
        self._trainer.lightning_module.zero_grad(set_to_none=True)
        memory.give_back(self._trainer.strategy.root_device)
