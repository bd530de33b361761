"""Optimizer steps done over the seconds since the start of the process, as measured: when an arm begins to train, where
it stands still, and when it has overtaken another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.report.comparison import WorkloadComparison
from trainer.report.pictures import style
from trainer.report.pictures.total_time import MAX_ARMS, ROW_INCHES, STROKES, draw_legend
from trainer.report.runs import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_INCHES, PANEL_INCHES, TOP_INCHES, BOTTOM_INCHES = 4.6, 2.6, 0.35, 0.6


def lines(cell: Cell) -> dict[str, list[list[float]]]:
    """Points of one run of each start, ``cold`` (or not known) and ``warm``: the median by when its last step ended."""
    found = {}
    for start, runs in (("cold", cell.cold or cell.others), ("warm", cell.warm)):
        known = sorted((run.record.progress for run in runs if run.record.progress), key=lambda points: points[-1][1])
        if known:
            found[start] = known[len(known) // 2]
    return found


def draw(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """A line for each arm and start; None where no run says when its steps were done."""
    arms = {row.cell.arm: found for row in comparison.rows if (found := lines(row.cell))}
    # Those that were through first; the baseline in any case.
    last = {arm: min(points[-1][1] for points in found.values()) for arm, found in arms.items()}
    shown = sorted(arms, key=lambda arm: (arm != comparison.baseline, last[arm]))[:MAX_ARMS]
    if not shown:
        return None
    warm = any("warm" in arms[arm] for arm in shown)
    listed = ROW_INCHES * (len(shown) + 2 * warm) + 0.05
    height = TOP_INCHES + PANEL_INCHES + BOTTOM_INCHES + listed
    with style.drawing():
        figure = style.new_figure(WIDTH_INCHES, height)
        axes = style.place_axes(figure, left=0.65, right=0.2, bottom=BOTTOM_INCHES + listed, top=TOP_INCHES)
        for arm in reversed(shown):
            for start, points in arms[arm].items():
                steps, seconds = [point[0] for point in points], [point[1] for point in points]
                axes.plot(seconds, steps, color=palette[arm], **STROKES[start])
        axes.set(xlabel="seconds since the start of the process", xlim=(0, None), ylim=(0, None))
        axes.set_title("Optimizer steps done", loc="left", weight="bold", size=10)
        axes.grid(True)
        draw_legend(figure, shown, palette, warm=warm)
    return figure
