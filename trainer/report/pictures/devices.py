"""Samples a second against the number of devices, beside the line on which each device does as much as one alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.report.pictures import style
from trainer.report.scaling import Scaling
from trainer.report.tables import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES = 4.6, 3.4


def draw(found: Scaling) -> Figure:
    """Each way to train together as a line through its medians, with the range over runs; the ideal line is dashed."""
    most = max(row.devices for row in found.rows)
    alone = [row for row in found.rows if row.devices == 1]
    ways = list(dict.fromkeys(row.how for row in found.rows if row.how))
    palette = style.colours([ways], baselines=())
    with style.drawing():
        figure = style.new_figure(WIDTH_INCHES, HEIGHT_INCHES)
        axes = style.place_axes(figure, left=0.75, right=0.3, bottom=0.55, top=0.35)
        if alone:
            one = alone[0].samples_per_second.median
            axes.plot([1, most], [one, one * most], "--", color=style.INK["muted"][0], linewidth=1.2, label="ideal")
        for way in ways or [""]:
            rows = [row for row in found.rows if row.how in (way, "")]
            colour = palette.get(way, style.INK["ink"][0])
            rates = [row.samples_per_second for row in rows]
            devices = [row.devices for row in rows]
            axes.plot(devices, [rate.median for rate in rates], "-o", color=colour, markersize=5, label=way)
            for row, rate in zip(rows, rates, strict=True):
                axes.plot([row.devices] * 2, [rate.low or rate.median, rate.high or rate.median], color=colour)
                if row.efficiency is not None and row.devices > 1:
                    text = f"{number(row.efficiency.median * 100)}%"
                    axes.annotate(text, (row.devices, rate.median), (8, -4), textcoords="offset points")
        axes.set(
            xlabel="devices", xlim=(0.7, most + 0.4), ylim=(0, None), xticks=sorted({r.devices for r in found.rows})
        )
        axes.set_title("Samples a second", loc="left", fontsize=11, weight="bold")
        axes.grid(axis="y")
        axes.legend(loc="upper left", fontsize=9)
    return figure
