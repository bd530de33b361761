"""``crucible.compare(module, data)``: would torch.compile help this module? Trains copies of it, eager and compiled.

All arms share this process, which a sweep's do not. What that costs in precision, and what is done about it:

- Every arm starts from the same weights, random numbers and data order, and takes as many steps as eager. The arms take
  turns in rounds. The first batches are compared: a note says where the order of the data does not repeat.
- Each arm has compile caches of its own. Before each turn the compiler's state in this process is reset. Round 1 is
  cold; later rounds start on the arm's own caches and count as warm.
- What a process does once (importing the compiler, the first kernels) comes before the first turn. Importing the
  compiler is charged to every compiled arm. Other state of libraries and of the allocator is shared; peak memory of the
  process is left out, since it never falls.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils import _pytree as pytree

from strategies import Auto, CudaGraph, Regional, Strategy, Whole
from strategies.base import label, ordered
from strategies.compile_errors import one_line
from strategies.compiler_warmup import Preparation, environment
from strategies.regions import find_containers
from strategies.torch_patches import compiled_codes, compiling_in, forget_compiled
from tasks.base import suggest
from trainer.advice import in_python
from trainer.bucketed_loaders import loss_of_padding
from trainer.callback import Compile
from trainer.loops.lightning import LightningLoop, throwaway_trainer
from trainer.loops.lightning_internals import lightning_classes
from trainer.process import process_settings
from trainer.report import tables
from trainer.report.comparison import WorkloadComparison, compare_runs
from trainer.report.runs import Run
from trainer.run_end import main_script, script_name
from trainer.run_start import origin
from trainer.settings import TrainerConfig
from trainer.sweep.progress import ProgressOutput, progress_output
from trainer.telemetry import hardware
from trainer.telemetry.hardware import note_machine
from trainer.telemetry.record import FILE_NAME, RunRecord
from trainer.wording import counted

WARMUP_STEPS = 5
MIN_STEADY_STEPS = 10
LONGEST = 3.0
"""A turn of steps that takes so many times eager's seconds ends there."""
MAX_STEPS = 1_000_000_000
"""For learning-rate schedules, which are the same in every arm; turns end before."""
OWN = ("logger", "max_steps", "max_epochs", "max_time", "min_steps", "min_epochs", "enable_checkpointing")
"""Options of Lightning's Trainer that are the comparison's."""
TAKEN = ("strategies", "record", "measure_peak", "warmup_steps")
"""Arguments of ``Compile`` that are."""
ARGUMENTS = ("strategies", "seconds", "rounds", "seed", "trainer", "out", "quiet")
"""Of the comparison itself."""


def compare(
    module: L.LightningModule | Callable[[], L.LightningModule],
    data: Any,
    strategies: Sequence[Strategy | Sequence[Strategy]] | None = None,
    *,
    seconds: float = 60.0,
    rounds: int = 3,
    seed: int = 0,
    trainer: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **declared: Any,
) -> WorkloadComparison:
    """Train copies of ``module`` eager and under strategies, in turn, and print which one to use for how many steps.

    Afterwards the module, the random numbers and torch's settings are what they were. An arm that fails is a row with
    its reason. Returns what ``crucible.compare_runs`` makes of any runs: the verdict, and a row for each arm. In a
    notebook one line says what goes on, and the answer shows itself as a table; ``answer.best`` names the fastest arm,
    ``answer.to_dataframe()`` has the figures.

    Args:
        module: A LightningModule, or a function that makes one where it cannot be copied.
        data: A DataLoader, a LightningDataModule, or whatever ``Trainer.fit`` takes for training.
        strategies: Beside eager: a strategy or a list of them for each arm. None = ``Regional()`` where blocks repeat,
            ``Whole()``, and on CUDA one of them with ``CudaGraph()``.
        seconds: Of eager's steady steps, all rounds together. Other arms take as many steps, and compile besides.
        rounds: Turns of each arm. Three give an interval; in one or two, less is shown.
        seed: Of the order of the data, of dropout, and of weights that a function makes.
        trainer: Options of ``lightning.Trainer``, such as ``{"precision": "bf16-mixed"}``; one device.
        out: Folder for the records, which ``crucible report`` and ``crucible compare`` read. None = not kept.
        quiet: Print nothing.
        declared: Further arguments of ``Compile``: ``blocks``, ``parts``, ``whole``, ``ragged``, ``count``.

    Raises:
        ValueError: Options that cannot be used.
        Exception: What eager itself raises.
    """
    options = _checked(trainer, strategies, declared, seconds=seconds, rounds=rounds)
    if out is not None and any(Path(out).glob(f"*/{FILE_NAME}")):
        raise ValueError(f"compare: out={str(out)!r} holds runs already; take another folder")
    ours = isinstance(module, lightning_classes(L.LightningModule))
    if not ours and (isinstance(module, torch.nn.Module) or not callable(module)):
        raise ValueError(f"compare: {type(module).__name__} is neither a LightningModule nor a function that makes one")
    telling = progress_output(quiet=quiet)

    def make() -> L.LightningModule:
        return copy.deepcopy(module) if isinstance(module, lightning_classes(L.LightningModule)) else module()

    settings = TrainerConfig(matmul_precision=torch.get_float32_matmul_precision())
    with isolate_rng(), process_settings(settings):
        arms, note = _arms(strategies, make(), declared, str(options.get("accelerator", "auto")))
        turns = _Turns(make=make, data=data, seed=seed, options=options, declared=declared, out=out)
        names = ", ".join(label(arm) for arm in arms)
        times = f"{counted(rounds, 'round')}, {seconds / rounds:g} s of eager each"
        telling.note(f"comparing {names}: {times}, as many steps of all")
        if note:
            telling.note(note)
        turns.all(arms, rounds, seconds / rounds, telling)
    found = compare_runs(turns.runs)[0]
    found.verdict = in_python(found.verdict)
    for row in found.rows:
        row.flags = [in_python(flag) for flag in row.flags]
    if len(set(turns.first_batches)) > 1:
        found.unlike.append("first batch: the order of the data does not repeat under one seed")
    telling.answer(found)
    return found


def _checked(
    trainer: Mapping[str, Any] | None, strategies: Any, declared: Mapping[str, Any], *, seconds: float, rounds: int
) -> dict[str, Any]:
    known = [name for name in inspect.signature(Compile).parameters if name not in TAKEN]
    if unknown := [name for name in declared if name not in known]:
        raise ValueError(f"compare: {unknown[0]} is not an argument{suggest(unknown[0], [*ARGUMENTS, *known])}")
    if strategies is not None and (isinstance(strategies, str) or not isinstance(strategies, Sequence)):
        arms = "[Regional(), [Regional(), Optimizer()]]"
        raise ValueError(f"compare: strategies={strategies!r} is not a list of arms, such as {arms}")
    options = {"devices": 1, "limit_val_batches": 0, **(trainer or {})}
    if taken := [name for name in OWN if name in options]:
        raise ValueError(f"compare: trainer[{taken[0]!r}] is for the comparison to set; leave it out")
    if options["devices"] not in (1, "1", [0]) or options.get("num_nodes", 1) != 1:
        raise ValueError(f"compare: trainer['devices']={options['devices']!r} must be 1; sweeps compare on several")
    if not seconds > 0 or rounds < 1:
        raise ValueError(f"compare: seconds={seconds:g} must be above 0, rounds={rounds} at least 1")
    return options


def _arms(
    given: Sequence[Strategy | Sequence[Strategy]] | None,
    module: L.LightningModule,
    declared: Mapping[str, Any],
    accelerator: str,
) -> tuple[list[list[Strategy]], str]:
    """The arms, eager first, and what to know of their choice."""
    note = ""
    if given is None:
        alone: list[Strategy] = [Whole()]
        if declared.get("blocks") or declared.get("parts") or find_containers(module):
            alone = [Regional(), Whole()]
        else:
            note = "regional is left out: no repeated blocks were found; blocks=[...] names them"
        cuda = torch.cuda.is_available() and accelerator in ("auto", "gpu", "cuda")
        given = [*alone, [alone[0], CudaGraph()]] if cuda else alone
    arms = [ordered([arm] if isinstance(arm, Strategy) else arm) for arm in given]
    if choosing := [one.name for arm in arms for one in arm if isinstance(one, Auto)]:
        raise ValueError(f"compare: {choosing[0]} chooses by the length of a run, which a comparison does not have")
    return [[], *(arm for arm in arms if arm)], note


@dataclass(kw_only=True, slots=True)
class _Turns:
    """The turns of all arms, one after the other."""

    make: Callable[[], L.LightningModule]
    data: Any
    seed: int
    options: dict[str, Any]
    declared: dict[str, Any]
    out: str | Path | None
    runs: list[Run] = field(default_factory=list)
    first_batches: list[Any] = field(default_factory=list)
    compiled_before: list[CodeType] = field(default_factory=compiled_codes)
    """Of which this process holds compiled code that is not an arm's."""
    preparation_seconds: float = 0.0

    def all(self, arms: Sequence[list[Strategy]], rounds: int, seconds: float, telling: ProgressOutput) -> None:
        """Every arm once a round; who fails is left out from then on. Raises what eager raises."""
        with (
            tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as folder,
            contextlib.ExitStack() as forgotten,
        ):
            forgotten.callback(forget_compiled, self.compiled_before)
            with telling.doing("getting ready"):
                preparation = Preparation()
                self._run_turn(RunRecord(task=""), [], folder, _Limit(steps=2))  # what a process does once
                preparation.wait_for_imports()
                preparation.wait()
                self.preparation_seconds = preparation.cost_seconds
            steps = None
            left = dict(enumerate(arms))
            for number, place in itertools.product(range(1, rounds + 1), range(len(arms))):
                if (arm := left.get(place)) is None:
                    continue
                strategies = copy.deepcopy(arm)
                record = RunRecord(task="", seed=self.seed, round=number, **origin(strategies, ()))
                record.script = script_name(main_script())
                record.start, record.versions = "cold" if number == 1 else "warm", hardware.versions()
                limit = _Limit(steps=steps, seconds=seconds if steps is None else LONGEST * seconds)
                turn = f"{label(arm)}, round {number} of {rounds}"
                with telling.doing(turn):
                    self._run_turn(record, strategies, str(Path(folder, str(place))), limit)
                telling.done(f"{turn}: {_format_line(record)}")
                if limit.of_padding and number == 1:
                    telling.note(f"{label(arm)}: {limit.of_padding}")
                steps = steps or record.steps
                if record.status != "finished":
                    del left[place]

    def _run_turn(self, record: RunRecord, strategies: Sequence[Strategy], folder: str, limit: _Limit) -> None:
        forget_compiled(self.compiled_before)
        began = time.perf_counter()
        variables = {"PL_GLOBAL_SEED": str(self.seed), "PL_SEED_WORKERS": "0"}  # as they were, afterwards
        with environment(variables), _rewound(self.data), contextlib.ExitStack() as stack:
            if strategies:
                stack.enter_context(compiling_in(Path(folder)))
            L.seed_everything(self.seed, verbose=False)
            module = self.make()
            record.task = type(module).__name__
            compile_ = Compile(
                strategies, record=record, measure_peak=False, warmup_steps=WARMUP_STEPS, **self.declared
            )
            given = self.options.get("callbacks") or []
            theirs = copy.deepcopy(given if isinstance(given, list) else [given])
            options = {**self.options, "max_steps": MAX_STEPS, "max_epochs": -1}
            options.pop("callbacks", None)
            limit.compile_ = compile_
            trainer = throwaway_trainer(folder, module, [*theirs, compile_, limit], **options)
            note_machine(record, LightningLoop(trainer))
            kept, record.status = record.round is not None, "interrupted"  # unless it ends by itself
            if kept:
                self.runs.append(Run(Path(self.out or "", f"{len(self.runs)}-{record.label}"), record))
            try:
                is_data_module = isinstance(self.data, lightning_classes(L.LightningDataModule))
                trainer.fit(module, copy.copy(self.data) if is_data_module else self.data)
                record.status = "finished"
            except Exception as error:
                record.status, record.reason = "failed", one_line(error)
                if not strategies:
                    raise
            finally:
                record.total_seconds = time.perf_counter() - began
                record.peak_process_memory_gib = None
                if strategies:
                    record.preparation_seconds = self.preparation_seconds
                if kept and self.out is not None:
                    record.save(self.runs[-1].directory)
                self.first_batches += [] if limit.first_batch is None else [limit.first_batch]
                limit.drop_references()
                del module, trainer, compile_
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()


class _Limit(L.Callback):
    """Ends a turn after ``steps``, or after ``seconds`` of steady steps."""

    def __init__(self, *, steps: int | None = None, seconds: float | None = None) -> None:
        self._steps, self._seconds = steps, seconds
        self._began: float | None = None
        self._last_batch: Any = None
        self.first_batch: Any = None
        self.of_padding = ""
        """That padding changes the loss, where it does."""
        self.compile_: Compile | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.first_batch is None:
            leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            self.first_batch = tuple((tuple(leaf.shape), leaf.detach().float().sum().item()) for leaf in leaves)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._last_batch = batch
        steps, now = trainer.global_step, time.perf_counter()
        if steps >= WARMUP_STEPS:
            self._began = self._began or now
        over = self._seconds is not None and self._began is not None and now - self._began >= self._seconds
        enough = steps >= WARMUP_STEPS + MIN_STEADY_STEPS
        trainer.should_stop |= (self._steps is not None and steps >= self._steps) or (over and enough)

    def drop_references(self) -> None:
        """Hold neither batch nor module any longer."""
        self.compile_ = self._last_batch = None

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        program = None if self.compile_ is None else self.compile_.program
        if program is not None and program.padding is not None and self._last_batch is not None:
            self.of_padding = loss_of_padding(pl_module, self._last_batch, program.padding.ragged)


def _format_line(record: RunRecord) -> str:
    if record.status != "finished" or record.steady_step_seconds_mean is None:
        return f"{record.status}: {record.reason or 'no steady step'}"
    return (
        f"{tables.number(record.steady_step_seconds_mean * 1e3)} ms a step over {record.steady_steps} steady steps, "
        f"after {tables.number(record.warmup_seconds)} s of warm-up"
    )


@contextlib.contextmanager
def _rewound(data: Any) -> Iterator[None]:
    """Leave generators that data loaders keep of their own as they are now, so that the next arm finds the same."""
    loaders = data if isinstance(data, list | tuple) else [data]
    owners = [*loaders, *(getattr(loader, name, None) for loader in loaders for name in ("sampler", "batch_sampler"))]
    generators = [one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
