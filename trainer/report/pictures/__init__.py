"""Pictures of a comparison: each question of a reader as one figure of matplotlib, None where nothing was measured.

``python -m scripts.report RUNS --pictures DIR`` writes them as PNG.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.report.comparison import WorkloadComparison
from trainer.report.pictures import bars, progress, style, total_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Picture:
    """One question and who draws its answer."""

    name: str
    """Of its file, and of its place on a page."""
    title: str
    caption: str
    """How to read it."""
    absent: str
    """What a page shows in its place where it cannot be drawn."""
    draw: Callable[..., Figure | None]
    """``draw(comparison, palette=...)``."""


def crossing(comparison: WorkloadComparison, *, palette: Mapping[str, str] | None = None) -> Figure | None:
    """Total time over the number of steps, crossing points marked."""
    return total_time.draw(comparison, palette=palette or arm_colours([comparison]))


def arm_colours(comparisons: Sequence[WorkloadComparison]) -> dict[str, str]:
    """One colour for each arm, the same in all pictures of all of these workloads; baselines are grey."""
    baselines = {one.baseline for one in comparisons}
    return style.colours([[row.cell.arm for row in one.rows] for one in comparisons], baselines=baselines)


PICTURES: tuple[Picture, ...] = (
    Picture(
        "crossing",
        "Total time",
        "Above 1x an arm has made up for its warm-up. Points mark where another arm becomes the one of least time, "
        "which the band below names. Arms of which no difference from the baseline is shown are pale and not chosen.",
        "total time: not known without warm-up and step times",
        crossing,
    ),
    Picture(
        "progress",
        "Progress",
        "As measured in one run of each arm, waiting, validation and checkpoints included.",
        "progress: not recorded",
        progress.draw,
    ),
    Picture(
        "throughput",
        "Throughput",
        "Steady state, after warm-up.",
        "throughput: not measured",
        bars.throughput,
    ),
    Picture(
        "warmup",
        "Warm-up",
        "What a run pays before its steps are steady, compiling included.",
        "warm-up: not measured",
        bars.warmup,
    ),
    Picture(
        "step_times",
        "Step times",
        "Steady steps, medians over the runs of an arm.",
        "step times: not measured",
        bars.step_times,
    ),
    Picture(
        "padding",
        "Padding",
        "Positions that are computed for nothing.",
        "padding: none, or not counted",
        bars.padding,
    ),
    Picture("memory", "Memory", "The highest allocation of any run.", "memory: not measured", bars.memory),
    Picture("energy", "Energy", "Of the board over steady steps.", "energy: not measured", bars.energy),
)


def write(comparisons: Sequence[WorkloadComparison], directory: Path) -> list[Path]:
    """Write every picture of every comparison into ``directory`` as PNG; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    palette, files = arm_colours(comparisons), []
    for place, comparison in enumerate(comparisons):
        for picture in PICTURES:
            figure = picture.draw(comparison, palette=palette)
            if figure is not None:
                files.append(directory / f"{file_stem(comparison, place)}-{picture.name}.png")
                style.png(figure, files[-1])
    return files


def file_stem(comparison: WorkloadComparison, place: int) -> str:
    """Name for what belongs to a workload: readable, and its place makes it unique."""
    readable = re.sub(r"[^\w.=-]+", "_", comparison.workload).strip("_")[:60]
    return f"{place + 1}-{readable or 'workload'}"
