"""Distribution of step times: a band for each arm, from its shortest to its longest steady step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.evidence import pictures_style as style
from trainer.evidence.comparison import Row, WorkloadComparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, ROW_INCHES, TITLE_INCHES, BOTTOM_INCHES = 4.6, 0.46, 0.4, 0.8
LARGEST_RATIO = 12
"""Between the longest and the shortest time shown; the axis is logarithmic beyond it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Step times of one arm in seconds; medians over its runs."""

    arm: str
    quantiles: Sequence[float]
    """From 0 to 100% in even steps; empty where no record has them."""
    median: float | None
    p95: float | None

    def at(self, share: float) -> float:
        """The quantile at ``share`` (0 to 1)."""
        return self.quantiles[round(share * (len(self.quantiles) - 1))]

    @property
    def known(self) -> list[float]:
        """Everything of it that is drawn, but the longest step, which one hiccup makes."""
        ends = [self.at(0.0), self.at(0.95)] if self.quantiles else []
        return [*ends, *(value for value in (self.median, self.p95) if value is not None)]


def spread(row: Row, *, inference: bool) -> Spread:
    """Step times of a row's runs; of batches in inference."""
    name = "latency_seconds_quantiles" if inference else "steady_step_seconds_quantiles"
    found = [quantiles for run in row.cell.finished if (quantiles := getattr(run.record, name))]
    alike = [quantiles for quantiles in found if len(quantiles) == len(found[0])]
    median = row.median_step_seconds.median if row.median_step_seconds else None
    p95 = row.p95_seconds.median if row.p95_seconds else None
    return Spread(row.cell.arm, [statistics.median(values) for values in zip(*alike, strict=True)], median, p95)


def step_times(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Bands from the 5% to the 95% quantile with the middle half, the median and the p95 marked; None without any."""
    inference = comparison.run == "inference"
    spreads = [one for row in comparison.rows if (one := spread(row, inference=inference)).known]
    if not spreads:
        return None
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    values = [value for one in spreads for value in one.known]
    logarithmic = max(values) > LARGEST_RATIO * min(values) > 0
    height = TITLE_INCHES + ROW_INCHES * len(spreads) + BOTTOM_INCHES
    with style.drawing():
        figure = style.new_figure(WIDTH_INCHES, height)
        axes = style.place_axes(figure, left=0.06, right=0.28, bottom=BOTTOM_INCHES, top=TITLE_INCHES)
        axes.set(ylim=(len(spreads), 0), yticks=[])
        if logarithmic:
            axes.set(xscale="log", xlim=(min(values) / 1.15, max(values) * 1.15))
        else:
            axes.set(xlim=(0, 1.06 * max(values)))
            axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.duration(value) if value else "0"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(True, axis="x")
        axes.spines["left"].set_visible(False)
        title = "Seconds of a batch" if inference else "Seconds of a step"
        figure.text(0.01 / WIDTH_INCHES, 1 - 0.17 / height, title, weight="bold", size=11, va="center")
        for place, one in enumerate(spreads):
            _band(axes, one, place, palette[one.arm])
        drawn = any(one.quantiles for one in spreads)
        said = "pale: 5% to 95% of the steps · full: the middle half\n" if drawn else ""
        figure.text(
            0.01 / WIDTH_INCHES,
            0.22 / height,
            f"{said}tick: median · dot: p95 (one step in twenty takes longer)",
            size=9,
            va="center",
            color=style.INK["muted"][0],
        )
    return figure


def _band(axes: Axes, one: Spread, place: int, colour: str) -> None:
    middle = place + 0.68
    axes.text(
        0.002,
        place + 0.25,
        style.plain(one.arm, longest=52),
        va="center",
        transform=axes.get_yaxis_transform(),
        zorder=4,
    )
    if one.quantiles:
        for low, high, alpha in ((0.05, 0.95, 0.35), (0.25, 0.75, 1.0)):
            axes.barh(middle, one.at(high) - one.at(low), left=one.at(low), height=0.36, color=colour, alpha=alpha)
    if one.median is not None:
        within = style.INK["paper"][0] if one.quantiles else colour
        axes.plot([one.median] * 2, [middle - 0.24, middle + 0.24], color=style.INK["ink"][0], linewidth=2.2)
        axes.plot([one.median] * 2, [middle - 0.15, middle + 0.15], color=within, linewidth=1.0)
    if one.p95 is not None:
        axes.plot([one.p95], [middle], marker="o", markersize=4.5, color=colour, markeredgecolor=style.INK["ink"][0])
