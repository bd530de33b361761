"""Total time over the number of steps: where the curves of the arms cross, and which arm is best from where on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.evidence import pictures_style as style
from trainer.evidence.comparison import WorkloadComparison
from trainer.evidence.pictures_lines import Line, drawn_arms, limits, lines, starts_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 121
CHARACTER_INCHES = 0.077
"""Width of a character of 9 points, on the wide side."""
LONGEST_NAME = 46
PALE = 0.35
"""Opacity of a line of which no difference from the baseline is shown."""
STROKES: Mapping[str, dict[str, Any]] = {
    "cold": {"linestyle": "-", "linewidth": 1.9},
    "warm": {"linestyle": (0, (4, 2)), "linewidth": 1.4},
}


def crossing(comparison: WorkloadComparison, *, palette: Mapping[str, str], narrow: bool) -> Figure | None:
    """Total time, the same relative to the baseline, and a strip that says which arm is best; None without totals."""
    every = lines(comparison)
    if not every:
        return None
    arms = drawn_arms(comparison, every)
    shown = [line for line in every if line.arm in arms]
    base = next((line for line in every if line.arm == comparison.baseline and line.start == "cold"), None)
    starts = starts_of(comparison)
    width, left = (4.6, 0.62) if narrow else (10.4, 0.75)
    right = 0.32
    if base is not None and not narrow:
        right = 0.35 + CHARACTER_INCHES * max(len(style.plain(arm, longest=LONGEST_NAME)) for arm in arms)
        right = max(right, 1.9)  # for what is said of the strips
    named, warm = narrow or base is None, any(line.start == "warm" for line in shown)
    legend_inches = 0.19 * (len(arms) + 2 * warm) if named else 0.25 * warm
    strip_inches = (0.72 if narrow else 0.48) * len(starts)
    absolute, relative = (2.1, 2.1 if base else 0.0) if narrow else (2.3, 2.5 if base else 0.0)
    gap, bottom = 0.42, 0.55
    height = 0.35 + absolute + (gap + relative if base else 0) + 0.05 + strip_inches + bottom + legend_inches
    low, high = limits(comparison, every)
    with style.drawing():
        figure = style.new_figure(width, height)
        top, floor = 0.35, height - 0.35 - absolute
        over = style.place_axes(figure, left=left, right=right, bottom=floor, top=top)
        _absolute(over, shown, palette, low, high)
        for crossed in comparison.crossings:
            same = [one for one in shown if one.arm == crossed.arm and crossed.start in starts]
            line = next((one for one in same if one.start == crossed.start), same[0] if same else None)
            if line is not None and low < crossed.from_steps < high:
                edge = style.INK["paper"][0]
                spot = ([crossed.from_steps], [line.at(crossed.from_steps)])
                over.plot(*spot, "o", markersize=6, color=palette[line.arm], markeredgecolor=edge, zorder=5)
        last = over
        if base is not None:
            top, floor = top + absolute + gap, floor - gap - relative
            last = style.place_axes(figure, left=left, right=right, bottom=floor, top=top, sharex=over)
            _relative(last, shown, base, palette, low, high, labelled=not narrow)
            over.tick_params(labelbottom=False)
        strips_top = height - floor + 0.05
        for start in starts:
            inches = strip_inches / len(starts)
            strip = style.place_axes(
                figure, left=left, right=right, bottom=height - strips_top - inches, top=strips_top, sharex=over
            )
            strips_top += inches
            last.tick_params(labelbottom=False, bottom=start == starts[0])
            _strip(strip, comparison, start, palette, low, high, room=(width - left - right, inches), narrow=narrow)
            last = strip
        last.tick_params(labelbottom=True)
        last.set_xlabel("batches" if comparison.run == "inference" else "optimizer steps")
        _legend(figure, arms, palette, named=named, warm=warm, left=left / width)
    return figure


def _steps(low: float, high: float) -> list[float]:
    ratio = (high / low) ** (1 / (POINTS - 1))
    return [low * ratio**place for place in range(POINTS)]


def _absolute(axes: Axes, shown: Sequence[Line], palette: Mapping[str, str], low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    steps = _steps(low, high)
    for line in shown:
        axes.plot(steps, [line.at(one) for one in steps], **_stroke(line, palette))
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    bottom, top = axes.get_ylim()
    ticks = [one for one in (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000, 86400, 604800) if bottom < one < top]
    axes.yaxis.set_major_locator(FixedLocator(ticks or [bottom, top]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: style.duration(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True)
    _title(axes, "Time to N steps, all of it included")


def _relative(
    axes: Axes,
    shown: Sequence[Line],
    base: Line,
    palette: Mapping[str, str],
    low: float,
    high: float,
    *,
    labelled: bool,
) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps, ends = _steps(low, high), {}
    for line in shown:
        speeds = [base.at(one) / line.at(one) for one in steps]
        axes.plot(steps, speeds, **_stroke(line, palette))
        if line.start == "cold" or line.arm not in ends:
            ends[line.arm] = speeds[-1]
        even = line.meets(base)
        if even is not None and line.shown and line is not base and low < even < high and line.start == "cold":
            axes.plot([even], [1.0], marker="o", markersize=4, color=palette[line.arm], linestyle="none")
    top = max(1.15, 1.08 * max(base.at(high) / line.at(high) for line in shown))
    axes.set(ylim=(0, top))
    axes.axhline(1.0, color=style.INK["muted"][0], linewidth=1.0)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.grid(True)
    axes.set_title(
        f"The same, times as fast as {style.plain(base.arm, longest=16)}", loc="left", weight="bold", size=11
    )
    if labelled:
        height = axes.get_window_extent().height / axes.figure.dpi
        for arm, y in apart(ends, smallest=0.19 / height * top, top=top).items():
            axes.annotate(
                style.plain(arm, longest=LONGEST_NAME),
                xy=(high, ends[arm]),
                xytext=(high * (high / low) ** 0.025, y),
                va="center",
                size=9,
                color=palette[arm],
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": palette[arm],
                    "linewidth": 0.7,
                    "relpos": (0.0, 0.5),
                    "shrinkA": 1,
                    "shrinkB": 0,
                },
            )


def _title(axes: Axes, words: str) -> None:
    axes.set_title(words, loc="left", weight="bold", size=11)


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
    palette: Mapping[str, str],
    low: float,
    high: float,
    *,
    room: tuple[float, float],
    narrow: bool,
) -> None:
    """A band that says by its colour which arm needs the least time, with the steps at which that changes above it.

    ``room`` is the width and height of the axes in inches.
    """
    width, height = room
    axes.set(ylim=(0, height), yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    muted = style.INK["muted"][0]
    said = "least time" if len(starts_of(comparison)) == 1 else f"least time, {start} starts"
    if narrow:
        axes.text(0, 0.61, said, transform=axes.get_yaxis_transform(), va="center", size=9, color=muted)
    else:
        axes.text(1.012, 0.14, said, transform=axes.get_yaxis_transform(), va="center", size=9, color=muted)
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


def _stroke(line: Line, palette: Mapping[str, str]) -> dict[str, Any]:
    colour = palette[line.arm]
    return {
        "color": colour,
        "alpha": 1.0 if line.shown else PALE,
        "zorder": 3 if colour == style.BASELINE[0] else 2,
        **STROKES[line.start],
    }


def _legend(
    figure: Figure, arms: Sequence[str], palette: Mapping[str, str], *, named: bool, warm: bool, left: float
) -> None:
    from matplotlib.lines import Line2D

    ink = style.INK["ink"][0]
    handles = [Line2D([], [], color=palette[arm], linewidth=2.4, label=style.plain(arm, longest=44)) for arm in arms]
    handles = handles if named else []
    if warm:
        for start, said in (("cold", "compile caches empty"), ("warm", "caches filled before")):
            handles.append(Line2D([], [], color=ink, label=f"{start} start: {said}", **STROKES[start]))
    if handles:
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(left - 0.01 if not named else 0.0, 0.0),
            ncols=1 if named else len(handles),
            borderaxespad=0.1,
            handlelength=2.2,
            labelspacing=0.25,
            fontsize=9,
        )
