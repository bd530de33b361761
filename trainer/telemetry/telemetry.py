"""Telemetry of one run: clock, compiler, memory and energy brought together at step boundaries.

The hot path (``batch_start``, ``batch_end``) keeps Python numbers and references to device scalars; nothing in it waits
for the device. Everything else happens in ``flush``, once every ``log_every_n_steps`` optimizer steps, and there too
the losses of a window are copied asynchronously and read one window later.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from strategies import Program
from strategies.loop_protocol import Loop, gathered
from trainer.telemetry import hardware
from trainer.telemetry.compiler import MAX_LINES, CompilerMonitor
from trainer.telemetry.hardware import find_peak
from trainer.telemetry.machine_monitor import EnergyMeter, MachineMonitor, now, nvml_handle
from trainer.telemetry.meter import Counts, Meter, Points, Step, StepClock, shape_of
from trainer.telemetry.profile import StepProfiler, with_idle_share
from trainer.telemetry.record import CompilerFigures, RankFigures, Rates, RunRecord
from trainer.telemetry.serialization import nan_to_none
from trainer.telemetry.tensorboard import TensorBoardPages

BatchCounter = Callable[[Any], Counts]
"""What a batch holds."""
COMPILER_POINTS = ("compile_seconds", "graphs", "graph_breaks", "recompiles", "cache_hits", "cache_misses")
"""Figures of the compiler that TensorBoard shows while a run lasts."""
MAX_SHAPES = 10_000
"""Shapes remembered; a run with more has no shape that is worth a report."""
FEW_SHAPES, MAX_NEW = 16, 4
"""Shapes, and new ones for each batch of one that was seen, from which on a new shape is the rule."""


def _as_counts(counted: Any) -> Counts:
    """What a counter of the user's returned. Raises ValueError where it is something else."""
    if isinstance(counted, tuple | list) and len(counted) == 4:
        return tuple(counted)
    raise ValueError(
        f"count returned {counted!r}: it has to return a tuple of four, samples, tokens, useful tokens and operations, "
        "None for what is not known"
    )


def added_up(mine: Rates, everywhere: Sequence[Rates]) -> Rates:
    """``mine`` with those that count things added up over all processes, None where one of them has none."""
    names = ("samples_per_second", "tokens_per_second", "useful_tokens_per_second")
    rates = {name: [getattr(each, name) for each in everywhere] for name in names}
    return dataclasses.replace(mine, **{name: None if None in each else sum(each) for name, each in rates.items()})


class SeenShapes:
    """Tells batches of a new shape from those whose like has been."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._again = 0

    def is_new(self, batch: Any) -> bool:
        """Whether its shapes are new although others come again, so that it costs once what a steady step does not. Not
        for the very first, which the warm-up leaves out, nor where most batches have a shape of their own."""
        shape = shape_of(batch)
        if shape in self._seen or len(self._seen) >= MAX_SHAPES:
            self._again += 1
            return False
        self._seen.add(shape)
        return 1 < len(self._seen) <= FEW_SHAPES + MAX_NEW * self._again


class Telemetry:
    """Measures one fit; the owner calls the methods named after the moments of the loop."""

    def __init__(
        self, *, count: BatchCounter | None, warmup_steps: int, measure_peak: bool | None = None, profile: bool = False
    ) -> None:
        self.compiler = CompilerMonitor()
        self.phase = "starting"
        """What is going on, in a word for the progress view."""
        self.steps_done = 0
        """Optimizer steps done; read by the progress view from another thread."""
        self.ready_seconds: float | None = None
        """Age of the process when the first batch was on the device."""
        self.count, self._measure_peak = count, measure_peak
        self._shapes = SeenShapes()
        self.meter = Meter(warmup_steps=warmup_steps)
        self.pause_seconds = 0.0
        self.pages: TensorBoardPages | None = None
        """Where curves go, from ``start`` on."""
        self._profile = profile
        self._profiler: StepProfiler | None = None
        self._after: str | None = None
        self._paused, self._paused_at = True, 0.0
        self._began_seconds: float | None = None
        self._running = False
        self.began = 0.0
        """When training did, by ``machine.now``."""

    def start(self, loop: Loop, pages: TensorBoardPages | None = None) -> None:
        """Training is about to begin: model and optimizer are on their device."""
        self._loop, self._device, self.pages = loop, loop.device, pages
        self.compiler.lines_left = MAX_LINES if loop.is_first_process else 0
        self._clock = StepClock(self._device)
        board = nvml_handle(self._device)
        self._energy, self._machine = EnergyMeter(board), MachineMonitor(board)
        self._peak = find_peak(self._device, loop.precision, measure=self._measure_peak)
        hardware.count_peak_from(self._device, 0)
        self._every = loop.log_every_n_steps
        self._unwatch_fetches = loop.around_fetch(self._clock.fetch_begins, self._clock.fetch_ends)
        self.meter.begin(self._clock, self._peak)
        if self._profile:
            self._profiler = StepProfiler(self._device, Path(loop.directory) if loop.is_first_process else None)
        self.steps_done = loop.steps_done
        self.last_step = Step(self.steps_done)
        self._begin_step()
        self.began = self._paused_at = now()
        self._paused = self._running = True

    def _begin_step(self) -> None:
        self._step = Step(self.steps_done + 1)
        self._compilations = self.compiler.compilations
        self.compiler.step = self._step.number

    def _compiler_phase(self, phase: str) -> None:
        if phase != self.compiler.phase:
            self.compiler.report(warm=self.meter.warm)
            self.compiler.phase = phase

    def batch_start(self) -> None:
        if self._paused:
            self._paused = False
            age = hardware.process_age_seconds()
            self.ready_seconds, self._began_seconds = self.ready_seconds or age, self._began_seconds or age
            self._compiler_phase("training")
            self._compilations = self.compiler.compilations  # what a validation compiled belongs to no step
            self.pause_seconds += now() - self._paused_at
            self._clock.mark()
            self._clock.fetches()  # before the lap began
            self._step.after, self._after = self._after, None
            self.phase = "profiling" if self._profiler is not None and self._profiler.recording else "training"
        self._step.fetches += self._clock.fetches()
        if not self._step.batches:
            self._step.epoch, self._step.batch_idx = self._loop.position
            rate = self._learning_rate
            self._step.learning_rate = rate.clone() if isinstance(rate, torch.Tensor) else rate

    def disturb(self) -> None:
        """The step under way is not steady: it prepares what later ones need not, or comes before compiled code."""
        self._step.compiled = True

    def leave_out(self) -> None:
        """The step under way is looked at: it counts in no figure, unless it prepares something as well."""
        self._step.left_out = True

    def batch_end(self, loss: torch.Tensor | None, batch: Any) -> bool:
        """A batch is through; returns whether it completed an optimizer step."""
        step = self._step
        step.batches += 1
        if self.count is not None:
            step.add(_as_counts(self.count(batch)))
        step.new_shape |= self._shapes.is_new(batch)
        if loss is not None:
            step.losses.append(loss)
        done = self._loop.steps_done
        if done == self.steps_done:
            return False
        self._clock.lap(step)
        self.steps_done = done
        was_warm = self.meter.warm
        self.meter.end(step)
        if self.compiler.compilations != self._compilations:
            step.compiled = True
            self.compiler.report(warm=was_warm)
        starts = self._profiler is not None and self._profiler.due(step, warm=was_warm)
        if step.disturbed or step.profiled or step.left_out:
            self._energy.discard()
        elif self.meter.warm:
            self._energy.step((step.counts and step.counts[0]) or 0)
        if self.meter.warm:
            self._machine.begin()
        self.last_step = step
        self._begin_step()
        if done % self._every == 0:
            self.flush()
        if self._profiler is not None and (starts or self._profiler.full):
            self.pause("profiling")
            if starts:
                self._profiler.start()
        return True

    def pause(self, phase: str) -> None:
        """``phase`` (validation, a checkpoint) begins; its time belongs to no step."""
        if not self._running:
            return
        self.phase = phase
        if phase == "validating":
            self._compiler_phase(phase)
        self._energy.end()
        self._after = phase
        within_step = self._step.batches > 0
        if not self._paused:
            self._paused, self._paused_at = True, now()
            if within_step:  # inside an accumulation: what was done of the step so far is a lap of its own
                self._clock.lap(self._step)
        if self._profiler is not None and self._profiler.recording:  # what a pause does is no part of a step
            self._step.profiled = within_step  # recorded in part: not a steady one either
            self._profiler.stop()

    def restart(self) -> None:
        """Another program trains from the next step on: what was steady so far becomes warm-up."""
        self.pause("switching strategies")
        self.flush(everything=True)
        self.meter.restart()
        self._energy.restart()

    def flush(self, *, everything: bool = False) -> None:
        """Send the open window's losses to the host and write the windows that have arrived."""
        self._energy.end()  # what is closed here cannot be spoilt by a later compile
        self._machine.look()
        for number, points in self.meter.read(everything=everything):
            if self.pages is None:
                continue
            rate = self._learning_rate
            compiler = self.compiler.figures() if self.compiler.compilations else CompilerFigures()
            since_the_beginning: Points = {
                "train/learning_rate": None if rate is None else float(rate),
                "warmup/first_step_seconds": self.meter.first_step_seconds,
                "warmup/seconds": self.meter.warmup_seconds,
                **{f"warmup/{name}": getattr(compiler, name) for name in COMPILER_POINTS},
                "usage/peak_device_gib": hardware.peak_device_gib(self._device),
                "usage/peak_process_gib": hardware.peak_process_gib(),
                "usage/joules_per_sample": self._energy.joules_per_sample(),
            }
            self.pages.scalars(points | since_the_beginning, number)

    def _rank_figures(self) -> RankFigures:
        number = "" if self._device.index is None else f" {self._device.index}"
        return RankFigures(
            rank=distributed.get_rank(),
            host=platform.node(),
            device=hardware.device_name(self._device) + number,
            steady_step_seconds_median=self.meter.median_seconds,
            exposed_communication_seconds=(self.profile() or {}).get("exposed_communication_seconds_per_step"),
            compile_seconds=self.compiler.compile_seconds if self.compiler.compilations else None,
            peak_device_memory_gib=hardware.peak_device_gib(self._device),
            peak_process_memory_gib=hardware.peak_process_gib(),
        )

    @property
    def _learning_rate(self) -> Any:
        return next((group["lr"] for each in self._loop.optimizers for group in each.param_groups), None)

    def finish(self) -> None:
        """Training is over, one way or another: read everything that is still on its way."""
        self.pause("finishing")
        self._unwatch_fetches()
        if self._profiler is not None:
            self._profiler.finish()
        self.flush(everything=True)

    def fill(self, record: RunRecord, program: Program | None, *, together: bool) -> None:
        """Write what was measured, and what ``program`` reports, into ``record``.

        ``together`` brings the figures of all processes together, for which every one of them must call this: after an
        error on one of them that would hang.
        """
        rates, peak = self.meter.steady.rates(), self._peak
        if together and self._loop.world_size > 1:
            found = gathered((self._rank_figures(), rates))
            rates = added_up(rates, [each for _, each in found])
            if self._loop.is_first_process:
                record.ranks = [figures for figures, _ in found]
        record.copy_fields(rates, peak)
        shares = peak.utilization(rates.teraflops_per_second)
        record.model_flops_utilization, record.model_flops_utilization_measured_peak = shares
        record.peak_device_memory_gib = hardware.peak_device_gib(self._device)
        record.peak_process_memory_gib = hardware.peak_process_gib()
        record.joules_per_sample = self._energy.joules_per_sample()
        record.machine = self._machine.facts()
        self.meter.fill(record)
        record.optimizer_gigabytes = hardware.optimizer_gigabytes(self._loop.optimizers)
        if (mean := record.steady_step_seconds_mean) and (rate := rates.teraflops_per_second) is not None:
            record.least_step_seconds = least = peak.least_seconds(rate * mean, record.optimizer_gigabytes)
            record.roofline_share = None if least is None else least / mean
        if record.ranks:
            record.peak_device_memory_gib = max(one.peak_device_memory_gib or 0.0 for one in record.ranks) or None
            record.peak_process_memory_gib = max(one.peak_process_memory_gib or 0.0 for one in record.ranks) or None
        record.steps = self.steps_done
        if record.import_seconds is not None:
            if self.ready_seconds is not None:
                record.setup_seconds = self.ready_seconds - record.import_seconds
            if self._began_seconds is not None:
                record.progress = self._clock.progress(self._began_seconds)
        record.pause_seconds = self.pause_seconds
        if (loss := self.meter.last_loss) is not None:
            record.final_loss = loss if math.isfinite(loss) else None
        record.losses = self.meter.loss_points()
        compiles = self.compiler.compilations > 0
        if program is not None:
            if (profile := self.profile()) is not None:
                program.report["profile"] = profile
            record.report = program.report
            record.eager_parts = dict(program.eager_parts)
            record.eager_evaluations = program.eager_evaluations
            record.ended_in_eager = program.ended_in_eager
            # What was tried for a choice and not taken was compiled as well.
            compiles = bool(program.strategies) or "auto" in program.report
        if compiles:
            record.copy_fields(self.compiler.figures())
            record.events = list(self.compiler.events)
        # Last: it reads from the device, which may be what the training failed at.
        record.final_metrics = nan_to_none({name: float(value) for name, value in self._loop.metrics.items()})

    def profile(self) -> dict[str, Any] | None:
        """What the profiler found, for the record's report; None when it was not asked."""
        return None if self._profiler is None else with_idle_share(self._profiler.facts, self.meter.median_seconds)
