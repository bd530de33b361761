"""Launcher: ``python -m trainer -m compile=eager,whole,regional`` runs every cell of the sweep in a fresh process.

In one process the second cell would find the first one's compiled code, memory and compiler state, and be measured
with them. Each cell starts from compile caches of its own too, unless ``hydra.launcher.caches=shared``.
This is Hydra's edge: it composes the cells, whose order and names ``plan`` decides.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import __main__
from trainer.advice import program
from trainer.config import source_flags, to_config
from trainer.process import present_handlers, signal_handlers
from trainer.report import tables
from trainer.report.comparison import compare_runs
from trainer.report.runs import Run
from trainer.run_start import CACHES_DIRECTORY, ROUND_VARIABLE, SWEEP_VARIABLE, cache_variables, initial_record
from trainer.settings import Peer
from trainer.sweep import plan
from trainer.sweep.plan import REFUSED, PlannedCell
from trainer.telemetry.record import RunRecord

PLUGIN_MODULE = "hydra_plugins.crucible"
"""Name that this module has in ``hydra.launcher._target_``."""
OURS = re.compile(r"^[+~]*hydra([./](mode|launcher|sweep|sweeper)\b|\.run\.dir\b)")
"""Hydra's own overrides that belong to the sweep, not to its cells."""
OUTPUT_NAME = "output.txt"
POLL_SECONDS = 0.05


def register(ended: Callable[[int], None]) -> None:
    """Make the launcher known to Hydra, under the one package name that Hydra 1.3 takes plug-ins from. It calls
    ``ended`` with exit code 1 where a cell did not finish.

    A real ``hydra_plugins`` directory would have to be a top-level package of ours; other plug-ins share that name.
    """
    if "hydra_plugins" not in sys.modules and importlib.util.find_spec("hydra_plugins") is None:
        package = types.ModuleType("hydra_plugins")
        package.__path__ = []
        sys.modules["hydra_plugins"] = package
    sys.modules[PLUGIN_MODULE] = sys.modules[__name__]
    IsolatedLauncher.ended = staticmethod(ended)
    Plugins.instance().register(IsolatedLauncher)


class IsolatedLauncher(Launcher):
    """Hydra launcher: one process for each cell, on this machine."""

    __module__ = PLUGIN_MODULE
    ended: ClassVar[Callable[[int], None]]

    def __init__(self, **options: object) -> None:
        self._given = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra hands over; the task function is left to the processes. Raises ValueError for bad options."""
        self._loader, self._config = hydra_context.config_loader, config
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        try:
            options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(plan.SweepOptions), self._given))
        except OmegaConfBaseException as error:
            raise ValueError(f"hydra.launcher: {str(error).splitlines()[0]}") from error
        assert isinstance(options, plan.SweepOptions)
        self.options = options
        self._console = Console(highlight=False, markup=False, soft_wrap=True)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the cells, print their table. Raises SystemExit (128 + signal) when a signal ended the sweep."""
        directory = Path(str(self._config.hydra.sweep.dir))
        signals: list[int] = []  # those to stop, as they arrive: the running cell decides how it ends
        handlers = dict.fromkeys(present_handlers(), lambda number, _: signals.append(number))
        with plan.alone(directory), signal_handlers(handlers):
            command = plan.again(sys.argv[1:], directory)
            cells = self._cells(job_overrides, directory)
            run_cells(cells, signals, self._console.print)
        runs = [Run(cell.directory, cell.record) for cell in cells if cell.exit_code is not None]
        summarize(runs, planned=len(cells), sweep_dir=directory, console=Console(highlight=False))
        if signals:
            self._console.print(f"continue with: {command}")
            sys.exit(128 + signals[-1])
        if any(cell.exit_code for cell in cells):
            IsolatedLauncher.ended(1)
            self._console.print(f"run what failed again with: {command}")
        return [self._returned([cell for cell in cells if cell.job == job]) for job in range(len(job_overrides))]

    def _returned(self, cells: Sequence[PlannedCell]) -> JobReturn:
        """What a sweeper gets of a job: the objective (of several cells, the median), NaN where one has failed."""
        config = self._composed[cells[0].overrides]
        figures = [getattr(cell.record, self.options.objective) for cell in cells]
        known = [float(figure) for figure in figures if isinstance(figure, int | float)]
        value = math.nan if any(cell.exit_code for cell in cells) else statistics.median(known) if known else None
        return JobReturn(
            overrides=cells[0].overrides,
            cfg=config,
            hydra_cfg=config,
            working_dir=str(cells[0].directory),
            task_name="trainer",
            status=JobStatus.COMPLETED,
            _return_value=value,
        )

    def _cells(self, job_overrides: Sequence[Sequence[str]], directory: Path) -> list[PlannedCell]:
        """All cells in the order in which they run, each with directory and command: the directory of its record, if
        this sweep has run it before.

        Raises ValueError, or Hydra's own errors, for what cannot be planned or composed.
        """
        options = self.options
        drafts = [
            self._draft(overrides, arm, job)
            for job, given in enumerate(job_overrides)
            for overrides, arm in plan.with_arms(given, options.arms)
        ]
        cells = plan.in_order(drafts, rounds=options.rounds)
        plan.name_by_difference(cells)
        before = plan.recorded(directory)
        numbers = itertools.count(max(map(plan.number_of, directory.iterdir()), default=-1) + 1)
        caches: dict[tuple[object, ...], Path] = {}
        for cell in cells:
            folders = before.get((*cell.record.command, cell.record.round), [])
            number = plan.number_of(folders[0]) if folders else next(numbers)
            config = self._composed[cell.overrides]
            with open_dict(config):
                config.hydra.job.id = str(number)
                config.hydra.job.num = number
                config.hydra.job.override_dirname = plan.directory_name(cell.chosen)
            cell.directory = folders.pop(0) if folders else directory / config.hydra.sweep.subdir
            cell.command = self._command(cell, config)
            # The cold and the warm one of a pair share them.
            if options.caches == "own" or cell.record.start is not None:
                cell.caches = caches.setdefault(cell.pair, directory / CACHES_DIRECTORY / cell.directory.name)
        return cells

    def _draft(self, overrides: tuple[str, ...], arm: tuple[str, ...], job: int) -> PlannedCell:
        config = self._composed[overrides] = self._loader.load_sweep_config(self._config, list(overrides))
        start = config.repeat
        if start is None and self.options.caches == "own" and "cached" not in (config.compile or {}):
            start = "cold"  # the store of ``cached`` may make it warm
        words = [*source_flags(sys.argv[1:]), *overrides, *([f"repeat={start}"] if config.repeat != start else [])]
        bare = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        record = initial_record(to_config(bare), words)
        record.start, record.round = start, None  # that of a sweep whose cell has started this one is not ours
        return PlannedCell(overrides=overrides, arm=arm, words=words, job=job, record=record)

    def _command(self, cell: PlannedCell, config: DictConfig) -> list[str]:
        devices = config.trainer.devices or 1
        by_torchrun = OmegaConf.get_type(config.run) is Peer and devices != 1  # ours start the others themselves
        how = started()
        if by_torchrun:
            how = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}", "-m", "trainer"]
        return [
            sys.executable,
            *how,
            *cell.words,
            *(override for override in self._config.hydra.overrides.hydra if not OURS.match(override)),
            # An experiment may ask for a sweep by itself; a cell never starts another one.
            "hydra.mode=RUN",
            f"hydra.job.num={config.hydra.job.num}",
            f"hydra.run.dir={plan.quoted(cell.directory.resolve())}",
        ]


def started() -> list[str]:
    """Python's arguments that start the trainer as this program was: by the console script, or as a module."""
    script, module = Path(sys.argv[0]), getattr(__main__, "__spec__", None) is not None
    module |= script.suffix == ".py" or not script.is_file()
    return ["-m", "trainer"] if module else [str(script.resolve())]


# ---- cells, each in a process of its own -----------------------------------------------------------------------------


def run_cells(cells: Sequence[PlannedCell], signals: Sequence[int], log: Callable[[str], None]) -> None:
    """Run what is left, in order; with the first of ``signals``, a list that grows, no further cell starts."""
    _look_back(cells, log)
    for number, cell in enumerate(cells, 1):
        if signals:
            return
        if cell.exit_code is not None:
            continue
        name, began = f"[{number}/{len(cells)}] {cell.title}", time.monotonic()
        if cell.record.start == "warm" and (cold := _cold(cells, cell)).exit_code != 0:
            cell.record.status, cell.record.reason = "failed", f"not run: its cold cell {cold.record.status}"
            cell.record.save(cell.directory)
            cell.exit_code = 1
        else:
            log(f"{name} -> {cell.directory}")
            run_cell(cell, signals)
        left = sum(each.exit_code is None for each in cells)
        log(f"{name}: {cell.outcome(time.monotonic() - began)} ({left} left)")
        if cell.caches is not None and cell is [each for each in cells if each.pair == cell.pair][-1]:
            shutil.rmtree(cell.caches, ignore_errors=True)  # nobody needs them any more


def _look_back(cells: Sequence[PlannedCell], log: Callable[[str], None]) -> None:
    """Find the cells that have finished before and need not run again; log why others do."""
    records = {cell.directory: loaded(cell.directory) for cell in cells}
    finished = {place: record for place, record in records.items() if record and record.status == "finished"}
    for cell in cells:
        if cell.record.start == "warm" and cell.directory not in finished:
            cold = _cold(cells, cell)
            if finished.pop(cold.directory, None) is not None:
                log(f"runs again, because {cell.title} needs its compile caches: {cold.title}")
    if finished:
        log(f"finished before, not run again: {len(finished)} of {len(cells)} cells")
    for cell in cells:
        if (record := finished.get(cell.directory)) is not None:
            cell.record, cell.exit_code = record, 0
            log(f"  {cell.title}")


def _cold(cells: Sequence[PlannedCell], warm: PlannedCell) -> PlannedCell:
    return next(each for each in cells if each.pair == warm.pair and each.record.start == "cold")


def run_cell(cell: PlannedCell, signals: Sequence[int]) -> None:
    """Run ``cell`` to its end; sets its exit code and its record.

    ``signals`` are those that the sweep got, a list that grows; all are passed on.
    """
    set_aside(cell.directory)
    cell.directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, SWEEP_VARIABLE: str(os.getpid()), ROUND_VARIABLE: str(cell.record.round or "")}
    if cell.caches is not None:
        if cell.record.start != "warm":
            shutil.rmtree(cell.caches, ignore_errors=True)
        environment |= cache_variables(cell.caches.resolve(), store=cell.record.start is not None)
    environment |= cell.variables
    with (cell.directory / OUTPUT_NAME).open("ab") as output:
        # A process group of its own: Ctrl-C in the terminal reaches it once, through the sweep, and what it leaves
        # behind when it is killed can be killed with it.
        process = subprocess.Popen(
            cell.command,
            cwd=cell.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            close_fds=False,  # it inherits the sweep's lock
        )
    passed_on = 0
    try:
        while (exit_code := process.poll()) is None:
            for number in signals[passed_on:]:
                process.send_signal(number)
                passed_on += 1
            time.sleep(POLL_SECONDS)
    finally:  # at an error of ours, too: nothing may stay behind
        if process.poll() is None:
            process.terminate()
    if exit_code != 0:  # processes that it started, other ranks for instance
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    cell.record, cell.exit_code = _final_record(cell, exit_code, signals), exit_code


def _final_record(cell: PlannedCell, exit_code: int, signals: Sequence[int]) -> RunRecord:
    """The record that it left, or that is written for it: finished, interrupted or failed, and why."""
    record = loaded(cell.directory) or cell.record  # refused or dead before the first record
    if record.status in ("failed", "interrupted") or (exit_code == 0 and record.status == "finished"):
        return record
    if signals:
        record.status, record.signal = "interrupted", signals[-1]
        record.reason = signal.Signals(signals[-1]).name
    else:
        record.status, record.reason = "failed", _cause(cell, exit_code)
    record.save(cell.directory)
    return record


def _cause(cell: PlannedCell, exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "killed (SIGKILL), as a system does that runs out of memory"
    if exit_code < 0:
        return f"killed ({signal.Signals(-exit_code).name})"
    with (cell.directory / OUTPUT_NAME).open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4096))
        text = stream.read().decode(errors="replace")
    printed = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]
    if exit_code == REFUSED or errors:  # torchrun has an exit code of its own
        return f"refused: {errors[0] if errors else 'see its output'}"
    return f"crashed (exit code {exit_code})" + (f": {printed[-1]}" if printed else "")


def loaded(directory: Path) -> RunRecord | None:
    with contextlib.suppress(ValueError):
        return RunRecord.load(directory)
    return None


def set_aside(directory: Path) -> None:
    """Move what an earlier attempt left out of the sweep, where neither TensorBoard nor a comparison finds it."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    aside = directory.parent.with_name(f"{directory.parent.name}-set-aside")
    aside.mkdir(exist_ok=True)
    target, count = aside / directory.name, 1
    while target.exists():
        count += 1
        target = aside / f"{directory.name}-{count}"
    directory.rename(target)


def summarize(runs: Sequence[Run], *, planned: int, sweep_dir: Path, console: Console) -> None:
    """Print the comparison of a sweep's runs, with the reasons of those that did not finish, and how to see more."""
    if runs:
        tables.show(compare_runs(runs), console)
    if len(runs) < planned:
        console.print(f"stopped after {len(runs)} of {planned} cells")
    folder = shlex.quote(str(sweep_dir))
    for command in (f"{shlex.join(program('scripts.compare'))} {folder}", f"tensorboard --logdir {folder}"):
        console.print(command, markup=False, soft_wrap=True)
