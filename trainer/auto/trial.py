"""Trial: one candidate compiled, timed on the batch at hand and taken back, as often as asked."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from strategies import STRATEGIES, Program, Strategy
from strategies.base import Region
from strategies.compose import compiler_settings, eager
from strategies.cuda_graph.steps import observed
from strategies.errors import first_line, is_out_of_memory, one_line
from strategies.graph_engine import CudaEngine
from strategies.loop import Loop, SkippedStep
from strategies.prepare import Preparation, is_prepared
from strategies.regions import uncompile
from trainer.auto.estimates import EAGER, GAPS, Estimates, Module
from trainer.guards.snapshot import Snapshot
from trainer.telemetry import hardware
from trainer.telemetry.hardware import seconds_of
from trainer.telemetry.telemetry import Telemetry

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
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        settings: contextlib.ExitStack,
    ) -> None:
        self._candidates, self._loop, self._program = candidates, loop, program
        self._telemetry, self._settings = telemetry, settings
        self._worn: Candidate | None = None
        self._snapshot: Snapshot | None = None
        self.tried: list[str] = []
        self.seconds = 0.0
        """Spent on trials, Inductor's import included."""

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """When the block ends, everything that trials changed is put back."""
        with self._loop.quiet():
            try:
                yield
            finally:  # inside: the snapshot holds the module as it is while nothing is logged
                if self._snapshot is not None:
                    self._snapshot.restore()
                    self._snapshot = None

    def reasons_against_capture(self, batch: Any) -> list[str]:
        """What a step does on the host that a graph would not repeat; everything is put back."""
        with self._loop.quiet():
            snapshot = Snapshot(self._loop, batch, weights=False)
            if snapshot.lost is not None:
                return [snapshot.lost]
            try:
                with eager(self._program), torch.no_grad(), contextlib.suppress(Exception):
                    self._loop.forward(batch)  # what only the first step does, it has done then
                return observed(self._loop, self._program, batch, lambda: self._loop.forward(batch)).problems
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
            self._snapshot = Snapshot(self._loop, batch, self._program)
            if self._snapshot.lost is not None:
                raise SkippedStep(self._snapshot.lost)
        self._telemetry.phase = f"timing {module.name}"
        self.tried.append(module.name)
        try:
            self._try(module, estimates, batch)
        except SkippedStep:
            raise
        except Exception as error:
            if self._loop.world_size > 1:  # the others wait within a step, or have taken it
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
        for _ in range(self._loop.micro_batches - 1):
            self._loop.train(batch)
        self._loop.step(batch)

    def _first_steps(self, batch: Any) -> float | Exception:
        """Compile everything; returns the seconds of a second step.

        Or what went wrong on any process, which alone must leave no other one waiting.
        """
        if self._loop.world_size > 1:
            failure: Exception | None = None
            try:
                self._loop.train(batch, together=False)
            except SkippedStep:
                raise
            except Exception as error:
                failure = error
            anywhere = self._loop.anywhere
            if anywhere(failure is not None):
                # What becomes of a candidate depends on the kind of error: one kind for all processes.
                other = anywhere(failure is not None and not is_out_of_memory(failure))
                if failure is not None and is_out_of_memory(failure) != other:
                    return failure
                return (RuntimeError if other else torch.OutOfMemoryError)("another process failed")
        self._step(batch)  # makes the optimizer's state
        return seconds_of(self._loop.device, lambda: self._step(batch))

    def _time(self, module: Module, estimates: Estimates, batch: Any, second: float, spent: float) -> None:
        module.step_seconds = step_seconds(
            self._loop, lambda: self._step(batch), about=second, planned_steps=estimates.steps
        )
        if estimates.capture != "no":
            work = device_work(self._loop, lambda: self._step(batch), module.step_seconds)
            # Where the device never waits for the host, a graph has nothing to take away.
            module.device_seconds = module.step_seconds
            if work is not None:
                module.at_most = not work.exact
                if module.step_seconds > GAPS * work.seconds:
                    module.device_seconds = work.seconds
        if module.name == EAGER:
            return
        module.spent = True
        compiling = float(self._loop.broadcast(max(0.0, spent - 2 * module.step_seconds)))
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
            module.device_seconds = captured_seconds(self._loop, batch)
        except Exception as error:
            module.cannot_capture = NO_MEMORY if is_out_of_memory(error) else f"not captured, {first_line(error)}"

    def _give_up(self, module: Module, error: Exception) -> None:
        if module.name == EAGER and not is_out_of_memory(error):
            raise error  # the user's own mistake
        module.step_seconds = module.device_seconds = None
        module.failed = NO_MEMORY if is_out_of_memory(error) else one_line(error)
        self.wear(EAGER)
        self._loop.module.zero_grad(set_to_none=True)
        hardware.give_back(self._loop.device)


MIN_STEPS, MAX_STEPS = 2, 8
MAX_SECONDS, MAX_SHARE = 0.25, 0.005
"""Timing one candidate takes no longer than this, in seconds and as a share of the planned run, or ``MIN_STEPS``."""
CALIBRATION_CYCLES = 2_000_000
"""About a thousandth of a second of a GPU's clock."""


def step_seconds(loop: Loop, step: Callable[[], Any], *, about: float, planned_steps: int) -> float:
    """Seconds of a step in a row of them, as in training. The same on all processes.

    ``step`` must have run before, the last time in ``about`` seconds.
    """
    affordable = int(min(MAX_SECONDS, MAX_SHARE * planned_steps * about) / max(about, 1e-9))
    steps = int(loop.broadcast(max(MIN_STEPS, min(MAX_STEPS, affordable))))
    return float(loop.broadcast(seconds_of(loop.device, step, times=steps)))


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does for a step."""

    seconds: float
    exact: bool
    """Whether the host had launched all of it before the device began; if not, it may take less than ``seconds``."""


def device_work(loop: Loop, step: Callable[[], Any], launched_seconds: float) -> Work | None:
    """What the device does for a step, the host's launches left out; None where it is no CUDA device.

    The device is kept asleep while the host launches the step, and timed once it wakes: what it does then is what a
    CUDA graph of the step would take. It may come out some percent too short: a device that has just slept runs at
    higher clocks. A step of more launches than the device's queue takes (1,024), or one that reads a value on the host,
    comes out too long, the more so the slower the host; ``captured_seconds`` does not.
    """
    device = loop.device
    if device.type != "cuda":
        return None
    cycles = int(CALIBRATION_CYCLES * 1.5 * launched_seconds / _sleep_seconds(device, CALIBRATION_CYCLES))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(cycles)
    seconds, exact = loop.broadcast(_between_events(device, step))
    return Work(seconds, exact)


def captured_seconds(loop: Loop, batch: Any) -> float:
    """Seconds of an optimizer step replayed from CUDA graphs, on one device.

    Forward and backward are captured for it, which costs about a step of the host and their memory once more, given
    back; the optimizer's launches fit in the queue. Raises what capturing them raises.
    """
    device = loop.device
    try:
        replayed = loop.micro_batches * _replay_seconds(device, lambda: loop.train(batch))
        launched = seconds_of(device, loop.optimize)
        optimizer = device_work(loop, loop.optimize, launched)
        return replayed + (launched if optimizer is None else optimizer.seconds)
    finally:
        loop.module.zero_grad(set_to_none=True)  # they lie in the graph's memory
        torch.cuda.empty_cache()


def _replay_seconds(device: torch.device, micro_batch: Callable[[], Any]) -> float:
    engine = CudaEngine(device)
    engine.eager(micro_batch)
    torch.cuda.empty_cache()  # a graph has memory of its own
    replay, _ = engine.capture(micro_batch)
    return seconds_of(device, replay, times=MIN_STEPS)


def _sleep_seconds(device: torch.device, cycles: int) -> float:
    torch.cuda._sleep(cycles)  # the first one loads its kernel
    torch.cuda.synchronize(device)
    return _between_events(device, lambda: torch.cuda._sleep(cycles))[0]


def _between_events(device: torch.device, work: Callable[[], Any]) -> tuple[float, bool]:
    """Seconds of ``work`` on the device, and whether it was all launched before the device began with it."""
    with torch.cuda.device(device):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        launched_first = not began.query()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1e3, launched_first


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One strategy of the MODULE stage, applied to a program when it is put on, and taken off again."""

    strategy: Strategy
    kinds: list[int]
    """Modules without children in each kind of region; regions of one kind share their compiled code."""
    notes: list[str]
    _regions: list[Region] = field(default_factory=list, init=False)
    _calls: list[Any] = field(default_factory=list, init=False)
    """Compiled calls of the regions, there once it has been put on; what they have compiled stays with them while they
    are off."""
    _settings: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def needs_inductor(self) -> bool:
        """Whether Inductor compiles it."""
        return self.strategy.needs_inductor

    def put_on(self, program: Program, settings: contextlib.ExitStack) -> None:
        """Let the program's modules run compiled in this way; compiler settings hold until ``settings`` is closed."""
        if not self._calls:
            self._apply(program)
        for region, call in zip(self._regions, self._calls, strict=True):
            program.module.get_submodule(region.path)._compiled_call_impl = call
        program.regions[:] = self._regions
        program.settings.update(self._settings)
        settings.enter_context(compiler_settings(self._settings))

    def take_off(self, program: Program) -> None:
        """Let them run eager again; nothing is lost."""
        uncompile(program)

    def _apply(self, program: Program) -> None:
        view = _view(program, outlined=False)
        try:
            self.strategy.apply(view)
            self._regions = list(view.regions)
            self._calls = [program.module.get_submodule(region.path)._compiled_call_impl for region in view.regions]
        finally:
            uncompile(view)
        self._settings = dict(view.settings)


def prepare(name: str, program: Program) -> Candidate:
    """The candidate ``name`` for ``program``, which is left as it was; nothing is handed to the compiler yet.

    Raises ValueError where it does not apply.
    """
    strategy = STRATEGIES[name]()
    view = _view(program, outlined=True)
    strategy.apply(view)
    modules = [program.module.get_submodule(region.path) for region in view.regions]
    return Candidate(strategy=strategy, kinds=_kinds(modules), notes=list(view.notes))


def _view(program: Program, *, outlined: bool) -> Program:
    return dataclasses.replace(program, outlined=outlined, regions=[], notes=[], settings={}, report={})


def _kinds(modules: list[nn.Module]) -> list[int]:
    kinds: dict[tuple[Any, ...], int] = {}
    for module in modules:
        leaves = sum(1 for child in module.modules() if next(child.children(), None) is None)
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
        kinds[type(module), shapes] = leaves
    return list(kinds.values())
