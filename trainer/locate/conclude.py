"""Conclude: what to do about what a search found: commands that go on, and a reproducer that is written and run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config import compose
from trainer.locate.advice import command_line, modular_overrides, with_changes
from trainer.locate.investigate import folder_name
from trainer.locate.remote import RemoteBench
from trainer.locate.report import Report
from trainer.locate.trial import OPTIMIZER, Site
from trainer.settings import Config

REPRODUCER_SECONDS = 300.0


def suggest(report: Report, site: Site, config: Config, overrides: Sequence[str], *, config_dir: str | None) -> None:
    """Commands that go on: with the option that makes it go, with the rest compiled."""
    strategies = list(config.compile.values())
    suggested = [
        with_changes(overrides, strategies, option.changes)
        for option in report.options
        if not option.shows and option.reason is None and not option.backend
    ]
    if report.rest_is_clean is not False:
        suggested.append(modular_overrides(overrides, strategies, site, report.rest))
    if not suggested:
        report.notes.append("no setting was found that leaves it out and compiles the rest; compile=eager does without")
    for given in suggested:
        if config_dir is None:  # whose plugin.py need not bear to be run twice
            compose(given)  # what is suggested is a command that is understood
        report.suggestions.append(command_line(given, config_dir=config_dir))


def reproduce(report: Report, bench: RemoteBench, *, batch: int, folder: Path | None = None) -> None:
    """Write the reproducer of the first culprit, with its inputs from ``batch``, and run it."""
    if not report.culprits or report.culprits[0].path == OPTIMIZER:
        report.notes.append("no reproducer: it takes more than one submodule; run this command again")
        return
    culprit = report.culprits[0]
    try:
        file = bench.reproducer(
            path=culprit.path,
            batch=batch,
            changes={},
            folder=str((folder or folder_name(report)).resolve()),
            symptom=report.symptom,
            reason=culprit.reason,
        )
    except ValueError as error:
        report.notes.append(f"no reproducer: {error}")
        return
    report.reproducer = str(file)
    try:
        done = subprocess.run(
            [sys.executable, file.name],
            cwd=file.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=REPRODUCER_SECONDS,
            check=False,
        )
        # Exit code 1, or the signal that the search has seen as well.
        report.reproducer_shows = done.returncode == 1 or (done.returncode < 0 and report.symptom == "fails")
    except subprocess.TimeoutExpired:
        report.reproducer_shows = report.symptom == "fails"
