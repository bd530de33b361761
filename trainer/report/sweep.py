"""What a sweep leaves at its end: the comparison of its runs, on the terminal and as a run ``summary`` for TensorBoard.

``python -m scripts.compare RUNS --tensorboard DIR`` writes the latter for any runs. Needs neither torch nor Lightning.
"""

from __future__ import annotations

import io
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report import tables
from trainer.report.comparison import WorkloadComparison, compare_runs
from trainer.report.runs import Run, find
from trainer.telemetry.record import RunRecord

FOLDER = "summary"
"""Of the run, in the sweep's folder."""
SUFFIX = ".summary"
"""Last part of the name of its file, by which the one of an earlier comparison is found."""


@dataclass(kw_only=True, slots=True)
class Cell:
    """One run of a sweep, ended."""

    overrides: list[str]
    """What sets this cell apart from the others."""
    directory: Path
    exit_code: int
    """Of its process; negative when a signal killed it."""
    record: RunRecord
    """As it left it, or as the sweep wrote it for one that left none."""

    @property
    def outcome(self) -> str:
        """How it ended: the record's status, or what the exit code means."""
        if self.exit_code < 0:
            return f"killed ({signal.Signals(-self.exit_code).name})"
        if self.exit_code == 2:
            return "refused"
        if self.record.status != "running":
            return self.record.status
        return "finished" if self.exit_code == 0 else f"crashed (exit code {self.exit_code})"


def summarize(cells: Sequence[Cell], *, planned: int, sweep_dir: Path, width: int) -> str:
    """The comparison of a sweep's runs as text, which has the reasons of those that did not finish, and how to see
    more."""
    from rich.console import Console

    runs = [Run(cell.directory, cell.record) for cell in cells]
    out = io.StringIO()
    if runs:
        tables.show(compare_runs(runs), Console(file=out, width=width, highlight=False, color_system=None))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if len(cells) < planned:
        lines.append(f"stopped after {len(cells)} of {planned} cells")
    folder = shlex.quote(str(sweep_dir))
    return "\n".join([*lines, f"python -m scripts.compare {folder}", f"tensorboard --logdir {folder}"])


def write_summary(sweep_dir: Path) -> str | None:
    """Compare the runs in ``sweep_dir``, write its ``summary``, and each run's speed to eager into the run's row of the
    HParams table; returns what the user should know of it.

    Nothing is written where no two arms of one workload are there to compare. A sweep does not fail for want of it.
    """
    try:
        compared = compare_runs(find([sweep_dir], unreadable=lambda reason: None))
        if all(len(found.rows) < 2 for found in compared):
            return None
        for row in (row for found in compared if found.baseline_row is not None for row in found.rows):
            for run in row.cell.finished:
                speed_to_eager = {"simple_value": 1.0 if row.ratio is None else row.ratio.value}
                _replace(run.directory, {"tag": "whole_run/speed_to_eager", **speed_to_eager}, run.record.steps or 0)
        write(compared, sweep_dir / FOLDER)
    except (OSError, ValueError) as error:
        return f"no summary for TensorBoard: {str(error).splitlines()[0]}"
    return None


def write(comparisons: Sequence[WorkloadComparison], directory: Path) -> None:
    """Write verdicts and tables of ``comparisons`` as the run ``directory``, instead of earlier ones. Raises OSError
    where it cannot be written."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    verdicts = [f"- **{_plain(found.workload)}**: {_plain(found.verdict)}" for found in comparisons]
    markdown = "\n".join([*(verdicts if len(verdicts) > 1 else []), "", tables.markdown(comparisons)])
    value = text_pb("comparison/tables", markdown).value[0]
    _replace(directory, {"tag": value.tag, "metadata": value.metadata, "tensor": value.tensor}, 0)


def _replace(directory: Path, value: dict[str, Any], step: int) -> None:
    """Write ``value`` instead of what an earlier comparison left in ``directory``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    writer = EventFileWriter(str(directory), filename_suffix=SUFFIX)
    writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[Summary.Value(**value)])))
    writer.close()


def _plain(text: str) -> str:
    """Text in which no character is Markdown's."""
    return "".join(f"\\{character}" if character in "\\*_`<[|" else character for character in text)
