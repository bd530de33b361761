"""Composing: the configuration and the command of each cell, as Hydra sees them; Hydra's edge."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf, open_dict

import __main__
from trainer.config import strategy_names, task_name, to_config
from trainer.described import described
from trainer.sweep.cell_environment import DIRECTORY
from trainer.sweep.ledger import Ledger
from trainer.sweep.options import SweepOptions
from trainer.sweep.plan import PlannedCell, directory_name, in_order, name_by_difference, with_arms
from trainer.sweep.quoting import quoted
from trainer.telemetry.record import RunRecord

OURS = re.compile(r"^[+~]*hydra([./](mode|launcher|sweep|sweeper)\b|\.run\.dir\b)")
"""Hydra's own overrides that belong to the sweep, not to its cells."""


class Composer:
    """Makes cells of the overrides that a sweeper hands over."""

    def __init__(self, loader: ConfigLoader, config: DictConfig) -> None:
        self._loader, self._config = loader, config
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self.sweep_dir = Path(str(config.hydra.sweep.dir))

    def cells(
        self,
        job_overrides: Sequence[Sequence[str]],
        options: SweepOptions,
        ledger: Ledger,
        *,
        fixed: frozenset[str] = frozenset(),
    ) -> list[PlannedCell]:
        """All cells in the order in which they run, entered into the ledger, each with directory and command.

        ``fixed`` are overrides that set none of them apart from cells launched earlier or later.

        Raises ValueError, or Hydra's own errors, for what cannot be planned or composed.
        """
        drafts = [
            self._draft(overrides, arm, job, own_caches=options.caches == "own")
            for job, given in enumerate(job_overrides)
            for overrides, arm in with_arms(given, options.arms)
        ]
        cells = in_order(drafts, rounds=options.rounds, take_turns=options.takes_turns)
        name_by_difference(cells, fixed)
        for cell in cells:
            cell.number = ledger.next_number()
            cell.directory = self.sweep_dir / str(self.config_of(cell).hydra.sweep.subdir)
            ledger.enter(cell)
            cell.command = self._command(cell)
        self._place_caches(cells, own=options.caches == "own")
        return cells

    def config_of(self, cell: PlannedCell) -> DictConfig:
        """The composed configuration of a cell."""
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
        """A directory of compile caches for each cell, the same for a cold one and its warm twin, named after the cold
        one."""
        named: dict[tuple[object, ...], Path] = {}
        for cell in cells:
            if own or cell.start is not None:
                cell.caches = named.setdefault(cell.pair, self.sweep_dir / DIRECTORY / cell.directory.name)

    def _command(self, cell: PlannedCell) -> list[str]:
        """The command of one cell: ours, with the flags and Hydra overrides of the sweep."""
        return [
            *own_command(),
            *flags(sys.argv[1:]),
            *(override for override in self._config.hydra.overrides.hydra if not OURS.match(override)),
            *cell.overrides,
            *([f"repeat={cell.start}"] if self._composed[cell.overrides].repeat != cell.start else []),
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
