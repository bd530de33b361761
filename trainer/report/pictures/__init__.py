"""Pictures of a comparison: each question of a reader as one figure of matplotlib, None where nothing was measured.

``python -m scripts.report RUNS --pictures DIR`` writes them as PNG. What was measured of the arms is drawn as bars. An
arm's name stands above its bars, so that it is never cut; a third of a page wide on a desk, a whole one on a phone.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.report.comparison import Row, WorkloadComparison
from trainer.report.pictures import progress, style, total_time
from trainer.report.statistics import Estimate, Ratio
from trainer.report.tables import NOT_SURE, marked, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, BARS_INCHES = 4.6, 2.6
NAME_INCHES, BAR_INCHES, GAP_INCHES, TITLE_INCHES = 0.2, 0.19, 0.09, 0.34


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


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar from zero."""

    value: float
    text: str
    low: float | None = None
    """Ends of the line that shows the spread."""
    high: float | None = None
    pale: bool = False
    """For warm starts."""


Groups = list[tuple[str, str, list[Bar]]]
"""Name, colour and bars of each arm."""


def draw_bars(title: str, groups: Groups, legend: Sequence[str] = (), *, whole: float | None = None) -> Figure | None:
    """The bars below their title, on one scale: a bar of full length is ``whole``, or the largest. None without any."""
    if not groups:
        return None
    names = NAME_INCHES * (len(groups) + len(legend))
    height = TITLE_INCHES + names + sum(BAR_INCHES * len(bars) + GAP_INCHES for _, _, bars in groups) + GAP_INCHES
    longest = whole or max(max(bar.value, bar.high or 0.0) for _, _, bars in groups for bar in bars) or 1.0
    with style.drawing():
        figure = style.new_figure(WIDTH_INCHES, height)
        axes = style.place_axes(figure, left=0.01, right=0.01, bottom=0.0, top=0.0)
        axes.set(xlim=(0, WIDTH_INCHES - 0.02), ylim=(height, 0))
        axes.axis("off")
        axes.text(0, TITLE_INCHES / 2, title, weight="bold", size=11, va="center")
        y = TITLE_INCHES
        for name, colour, bars in groups:
            axes.text(0, y + NAME_INCHES / 2, style.plain(name, longest=52), va="center")
            y += NAME_INCHES
            for bar in bars:
                _bar(axes, bar, y, BARS_INCHES / longest, colour)
                y += BAR_INCHES
            y += GAP_INCHES
        for line in legend:
            axes.text(0, y + NAME_INCHES / 2, line, va="center", size=9, color=style.INK["muted"][0])
            y += NAME_INCHES
    return figure


def _bar(axes: Axes, bar: Bar, y: float, scale: float, colour: str) -> None:
    middle, height = y + BAR_INCHES / 2, BAR_INCHES - 0.04
    axes.barh(middle, BARS_INCHES, height=height, color=style.INK["soft"][0])
    axes.barh(middle, bar.value * scale, height=height, color=colour, alpha=0.55 if bar.pale else 1.0)
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        # A line with an edge of paper, to be seen on a bar of any colour.
        for ink, width in ((style.INK["paper"][0], 3.2), (style.INK["ink"][0], 1.4)):
            ends = [bar.low * scale, bar.high * scale]
            axes.plot(ends, [middle, middle], color=ink, linewidth=width, solid_capstyle="butt")
    axes.text(BARS_INCHES + 0.08, middle, bar.text, va="center", size=9)


def _groups(comparison: WorkloadComparison, palette: Mapping[str, str], bar_of: Callable[[Row], Bar | None]) -> Groups:
    bars = [(row.cell.arm, bar_of(row)) for row in comparison.rows]
    return [(arm, palette[arm], [bar]) for arm, bar in bars if bar is not None]


def _of(value: Estimate | None, text: str = "") -> Bar | None:
    return None if value is None else Bar(value.median, number(value.median) + text, value.low, value.high)


def throughput(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Useful tokens a second of each arm, or samples, or steps, with their range over runs and the ratio's interval."""
    rates = {"useful tokens": "useful_tokens_per_second", "samples": "samples_per_second"}
    known = [unit for unit, name in rates.items() if any(getattr(row, name) is not None for row in comparison.rows)]
    unit = (known or [comparison.unit])[0]

    def bar_of(row: Row) -> Bar | None:
        ratio = "" if row.ratio is None else f" · {_interval(row.ratio)}"
        if known or row.step_seconds is None:
            return _of(getattr(row, rates[unit]), ratio) if known else None
        low, high = (None if end is None else 1 / end for end in (row.step_seconds.high, row.step_seconds.low))
        return Bar(1 / row.step_seconds.median, number(1 / row.step_seconds.median) + ratio, low, high)

    groups = _groups(comparison, palette, bar_of)
    ratios = [row.ratio for row in comparison.rows if row.ratio is not None]
    legend = []
    if any(bars[0].low is not None for _, _, bars in groups):
        legend.append("line: slowest to fastest run")
    if any(ratio.low is not None for ratio in ratios):
        legend.append(f"x: times {style.plain(comparison.baseline, longest=24)} (95% interval)")
    if any(not ratio.shown and ratio.low is not None for ratio in ratios):
        legend.append(f"{NOT_SURE}: no difference shown")
    return draw_bars(f"{unit.capitalize()} a second", groups, legend)


def _interval(ratio: Ratio) -> str:
    """A ratio with its interval; far ends are cut short. Single runs have none, and say so."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}x, one run"
    low = f"{ratio.low:.2f}" if ratio.low >= 0.01 else "<0.01"
    high = f"{ratio.high:.2f}" if ratio.high < 100 else ">100"
    return f"{marked(ratio)} ({low}-{high})"


def warmup(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Warm-up seconds of each arm, cold and warm."""
    groups = []
    for row in comparison.rows:
        cold, warm = row.cold_warmup_seconds, row.warm_warmup_seconds
        caches = "cold" if row.cell.cold else "caches unknown" if row.cell.compiles else ""
        bars = (
            [] if cold is None else [Bar(cold.median, f"{style.duration(cold.median)} {caches}", cold.low, cold.high)]
        )
        if warm is not None and warm != cold:  # what compiles nothing starts the same either way
            bars.append(Bar(warm.median, f"{style.duration(warm.median)} warm", warm.low, warm.high, pale=True))
        if bars:
            groups.append((row.cell.arm, palette[row.cell.arm], bars))
    return draw_bars("Seconds of warm-up", groups)


def padding(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Share of padding in what each arm computed."""
    if not any(row.padded_share for row in comparison.rows):
        return None

    def bar_of(row: Row) -> Bar | None:
        return None if row.padded_share is None else Bar(row.padded_share, f"{row.padded_share:.1%}")

    return draw_bars("Padding, share of all positions", _groups(comparison, palette, bar_of), whole=1.0)


def memory(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Peak memory of each arm: of the device, or of the process where no device counts it."""
    on_device = any(row.peak_device_memory_gib is not None for row in comparison.rows)

    def bar_of(row: Row) -> Bar | None:
        gib = row.peak_device_memory_gib if on_device else row.peak_process_memory_gib
        return None if gib is None else Bar(gib, number(gib))

    title = "Peak memory, GiB" + (" on the device" if on_device else " of the process")
    return draw_bars(title, _groups(comparison, palette, bar_of))


def energy(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Joules a sample of each arm."""
    groups = _groups(comparison, palette, lambda row: _of(row.joules_per_sample))
    return draw_bars("Energy, joules a sample", groups)


def step_times(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Median step of each arm with its 5% and 95% quantile, medians over its runs; of batches in inference."""
    inference = comparison.run == "inference"
    quantiles_of = "latency_seconds_quantiles" if inference else "steady_step_seconds_quantiles"

    def bar_of(row: Row) -> Bar | None:
        if row.median_step_seconds is None:
            return None
        median, p95 = row.median_step_seconds.median, row.p95_seconds
        found = [quantiles for run in row.cell.finished if (quantiles := getattr(run.record, quantiles_of))]
        low, high = (
            statistics.median(quantiles[round(share * (len(quantiles) - 1))] for quantiles in found) if found else None
            for share in (0.05, 0.95)
        )
        text = f"{number(median * 1e3)}" + ("" if p95 is None else f" · p95 {number(p95.median * 1e3)}")
        return Bar(median, text, low, high)

    groups = _groups(comparison, palette, bar_of)
    spread = any(bar.low is not None for _, _, bars in groups for bar in bars)
    legend = ["bar: median", "line: 5% to 95% of the steps"] if spread else ["bar: median"]
    return draw_bars(f"Milliseconds of a {'batch' if inference else 'step'}", groups, legend)


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
        throughput,
    ),
    Picture(
        "warmup",
        "Warm-up",
        "What a run pays before its steps are steady, compiling included.",
        "warm-up: not measured",
        warmup,
    ),
    Picture(
        "step_times",
        "Step times",
        "Steady steps, medians over the runs of an arm.",
        "step times: not measured",
        step_times,
    ),
    Picture(
        "padding",
        "Padding",
        "Positions that are computed for nothing.",
        "padding: none, or not counted",
        padding,
    ),
    Picture("memory", "Memory", "The highest allocation of any run.", "memory: not measured", memory),
    Picture("energy", "Energy", "Of the board over steady steps.", "energy: not measured", energy),
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
