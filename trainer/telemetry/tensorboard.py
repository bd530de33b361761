"""TensorBoard: the keys of every run, its row in the table of runs and its pages.

``docs/reference.md`` documents each key. TensorBoard sorts groups by name: speed, then loss. Needs no torch to import.
For whoever watches a run, or compares many in TensorBoard's table.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from strategies.compile_errors import redact
from strategies.loop_protocol import Loop
from trainer.telemetry.record import Event, RankFigures, RunRecord, communication_of, set_parameters
from trainer.telemetry.serialization import nan_to_none
from trainer.telemetry.source_lines import display_path

FINAL: dict[str, tuple[str, str]] = {
    "whole_run/steps_per_second": ("steady_steps_per_second", "steps/s"),
    "whole_run/useful_tokens_per_second": ("useful_tokens_per_second", "useful tokens/s"),
    "whole_run/speed_to_eager": ("speed_to_eager", "speed to eager"),
    "whole_run/compile_seconds": ("compile_seconds", "compile s"),
    "whole_run/loss": ("final_loss", "final loss"),
    "whole_run/step_milliseconds_p95": ("steady_step_seconds_p95", "p95 step ms"),
    "whole_run/samples_per_second": ("samples_per_second", "samples/s"),
    "whole_run/warmup_seconds": ("warmup_seconds", "warm-up s"),
    "whole_run/peak_device_gib": ("peak_device_memory_gib", "peak GiB"),
}
"""Metric columns of the HParams table, the record's field and the heading of each; written when a run finishes. At a
width of 1500 pixels TensorBoard shows the first four."""


class TensorBoardPages:
    """Writes the scalars and pages of one run through its loop's writer; other loggers get the scalars alone."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._writer = loop, loop.writer

    def begin(self, record: RunRecord) -> None:
        """Open the run's row of the HParams table: its metrics stay blank until ``finish``, so that a run that was
        killed shows as unfinished instead of as zeros."""
        if self._writer is None:
            return
        *begin, self._row_ends = row(record)
        for summary in begin:
            self._writer._get_file_writer().add_summary(summary)
        config = json.dumps(nan_to_none(record.config), indent=2, default=str, allow_nan=False)
        self._writer.add_text("run/config", textwrap.indent(config, "    "), 0)
        self._writer.flush()

    def scalars(self, values: Mapping[str, float | None], step: int) -> None:
        present = {key: value for key, value in values.items() if value is not None and not self._loop.logs(key)}
        if self._writer is not None:
            # One event for all of them: twenty add_scalar calls would cost half a millisecond more.
            points = [Summary.Value(tag=key, simple_value=value) for key, value in present.items()]
            self._writer._get_file_writer().add_summary(Summary(value=points), step)
        self._loop.log_figures(present, step)

    def events(self, events: Iterable[Event], step: int) -> None:
        if self._writer is not None:
            self._writer.add_text("compile/events", events_table(events), step)

    def finish(self, record: RunRecord, summary: Mapping[str, str]) -> None:
        """Write the final metrics; close the run's row in the HParams table when the run finished."""
        if self._writer is None:
            return
        step = record.steps or 0
        rows = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in summary.items())
        self._writer.add_text("run/summary", f"| figure | value |\n|---|---|\n{rows}", step)
        if record.ranks:
            self.scalars(rank_figures(record.ranks), step)
        if record.status == "finished":
            values: dict[str, float | None] = {
                "whole_run/speed_to_eager": None if record.verdict is None else record.verdict.shown_ratio
            }
            for key, (name, _) in FINAL.items():
                if key not in values:
                    value = getattr(record, name)
                    values[key] = value * 1e3 if value is not None and "_milliseconds" in key else value
            self.scalars(values, step)
            self._writer._get_file_writer().add_summary(self._row_ends)
        self._writer.flush()


def events_table(events: Iterable[Event]) -> str:
    counted: dict[tuple[str, ...], list[int | None]] = {}
    for event in events:
        counted.setdefault((event.kind, event.phase, event.reason, event.location or ""), []).append(event.step)
    lines = ["| what | during | times | first step | reason | where |", "|---|---|---|---|---|---|"]
    for (kind, phase, reason, location), steps in counted.items():
        first = "-" if steps[0] is None else str(steps[0])
        # From the site-packages or working directory on: the table is narrow, the record has it whole.
        where = display_path(location) if display_path(location) != location else "/".join(location.split("/")[-3:])
        lines.append(f"| {kind} | {phase} | {len(steps)} | {first} | {_cell(reason)} | `{where}` |")
    return "\n".join(lines) if counted else "No graph breaks, recompiles or fallbacks."


def _cell(text: str) -> str:
    return redact(text).replace("|", "\\|").replace("\n", "<br>")


def rank_figures(ranks: Sequence[RankFigures]) -> dict[str, float | None]:
    """What the processes of one run lose to each other, and the fullest one's memory, by key."""
    found, peaks = communication_of(ranks), [one.peak_device_memory_gib for one in ranks]
    return {
        "ranks/skew_milliseconds": None if found is None else found.skew_seconds * 1e3,
        "ranks/slowest": None if found is None else found.slowest.rank,
        "ranks/exposed_communication_share": None if found is None else found.exposed_share,
        "ranks/peak_device_gib": max((peak for peak in peaks if peak is not None), default=None),
    }


def hyperparameters(record: RunRecord) -> dict[str, str]:
    """Columns that tell runs apart: strategies with their options, and everything else in one. TensorBoard shows five
    columns if there are as many, and figures would be out of sight behind them."""
    options = " ".join(f"{name}={value}" for name, value in set_parameters(record).items())
    size = batch_size(record)
    batch, number = size and f"batch {size}", record.round and f"round {record.round}"
    facts = [record.task, batch, record.start, number, f"seed {record.seed}", record.precision, record.device]
    return {"compile": f"{record.label} {options}".strip(), "workload": " · ".join(fact for fact in facts if fact)}


def batch_size(record: RunRecord) -> int | None:
    """Samples of a batch, as configured; None for a task that does not name them so."""
    task = record.config.get("task", {})
    sizes = [section.get("batch_size") for section in (task.get("data"), task) if isinstance(section, dict)]
    return next((size for size in sizes if isinstance(size, int)), None)


def row(record: RunRecord) -> tuple[Summary, Summary, Summary]:
    """The columns of the table, what opens the run's row, and what closes it once the run has finished."""
    from torch.utils.tensorboard.summary import hparams

    columns, begins, ends = hparams(hyperparameters(record), dict.fromkeys(FINAL, 0.0))
    kept = columns.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(kept.content)
    for info in data.experiment.metric_infos:  # torch gives them no headings
        info.display_name = FINAL[info.name.tag][1]
    kept.content = data.SerializeToString()
    return columns, begins, ends
