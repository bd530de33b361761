"""What a sweep leaves at its end: a table with a row for each cell, and a run ``summary`` for TensorBoard with the
comparison of all cells: verdicts, tables, curves.

``python -m scripts.compare RUNS --tensorboard DIR`` writes the latter for any runs. Needs neither torch nor Lightning;
without matplotlib there are no curves.
"""

from __future__ import annotations

import importlib.util
import io
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report import tables
from trainer.report.comparison import WorkloadComparison, compare_runs
from trainer.report.runs import Run, find
from trainer.report.tables import ABSENT, footnotes, number, paid_back, plain_lines, speed
from trainer.telemetry.record import RunRecord

FOLDER = "summary"
"""Of the run, in the sweep's folder."""
SUFFIX = ".summary"
"""Last part of the name of its file, by which the one of an earlier comparison is found."""
WITHOUT_CURVES = "the summary in TensorBoard has no curves: they need matplotlib, pip install -e '.[report]'"


@dataclass(kw_only=True, slots=True)
class Cell:
    """One run of a sweep, ended."""

    overrides: list[str]
    """What sets this cell apart from the others."""
    directory: Path
    exit_code: int
    """Of its process; negative when a signal killed it."""
    record: RunRecord | None
    """None when the cell left none."""

    @property
    def outcome(self) -> str:
        """How it ended, for the table: the record's status, or what the exit code means."""
        if self.exit_code < 0:
            return f"killed ({signal.Signals(-self.exit_code).name})"
        if self.exit_code == 2:
            return "refused"
        if self.record is not None and self.record.status != "running":
            return self.record.status
        return "finished" if self.exit_code == 0 else f"crashed (exit code {self.exit_code})"


def summarize(cells: Sequence[Cell], *, planned: int, sweep_dir: Path, width: int) -> str:
    """The sweep's table as text, with the reasons of cells that did not finish, the verdict and how to see more.

    A cell's ratio to eager is that of its arm in the comparison: all repeats together, and ``~`` before what
    they do not show.
    """
    runs = [Run(cell.directory, cell.record) for cell in cells if cell.record is not None]
    compared = compare_runs(runs) if runs else []
    lines: list[str] = []
    for inference in (False, True):
        chosen = [cell for cell in cells if (cell.record is not None and cell.record.run == "inference") is inference]
        if chosen:
            lines += plain_lines(_columns(chosen, compared, inference=inference), width)
    lines += footnotes(compared)
    for cell in cells:
        if cell.exit_code != 0 and cell.record is not None and cell.record.reason:
            lines.append(f"{_name(cell)}: {cell.record.reason.splitlines()[0]}")
    if len(cells) < planned:
        lines.append(f"stopped after {len(cells)} of {planned} cells")
    lines += [f"{found.workload}: {found.verdict}" for found in compared if len(found.rows) > 1]
    folder = shlex.quote(str(sweep_dir))
    lines += [f"python -m scripts.compare {folder}", f"tensorboard --logdir {folder}"]
    return "\n".join(lines)


def _columns(cells: Sequence[Cell], compared: Sequence[WorkloadComparison], *, inference: bool) -> dict[str, list[str]]:
    """What the table shows of each cell, by heading; the status only where not all have finished."""
    records = [cell.record for cell in cells]
    outcomes = [cell.outcome for cell in cells]
    against = [_against(record, compared) for record in records]

    def figures(name: str, factor: float = 1.0) -> list[str]:
        values = [None if record is None else getattr(record, name) for record in records]
        return [number(None if value is None else value * factor) for value in values]

    losses = [None if record is None else record.final_loss for record in records]
    measured = {"steps/s": figures("steady_steps_per_second")}
    if inference:
        measured = {
            "median ms": figures("latency_seconds_median", 1e3),
            "p95 ms": figures("latency_seconds_p95", 1e3),
            "samples/s": figures("samples_per_second"),
        }
    return {
        "cell": [_name(cell) for cell in cells],
        "status": [ABSENT] * len(cells) if {*outcomes} == {"finished"} else outcomes,
        "start": [ABSENT if record is None else record.start or record.cache or ABSENT for record in records],
        **measured,
        "vs eager": [ratio for ratio, _ in against],
        f"pays back after {'batches' if inference else 'steps'}": [steps for _, steps in against],
        "compile s": figures("compile_seconds"),
        "warm-up s": figures("warmup_seconds"),
        "final loss": [ABSENT if loss is None else f"{loss:.4f}" for loss in losses],
    }


def _against(record: RunRecord | None, compared: Sequence[WorkloadComparison]) -> tuple[str, str]:
    """How much faster than eager a run's arm is, and after how many steps or batches that has paid for compiling."""
    for found in compared:
        for row in found.rows if len(found.rows) > 1 else []:
            if any(run.record is record for run in row.cell.finished):
                warm = any(run.record is record for run in row.cell.warm) and row.cell.compiles
                return speed(row, found), paid_back(row, warm=warm)
    return ABSENT, ABSENT


def _name(cell: Cell) -> str:
    return " ".join(cell.overrides) or cell.directory.name


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
                _replace(run.directory, [{"tag": "whole_run/speed_to_eager", **speed_to_eager}], run.record.steps or 0)
        return write(compared, sweep_dir / FOLDER)
    except (OSError, ValueError) as error:
        return f"no summary for TensorBoard: {str(error).splitlines()[0]}"


def write(comparisons: Sequence[WorkloadComparison], directory: Path) -> str | None:
    """Write verdicts, tables and curves of ``comparisons`` as the run ``directory``, instead of earlier ones.

    Returns:
        What is missing and why; None when all is there.

    Raises:
        OSError: ``directory`` cannot be written.
    """
    can_draw = importlib.util.find_spec("matplotlib") is not None
    values = [_text(comparisons), *(_pictures(comparisons) if can_draw else [])]
    _replace(directory, values, 0)
    return None if can_draw else WITHOUT_CURVES


def _replace(directory: Path, values: Sequence[dict[str, Any]], step: int) -> None:
    """Write ``values`` instead of what an earlier comparison left in ``directory``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    writer = EventFileWriter(str(directory), filename_suffix=SUFFIX)
    for value in values:
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[Summary.Value(**value)])))
    writer.close()


def _text(comparisons: Sequence[WorkloadComparison]) -> dict[str, Any]:
    """One page: the verdicts, where there are several, then all tables."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    verdicts = [f"- **{_plain(found.workload)}**: {_plain(found.verdict)}" for found in comparisons]
    markdown = "\n".join([*(verdicts if len(verdicts) > 1 else []), "", tables.markdown(comparisons)])
    value = text_pb("comparison/tables", markdown).value[0]
    return {"tag": value.tag, "metadata": value.metadata, "tensor": value.tensor}


def _pictures(comparisons: Sequence[WorkloadComparison]) -> Iterator[dict[str, Any]]:
    """Speed over the number of steps, warm-up included, and steady speed: what can be read as wide as TensorBoard shows
    an image, 320 pixels."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    from trainer.report import pictures
    from trainer.report.pictures import style

    palette = pictures.arm_colours(comparisons)
    for place, found in enumerate(comparisons):
        for name, draw in (("speed_by_steps", pictures.total_time.compact), ("steady_speed", pictures.throughput)):
            figure = draw(found, palette=palette)
            if figure is None:
                continue
            out = io.BytesIO()
            style.png(figure, out)
            width, height = (round(inches * style.DOTS_PER_INCH) for inches in figure.get_size_inches())
            yield {
                "tag": f"verdict/{name}/{pictures.file_stem(found, place)}",
                "image": Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=out.getvalue()),
                "metadata": SummaryMetadata(summary_description=_plain(found.verdict)),
            }


def _plain(text: str) -> str:
    """Text in which no character is Markdown's."""
    return "".join(f"\\{character}" if character in "\\*_`<[|" else character for character in text)
