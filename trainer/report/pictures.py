"""Pictures of a comparison: each question of a reader as one figure of matplotlib, None where nothing was measured.

``python -m scripts.report RUNS --pictures DIR`` writes them as PNG. Every picture is drawn once, in the light palette.
No colour of it occurs twice, so that a page can put a CSS variable in place of each one: the same SVG then serves light
and dark. Matplotlib is imported where it is used.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.report.comparison import Row, WorkloadComparison
from trainer.report.statistics import Estimate
from trainer.report.tables import marked, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "pictures need matplotlib: pip install -e '.[report]'"
DOTS_PER_INCH = 160
WIDTH_INCHES, WIDE_INCHES, PANEL_INCHES = 4.6, 10.4, 3.2
BAR_INCHES, NAME_INCHES, GAP_INCHES, TITLE_INCHES = 0.19, 0.2, 0.09, 0.34
MAX_ARMS = 10
"""Arms whose lines are drawn; of more than these, the slowest are left to the table."""
MIN_STEPS, MAX_STEPS = 10, 1_000_000
POINTS = 121
MAX_NAME = 52
"""Characters of an arm's name."""
PALE = 0.35
"""Opacity of a line of which no difference from the baseline is shown, and of the bars of warm starts."""
STROKES: Mapping[str, dict[str, Any]] = {
    "cold": {"linestyle": "-", "linewidth": 1.9},
    "warm": {"linestyle": (0, (4, 2)), "linewidth": 1.4},
}
INK: Mapping[str, tuple[str, str]] = {
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#5b636d", "#a3abb5"),
    "grid": ("#e3e6ea", "#31363d"),
    "soft": ("#eef0f3", "#23272d"),
    "paper": ("#ffffff", "#16191d"),
}
"""Name, light and dark colour of everything but arms."""
ARMS: tuple[tuple[str, str], ...] = (
    ("#1e6ff0", "#6699f7"),
    ("#d97214", "#cf9a35"),
    ("#0fa266", "#7dda9c"),
    ("#c16fc6", "#b84aa3"),
    ("#604408", "#e8e33b"),
    ("#3a24e6", "#7657f7"),
    ("#751535", "#cf4044"),
    ("#0b4184", "#50eff7"),
)
"""Light and dark colours of arms. Found by search: apart from each other and from the baseline's grey for all three
kinds of colour blindness (Machado et al. 2009), and each at three to one or more against its paper."""
BASELINE = ("#6a717a", "#9aa2ac")
"""Grey: what the others are compared with."""
PALETTE = {**INK, **{f"arm-{place}": pair for place, pair in enumerate(ARMS)}, "baseline": BASELINE}
Palette = Mapping[str, str]
"""Colour of each arm."""


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


# ---- lines ------------------------------------------------------------------------------------------------------


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


def crossing(comparison: WorkloadComparison, *, palette: Palette | None = None) -> Figure | None:
    """Speed over the number of steps, warm-up and compiling included, as a multiple of the baseline's (total time,
    without one); points with the number of steps where another arm becomes the best one. None without totals."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    every, palette = lines(comparison), palette or arm_colours([comparison])
    if not every:
        return None
    # The baseline, arms that are best somewhere, then the fastest.
    needed = {comparison.baseline, *(one.arm for one in comparison.crossings)}
    seconds = {line.arm: line.step_seconds for line in every}
    kept = sorted(seconds, key=lambda arm: (arm not in needed, seconds[arm]))[:MAX_ARMS]
    shown = [line for line in every if line.arm in kept]
    base = next((line for line in every if line.arm == comparison.baseline and line.start == "cold"), None)

    def height(line: Line, steps: float) -> float:
        return line.at(steps) if base is None else base.at(steps) / line.at(steps)

    low, high = _limits(comparison)
    steps = [low * (high / low) ** (place / (POINTS - 1)) for place in range(POINTS)]
    with _panel(WIDE_INCHES, shown, palette) as (figure, axes):
        for line in shown:
            look = {"alpha": 1.0 if line.shown else PALE, "zorder": 3 if line is base else 2, **STROKES[line.start]}
            axes.plot(steps, [height(line, one) for one in steps], color=palette[line.arm], **look)
        unit = "batches" if comparison.run == "inference" else "optimizer steps"
        axes.set(xscale="log", xlim=(low, high), xlabel=unit)
        title = "Time to N steps, all of it included"
        if base is None:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
        else:
            axes.set_ylim(0, max(1.15, 1.08 * max(height(line, high) for line in shown)))
            axes.axhline(1.0, color=INK["muted"][0], linewidth=1.0)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
            title = f"Times as fast as {plain(base.arm, 16)} by step N, warm-up included"
        axes.set_title(title, loc="left", weight="bold", size=11)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        for crossed in comparison.crossings:
            spot = next((line for line in shown if (line.arm, line.start) == (crossed.arm, crossed.start)), None)
            if spot is not None and low < crossed.from_steps < high:
                place = (crossed.from_steps, height(spot, crossed.from_steps))
                axes.plot(*place, "o", color=palette[spot.arm], markeredgecolor=INK["paper"][0], zorder=5)
                above: dict[str, Any] = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "size": 9}
                axes.annotate(f"{crossed.from_steps:,}", place, **above)
    return figure


def _limits(comparison: WorkloadComparison) -> tuple[float, float]:
    """Steps from which to which the picture goes: a good way beyond all that happens."""
    marks = [float(one.from_steps) for one in comparison.crossings]
    for row in comparison.rows:
        marks += [steps for steps in (row.break_even_steps, row.break_even_steps_warm) if steps is not None]
        marks += [float(steps) for steps in row.total_seconds]
    known = [steps for steps in marks if math.isfinite(steps) and steps > 0] or [1000.0]
    low = 10 ** math.floor(math.log10(max(MIN_STEPS, min(known) / 4)))
    high = 10 ** math.ceil(math.log10(min(MAX_STEPS, max(known) * 2)))
    return float(low), float(max(high, 100 * low))


def progress(comparison: WorkloadComparison, *, palette: Palette) -> Figure | None:
    """Optimizer steps done over the seconds since the start of the process, as measured: when an arm begins to train,
    where it stands still, and when it has overtaken another one. Of each arm and start the run whose last step ended
    in the middle; None where no run says when its steps were done."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for row in comparison.rows:
        for start, runs in (("cold", row.cell.cold or row.cell.others), ("warm", row.cell.warm)):
            known = sorted((run.record.progress for run in runs if run.record.progress), key=lambda one: one[-1][1])
            if known:
                found[row.cell.arm, start] = known[len(known) // 2]
    # The baseline, then those that were through first.
    order = sorted(found, key=lambda key: (key[0] != comparison.baseline, found[key][-1][1]))
    arms = list(dict.fromkeys(arm for arm, _ in order))[:MAX_ARMS]
    if not arms:
        return None
    shown = [Line(arm, start, 0.0, 0.0) for arm, start in order if arm in arms]
    with _panel(WIDTH_INCHES, shown, palette) as (figure, axes):
        for line in reversed(shown):
            steps, seconds = zip(*found[line.arm, line.start], strict=True)
            axes.plot(seconds, steps, color=palette[line.arm], **STROKES[line.start])
        axes.set(xlabel="seconds since the start of the process", xlim=(0, None), ylim=(0, None))
        axes.set_title("Optimizer steps done", loc="left", weight="bold", size=11)
    return figure


@contextmanager
def _panel(width: float, shown: Sequence[Line], palette: Palette) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one panel, and below it the names of the arms and what dashed lines are."""
    with drawing():
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        named = {plain(line.arm): palette[line.arm] for line in shown}
        handles = [Line2D([], [], color=colour, linewidth=2.4, label=name) for name, colour in named.items()]
        if any(line.start == "warm" for line in shown):
            for start, label in (("cold", "compile caches empty"), ("warm", "caches filled before")):
                handles.append(Line2D([], [], color=INK["ink"][0], label=f"{start} start: {label}", **STROKES[start]))
        columns = max(1, round(width / WIDTH_INCHES))
        height = PANEL_INCHES + 0.8 + 0.2 * math.ceil(len(handles) / columns)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(True)
        yield figure, axes
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=9, labelspacing=0.25)


# ---- bars -------------------------------------------------------------------------------------------------------


def draw_bars(
    title: str, groups: Mapping[str, list[Bar]], palette: Palette, legend: Sequence[str] = ()
) -> Figure | None:
    """The bars of each arm below its name, on one scale. None without any."""
    groups = {arm: bars for arm, bars in groups.items() if bars}
    if not groups:
        return None
    every = [bar for bars in groups.values() for bar in bars]
    names = NAME_INCHES * (len(groups) + len(legend))
    height = TITLE_INCHES + names + BAR_INCHES * len(every) + GAP_INCHES * (len(groups) + 1)
    longest = max(max(bar.value, bar.high or 0.0) for bar in every) or 1.0
    scale = 2.6 / longest
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH_INCHES, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-0.02, WIDTH_INCHES - 0.02), ylim=(height, 0))
        axes.axis("off")
        axes.text(0, TITLE_INCHES / 2, title, weight="bold", size=11, va="center")
        y = TITLE_INCHES
        for arm, bars in groups.items():
            axes.text(0, y + NAME_INCHES / 2, plain(arm), va="center")
            y += NAME_INCHES
            for bar in bars:
                middle, thick = y + BAR_INCHES / 2, BAR_INCHES - 0.04
                axes.barh(middle, bar.value * scale, height=thick, color=palette[arm], alpha=PALE if bar.pale else 1.0)
                if bar.low is not None and bar.high is not None and bar.high > bar.low:
                    ends = [bar.low * scale, bar.high * scale]
                    axes.plot(ends, [middle, middle], color=INK["ink"][0], linewidth=1.4)
                axes.text(2.68, middle, bar.text, va="center", size=9)
                y += BAR_INCHES
            y += GAP_INCHES
        for line in legend:
            axes.text(0, y + NAME_INCHES / 2, line, va="center", size=9, color=INK["muted"][0])
            y += NAME_INCHES
    return figure


def _of(value: Estimate | None, text: str = "", factor: float = 1.0) -> list[Bar]:
    """The median with its range."""
    if value is None:
        return []
    low, high = (None if end is None else end * factor for end in (value.low, value.high))
    return [Bar(value.median * factor, number(value.median * factor) + text, low, high)]


def throughput(comparison: WorkloadComparison, *, palette: Palette) -> Figure | None:
    """Useful tokens a second of each arm, or samples, with their range over runs and the ratio's 95% interval."""
    rates = {"Useful tokens": "useful_tokens_per_second", "Samples": "samples_per_second"}
    for unit, name in rates.items():
        groups = {row.cell.arm: _of(getattr(row, name), _interval(row)) for row in comparison.rows}
        if any(groups.values()):
            legend = ["line: slowest to fastest run"] * any(bar.low for bars in groups.values() for bar in bars)
            if any(row.ratio is not None and row.ratio.low is not None for row in comparison.rows):
                legend.append(f"x: times {plain(comparison.baseline, 24)} (95% interval); ~: no difference shown")
            return draw_bars(f"{unit} a second", groups, palette, legend)
    return None


def _interval(row: Row) -> str:
    """A ratio with its interval; far ends are cut short. Single runs have none, and say so."""
    ratio = row.ratio
    if ratio is None:
        return ""
    if ratio.low is None or ratio.high is None:
        return f" · {ratio.value:.2f}x, one run"
    return f" · {marked(ratio)} ({ratio.low:.2f}-{min(ratio.high, 99):.2f})"


def warmup(comparison: WorkloadComparison, *, palette: Palette) -> Figure | None:
    """Warm-up seconds of each arm, cold and warm."""
    groups: dict[str, list[Bar]] = {}
    for row in comparison.rows:
        caches = "cold" if row.cell.cold else "caches unknown" if row.cell.compiles else ""
        bars = groups[row.cell.arm] = []
        for value, what in ((row.cold_warmup_seconds, caches), (row.warm_warmup_seconds, "warm")):
            if value is not None and not (bars and value == row.cold_warmup_seconds):  # eager starts either way alike
                text = f"{duration(value.median)} {what}"
                bars.append(Bar(value.median, text, value.low, value.high, pale=what == "warm"))
    return draw_bars("Seconds of warm-up", groups, palette)


def step_times(comparison: WorkloadComparison, *, palette: Palette) -> Figure | None:
    """Median step of each arm and its 95% quantile, medians over its runs; of batches in inference."""
    groups: dict[str, list[Bar]] = {}
    for row in comparison.rows:
        p95 = "" if row.p95_seconds is None else f" · p95 {number(row.p95_seconds.median * 1e3)}"
        groups[row.cell.arm] = _of(row.median_step_seconds, p95, 1e3)
    what = "batch" if comparison.run == "inference" else "step"
    return draw_bars(f"Milliseconds of a {what}, median", groups, palette)


def _figure_of(title: str, value: Callable[[Row], float | None]) -> Callable[..., Figure | None]:
    """Draws one figure of each arm."""

    def draw(comparison: WorkloadComparison, *, palette: Palette) -> Figure | None:
        found = {row.cell.arm: value(row) for row in comparison.rows}
        groups = {arm: [] if each is None else [Bar(each, number(each))] for arm, each in found.items()}
        return draw_bars(title, groups, palette) if any(found.values()) else None

    return draw


def _joules(row: Row) -> float | None:
    return None if row.joules_per_sample is None else row.joules_per_sample.median


@dataclass(frozen=True, slots=True)
class Picture:
    """One question and who draws its answer."""

    name: str
    """Of its file, and of its place on a page."""
    title: str
    caption: str
    """How to read it."""
    draw: Callable[..., Figure | None]
    """``draw(comparison, palette=...)``."""


PICTURES: tuple[Picture, ...] = (
    Picture(
        "crossing",
        "Total time",
        "Above 1x an arm has made up for its warm-up. Points mark the step from which another arm needs the least "
        "time. Arms of which no difference from the baseline is shown are pale and not chosen.",
        crossing,
    ),
    Picture(
        "progress",
        "Progress",
        "As measured in one run of each arm, waiting, validation and checkpoints included.",
        progress,
    ),
    Picture("throughput", "Throughput", "Steady state, after warm-up.", throughput),
    Picture("warmup", "Warm-up", "What a run pays before its steps are steady, compiling included.", warmup),
    Picture("step_times", "Step times", "Steady steps, medians over the runs of an arm.", step_times),
    Picture(
        "padding",
        "Padding",
        "Positions that are computed for nothing.",
        _figure_of("Padding, share of all positions", lambda row: row.padded_share),
    ),
    Picture(
        "memory",
        "Memory",
        "The highest allocation of any run.",
        _figure_of("Peak memory on the device, GiB", lambda row: row.peak_device_memory_gib),
    ),
    Picture("energy", "Energy", "Of the board over steady steps.", _figure_of("Energy, joules a sample", _joules)),
)


def write(comparisons: Sequence[WorkloadComparison], directory: Path) -> list[Path]:
    """Write every picture of every comparison into ``directory`` as PNG; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    palette, files = arm_colours(comparisons), []
    for place, comparison in enumerate(comparisons):
        for picture in PICTURES:
            figure = picture.draw(comparison, palette=palette)
            if figure is not None:
                readable = re.sub(r"[^\w.=-]+", "_", comparison.workload).strip("_")[:60]
                files.append(directory / f"{place + 1}-{readable or 'workload'}-{picture.name}.png")
                with drawing():
                    figure.savefig(files[-1], dpi=DOTS_PER_INCH)
    return files


# ---- ink and paper ----------------------------------------------------------------------------------------------


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's settings for what is drawn inside. Raises ValueError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError(MISSING) from error
    ink, muted, grid, paper = (INK[name][0] for name in ("ink", "muted", "grid", "paper"))
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10.0,
        "text.parse_math": False,  # a dollar in an override is not a formula
        "text.color": ink,
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), muted),
        "axes.facecolor": "none",
        "axes.linewidth": 0.8,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.unicode_minus", "legend.frameon"), False),
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "figure.facecolor": paper,
        "svg.fonttype": "none",
        "svg.hashsalt": "crucible",  # the same records make the same page
    }
    with mpl.rc_context(settings):
        yield


def arm_colours(comparisons: Sequence[WorkloadComparison]) -> dict[str, str]:
    """One colour for each arm, the same in all pictures of all of these workloads; baselines are grey. Arms of one
    workload share a colour only where there are more than eight."""
    together = [[row.cell.arm for row in one.rows] for one in comparisons]
    chosen = dict.fromkeys((one.baseline for one in comparisons), BASELINE[0])
    for arm in dict.fromkeys(arm for arms in together for arm in arms if arm not in chosen):
        taken = [chosen.get(other) for arms in together if arm in arms for other in arms]
        used = list(chosen.values())
        chosen[arm] = min((light for light, _ in ARMS), key=lambda one: (taken.count(one), used.count(one)))
    return chosen


def plain(text: str, longest: int = MAX_NAME) -> str:
    """One line without control characters, short enough for a picture."""
    line = " ".join("".join(" " if unicodedata.category(sign)[0] == "C" else sign for sign in text).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def duration(seconds: float) -> str:
    """``90`` as ``1.5 min``: in the unit that fits."""
    for limit, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
