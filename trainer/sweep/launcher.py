"""Launcher: ``python -m trainer -m compile=eager,whole,regional`` runs every cell of the sweep in a fresh process.

In one process the second cell would find the first one's compiled code, memory and compiler state, and be measured
with them. Each cell starts from compile caches of its own too, unless ``hydra.launcher.caches=shared``.
This is Hydra's edge: it composes the cells; what happens to them is in the other modules of ``trainer.sweep``.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
import shutil
import statistics
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import __main__
from trainer.config import to_config
from trainer.process import handled, present_handlers
from trainer.report.runs import Run
from trainer.settings import Peer
from trainer.sweep import plan
from trainer.sweep.environment import CACHES_DIRECTORY, described
from trainer.sweep.plan import PlannedCell
from trainer.sweep.sweep import run_cells, summarize

PLUGIN_MODULE = "hydra_plugins.crucible"
"""Name that this module has in ``hydra.launcher._target_``."""
OURS = re.compile(r"^[+~]*hydra([./](mode|launcher|sweep|sweeper)\b|\.run\.dir\b)")
"""Hydra's own overrides that belong to the sweep, not to its cells."""


def register() -> None:
    """Make the launcher known to Hydra, under the one package name that Hydra 1.3 takes plug-ins from.

    A real ``hydra_plugins`` directory would have to be a top-level package of ours; other plug-ins share that name.
    """
    if "hydra_plugins" not in sys.modules and importlib.util.find_spec("hydra_plugins") is None:
        package = types.ModuleType("hydra_plugins")
        package.__path__ = []
        sys.modules["hydra_plugins"] = package
    sys.modules[PLUGIN_MODULE] = sys.modules[__name__]
    IsolatedLauncher.exit_code = 0
    Plugins.instance().register(IsolatedLauncher)


class IsolatedLauncher(Launcher):
    """Hydra launcher: one process for each cell, on this machine."""

    __module__ = PLUGIN_MODULE
    exit_code: ClassVar[int] = 0
    """1 once a cell did not finish."""

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
        with plan.alone(directory), handled(handlers):
            command = plan.again(sys.argv[1:], directory)
            cells = self._cells(job_overrides, directory)
            run_cells(cells, signals, self._console.print)
        width = shutil.get_terminal_size().columns
        runs = [Run(cell.directory, cell.record) for cell in cells if cell.exit_code is not None]
        self._console.print(summarize(runs, planned=len(cells), sweep_dir=directory, width=width))
        if signals:
            self._console.print(f"continue with: {command}")
            sys.exit(128 + signals[-1])
        if any(cell.exit_code for cell in cells):
            IsolatedLauncher.exit_code = 1
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
            folders = before.get((*cell.record.command, cell.round), [])
            number = plan.number_of(folders[0]) if folders else next(numbers)
            config = self._composed[cell.overrides]
            with open_dict(config):
                config.hydra.job.id = str(number)
                config.hydra.job.num = number
                config.hydra.job.override_dirname = plan.directory_name(cell.chosen)
            cell.directory = folders.pop(0) if folders else directory / config.hydra.sweep.subdir
            cell.command = self._command(cell, config)
            if options.caches == "own" or cell.start is not None:  # the cold and the warm one of a pair share them
                cell.caches = caches.setdefault(cell.pair, directory / CACHES_DIRECTORY / cell.directory.name)
        return cells

    def _draft(self, overrides: tuple[str, ...], arm: tuple[str, ...], job: int) -> PlannedCell:
        config = self._composed[overrides] = self._loader.load_sweep_config(self._config, list(overrides))
        start = config.repeat
        if start is None and self.options.caches == "own" and "cached" not in (config.compile or {}):
            start = "cold"  # the store of ``cached`` may make it warm
        words = [*flags(sys.argv[1:]), *overrides, *([f"repeat={start}"] if config.repeat != start else [])]
        bare = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        record = described(to_config(bare), words)
        record.start = start
        return PlannedCell(overrides=overrides, arm=arm, words=words, job=job, start=start, record=record)

    def _command(self, cell: PlannedCell, config: DictConfig) -> list[str]:
        devices = config.trainer.devices or 1
        by_torchrun = OmegaConf.get_type(config.run) is Peer and devices != 1  # ours start the others themselves
        # As this program was started: by the console script, or as a module.
        script, module = Path(sys.argv[0]), getattr(__main__, "__spec__", None) is not None
        module |= script.suffix == ".py" or not script.is_file()
        how = ["-m", "trainer"] if module else [str(script.resolve())]
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


def flags(arguments: Sequence[str]) -> list[str]:
    """Hydra's flags that say where configuration comes from, as absolute paths."""
    given = get_args_parser().parse_known_args(list(arguments))[0]
    folder = None if given.config_dir is None else os.path.abspath(given.config_dir)
    found = {"--config-dir": folder, "--config-path": given.config_path, "--config-name": given.config_name}
    return [word for flag, value in found.items() if value is not None for word in (flag, value)]
