"""What a run writes to TensorBoard beside its scalars: HParams, the compiler's events and the configuration as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary

from strategies.credentials import hidden
from trainer.atomic import finite
from trainer.telemetry import hparams
from trainer.telemetry.events import Event
from trainer.telemetry.facts import rows as facts_in
from trainer.telemetry.keys import FINAL
from trainer.telemetry.layout import layout
from trainer.telemetry.profile_page import profile_page
from trainer.telemetry.record import RunRecord
from trainer.telemetry.slow_steps import slow_steps_table
from trainer.telemetry.source import shown


class TensorBoardPages:
    """Writes the scalars and pages of one run through its TensorBoardLogger; another logger gets the scalars alone."""

    def __init__(self, logger: Logger | None) -> None:
        self._logger = logger if isinstance(logger, TensorBoardLogger) else None
        self._other = logger if self._logger is None else None

    def begin(self, record: RunRecord) -> None:
        """Open the run's row of the HParams table: its metrics stay blank until ``finish``, so that a run that was
        killed shows as unfinished instead of as zeros. Put what strategies are compared by on charts of all runs."""
        if self._logger is None:
            return
        writer = self._logger.experiment._get_file_writer()
        writer.add_summary(Summary(value=[*hparams.begin(record), layout()]))
        config = json.dumps(finite(record.config), indent=2, default=str, allow_nan=False)
        self._logger.experiment.add_text("run/config", _fenced(config), 0)
        self._logger.experiment.flush()

    def scalars(self, values: Mapping[str, float | None], step: int) -> None:
        """Write the figures that exist at ``step``; loggers other than TensorBoard get them the ordinary way."""
        present = {key: value for key, value in values.items() if value is not None}
        if self._logger is not None:
            # One event for all of them: twenty add_scalar calls would cost half a millisecond more.
            points = [Summary.Value(tag=key, simple_value=value) for key, value in present.items()]
            self._logger.experiment._get_file_writer().add_summary(Summary(value=points), step)
        elif self._other is not None:
            self._other.log_metrics(present, step)

    def events(self, events: Iterable[Event], step: int) -> None:
        """Write the table of the compiler's events so far."""
        if self._logger is not None:
            self._logger.experiment.add_text("compile/events", events_table(events), step)

    def finish(self, record: RunRecord, summary: Mapping[str, str]) -> None:
        """Write the final metrics; close the run's row in the HParams table when the run finished."""
        if self._logger is None:
            return
        step = record.steps or record.repeats or 0
        rows = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in summary.items())
        self._logger.experiment.add_text("run/summary", f"| figure | value |\n|---|---|\n{rows}", step)
        if record.strategies:
            self._logger.experiment.add_text("run/strategies", strategies_table(record), step)
        if record.run == "train":
            table = slow_steps_table(record.slow_steps, record.slow_step_count)
            self._logger.experiment.add_text("run/slow_steps", table, step)
        if "profile" in record.report:
            self._logger.experiment.add_text("run/profile", profile_page(record.report["profile"]), step)
        if record.status == "finished":
            values = {key: getattr(record, name) for key, name in FINAL.items()}
            for key in values:
                if "_milliseconds" in key and values[key] is not None:
                    values[key] *= 1e3
            self.scalars(values, step)
            self._logger.experiment._get_file_writer().add_summary(Summary(value=[hparams.end()]))
        self._logger.experiment.flush()


def events_table(events: Iterable[Event]) -> str:
    """Markdown table of the compiler's events, equal ones counted once."""
    counted: dict[tuple[str, str, str, str], list[int | None]] = {}
    for event in events:
        counted.setdefault((event.kind, event.phase, event.reason, event.location or ""), []).append(event.step)
    if not counted:
        return "No graph breaks, recompiles or fallbacks."
    lines = ["| what | during | times | first step | reason | where |", "|---|---|---|---|---|---|"]
    for (kind, phase, reason, location), steps in counted.items():
        first = "-" if steps[0] is None else str(steps[0])
        lines.append(f"| {kind} | {phase} | {len(steps)} | {first} | {_cell(reason)} | {_shortened(location)} |")
    return "\n".join(lines)


def strategies_table(record: RunRecord) -> str:
    """Markdown table of what each strategy, and the checks beside them, found."""
    report = {name: facts for name, facts in record.report.items() if name != "profile"}  # which has its own page
    lines = [f"| {_cell(name)} | {_cell(fact)} | {_cell(value)} |" for name, fact, value in facts_in(report)]
    return "\n".join(["| strategy | fact | value |", "|---|---|---|", *lines]) if lines else "Nothing to tell."


def _shortened(location: str) -> str:
    """``location`` from the site-packages or working directory on: the table is narrow, the record has it whole."""
    inside = shown(location)
    return f"`{inside if inside != location else '/'.join(location.split('/')[-3:])}`"


def _cell(text: str) -> str:
    return hidden(text).replace("|", "\\|").replace("\n", "<br>")


def _fenced(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
