"""Pictures of a comparison: each question of a reader as one figure of matplotlib, None where nothing was measured.

``crucible report`` puts them on its page, ``crucible verify --tables`` those of published records into files.
Matplotlib is imported where it is used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.report.comparison import Row, WorkloadComparison
from trainer.report.tables import interval, marked, number
from trainer.wording import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "pictures need matplotlib: pip install matplotlib"
DOTS_PER_INCH = 160
WIDTH_INCHES, PANEL_INCHES, LINE_INCHES = 8.0, 3.2, 0.2
MAX_ARMS = 10
"""Arms whose lines are drawn; of more than these, the slowest are left to the table."""
MIN_STEPS, MAX_STEPS = 10, 1_000_000
POINTS = 121
MAX_NAME, LEGEND, MAX_END = 52, 44, 24
"""Characters of an arm's name, beside its bar, in the legend, and at the end of its line."""
TITLE: dict[str, Any] = {"loc": "left", "weight": "bold", "size": 11}
PALE = 0.35
"""Opacity of a line of which no difference from the baseline is shown."""
INK, MUTED, GRID, PAPER = "#1b1f24", "#5b636d", "#e3e6ea", "#ffffff"
ARMS = ("#1e6ff0", "#d97214", "#0fa266", "#c16fc6", "#604408", "#3a24e6", "#751535", "#0b4184")
"""Found by search: apart from each other and from the baseline's grey for all three kinds of colour blindness (Machado
et al. 2009), and each at three to one or more against the paper."""
BASELINE = "#6a717a"
"""Grey: what the others are compared with."""
Palette = Mapping[str, str]
"""Colour of each arm."""


def crossing(comparison: WorkloadComparison, palette: Palette) -> Figure | None:
    """Speed over the number of steps, warm-up and compiling included, as a multiple of the baseline's; points with the
    number of steps where another arm becomes the best one. None without the baseline's total times."""
    known = {row.cell.arm: row for row in comparison.rows if row.cost is not None}
    base = known.get(comparison.baseline)
    if base is None:
        return None
    # The baseline, arms that are best somewhere, then the fastest.
    needed = {comparison.baseline, *(one.arm for one in comparison.crossings)}
    every = {arm: row.cost.step_seconds for arm, row in known.items() if row.cost is not None}
    arms = sorted(every, key=lambda arm: (arm not in needed, every[arm]))[:MAX_ARMS]

    def height(arm: str, steps: float) -> float:
        return (base.total_at(steps) or math.nan) / (known[arm].total_at(steps) or math.nan)

    low, high = float(MIN_STEPS), _most(comparison)
    steps = [low * (high / low) ** (place / (POINTS - 1)) for place in range(POINTS)]
    caches = ", from filled caches" if comparison.start == "warm" else ""
    title = f"Times as fast as {shorten(comparison.baseline, 16)} by step N, warm-up included{caches}"
    with _panels([title], arms, palette) as (figure, (axes,)):
        from matplotlib.ticker import FuncFormatter, NullLocator

        for arm in arms:
            ratio, order = known[arm].ratio, 3 if known[arm] is base else 2
            alpha = 1.0 if ratio is None or ratio.shown else PALE
            heights = [height(arm, one) for one in steps]
            axes.plot(steps, heights, color=palette[arm], linewidth=1.9, alpha=alpha, zorder=order)
        axes.set(xscale="log", xlim=(low, high), xlabel="optimizer steps")
        axes.set_ylim(0, max(1.15, 1.08 * max(height(arm, high) for arm in arms)))
        axes.axhline(1.0, color=MUTED, linewidth=1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        for crossed in comparison.crossings:
            if crossed.arm in arms and low < crossed.from_steps < high:
                place = (crossed.from_steps, height(crossed.arm, crossed.from_steps))
                axes.plot(*place, "o", color=palette[crossed.arm], markeredgecolor=PAPER, zorder=5)
                text = f"{crossed.from_steps:,}"
                axes.annotate(text, place, textcoords="offset points", xytext=(0, 7), ha="center", size=9)
    return figure


def _most(comparison: WorkloadComparison) -> float:
    """Steps up to which the picture goes: a good way beyond all that happens, a power of ten."""
    marks = [row.break_even_steps or 0.0 for row in comparison.rows]
    marks += [steps for row in comparison.rows for steps in row.total_seconds]
    known = [steps for steps in (*marks, *(one.from_steps for one in comparison.crossings)) if math.isfinite(steps)]
    return float(10 ** math.ceil(math.log10(min(MAX_STEPS, max(100, *known) * 2))))


def progress(comparison: WorkloadComparison, palette: Palette) -> Figure | None:
    """Seconds since the start of the process over the optimizer steps done, as measured: when an arm begins to train,
    where it stands still, and when it has overtaken another one. Of each arm's runs from the comparison's start the one
    whose last step ended in the middle; None where no run says when its steps were done."""
    found: dict[str, list[list[float]]] = {}
    for row in comparison.rows:
        curves = [run.record.progress for run in row.cell.started(comparison.start) if run.record.progress]
        if curves:
            found[row.cell.arm] = sorted(curves, key=lambda one: one[-1][1])[len(curves) // 2]
    # The baseline, then those that were through first.
    arms = sorted(found, key=lambda arm: (arm != comparison.baseline, found[arm][-1][1]))[:MAX_ARMS]
    if not arms:
        return None
    with _panels([_through_first({arm: found[arm][-1] for arm in arms}, comparison.baseline)], [], palette) as (
        figure,
        (axes,),
    ):
        for arm in reversed(arms):
            steps, seconds = zip(*found[arm], strict=True)
            axes.plot(steps, seconds, color=palette[arm], linewidth=1.9)
        axes.set(
            xlabel="optimizer steps", ylabel="seconds since the start of the process", xlim=(0, None), ylim=(0, None)
        )
        # Names at the lines' ends, as far from each other as a line of text is high.
        height, lowest = axes.get_ylim()[1] * LINE_INCHES / PANEL_INCHES, -math.inf
        for arm in sorted(arms, key=lambda arm: found[arm][-1][1]):
            step, second = found[arm][-1]
            lowest = max(second, lowest + height)
            text, place = f"{shorten(arm, MAX_END)} · {second:,.0f} s", (step, lowest)
            axes.annotate(
                text, place, xytext=(5, 0), textcoords="offset points", color=palette[arm], va="center", size=9
            )
    return figure


def _through_first(ends: Mapping[str, Sequence[float]], baseline: str) -> str:
    """What the picture of progress shows, of the last step of each arm and its seconds."""
    steps = max(step for step, _ in ends.values())
    through = {arm: seconds for arm, (step, seconds) in ends.items() if step == steps}
    first = min(through, key=lambda arm: through[arm])
    point = f"{shorten(first, MAX_END)} trained {steps:,.0f} steps in {through[first]:,.0f} s"
    if first == baseline or baseline not in through:
        return point
    return f"{point}, {shorten(baseline, MAX_END)} in {through[baseline]:,.0f} s"


def losses(comparison: WorkloadComparison, palette: Palette) -> Figure | None:
    """The training loss of each arm over optimizer steps, the median over its runs in the range of all of them; below,
    each run less the baseline's of its seed, over the baseline's runs less their median: what a seed changes. None
    where no run has two losses to join by a line."""
    runs: dict[str, list[tuple[int | None, dict[int, float]]]] = {}
    for row in comparison.rows:
        for record in (run.record for run in row.cell.finished if len(run.record.losses) > 1):
            runs.setdefault(row.cell.arm, []).append((record.seed, {int(step): loss for step, loss in record.losses}))
    arms = list(runs)[:MAX_ARMS]
    if not arms:
        return None
    base = runs.get(comparison.baseline, [])
    middles = {step: statistics.median(found) for step, found in _by_step([curve for _, curve in base]).items()}
    seeds = len({seed for arm in arms for seed, _ in runs[arm]})

    def own(arm: str) -> list[dict[int, float]]:
        return [curve for _, curve in runs[arm]]

    def less(arm: str) -> list[dict[int, float]]:
        of_seed = dict(base) if arm != comparison.baseline else dict.fromkeys((seed for seed, _ in base), middles)
        pairs = [(curve, of_seed[seed]) for seed, curve in runs[arm] if seed in of_seed]
        return [{step: loss - theirs[step] for step, loss in ours.items() if step in theirs} for ours, theirs in pairs]

    titles = [f"Training loss, median and range over the runs, {seeds} seed{'s' * (seeds > 1)}"]
    titles += [f"The same minus {shorten(comparison.baseline, 24)} of that seed"] if base and len(arms) > 1 else []
    with _panels(titles, arms, palette) as (figure, panels):
        for axes, shown in zip(panels, (own, less), strict=False):
            for arm in arms:  # the baseline below the others, and wider: equal curves are both seen
                points = sorted(_by_step(shown(arm)).items())
                steps = [step for step, _ in points]
                low, middle, high = ([of(found) for _, found in points] for of in (min, statistics.median, max))
                alpha, width = (0.25, 3.2) if arm == comparison.baseline else (0.08, 1.2)
                axes.fill_between(steps, low, high, color=palette[arm], alpha=alpha, linewidth=0)
                axes.plot(steps, middle, color=palette[arm], linewidth=width)
        panels[-1].set_xlabel("optimizer steps")
    return figure


def _by_step(curves: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for curve in curves:
        for step, loss in curve.items():
            found.setdefault(step, []).append(loss)
    return found


def throughput(comparison: WorkloadComparison, palette: Palette) -> Figure | None:
    """Useful tokens a second of each arm, or samples, with their range over runs and the ratio's 95% interval."""
    useful = any(row.cell.over("useful_tokens_per_second") is not None for row in comparison.rows)
    unit, name = ("Useful tokens", "useful_tokens_per_second") if useful else ("Samples", "samples_per_second")
    rates = {row.cell.arm: (row, rate) for row in comparison.rows if (rate := row.cell.over(name)) is not None}
    if not rates:
        return None
    with _drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH_INCHES, 0.6 + 2 * LINE_INCHES * len(rates)), layout="constrained")
        axes = figure.add_subplot()
        ratios = "" if comparison.baseline_row is None else f", times {shorten(comparison.baseline, 24)} (95% interval)"
        axes.set_title(f"{unit} a second{ratios}", **TITLE)
        longest = max(rate.high or rate.median for _, rate in rates.values())
        for place, (arm, (row, rate)) in enumerate(rates.items()):
            ratio = "" if row.ratio is None else f" · {marked(row.ratio)}"
            within = f" ({interval(row.ratio)})" if interval(row.ratio) else ""
            axes.barh(place, rate.median, height=0.55, color=palette[arm])
            if rate.low is not None and rate.high is not None:
                axes.plot([rate.low, rate.high], [place, place], color=INK, linewidth=1.4)
            axes.text(longest * 1.02, place, f"{number(rate.median)}{ratio}{within}", va="center", size=9)
        axes.set(xlim=(0, longest * 1.5), ylim=(len(rates) - 0.5, -0.5))
        axes.set_yticks(range(len(rates)), [shorten(arm, MAX_NAME) for arm in rates], color=INK, size=9)
        axes.xaxis.set_visible(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def models(comparisons: Sequence[WorkloadComparison], palette: Palette) -> Figure | None:
    """The steady speed of each arm over the baseline's, a line for each workload, the most gained first; of ``auto``
    over its own first steps where the baseline was not run. None where nothing was compared."""
    gained: dict[str, dict[str, float]] = {}
    for one in comparisons:
        compared = {row.cell.arm: over_own_eager(row) if row.ratio is None else row.ratio.value for row in one.rows}
        ratios = {arm: ratio for arm, ratio in compared.items() if ratio is not None}
        if ratios:
            gained[one.workload] = ratios
    arms = [arm for arm in palette if any(arm in ratios for ratios in gained.values())][:MAX_ARMS]
    gained = {name: {arm: ratios[arm] for arm in arms if arm in ratios} for name, ratios in gained.items()}
    names = sorted((name for name in gained if gained[name]), key=lambda name: -max(gained[name].values()))
    if not names:
        return None
    best = [max(gained[name].values()) for name in names]
    title = f"Times as fast as {comparisons[0].baseline}: the best arm {number(best[-1])} to {number(best[0])}"
    with _panels([title], arms, palette) as (figure, (axes,)):
        from matplotlib.ticker import FuncFormatter, NullLocator

        figure.set_figheight(1.4 + LINE_INCHES * (1.3 * len(names) + math.ceil(len(arms) / 2)))
        for place, name in enumerate(names):
            ratios = gained[name]
            axes.plot([min(ratios.values()), max(ratios.values())], [place, place], color=GRID, linewidth=4, zorder=1)
            for arm, ratio in ratios.items():
                axes.plot(ratio, place, "o", color=palette[arm], markeredgecolor=PAPER, zorder=3)
        axes.axvline(1.0, color=MUTED, linewidth=1.0)
        ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24) if tick <= 1.3 * best[0]]
        lowest = min(min(gained[name].values()) for name in names)
        axes.set(xscale="log", xlim=(min(0.9, 0.93 * lowest), 1.1 * best[0]), ylim=(len(names) - 0.4, -0.6))
        axes.set_xticks([tick for tick in ticks if tick >= min(1.0, 0.85 * lowest)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks(range(len(names)), [shorten(name, MAX_NAME) for name in names], color=INK, size=9)
        axes.grid(False, axis="y")
    return figure


def over_own_eager(row: Row) -> float | None:
    """Of ``auto``, which begins in eager: its steps there over its steady ones, the median over its runs."""
    found = []
    for record in (run.record for run in row.cell.finished):
        eager, step = record.report.get("auto_step_seconds", {}).get("eager"), record.step_seconds
        found += [eager / step] if eager and step else []
    return statistics.median(found) if found else None


Draw = Callable[[WorkloadComparison, Palette], "Figure | None"]
PICTURES: dict[str, tuple[Draw, str]] = {
    "crossing": (
        crossing,
        "Above 1x an arm has made up for its warm-up. Points mark the step from which another arm needs the least "
        "time. Arms of which no difference from the baseline is shown are pale and not chosen.",
    ),
    "throughput": (throughput, "Steady state, after warm-up. Thin lines: slowest to fastest run."),
    "progress": (progress, "As measured in one run of each arm; waiting, validation and checkpoints included."),
    "losses": (losses, "Means over the steps between two log lines."),
}
"""By the name of its file: who draws a picture, and how to read it."""


def save(figure: Figure, file: Any, **options: Any) -> None:
    """Write ``figure`` as PNG, or in the ``format`` that ``options`` name, to a path or an open file."""
    if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
    with _drawing():
        figure.savefig(file, **{"format": "png", "dpi": DOTS_PER_INCH, **options})


# ---- ink and paper ----------------------------------------------------------------------------------------------


@contextmanager
def _panels(titles: Sequence[str], arms: Sequence[str], palette: Palette) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with a panel for each title, and below them the names of ``arms``."""
    with _drawing():
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], color=palette[arm], linewidth=2.4, label=shorten(arm, LEGEND)) for arm in arms]
        height = PANEL_INCHES * len(titles) + 0.8 + LINE_INCHES * math.ceil(len(handles) / 2)
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        panels = [figure.add_subplot(len(titles), 1, place) for place in range(1, len(titles) + 1)]
        for axes, title in zip(panels, titles, strict=True):
            axes.grid(True)
            axes.set_title(title, **TITLE)
        yield figure, panels
        if handles:
            figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=9, labelspacing=0.25)


@contextmanager
def _drawing() -> Iterator[None]:
    """Matplotlib's settings for what is drawn inside. Raises ValueError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError(MISSING) from error
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10.0,
        "text.parse_math": False,  # a dollar in an override is not a formula
        "text.color": INK,
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
        "axes.linewidth": 0.8,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.unicode_minus", "legend.frameon"), False),
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "svg.fonttype": "path",  # the same on every machine
        "svg.hashsalt": "crucible",  # the same records make the same page
    }
    with mpl.rc_context(settings):
        yield


def arm_colours(comparisons: Sequence[WorkloadComparison]) -> dict[str, str]:
    """A colour for each arm, the same in all pictures of all of these workloads; baselines are grey. Arms share one
    where there are more than eight in all."""
    baselines = dict.fromkeys((one.baseline for one in comparisons), BASELINE)
    arms = dict.fromkeys(row.cell.arm for one in comparisons for row in one.rows if row.cell.arm not in baselines)
    return {arm: ARMS[place % len(ARMS)] for place, arm in enumerate(arms)} | baselines
