"""What a run writes to TensorBoard beside its scalars: HParams, the compiler's events and the configuration as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import hparams

from trainer.telemetry.facts import flat
from trainer.telemetry.facts import rows as facts_in
from trainer.telemetry.keys import FINAL
from trainer.telemetry.record import Event, RunRecord


class TensorBoardPages:
    """Writes the scalars and pages of one run through its TensorBoardLogger; another logger gets the scalars alone."""

    def __init__(self, logger: Logger | None) -> None:
        self._logger = logger if isinstance(logger, TensorBoardLogger) else None
        self._other = logger if self._logger is None else None
        self._session_end: Any = None

    def begin(self, record: RunRecord) -> None:
        """Open the run's row of the HParams table: its columns stay blank until ``finish``, so that a run that was
        killed shows as unfinished instead of as zeros."""
        if self._logger is None:
            return
        experiment, session_start, self._session_end = hparams(hyperparameters(record), dict.fromkeys(FINAL, 0.0))
        writer = self._logger.experiment._get_file_writer()
        writer.add_summary(experiment)
        writer.add_summary(session_start)
        self._logger.experiment.add_text("run/config", _fenced(json.dumps(record.config, indent=2, default=str)), 0)
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
        if record.status == "finished":
            values = {key: getattr(record, name) for key, name in FINAL.items()}
            for key in values:
                if "_milliseconds" in key and values[key] is not None:
                    values[key] *= 1e3
            self.scalars(values, step)
            self._logger.experiment._get_file_writer().add_summary(self._session_end)
        self._logger.experiment.flush()


def hyperparameters(record: RunRecord) -> dict[str, Any]:
    """Columns that tell runs apart: task, strategies with their options, device, precision and seed."""
    columns: dict[str, Any] = {
        "task": record.task,
        "run": record.run,
        "compile": record.label,
        "device": record.device or "",
        "precision": record.precision or "",
        "seed": str(record.seed),  # a number would be shown as 0.0000
    }
    # One column, the same in every run: TensorBoard takes the list of columns from any one of them.
    columns["options"] = " ".join(
        f"{strategy['name']}.{name}={value}"
        for strategy in record.strategies
        for name, value in flat(strategy)
        if name != "name"
    )
    return columns


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
    lines = [f"| {_cell(name)} | {_cell(fact)} | {_cell(value)} |" for name, fact, value in facts_in(record.report)]
    return "\n".join(["| strategy | fact | value |", "|---|---|---|", *lines]) if lines else "Nothing to tell."


def _shortened(location: str) -> str:
    """``location`` from the working directory or site-packages on: the table is narrow, the record has it whole."""
    inside = location.removeprefix(f"{Path.cwd()}/").rpartition("/site-packages/")[2]
    return f"`{inside if inside != location else '/'.join(location.split('/')[-3:])}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _fenced(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
