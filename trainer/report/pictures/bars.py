"""What was measured of the arms of one workload, as bars: throughput, warm-up, step times, padding, memory and energy.

An arm's name stands above its bars, so that it is never cut; half a page wide on a screen, a whole one on a phone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer.report.comparison import Row, WorkloadComparison
from trainer.report.pictures import style
from trainer.report.statistics import Estimate, Ratio
from trainer.report.tables import NOT_SURE, marked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, BARS_INCHES = 4.6, 2.6
NAME_INCHES, BAR_INCHES, GAP_INCHES, TITLE_INCHES = 0.2, 0.19, 0.09, 0.34
STEPS_ROW_INCHES, STEPS_TITLE_INCHES, STEPS_BOTTOM_INCHES = 0.46, 0.4, 0.8
MAX_LINEAR = 12
"""Between the longest and the shortest step time shown; the axis is logarithmic beyond it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``value`` is all of its length."""

    value: float
    text: str
    low: float | None = None
    """Ends of the line that shows the spread."""
    high: float | None = None
    pale: bool = False
    """For warm starts and for what is only compared with."""
    dark: float | None = None
    """Part of it, from its start, drawn in full colour over a paler rest."""
    inner: float | None = None
    """Length of a line inside it."""


@dataclass(frozen=True, slots=True)
class Section:
    """Bars on one scale."""

    title: str
    groups: list[tuple[str, str, list[Bar]]] = field(default_factory=list)
    """Name, colour and bars."""
    legend: list[str] = field(default_factory=list)
    """Lines below."""
    whole: float | None = None
    """Value of a bar of full length; None for the largest."""


def draw(sections: Sequence[Section]) -> Figure | None:
    """The sections one below the other; None when none has a bar."""
    sections = [section for section in sections if section.groups]
    if not sections:
        return None
    height = sum(
        TITLE_INCHES
        + sum(NAME_INCHES + BAR_INCHES * len(bars) + GAP_INCHES for _, _, bars in section.groups)
        + NAME_INCHES * len(section.legend)
        for section in sections
    ) + GAP_INCHES * len(sections)
    with style.drawing():
        figure = style.new_figure(WIDTH_INCHES, height)
        axes = style.place_axes(figure, left=0.01, right=0.01, bottom=0.0, top=0.0)
        axes.set(xlim=(0, WIDTH_INCHES - 0.02), ylim=(height, 0))
        axes.axis("off")
        y = 0.0
        for section in sections:
            axes.text(0, y + TITLE_INCHES / 2, section.title, weight="bold", size=11, va="center")
            y += TITLE_INCHES
            longest = max(max(bar.value, bar.high or 0.0) for _, _, bars in section.groups for bar in bars)
            for name, colour, bars in section.groups:
                axes.text(0, y + NAME_INCHES / 2, style.plain(name, longest=52), va="center")
                y += NAME_INCHES
                for bar in bars:
                    _bar(axes, bar, y, BARS_INCHES / (section.whole or longest or 1.0), colour)
                    y += BAR_INCHES
                y += GAP_INCHES
            for line in section.legend:
                axes.text(0, y + NAME_INCHES / 2, line, va="center", size=9, color=style.INK["muted"][0])
                y += NAME_INCHES
            y += GAP_INCHES
    return figure


def _bar(axes: Axes, bar: Bar, y: float, scale: float, colour: str) -> None:
    middle, height = y + BAR_INCHES / 2, BAR_INCHES - 0.04
    axes.barh(middle, BARS_INCHES, height=height, color=style.INK["soft"][0])
    pale = 0.55 if bar.pale else 1.0
    if bar.dark is not None:
        axes.barh(middle, bar.value * scale, height=height, color=colour, alpha=0.45 * pale)
        axes.barh(middle, min(bar.dark, bar.value) * scale, height=height, color=colour, alpha=pale)
    else:
        axes.barh(middle, bar.value * scale, height=height, color=colour, alpha=pale)
    if bar.inner is not None:
        _line(axes, 0.0, bar.inner * scale, middle + height / 2 - 0.035)
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        _line(axes, bar.low * scale, bar.high * scale, middle)
    axes.text(BARS_INCHES + 0.08, middle, bar.text, va="center", size=9)


def _line(axes: Axes, begin: float, end: float, y: float) -> None:
    """A line with an edge of paper, to be seen on a bar of any colour."""
    for colour, width in ((style.INK["paper"][0], 3.2), (style.INK["ink"][0], 1.4)):
        axes.plot([begin, end], [y, y], color=colour, linewidth=width, solid_capstyle="butt")


def throughput(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Useful tokens a second of each arm, or samples, or steps, with their range over runs and the ratio's interval."""
    unit, rates = _rates(comparison)
    section = Section(f"{unit.capitalize()} a second")
    for row, rate in zip(comparison.rows, rates, strict=True):
        if rate is not None:
            ratio = "" if row.ratio is None else f" · {marked(row.ratio)}{_interval(row.ratio)}"
            bar = Bar(rate.median, f"{style.rounded(rate.median)}{ratio}", rate.low, rate.high)
            section.groups.append((row.cell.arm, palette[row.cell.arm], [bar]))
    if any(bars[0].low is not None for _, _, bars in section.groups):
        section.legend.append("line: slowest to fastest run")
    ratios = [row.ratio for row in comparison.rows if row.ratio is not None]
    if any(ratio.low is not None for ratio in ratios):
        section.legend.append(f"x: times {style.plain(comparison.baseline, longest=24)} (95% interval)")
    if not all(ratio.shown for ratio in ratios):
        section.legend.append(f"{NOT_SURE}: no difference shown")
    return draw([section])


def _interval(ratio: Ratio) -> str:
    """A ratio's interval in brackets; far ends are cut short. Nothing without one."""
    if ratio.low is None or ratio.high is None:
        return ""
    low = f"{ratio.low:.2f}" if ratio.low >= 0.01 else "<0.01"
    high = f"{ratio.high:.2f}" if ratio.high < 100 else ">100"
    return f" ({low}-{high})"


def _rates(comparison: WorkloadComparison) -> tuple[str, list[Estimate | None]]:
    """What is counted, and how much of it each arm does in a second: useful tokens, samples or steps."""
    for unit, name in (("useful tokens", "useful_tokens_per_second"), ("samples", "samples_per_second")):
        rates = [getattr(row, name) for row in comparison.rows]
        if any(rate is not None for rate in rates):
            return unit, rates
    rates = []
    for row in comparison.rows:
        seconds = row.step_seconds
        if seconds is None or not seconds.median:
            rates.append(None)
            continue
        low, high = (None if end is None else 1 / end for end in (seconds.high, seconds.low))
        values = tuple(1 / value for value in seconds.values)
        rates.append(Estimate(1 / seconds.median, low, high, seconds.count, values))
    return comparison.unit, rates


def warmup(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Warm-up seconds of each arm, cold and warm, with what the preflight and the compiler took of them."""
    section = Section("Seconds of warm-up")
    split = compiled = False
    for row in comparison.rows:
        bars = []
        for start, estimate, runs in (
            ("cold", row.cold_warmup_seconds, row.cell.cold or row.cell.others),
            ("warm", row.warm_warmup_seconds, row.cell.warm),
        ):
            if estimate is None or (start == "warm" and estimate == row.cold_warmup_seconds):
                continue  # what compiles nothing starts the same either way
            preflights = [each for run in runs if (each := run.record.preflight_seconds) is not None]
            compiling = [each for run in runs if (each := run.record.compile_seconds) is not None]
            split, compiled = split or bool(preflights), compiled or bool(compiling)
            known = start if start == "warm" or row.cell.cold else "caches unknown" if row.cell.compiles else ""
            bar = Bar(
                estimate.median,
                f"{style.duration(estimate.median)} {known}".rstrip(),
                estimate.low,
                estimate.high,
                pale=start == "warm",
                dark=statistics.median(preflights) if preflights else None,
                # The record's compile seconds include validation's, which come after the warm-up.
                inner=min(statistics.median(compiling), estimate.median) if compiling else None,
            )
            bars.append(bar)
        if bars:
            section.groups.append((row.cell.arm, palette[row.cell.arm], bars))
    if split:
        section.legend.append("full colour: preflight before the first step")
        section.legend.append("paler: first steps, and steps that compiled something")
    if compiled:
        section.legend.append("line inside: of it in the compiler")
    return draw([section])


def padding(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Share of padding in what each arm computed, and by bucket where a record has it."""
    section = Section("Padding, share of all positions", whole=1.0)
    for row in comparison.rows:
        if row.padded_share is not None:
            bar = Bar(row.padded_share, f"{row.padded_share:.1%}")
            section.groups.append((row.cell.arm, palette[row.cell.arm], [bar]))
    if not any(bars[0].value for _, _, bars in section.groups):
        return None
    sections, seen = [section], []
    for row in comparison.rows:
        for run in row.cell.finished:
            facts = run.record.report.get("buckets", {})
            buckets = [facts.get(name) for name in ("edges", "padded_share_by_edge", "examples")]
            if buckets[1] is None or buckets[:2] in seen:
                continue
            seen.append(buckets[:2])
            colour, count = palette[row.cell.arm], max(sum(facts["examples"]), 1)
            groups = [
                (f"up to {edge}", colour, [Bar(share, f"{share:.1%} · {examples / count:.0%} of examples")])
                for edge, share, examples in zip(*buckets, strict=True)
                if share is not None
            ]
            sections.append(Section(f"Padding by bucket: {style.plain(row.cell.arm, longest=34)}", groups, whole=1.0))
    return draw(sections)


def resources(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Peak memory and energy of each arm, as far as they were measured."""
    on_device = any(row.peak_device_memory_gib is not None for row in comparison.rows)
    memory = Section("Peak memory, GiB" + (" on the device" if on_device else " of the process"))
    energy = Section("Energy, joules a sample")
    for row in comparison.rows:
        arm, colour = row.cell.arm, palette[row.cell.arm]
        gib = row.peak_device_memory_gib if on_device else row.peak_process_memory_gib
        if gib is not None:
            memory.groups.append((arm, colour, [Bar(gib, f"{gib:.3g}")]))
        if (joules := row.joules_per_sample) is not None:
            bar = Bar(joules.median, style.rounded(joules.median), joules.low, joules.high)
            energy.groups.append((arm, colour, [bar]))
    return draw([memory, energy])


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
    median, p95 = (None if each is None else each.median for each in (row.median_step_seconds, row.p95_seconds))
    return Spread(row.cell.arm, [statistics.median(values) for values in zip(*alike, strict=True)], median, p95)


def step_times(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Bands from the 5% to the 95% quantile with the middle half, the median and the p95 marked; None without any."""
    inference = comparison.run == "inference"
    spreads = [one for row in comparison.rows if (one := spread(row, inference=inference)).known]
    if not spreads:
        return None
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    values = [value for one in spreads for value in one.known]
    height = STEPS_TITLE_INCHES + STEPS_ROW_INCHES * len(spreads) + STEPS_BOTTOM_INCHES
    with style.drawing():
        figure = style.new_figure(WIDTH_INCHES, height)
        axes = style.place_axes(figure, left=0.06, right=0.28, bottom=STEPS_BOTTOM_INCHES, top=STEPS_TITLE_INCHES)
        axes.set(ylim=(len(spreads), 0), yticks=[])
        if max(values) > MAX_LINEAR * min(values) > 0:
            axes.set(xscale="log", xlim=(min(values) / 1.15, max(values) * 1.15))
        else:
            axes.set(xlim=(0, 1.06 * max(values)))
            axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.duration(value) if value else "0"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(True, axis="x")
        axes.spines["left"].set_visible(False)
        left, title = 0.01 / WIDTH_INCHES, "Seconds of a batch" if inference else "Seconds of a step"
        figure.text(left, 1 - 0.17 / height, title, weight="bold", size=11, va="center")
        for place, one in enumerate(spreads):
            _band(axes, one, place, palette[one.arm])
        legend = "tick: median · dot: p95 (one step in twenty takes longer)"
        if any(one.quantiles for one in spreads):
            legend = f"pale: 5% to 95% of the steps · full: the middle half\n{legend}"
        figure.text(left, 0.22 / height, legend, size=9, va="center", color=style.INK["muted"][0])
    return figure


def _band(axes: Axes, one: Spread, place: int, colour: str) -> None:
    middle, ink, across = place + 0.68, style.INK["ink"][0], axes.get_yaxis_transform()
    axes.text(0.002, place + 0.25, style.plain(one.arm, longest=52), va="center", transform=across, zorder=4)
    if one.quantiles:
        for low, high, alpha in ((0.05, 0.95, 0.35), (0.25, 0.75, 1.0)):
            axes.barh(middle, one.at(high) - one.at(low), left=one.at(low), height=0.36, color=colour, alpha=alpha)
    if one.median is not None:
        within = style.INK["paper"][0] if one.quantiles else colour
        axes.plot([one.median] * 2, [middle - 0.24, middle + 0.24], color=ink, linewidth=2.2)
        axes.plot([one.median] * 2, [middle - 0.15, middle + 0.15], color=within, linewidth=1.0)
    if one.p95 is not None:
        axes.plot([one.p95], [middle], marker="o", markersize=4.5, color=colour, markeredgecolor=ink)
