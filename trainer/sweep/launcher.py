"""Launcher: ``python -m trainer -m compile=eager,whole,regional`` runs every cell of the sweep in a fresh process.

In one process the second cell would find the first one's compiled code, memory and compiler state, and be measured
with them. Each cell starts from compile caches of its own too, unless ``hydra.launcher.caches=shared``.
This is Hydra's edge: it composes the cells; what happens to them is in the other modules of ``trainer.sweep``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import statistics
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import __main__
from trainer.config import strategy_names, task_name, to_config
from trainer.report.sweep import summarize, write_summary
from trainer.settings import Peer
from trainer.sweep.environment import CACHES_DIRECTORY, described
from trainer.sweep.plan import (
    Ledger,
    PlannedCell,
    SweepOptions,
    alone,
    directory_name,
    in_order,
    name_by_difference,
    queues,
    quoted,
    value_of,
    with_arms,
)
from trainer.sweep.processes import Signals, places, run_queues, visible_gpus
from trainer.sweep.sweep import Sweep, SweepView
from trainer.telemetry.record import RunRecord

PLUGIN_MODULE = "hydra_plugins.crucible"
"""Name that this module has in ``hydra.launcher._target_``."""
OURS = re.compile(r"^[+~]*hydra([./](mode|launcher|sweep|sweeper)\b|\.run\.dir\b)")
"""Hydra's own overrides that belong to the sweep, not to its cells."""


class CellFailed(RuntimeError):
    """A cell of the sweep failed, crashed or was refused; the table has reported it already."""


class CellReturn(JobReturn):
    """What a sweeper gets of a cell; of a failed one without Hydra's line on stderr: the table has it."""

    @property
    def return_value(self) -> Any:
        """The objective. Raises CellFailed."""
        if self.status is JobStatus.FAILED:
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def register() -> None:
    """Make the launcher known to Hydra, under the one package name that Hydra 1.3 takes plug-ins from.

    A real ``hydra_plugins`` directory would have to be a top-level package of ours; other plug-ins share that name.
    """
    if "hydra_plugins" not in sys.modules and importlib.util.find_spec("hydra_plugins") is None:
        package = types.ModuleType("hydra_plugins")
        package.__path__ = []
        sys.modules["hydra_plugins"] = package
    sys.modules[PLUGIN_MODULE] = sys.modules[__name__]
    Plugins.instance().register(IsolatedLauncher)


class IsolatedLauncher(Launcher):
    """Hydra launcher: one process for each cell, on this machine."""

    __module__ = PLUGIN_MODULE

    def __init__(self, **options: object) -> None:
        self._given = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra hands over; the task function is left to the processes. Raises ValueError for bad options."""
        options = self.options = _options(self._given)
        self._composer = Composer(hydra_context.config_loader, config)
        gpus = visible_gpus() if options.parallel != 1 else []
        self._places = places(options.parallel, options.gpus_per_cell, gpus)
        if len(self._places) > 1 and not self._places[0]:
            self._print("cells that run at once share this machine's processors: their times are no measure")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the cells, print their table. Raises SystemExit (128 + signal) when a signal ended the sweep."""
        directory = self._composer.sweep_dir
        signals = Signals()
        with alone(directory), signals.watch():
            ledger = Ledger.load(directory) or Ledger(directory=directory)
            ledger.arguments, ledger.working_directory = sys.argv[1:], str(Path.cwd())
            ledger.state = "running"
            cells = self._composer.cells(job_overrides, self.options, ledger)
            ledger.save()
            view = SweepView(cells)
            sweep = Sweep(cells, ledger, self.options, view)
            for entry in ledger.unplanned(cells):
                view.print(f"left alone, not part of this command: {entry.directory} ({entry.state})")
            try:
                groups = queues(cells, interleaved=self.options.interleaved)
                run_queues(groups, sweep, signals, places=self._places)
            finally:
                sweep.close(stopped=signals.received is not None)
        width = shutil.get_terminal_size().columns
        self._print(summarize(sweep.results, planned=len(cells), sweep_dir=directory, width=width))
        if missing := write_summary(directory):
            self._print(missing)
        if signals.received is not None:
            self._print(f"continue with: {ledger.go_on_with()}")
            sys.exit(128 + signals.received)
        if any(result.exit_code != 0 for result in sweep.results):
            self._print(f"run what failed again with: {ledger.go_on_with()}")
        return [self._job_return(job, cells, sweep) for job in range(len(job_overrides))]

    def _print(self, text: str) -> None:
        Console().print(text, markup=False, highlight=False, soft_wrap=True)

    def _job_return(self, job: int, cells: Sequence[PlannedCell], sweep: Sweep) -> JobReturn:
        """What a sweeper gets: the objective (of several cells, the median), or the failure."""
        mine = [cell for cell in cells if cell.job == job]
        config = self._composer.config_of(mine[0])
        result = CellReturn(
            overrides=list(mine[0].overrides),
            cfg=config,
            hydra_cfg=config,
            working_dir=str(mine[0].directory),
            task_name="trainer",
        )
        ends = [end for cell in mine if (end := sweep.result_of(cell)) is not None]
        if failed := [end for end in ends if end.exit_code != 0]:
            result.status = JobStatus.FAILED
            result.return_value = CellFailed(f"{shlex.join(failed[0].overrides)}: {failed[0].outcome}")
            return result
        values = [value_of(end.record, self.options.objective) for end in ends if end.record is not None]
        known = [value for value in values if value is not None]
        result.status = JobStatus.COMPLETED
        result.return_value = statistics.median(known) if known else None
        return result


def _options(given: dict[str, object]) -> SweepOptions:
    """The launcher's options with their types. Raises ValueError for a wrong one, a line each."""
    try:
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SweepOptions), given))
    except OmegaConfBaseException as error:
        raise ValueError(f"hydra.launcher: {str(error).splitlines()[0]}") from error
    assert isinstance(options, SweepOptions)
    return options


class Composer:
    """Makes cells of the overrides that a sweeper hands over."""

    def __init__(self, loader: ConfigLoader, config: DictConfig) -> None:
        self._loader, self._config = loader, config
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self.sweep_dir = Path(str(config.hydra.sweep.dir))

    def cells(self, job_overrides: Sequence[Sequence[str]], options: SweepOptions, ledger: Ledger) -> list[PlannedCell]:
        """All cells in the order in which they run, entered into the ledger, each with directory and command.

        Raises ValueError, or Hydra's own errors, for what cannot be planned or composed.
        """
        drafts = [
            self._draft(overrides, arm, job, own_caches=options.caches == "own")
            for job, given in enumerate(job_overrides)
            for overrides, arm in with_arms(given, options.arms)
        ]
        cells = in_order(drafts, rounds=options.rounds, interleaved=options.interleaved)
        name_by_difference(cells)
        for cell in cells:
            cell.number = ledger.next_number()
            cell.directory = self.sweep_dir / str(self.config_of(cell).hydra.sweep.subdir)
            ledger.enter(cell)
            cell.command = self._command(cell)
        self._place_caches(cells, own=options.caches == "own")
        return cells

    def config_of(self, cell: PlannedCell) -> DictConfig:
        config = self._composed[cell.overrides]
        with open_dict(config):
            config.hydra.job.id = str(cell.number)
            config.hydra.job.num = cell.number
            config.hydra.job.override_dirname = directory_name(cell.chosen)
        return config

    def _draft(self, overrides: tuple[str, ...], arm: tuple[str, ...], job: int, *, own_caches: bool) -> PlannedCell:
        config = self._loader.load_sweep_config(self._config, list(overrides))
        self._composed[overrides] = config
        described = self._describe(config, overrides)
        if (
            config.repeat is None and own_caches and "cached" not in (config.compile or {})
        ):  # whose store may make it warm
            described.start = "cold"
        return PlannedCell(overrides=overrides, arm=arm, job=job, start=described.start, described=described)

    def _describe(self, config: DictConfig, overrides: Sequence[str]) -> RunRecord:
        """The record of a cell that leaves none: as a run would begin it, or as much as a bad configuration tells."""
        command = [*flags(sys.argv[1:]), *overrides]
        bare = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            return described(to_config(bare), command)
        except ValueError:
            values = OmegaConf.to_container(bare, resolve=False, enum_to_str=True)
            assert isinstance(values, dict)
            return RunRecord(
                task=task_name(config.task),
                label=strategy_names(config.compile),
                strategies=[{"name": str(name)} for name in config.compile],
                config={str(key): value for key, value in values.items()},
                command=command,
                start=config.repeat,
            )

    def _place_caches(self, cells: Sequence[PlannedCell], *, own: bool) -> None:
        """A directory of compile caches for each cell, the same for the cold and the warm one of a pair, named after
        the cold one."""
        named: dict[tuple[object, ...], Path] = {}
        for cell in cells:
            if own or cell.start is not None:
                cell.caches = named.setdefault(cell.pair, self.sweep_dir / CACHES_DIRECTORY / cell.directory.name)

    def _command(self, cell: PlannedCell) -> list[str]:
        """The command of one cell: ours, with the flags and Hydra overrides of the sweep."""
        config = self._composed[cell.overrides]
        devices = config.trainer.devices or 1
        by_torchrun = OmegaConf.get_type(config.run) is Peer and devices != 1  # ours start the others themselves
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}", "-m", "trainer"]
        return [
            *([sys.executable, *torchrun] if by_torchrun else own_command()),
            *flags(sys.argv[1:]),
            *(override for override in self._config.hydra.overrides.hydra if not OURS.match(override)),
            *cell.overrides,
            *([f"repeat={cell.start}"] if config.repeat != cell.start else []),
            # An experiment may ask for a sweep by itself; a cell never starts another one.
            "hydra.mode=RUN",
            f"hydra.job.num={cell.number}",
            f"hydra.run.dir={quoted(cell.directory.resolve())}",
        ]


def own_command() -> list[str]:
    """How this program was started: the console script, or ``python -m trainer``."""
    started_by_module = getattr(__main__, "__spec__", None) is not None
    script = Path(sys.argv[0])
    if started_by_module or script.suffix == ".py" or not script.is_file():
        return [sys.executable, "-m", "trainer"]
    return [sys.executable, str(script.resolve())]


def flags(arguments: Sequence[str]) -> list[str]:
    """Hydra's flags that say where configuration comes from, as absolute paths."""
    given = get_args_parser().parse_known_args(list(arguments))[0]
    flags: list[str] = []
    if given.config_dir is not None:
        flags += ["--config-dir", os.path.abspath(given.config_dir)]
    if given.config_path is not None:
        flags += ["--config-path", given.config_path]
    if given.config_name is not None:
        flags += ["--config-name", given.config_name]
    return flags
