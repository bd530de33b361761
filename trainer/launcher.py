"""Launcher: ``python -m trainer -m compile=eager,whole,regional`` runs every cell of the sweep in a fresh process.

In one process the second cell would find the first one's compiled code, memory and compiler state, and be measured
with them. Compile caches on disk are left as they are: a cell may find there what an earlier one compiled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

import __main__
from trainer.summary import Cell, summarize
from trainer.telemetry.record import FILE_NAME, RunRecord

OURS = re.compile(r"^[+~]*hydra([./](mode|launcher|sweep|sweeper)\b|\.run\.dir\b)")
"""Hydra's own overrides that belong to the sweep, not to its cells."""
PLUGIN_MODULE = "hydra_plugins.crucible"
"""Name that this module has in ``hydra.launcher._target_``."""
LONGEST_NAME = 120
"""Characters of a cell's directory name; file systems take 255 bytes."""


class CellFailed(RuntimeError):
    """A cell of the sweep failed, crashed or was refused; the table has said so already."""


def register() -> None:
    """Make the launcher known to Hydra, under the one package name that Hydra 1.3 takes launchers from.

    A real ``hydra_plugins`` directory would have to be a top-level package of ours; other plug-ins share that name.
    """
    plugins = Plugins.instance()
    if "hydra_plugins" not in sys.modules and importlib.util.find_spec("hydra_plugins") is None:
        package = types.ModuleType("hydra_plugins")
        package.__path__ = []
        sys.modules["hydra_plugins"] = package
    sys.modules[PLUGIN_MODULE] = sys.modules[__name__]
    plugins.register(IsolatedLauncher)


@dataclass(kw_only=True, slots=True)
class Signals:
    """Signals that arrived while the sweep ran; the running cell decides how it ends."""

    received: int | None = None
    child: subprocess.Popen[bytes] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal. Ctrl-C reaches the cell through the terminal, SIGTERM only through us."""
        self.received = number
        if number == signal.SIGTERM and self.child is not None:
            self.child.send_signal(number)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM, and put the former handlers back."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class IsolatedLauncher(Launcher):
    """Hydra launcher: one process for each cell, one after the other, in the terminal of the sweep."""

    __module__ = PLUGIN_MODULE

    config: DictConfig
    hydra_context: HydraContext

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra hands over; the task function is left to the processes."""
        self.hydra_context = hydra_context
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the cells, print their table. Raises SystemExit (128 + signal) when a signal ended the sweep."""
        sweep_dir = Path(str(self.config.hydra.sweep.dir))
        sweep_dir.mkdir(parents=True, exist_ok=True)
        varied = _varied(job_overrides)
        signals = Signals()
        cells: list[Cell] = []
        returns: list[JobReturn] = []
        with signals.watch():
            for position, overrides in enumerate(job_overrides):
                if signals.received is not None:
                    break
                number = initial_job_idx + position
                chosen = [override for override in overrides if override in varied]
                config = self._compose(overrides, number, _directory_name(chosen))
                directory = sweep_dir / str(config.hydra.sweep.subdir)
                title = " ".join(chosen) or "one cell"
                print(f"[{position + 1}/{len(job_overrides)}] {title} -> {directory}", flush=True)
                stale = _written(directory)
                exit_code = _run_cell(self._command(overrides, number, directory), signals)
                # A sweep directory that is used again holds the records of the sweep before.
                record = _read_record(directory) if _written(directory) != stale else None
                cell = Cell(overrides=chosen, directory=directory, exit_code=exit_code, record=record)
                cells.append(cell)
                returns.append(_job_return(cell, overrides, config))
        print(summarize(cells, planned=len(job_overrides), sweep_dir=sweep_dir), flush=True)
        if signals.received is not None:
            sys.exit(128 + signals.received)
        return returns

    def _compose(self, overrides: Sequence[str], number: int, name: str) -> DictConfig:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
            config.hydra.job.override_dirname = name
        return config

    def _command(self, overrides: Sequence[str], number: int, directory: Path) -> list[str]:
        """The command of one cell: ours, with the flags and Hydra overrides of the sweep."""
        return [
            *own_command(),
            *flags(sys.argv[1:]),
            *(override for override in self.config.hydra.overrides.hydra if not OURS.match(override)),
            *overrides,
            # An experiment may ask for a sweep by itself; a cell never starts another one.
            "hydra.mode=RUN",
            f"hydra.job.num={number}",
            f"hydra.run.dir={_quoted(str(directory.resolve()))}",
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


def _quoted(value: str) -> str:
    """A value in quotes for Hydra's override grammar: backslashes count only before a quote, and are doubled there."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"


def _varied(job_overrides: Sequence[Sequence[str]]) -> set[str]:
    """Overrides that not all cells share: what names a cell. All of them when there is one cell only."""
    if len(job_overrides) == 1:
        return set(job_overrides[0])
    shared = set(job_overrides[0]).intersection(*job_overrides[1:])
    return {override for overrides in job_overrides for override in overrides} - shared


def _directory_name(overrides: Sequence[str]) -> str:
    """A readable, short file name from overrides: ``compile=[regional,mine]`` becomes ``compile=regional+mine``."""
    text = ",".join(re.sub(r"[\[\]{}'\"]", "", override).replace(",", "+") for override in overrides)
    return re.sub(r"[^\w.=+,-]+", "_", text)[:LONGEST_NAME] or "run"


def _run_cell(command: list[str], signals: Signals) -> int:
    """Run one cell to its end; its exit code, negative when a signal killed it."""
    with subprocess.Popen(command) as child:
        signals.child = child
        if signals.received == signal.SIGTERM:  # it came between our looking and the start
            child.terminate()
        try:
            return child.wait()
        finally:
            signals.child = None


def _written(directory: Path) -> int | None:
    """When the cell's record was last written, nanoseconds; None without one."""
    file = directory / FILE_NAME
    return file.stat().st_mtime_ns if file.is_file() else None


def _read_record(directory: Path) -> RunRecord | None:
    try:
        return RunRecord.load(directory)
    except ValueError:
        return None  # refused before any work, or killed before the first record


def _job_return(cell: Cell, overrides: Sequence[str], config: DictConfig) -> JobReturn:
    """What a sweeper gets: the final loss, or the failure (which Optuna's counts, and Hydra's own raises)."""
    result = JobReturn(
        overrides=list(overrides), cfg=config, hydra_cfg=config, working_dir=str(cell.directory), task_name="trainer"
    )
    if cell.exit_code == 0:
        result.status = JobStatus.COMPLETED
        result.return_value = cell.record.final_loss if cell.record is not None else None
    else:
        result.status = JobStatus.FAILED
        result.return_value = CellFailed(f"{shlex.join(overrides)}: {cell.outcome}")
    return result
