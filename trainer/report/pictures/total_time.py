"""Speed over the number of steps, warm-up and compiling included: where the curves of the arms cross, and which arm is
best from where on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.report.comparison import WorkloadComparison
from trainer.report.pictures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ARMS = 10
"""Arms that are drawn; of more than these, the slowest are left to the table."""
MIN_STEPS, MAX_STEPS = 10, 1_000_000
POINTS = 121
CHARACTER_INCHES = 0.077
"""Width of a character of 9 points, on the wide side."""
LONGEST_NAME = 46
WIDTH_INCHES, COMPACT_INCHES = 10.4, 4.6
LEFT_INCHES, TOP_INCHES, BOTTOM_INCHES = 0.75, 0.35, 0.55
PANEL_INCHES, STRIP_INCHES, ROW_INCHES = 3.2, 0.48, 0.19
PALE = 0.35
"""Opacity of a line of which no difference from the baseline is shown."""
STROKES: Mapping[str, dict[str, Any]] = {
    "cold": {"linestyle": "-", "linewidth": 1.9},
    "warm": {"linestyle": (0, (4, 2)), "linewidth": 1.4},
}


@dataclass(frozen=True, slots=True)
class Line:
    """Total seconds of one arm from one start: ``fixed_seconds + step_seconds * steps``."""

    arm: str
    start: str
    """``cold`` or ``warm``."""
    fixed_seconds: float
    step_seconds: float
    shown: bool = True
    """Whether a difference from the baseline is; the baseline's own line is sure as well."""

    def at(self, steps: float) -> float:
        """Total seconds at ``steps``."""
        return self.fixed_seconds + self.step_seconds * steps


def lines(comparison: WorkloadComparison) -> list[Line]:
    """A line for each arm and start whose total time is known."""
    found: list[Line] = []
    for row in comparison.rows:
        drawn: set[tuple[float, float]] = set()
        for start, cost in (("cold", row.cost), ("warm", row.cost_warm)):
            fixed = row.total_at(0, baseline=comparison.baseline_row, warm=start == "warm")
            if cost is None or fixed is None or (fixed, cost.step_seconds) in drawn:
                continue  # what compiles nothing starts the same either way: one line
            drawn.add((fixed, cost.step_seconds))
            shown = row.ratio is None or row.ratio.shown
            found.append(Line(row.cell.arm, start, fixed, cost.step_seconds, shown))
    return found


def draw(comparison: WorkloadComparison, *, palette: Mapping[str, str], compact: bool = False) -> Figure | None:
    """Speed as a multiple of the baseline's (total time, without one) and strips that show which arm is best; None
    without totals. ``compact``: without strips, and readable when it is 320 pixels wide."""
    every = lines(comparison)
    if not every:
        return None
    # The baseline, arms that are best somewhere, then the fastest.
    needed = {comparison.baseline, *(one.arm for one in comparison.crossings)}
    known = {line.arm: line.step_seconds for line in every}
    fastest = sorted(known, key=lambda arm: (arm not in needed, known[arm]))[:MAX_ARMS]
    arms = [row.cell.arm for row in comparison.rows if row.cell.arm in fastest]
    shown = [line for line in every if line.arm in arms]
    base = next((line for line in every if line.arm == comparison.baseline and line.start == "cold"), None)
    listed = arms if compact or base is None else []
    warm = any(line.start == "warm" for line in shown)
    starts = [] if compact else _starts(comparison)
    right = 0.32
    if not compact:  # names stand at the ends of the lines, and "least time" beside the strips
        right = max(1.9, 0.35 + CHARACTER_INCHES * max(len(style.plain(arm, longest=LONGEST_NAME)) for arm in arms))
    width, panel = (COMPACT_INCHES, 2.0) if compact else (WIDTH_INCHES, PANEL_INCHES)
    legend = ROW_INCHES * (len(listed) + 2 * warm) if listed else 0.25 * warm
    height = TOP_INCHES + panel + STRIP_INCHES * len(starts) + BOTTOM_INCHES + legend
    span = _limits(comparison, every)
    with style.drawing():
        figure = style.new_figure(width, height)
        top = TOP_INCHES

        def axes_of(inches: float, sharex: Axes | None = None) -> Axes:
            nonlocal top
            sides = {"left": LEFT_INCHES, "right": right, "top": top, "bottom": height - top - inches}
            top += inches
            return style.place_axes(figure, **sides, sharex=sharex)

        last = panel_axes = axes_of(panel)
        _curves(panel_axes, comparison, shown, base, palette, span, names=not listed)
        for start in starts:
            last.tick_params(labelbottom=False, bottom=last is panel_axes)
            last = axes_of(STRIP_INCHES, panel_axes)
            label = "least time" if len(starts) == 1 else f"least time, {start} starts"
            _strip(last, comparison, start, label, palette, span, width - LEFT_INCHES - right)
        last.tick_params(labelbottom=True)
        last.set_xlabel("batches" if comparison.run == "inference" else "optimizer steps")
        draw_legend(figure, listed, palette, warm=warm)
    return figure


def compact(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """The curves alone, for TensorBoard."""
    return draw(comparison, palette=palette, compact=True)


def _starts(comparison: WorkloadComparison) -> list[str]:
    """Starts whose least time has a strip of its own: both, unless they are alike."""
    best = {
        start: [(one.from_steps, one.arm) for one in comparison.crossings if one.start == start]
        for start in ("cold", "warm")
    }
    return [start for start in best if best[start] and (start == "cold" or best["warm"] != best["cold"])]


def _limits(comparison: WorkloadComparison, every: Sequence[Line]) -> tuple[float, float]:
    """Steps from which to which the pictures go: a good way beyond all that happens."""
    marks = [float(one.from_steps) for one in comparison.crossings]
    for row in comparison.rows:
        marks += [steps for steps in (row.break_even_steps, row.break_even_steps_warm) if steps is not None]
        marks += [float(steps) for steps in row.total_seconds]
    known = [steps for steps in marks if math.isfinite(steps) and steps > 0] or [1000.0]
    low = 10 ** math.floor(math.log10(max(MIN_STEPS, min(known) / 4)))
    high = 10 ** math.ceil(math.log10(min(MAX_STEPS, max(known) * 2)))
    return float(low), float(max(high, 100 * low))


def _curves(
    axes: Axes,
    comparison: WorkloadComparison,
    shown: Sequence[Line],
    base: Line | None,
    palette: Mapping[str, str],
    span: tuple[float, float],
    *,
    names: bool,
) -> None:
    """How many times as fast as the baseline each arm is by then, points where another arm becomes the best one, and
    with ``names`` the arms' names at the ends of their lines."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    def height(line: Line, steps: float) -> float:
        return line.at(steps) if base is None else base.at(steps) / line.at(steps)

    (low, high), ends = span, {}
    steps = [low * (high / low) ** (place / (POINTS - 1)) for place in range(POINTS)]
    for line in shown:
        heights = [height(line, one) for one in steps]
        look = {"alpha": 1.0 if line.shown else PALE, "zorder": 3 if line is base else 2, **STROKES[line.start]}
        axes.plot(steps, heights, color=palette[line.arm], **look)
        if line.start == "cold" or line.arm not in ends:
            ends[line.arm] = heights[-1]
    axes.set(xscale="log", xlim=span)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    title = "Time to N steps, all of it included"
    if base is None:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: style.duration(value)))
    else:
        top = max(1.15, 1.08 * max(height(line, high) for line in shown))
        axes.set(ylim=(0, top))
        axes.axhline(1.0, color=style.INK["muted"][0], linewidth=1.0)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        title = f"Times as fast as {style.plain(base.arm, longest=16)} by step N{', warm-up included' if names else ''}"
        if names:
            _names(axes, ends, palette, span, top)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(True)
    axes.set_title(title, loc="left", weight="bold", size=11 if names else 10)
    mark: dict[str, Any] = {"markersize": 6, "markeredgecolor": style.INK["paper"][0], "zorder": 5}
    for crossed in comparison.crossings:
        same = [line for line in shown if line.arm == crossed.arm and crossed.start in _starts(comparison)]
        spot = next((line for line in same if line.start == crossed.start), same[0] if same else None)
        if spot is not None and low < crossed.from_steps < high:
            place = [height(spot, crossed.from_steps)]
            axes.plot([crossed.from_steps], place, "o", color=palette[spot.arm], **mark)


def _names(
    axes: Axes, ends: Mapping[str, float], palette: Mapping[str, str], span: tuple[float, float], top: float
) -> None:
    low, high = span
    arrow: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.7, "relpos": (0.0, 0.5), "shrinkA": 1, "shrinkB": 0}
    for arm, y in apart(ends, smallest=ROW_INCHES / PANEL_INCHES * top, top=top).items():
        axes.annotate(
            style.plain(arm, longest=LONGEST_NAME),
            xy=(high, ends[arm]),
            xytext=(high * (high / low) ** 0.025, y),
            va="center",
            size=9,
            color=palette[arm],
            annotation_clip=False,
            arrowprops=arrow | {"color": palette[arm]},
        )


def apart(ends: Mapping[str, float], *, smallest: float, top: float) -> dict[str, float]:
    """Heights of labels at their lines' ends, moved so that none covers another, within 0 and ``top``."""
    order = sorted(ends, key=lambda arm: ends[arm])
    heights = [ends[arm] for arm in order]
    for place in range(1, len(heights)):
        heights[place] = max(heights[place], heights[place - 1] + smallest)
    if heights:
        heights[-1] = min(heights[-1], top)
    for place in range(len(heights) - 2, -1, -1):
        heights[place] = min(heights[place], heights[place + 1] - smallest)
    return dict(zip(order, heights, strict=True))


def _strip(
    axes: Axes,
    comparison: WorkloadComparison,
    start: str,
    label: str,
    palette: Mapping[str, str],
    span: tuple[float, float],
    width: float,
) -> None:
    """A band of ``width`` inches that shows by its colour which arm needs the least time, with the steps at which that
    changes above it."""
    low, high = span
    axes.set(ylim=(0, STRIP_INCHES), yticks=[])
    axes.spines[:].set_visible(False)
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "size": 9}
    axes.text(1.012, 0.14, label, color=style.INK["muted"][0], **beside)
    marks = [one for one in comparison.crossings if one.start == start]
    edges = [min(max(float(one.from_steps), low), high) for one in marks] + [high]
    written = 0.0  # how far right the row of numbers is taken
    for mark, begin, end in zip(marks, edges, edges[1:], strict=False):
        if end <= begin:
            continue
        axes.fill_between([begin, end], 0.02, 0.26, color=palette[mark.arm], linewidth=0)
        inside = width * math.log(end / begin) / math.log(high / low)
        name = style.plain(mark.arm, longest=max(int(inside / CHARACTER_INCHES) - 1, 1))
        if len(name) > 4 or len(name) == len(mark.arm):
            ink = style.INK["paper"][0]
            axes.text(math.sqrt(begin * end), 0.14, name, ha="center", va="center", size=9, color=ink)
        number, place = f"{mark.from_steps:,}", width * math.log(begin / low) / math.log(high / low)
        half = CHARACTER_INCHES * len(number) / 2
        moved = max(place, written + half)
        if low < begin and moved - place < half + 0.1:
            axes.text(low * (high / low) ** (moved / width), 0.36, number, ha="center", va="center", size=9)
            written = moved + half + 0.06


def draw_legend(figure: Figure, arms: Sequence[str], palette: Mapping[str, str], *, warm: bool) -> None:
    """Below: ``arms``, where no line bears a name, and what solid and dashed lines are."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=palette[arm], linewidth=2.4, label=style.plain(arm, longest=44)) for arm in arms]
    for start, label in (("cold", "compile caches empty"), ("warm", "caches filled before")) if warm else ():
        ink = style.INK["ink"][0]
        handles.append(Line2D([], [], color=ink, label=f"{start} start: {label}", **STROKES[start]))
    if handles:
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.0 if arms else LEFT_INCHES / WIDTH_INCHES - 0.01, 0.0),
            ncols=1 if arms else len(handles),
            borderaxespad=0.1,
            handlelength=2.2,
            labelspacing=0.25,
            fontsize=9,
        )
