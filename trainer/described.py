"""Describe a run: the record as far as its configuration tells it, before anything is built. Needs no torch."""

from __future__ import annotations

import dataclasses
import datetime

from strategies.compose import label, ordered
from strategies.credentials import without_credentials
from trainer.settings import Config
from trainer.sweep import cell_environment
from trainer.sweep.code_version import git_commit
from trainer.telemetry.processor import processor_name
from trainer.telemetry.record import RunRecord


def described(config: Config, command: list[str]) -> RunRecord:
    """A record that says what runs, of which code, from which caches and in which turn of a sweep."""
    strategies = ordered(config.compile.values())
    cell = cell_environment.current()
    return RunRecord(
        task=config.task.title,
        run=config.run.name,
        strategies=without_credentials([strategy.facts() for strategy in strategies]),
        label=label(strategies),
        config=without_credentials(dataclasses.asdict(config)),
        command=without_credentials(command),
        seed=config.seed,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        processor=processor_name(),
        git_commit=git_commit(),
        start=config.repeat,
        round=None if cell is None else cell.round,
    )
