"""Recorder: the Lightning callback that chooses the batches of an explanation and records what their steps compile.

A recompile over an epoch comes from a shape that is new; a batch like one that was run has nothing more to tell.
Everything under ``torch._dynamo`` is private to torch. ``trainer.telemetry.compiler`` counts for the record of a run;
this reads more, at a price that no run should pay.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch._dynamo.utils as dynamo_utils
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from scripts.explain import Finding, Graphs, read_break, read_recompile
from strategies import Program
from strategies.compose import eager
from strategies.padding import parts_of
from strategies.regions import RegionCall, region_calls
from trainer.callback import Compile
from trainer.loops.lightning import LightningLoop
from trainer.telemetry import source
from trainer.telemetry.compiler import METRICS_KEPT, EventReporter
from trainer.telemetry.source import Line

OPTIMIZERS = ("optimizer", "optim")
"""Names of files and folders whose code is part of the optimizer step."""
LOGGERS = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension")
FIRST_BATCHES = 4
"""Run whatever their shape: optimizer state, gradient buffers and counters change over the first steps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to explain."""

    backend: str = "configured"
    """``inductor``, ``aot_eager`` or ``eager``; ``configured`` leaves each strategy its own."""
    batches: int | None = None
    """Batches of the epoch to look at; None = all."""
    seconds: float = 120.0
    """After so many seconds no further batch is looked at. The first batches do not count: they may compile long."""
    progress: Callable[[str], None] = lambda line: None
    """Called with a line about what is being done."""
    before_steps: Callable[[], None] = lambda: None
    """Called once Lightning has set its signal handlers: for whoever has handlers of their own."""


class CompilerRecorder:
    """Reads torch's metrics of each compilation from ``start`` on."""

    def __init__(self) -> None:
        self.phase = "warming"
        """``warming`` (before the first step), ``training`` or ``validating``, set by the owner."""
        self.graphs: dict[str, Graphs] = {}
        """By kind of region."""
        self.breaks: list[Finding] = []
        self.recompiles: list[Finding] = []
        self.failures: list[str] = []
        self.left_out_of_cuda_graphs: list[str] = []
        """Why, for each graph."""
        self._regions: dict[str, str] = {}
        self._locations: dict[str, Line] = {}
        self._metrics = self._breaks = 0

    def start(self) -> None:
        dynamo_utils.set_compilation_metrics_limit(METRICS_KEPT)
        self._metrics = len(dynamo_utils.get_compilation_metrics())
        self._breaks = len(dynamo_utils.graph_break_reasons)

    def read(self, region: str | None = None, *, first_call: bool = False) -> None:
        """Take in what is new, compiled on behalf of ``region``, of which one copy was called for the first time."""
        metrics = dynamo_utils.get_compilation_metrics()
        for metric in metrics[self._metrics :]:
            self._read_metric(metric, region, first_call=first_call)
        self._metrics = len(metrics)
        reasons = dynamo_utils.graph_break_reasons
        self._breaks = min(self._breaks, len(reasons))  # torch._dynamo.reset() empties the list
        for reason in reasons[self._breaks :]:
            stack = [source.line(frame.filename, frame.lineno or 0, frame.name) for frame in reason.user_stack]
            self.breaks.append(read_break(reason.reason, stack, region=region, phase=self.phase))
        self._breaks = len(reasons)

    def _read_metric(self, metric: Any, region: str | None, *, first_call: bool) -> None:
        identifier = str(metric.compile_id)
        frame = identifier.split("/")[0]
        if metric.co_filename:
            self._locations[frame] = source.line(metric.co_filename, metric.co_firstlineno or 0, metric.co_name)
        where = self._locations.get(frame)
        backward = metric.is_forward is False
        if region is None and backward:
            region = self._regions.get(identifier)  # a backward is compiled when no region runs
        region = region or _place(where)
        self._regions.setdefault(identifier, region)
        if metric.cudagraph_skip_reason:
            self.left_out_of_cuda_graphs.append(" ".join(metric.cudagraph_skip_reason.split()))
        if metric.fail_type:
            line = " ".join(str(metric.fail_reason or "no reason given").split("\n")[0].split())
            at = f" ({metric.fail_user_frame_filename}:{metric.fail_user_frame_lineno})"
            where_text = at if metric.fail_user_frame_filename else f" ({where})" if where else ""
            self.failures.append(f"{metric.fail_type}: {line}{where_text}")
        elif metric.recompile_reason and metric.has_guarded_code:
            self.recompiles.append(
                read_recompile(
                    metric.recompile_reason,
                    function=where,
                    region=region,
                    phase=self.phase,
                    seconds=metric.entire_frame_compile_time_s,
                    first_call=first_call,
                )
            )
        if backward or (metric.has_guarded_code and metric.graph_op_count):
            graphs = self.graphs_of(region)
            if self.phase == "validating":
                graphs.validation += 1
                return
            graphs.backward += backward
            graphs.forward += not backward

    def graphs_of(self, region: str) -> Graphs:
        """The graphs of one kind of region, to be added to."""
        return self.graphs.setdefault(region, Graphs(region=region))


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Silence torch's own reports of what is explained anyway; whoever sets TORCH_LOGS wants to read them."""
    loggers = [] if os.environ.get("TORCH_LOGS") else [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _place(where: Line | None) -> str:
    """Name for what was compiled outside of all regions."""
    path = Path(where.file if where is not None else "")
    names = (path.stem.split("_")[0], *(parent.name for parent in path.parents))
    return "optimizer" if any(name in OPTIMIZERS for name in names) else "outside regions"


class ChosenBatches:
    """A training loader over another one, which passes on the first batches and then one of each new kind.

    Args:
        loader: What the training would iterate over.
        batches, seconds: See ``Options``.
        accumulate: Batches that make up an optimizer step, which is never left half done.
    """

    def __init__(self, loader: Iterable[Any], *, batches: int | None, seconds: float, accumulate: int = 1) -> None:
        self._loader, self._max_batches, self._seconds = loader, batches, seconds
        self._accumulate = accumulate
        self.kinds: Counter[str] = Counter()
        self.looked_at = self.run = 0
        self.stopped: str | None = None

    def __iter__(self) -> Iterator[Any]:
        began: float | None = None
        first: Any = None
        for batch in self._loader:
            kind = kind_of(batch)
            new = kind not in self.kinds
            self.kinds[kind] += 1
            self.looked_at += 1
            if first is None:
                first = copied(batch)
            if new or self.run < FIRST_BATCHES * self._accumulate or self.run % self._accumulate:
                self.run += 1
                yield batch
            if self._max_batches is not None and self.looked_at >= self._max_batches:
                self.stopped = f"--batches {self._max_batches}"
                break
            if self.run < FIRST_BATCHES * self._accumulate:
                continue
            began = began or time.perf_counter()
            if time.perf_counter() - began > self._seconds:
                self.stopped = f"--seconds {self._seconds:g} were over"
                break
        while self.run % self._accumulate:
            self.run += 1
            yield copied(first)


class StepRecorder(L.Callback):
    """Comes after ``Compile`` in the trainer's callbacks: chooses the batches and names regions.

    Args:
        compile_: The callback that applies the strategies.
    """

    def __init__(self, compile_: Compile, options: Options) -> None:
        self.compiler = CompilerRecorder()
        self.chosen: ChosenBatches | None = None
        self.validated = False
        """Whether a validation came up."""
        self.eager_passed = False
        """Whether the batch that ended the steps with an error runs in eager without one."""
        self._compile, self._options = compile_, options
        self._batch: Any = None
        self._calls: list[tuple[RegionCall, Callable[..., Any]]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Strategies are applied: stand between the training loader and the loop."""
        self.compiler.start()

        def chosen(loader: Any) -> ChosenBatches:
            self.chosen = ChosenBatches(
                loader,
                batches=self._options.batches,
                seconds=self._options.seconds,
                accumulate=trainer.accumulate_grad_batches,
            )
            return self.chosen

        wrap_training_loader(trainer, chosen)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the regions; what a run logs line by line is reported here at the end."""
        assert self._compile.program is not None
        self._record_regions(self._compile.program)
        self._compile.telemetry.reporter = EventReporter(enabled=False)
        self._options.before_steps()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch
        self.compiler.read()  # before the first batch, Compile has warmed all shapes where a strategy asks for it
        self.compiler.phase = "training"
        assert self.chosen is not None
        self._options.progress(f"batch {batch_idx + 1}, {self.chosen.looked_at} looked at: forward, backward, step")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.compiler.read()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.compiler.read()
        self.compiler.phase = "validating"
        self._options.progress("validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.compiler.read()
        self.compiler.phase, self.validated = "training", True
        trainer.val_check_batch = float("inf")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ask eager, on the same batch: nothing is trained for keeps."""
        program, batch = self._compile.program, self._batch
        if batch is None or program is None or not isinstance(exception, Exception):
            return
        passes = LightningLoop(trainer, cuda_graphs=False)
        with contextlib.suppress(Exception), passes.quiet(), eager(program):
            passes.step(batch)
            self.eager_passed = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = True

    def close(self) -> None:
        """Stop recording, whatever happened; figures stay."""
        self.compiler.read()
        for call, compiled in self._calls:
            call.compiled = compiled
        self._calls.clear()

    def _record_regions(self, program: Program) -> None:
        """Have each compiled call say on whose behalf the compiler works; regions within regions are not called."""
        for region in program.regions:
            self.compiler.graphs_of(region.kind).paths.append(region.path)
        for region, call in region_calls(program):
            self._calls.append((call, call.compiled))
            call.compiled = self._recorded(call.compiled, region.kind)

    def _recorded(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        called: set[str] = set()

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.compiler.read()
            first = self.compiler.phase not in called
            called.add(self.compiler.phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.compiler.read(kind, first_call=first)

        return recorded


# ---- batches, which bisect looks at as well --------------------------------------------------------------------------


def wrap_training_loader(trainer: L.Trainer, wrap: Callable[[Any], Any]) -> None:
    """Have the training loop iterate over what ``wrap`` makes of its loader."""
    strategy: Any = trainer.strategy
    process = strategy.process_dataloader

    def process_dataloader(loader: Any) -> Any:
        processed = process(loader)
        return wrap(processed) if trainer.state.stage is RunningStage.TRAINING else processed

    strategy.process_dataloader = process_dataloader


def copied(batch: Any) -> Any:
    """A batch that a step may change."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # a class that refuses; then steps get the same object
        return batch


def kind_of(batch: Any) -> str:
    """Dtypes and shapes of everything in a batch that is a tensor, and the types of the rest, with names."""
    return ", ".join(_described("", batch)) or "empty"


def _described(name: str, value: Any) -> Iterator[str]:
    parts = {} if isinstance(value, Tensor) else parts_of(value)
    if isinstance(value, Tensor):
        shape = " x ".join(map(str, value.shape)) or "scalar"
        yield f"{name} {str(value.dtype).removeprefix('torch.')} {shape}".strip()
    elif not parts and value is not None:
        yield f"{name} {type(value).__name__}".strip()
    for key, part in parts.items():
        yield from _described(f"{name}.{key}" if name else key, part)
