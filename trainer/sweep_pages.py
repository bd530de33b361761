"""Sweep pages: a run ``summary`` in TensorBoard that holds the comparison of other runs: verdicts, tables, curves.

Written at the end of a sweep, and by ``python -m scripts.compare RUNS --tensorboard DIR``. Needs neither torch nor
Lightning; without matplotlib there are no curves.
"""

from __future__ import annotations

import importlib.util
import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.evidence import tables
from trainer.evidence.comparison import WorkloadComparison, compare
from trainer.evidence.runs import find

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "summary"
"""Of the run, in the sweep's folder."""
TAGS = "comparison"
"""First part of its keys; by name it comes before those of single runs."""
SUFFIX = ".summary"
"""Last part of the name of its file, by which the one of an earlier comparison is found."""
WITHOUT_CURVES = "the summary in TensorBoard has no curves: they need matplotlib, pip install 'crucible-train[report]'"
DOTS_PER_INCH = 110


def write_summary(sweep_dir: Path) -> str | None:
    """Compare the runs in ``sweep_dir`` and write its ``summary``; returns what the user should know of it.

    Nothing is written where no two arms of one workload are there to compare. A sweep does not fail for want of it.
    """
    try:
        compared = compare(find([sweep_dir], unreadable=lambda reason: None))
        if all(len(found.rows) < 2 for found in compared):
            return None
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
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    can_draw = importlib.util.find_spec("matplotlib") is not None
    values = [_text(comparisons), *(_curves(comparisons) if can_draw else [])]
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    writer = EventFileWriter(str(directory), filename_suffix=SUFFIX)
    for value in values:
        writer.add_event(Event(step=0, wall_time=time.time(), summary=Summary(value=[value])))
    writer.close()
    return None if can_draw else WITHOUT_CURVES


def _text(comparisons: Sequence[WorkloadComparison]) -> Summary.Value:
    """One page: the verdicts, where there are several, then all tables."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text import metadata

    verdicts = [f"- **{_plain(found.workload)}**: {_plain(found.verdict)}" for found in comparisons]
    markdown = "\n".join([*(verdicts if len(verdicts) > 1 else []), "", tables.markdown(comparisons)])
    return Summary.Value(
        tag=f"{TAGS}/tables",
        metadata=metadata.create_summary_metadata(display_name="", description=""),
        tensor=TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=TensorShapeProto()),
    )


def _curves(comparisons: Sequence[WorkloadComparison]) -> Iterator[Summary.Value]:
    """Total time over the number of steps, a picture for each workload that has one."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    from trainer.evidence import pictures, pictures_style

    palette = pictures.arm_colours(comparisons)
    for place, found in enumerate(comparisons):
        figure = pictures.crossing(found, palette=palette)
        if figure is None:
            continue
        out = io.BytesIO()
        pictures_style.png(figure, out, dots_per_inch=DOTS_PER_INCH)
        width, height = (round(inches * DOTS_PER_INCH) for inches in figure.get_size_inches())
        yield Summary.Value(
            tag=f"{TAGS}/total_time/{pictures.file_stem(found, place)}",
            image=Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=out.getvalue()),
            metadata=SummaryMetadata(summary_description=_plain(found.verdict)),
        )


def _plain(text: str) -> str:
    """Text in which no character is Markdown's."""
    return "".join(f"\\{character}" if character in "\\*_`<[|" else character for character in text)
