"""Launchers: ``python -m trainer -m compile=eager,whole,regional`` runs every cell of the sweep in a fresh process.

In one process the second cell would find the first one's compiled code, memory and compiler state, and be measured
with them. Each cell starts from compile caches of its own too, unless ``hydra.launcher.caches=shared``.
This is Hydra's edge; what a sweep does is in ``trainer.sweep``.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import statistics
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from trainer.report.sweep import Cell, summarize, write_summary
from trainer.sweep.composing import Composer
from trainer.sweep.devices import places, visible_gpus
from trainer.sweep.ledger import Ledger, alone
from trainer.sweep.objectives import value_of
from trainer.sweep.options import LocalOptions, SubmititOptions, SweepOptions
from trainer.sweep.plan import PlannedCell, lanes
from trainer.sweep.pool import Signals, run_lanes
from trainer.sweep.sweep import Sweep
from trainer.sweep.view import SweepView

PLUGIN_MODULE = "hydra_plugins.crucible"
"""Name that this module has in ``hydra.launcher._target_``."""


class CellFailed(RuntimeError):
    """A cell of the sweep failed, crashed or was refused; the table has said so already."""


class CellReturn(JobReturn):
    """What a sweeper gets of a cell; of one that failed without Hydra's line on stderr, as the table has said so."""

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
    """Make launchers and sweeper known to Hydra, under the one package name that Hydra 1.3 takes plug-ins from.

    A real ``hydra_plugins`` directory would have to be a top-level package of ours; other plug-ins share that name.
    """
    from trainer import optuna_sweeper

    plugins = Plugins.instance()
    if "hydra_plugins" not in sys.modules and importlib.util.find_spec("hydra_plugins") is None:
        package = types.ModuleType("hydra_plugins")
        package.__path__ = []
        sys.modules["hydra_plugins"] = package
    sys.modules[PLUGIN_MODULE] = sys.modules[__name__]
    sys.modules[optuna_sweeper.PLUGIN_MODULE] = optuna_sweeper
    for plugin in (IsolatedLauncher, SubmititLauncher, optuna_sweeper.OptunaSweeper):
        plugins.register(plugin)


class IsolatedLauncher(Launcher):
    """Hydra launcher: one process for each cell, on this machine."""

    __module__ = PLUGIN_MODULE

    kind: ClassVar[type[SweepOptions]] = LocalOptions
    trials: int | None = None
    """How many cells a sweeper will have launched in the end that launches them a few at a time, and prints the table
    itself; None for one that launches all at once."""
    fixed: frozenset[str] = frozenset()
    """Overrides that all cells of such a sweeper share."""

    def __init__(self, **options: object) -> None:
        self._given = options
        self._told: dict[int, tuple[PlannedCell, Cell | None]] = {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra hands over; the task function is left to the processes. Raises ValueError for bad options."""
        self.options = _options(self.kind, self._given)
        self._composer = Composer(hydra_context.config_loader, config)
        self._prepare()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the cells, print their table. Raises SystemExit (128 + signal) when a signal ended the sweep."""
        directory = self._composer.sweep_dir
        signals = Signals()
        with alone(directory), signals.watch():
            ledger = Ledger.load(directory) or Ledger(directory=directory)
            ledger.arguments, ledger.working_directory = sys.argv[1:], str(Path.cwd())
            ledger.state = "running"
            self._check(ledger)
            cells = self._composer.cells(job_overrides, self.options, ledger, fixed=self.fixed)
            ledger.save()
            view = SweepView(
                cells, parallel=self._at_once(), live=self._live(), before=initial_job_idx, total=self.trials
            )
            sweep = Sweep(cells, ledger, self.options, view)
            for entry in ledger.unplanned(cells) if self.trials is None else []:
                view.say(f"left alone, not part of this command: {entry.directory} ({entry.state})")
            try:
                self._run(sweep, signals)
            finally:
                view.close()
                sweep.close(stopped=signals.received is not None)
        self._told.update({cell.number: (cell, sweep.result_of(cell)) for cell in cells})
        if self.trials is None or signals.received is not None:
            self.tell()
        if signals.received is not None:
            self._say(f"go on with: {ledger.go_on_with()}")
            sys.exit(128 + signals.received)
        if self.trials is None and any(result.exit_code != 0 for result in sweep.results):
            self._say(f"run what failed again with: {ledger.go_on_with()}")
        return [self._job_return(job, cells, sweep) for job in range(len(job_overrides))]

    def tell(self) -> None:
        """Print the table of all cells so far, and write it for TensorBoard."""
        results = [result for _, result in self._told.values() if result is not None]
        planned = len(self._told) if self.trials is None else len(results)
        directory, width = self._composer.sweep_dir, shutil.get_terminal_size().columns
        self._say(summarize(results, planned=planned, sweep_dir=directory, width=width))
        if told := write_summary(self._composer.sweep_dir):
            self._say(told)

    def _say(self, text: str) -> None:
        """Print, in as many columns as there are."""
        Console().print(text, markup=False, highlight=False, soft_wrap=True)

    def _prepare(self) -> None:
        """Look for what the sweep needs, before anything runs. Raises ValueError when it is not there."""
        options = self.options
        assert isinstance(options, LocalOptions)
        self._places = places(options.parallel, options.gpus_per_cell, visible_gpus() if options.parallel != 1 else [])
        if len(self._places) > 1 and not self._places[0]:
            self._say("cells that run at once share this machine's processors: their times are no measure")

    def _check(self, ledger: Ledger) -> None:
        """Whether the sweep can be gone on with now. Raises ValueError when something else still runs its cells."""

    def _at_once(self) -> int:
        return len(self._places)

    def _live(self) -> bool | None:
        assert isinstance(self.options, LocalOptions)
        return None if self.options.output == "file" else False

    def _run(self, sweep: Sweep, signals: Signals) -> None:
        assert isinstance(self.options, LocalOptions)
        groups = lanes(sweep.cells, take_turns=self.options.takes_turns)
        run_lanes(groups, sweep, signals, places=self._places, to_file=self.options.output == "file")

    def _job_return(self, job: int, cells: Sequence[PlannedCell], sweep: Sweep) -> JobReturn:
        """What a sweeper gets: the objective (of several cells, the median), or the failure, which Optuna's counts and
        Hydra's own raises."""
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
        failed = [end for end in ends if end.exit_code != 0]
        if failed:
            result.status = JobStatus.FAILED
            result.return_value = CellFailed(f"{shlex.join(failed[0].overrides)}: {failed[0].outcome}")
            return result
        known = [
            value
            for end in ends
            if end.record is not None
            and (value := value_of(end.record, self.options.objective, steps=self.options.objective_steps)) is not None
        ]
        result.status = JobStatus.COMPLETED
        result.return_value = statistics.median(known) if known else None
        return result


class SubmititLauncher(IsolatedLauncher):
    """Hydra launcher: a job of a SLURM cluster for each cell, or for each group of cells that belong together."""

    __module__ = PLUGIN_MODULE

    kind = SubmititOptions

    def _prepare(self) -> None:
        if importlib.util.find_spec("submitit") is None:
            raise ValueError("hydra/launcher=submitit_* needs submitit: pip install 'crucible-train[slurm]'")

    def _check(self, ledger: Ledger) -> None:
        from trainer.sweep.submitted import refuse_unfinished

        assert isinstance(self.options, SubmititOptions)
        refuse_unfinished(ledger, self.options, self._folder)

    def _at_once(self) -> int:
        assert isinstance(self.options, SubmititOptions)
        return self.options.jobs_at_once

    def _live(self) -> bool | None:
        return None

    def _run(self, sweep: Sweep, signals: Signals) -> None:
        from trainer.sweep.submitted import run_jobs

        assert isinstance(self.options, SubmititOptions)
        groups = lanes(sweep.cells, take_turns=self.options.takes_turns)
        run_jobs(groups, sweep, signals, options=self.options, folder=self._folder)

    @property
    def _folder(self) -> Path:
        return self._composer.sweep_dir / "submitit"


def _options(kind: type[SweepOptions], given: dict[str, object]) -> SweepOptions:
    """The launcher's options with their types. Raises ValueError for a wrong one, a line each."""
    try:
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), given))
    except OmegaConfBaseException as error:
        raise ValueError(f"hydra.launcher: {str(error).splitlines()[0]}") from error
    assert isinstance(options, kind)
    return options
