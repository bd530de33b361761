"""Pictures: what they draw is what the comparison says, nothing is cut off, and colours differ for everyone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.report.records import ragged, record, static
from trainer.report import pictures
from trainer.report.comparison import WorkloadComparison
from trainer.report.comparison import compare_runs as compare
from trainer.report.pictures import ARMS, BASELINE, INK, MUTED, PALE, PAPER, arm_colours
from trainer.report.runs import Run
from trainer.telemetry.record import RunRecord

DRAW = {name: draw for name, (draw, _) in pictures.PICTURES.items()}


def compared(*records: RunRecord) -> WorkloadComparison:
    (found,) = compare([Run(Path(f"run{number}"), one) for number, one in enumerate(records)])
    return found


def drawn(name: str, *records: RunRecord) -> Figure:
    found = compared(*records)
    figure = DRAW[name](found, arm_colours([found]))
    assert figure is not None
    return figure


@pytest.fixture(scope="module")
def comparisons() -> list[WorkloadComparison]:
    return compare([Run(Path(f"run{number}"), one) for number, one in enumerate([*static(rounds=3), *ragged()])])


def texts(figure: Figure) -> list[str]:
    return [one.get_text() for one in figure.findobj(Text) if one.get_visible() and one.get_text()]


def test_lines_meet_where_the_comparison_says_that_compiling_breaks_even() -> None:
    arms = (("eager", 0.1, 0.5), ("whole", 0.05, 30.25))
    runs = [
        record(arm, step_seconds=step, warmup_seconds=warm, round=turn) for arm, step, warm in arms for turn in (1, 2)
    ]
    (eager, whole), (axes,) = compared(*runs).rows, drawn("crossing", *runs).axes
    speeds = {line.get_color(): line for line in axes.get_lines() if len(line.get_xdata()) > 2}  # type: ignore[arg-type]
    for steps, speed in zip(*speeds[ARMS[0]].get_data(), strict=True):
        ours, theirs = (row.total_at(float(steps)) for row in (whole, eager))
        assert speed == pytest.approx(theirs / ours)
    assert speeds[ARMS[0]].get_alpha() == 1
    # 30 s beyond its five steps against none: 30 s at 0.05 s a step.
    assert whole.break_even_steps == pytest.approx(600)
    single = drawn("crossing", *runs[1:3]).axes[0].get_lines()
    assert PALE in [line.get_alpha() for line in single], "single runs show no difference"


def test_the_crossing_picture_marks_where_another_arm_takes_over(comparisons: list[WorkloadComparison]) -> None:
    figure = pictures.crossing(comparisons[0], arm_colours(comparisons))
    assert figure is not None
    crossings = {f"{one.from_steps:,}" for one in comparisons[0].crossings if one.from_steps > 0}
    assert crossings
    assert crossings | {row.cell.arm for row in comparisons[0].rows} <= set(texts(figure))


def test_what_has_no_figures_has_no_picture() -> None:
    alone = compared(record("whole", warmup_seconds=9.0))
    assert pictures.crossing(alone, arm_colours([alone])) is None, "nothing to be a multiple of"
    found = compared(RunRecord(task="toy", status="failed", reason="out of memory"))
    assert {draw(found, arm_colours([found])) for draw in DRAW.values()} == {None}


@pytest.mark.parametrize("name", DRAW)
def test_nothing_is_cut_off_even_of_long_names(name: str) -> None:
    curve, records = [[10.0, 3.0], [20.0, 2.0]], []
    for number in range(14):
        arm = f"cached+buckets+regional+optimizer+cuda_graph_of_the_{number}th" if number else "eager"
        step = 0.1 / (1.1 + number / 7)
        records.append(record(arm, step_seconds=step, warmup_seconds=5.0 + number, losses=curve))
    figure = drawn(name, *records)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02


def test_bars_are_rates_and_ratios_of_single_runs_bear_a_mark() -> None:
    figure = drawn("throughput", record("eager", warmup_seconds=1.0), record("whole", step_seconds=0.05))
    assert "640 · ~2.00x" in texts(figure)
    assert [patch.get_width() for patch in figure.axes[0].patches] == pytest.approx([320, 640])  # type: ignore[attr-defined]


def test_a_dollar_is_no_formula(tmp_path: Path) -> None:
    figure = drawn("crossing", record("eager", warmup_seconds=1.0), record("mine$x_1$", warmup_seconds=2.0))
    assert "mine$x_1$" in texts(figure)
    pictures.save(figure, tmp_path / "picture.png")


def test_progress_is_drawn_as_recorded_of_one_run_of_each_arm() -> None:
    def began(arm: str, start: str, seconds: float, round: int) -> RunRecord:
        return record(arm, start=start, round=round, warmup_seconds=1.0, progress=[[0, seconds], [200, 2 * seconds]])

    runs = [began("whole", "cold", seconds, turn) for turn, seconds in enumerate((30.0, 20.0, 25.0), start=1)]
    figure = drawn("progress", began("eager", "cold", 5.0, 1), *runs, began("whole", "warm", 7.0, 1))
    found = {(line.get_color(), *line.get_ydata()) for line in figure.axes[0].get_lines()}  # type: ignore[misc]
    assert found == {(BASELINE, 5.0, 10.0), (ARMS[0], 25.0, 50.0)}, "the middle one of the cold starts"
    title = "eager trained 200 steps in 10 s"
    assert {"eager · 10 s", "whole · 50 s", title} <= set(texts(figure))


def test_progress_says_in_its_title_who_was_through_first() -> None:
    runs = [
        record(arm, start="cold", warmup_seconds=1.0, progress=[[0, 5.0], [2000, seconds]])
        for arm, seconds in (("eager", 120.0), ("whole", 81.4), ("regional", 81.0))
    ]
    figure = drawn("progress", *runs)
    assert "regional trained 2,000 steps in 81 s, eager in 120 s" in texts(figure)
    ends = {text.get_text(): text.xy[1] for text in figure.axes[0].texts}  # type: ignore[attr-defined]
    assert ends["whole · 81 s"] - ends["regional · 81 s"] > 5, "names do not lie on each other"


def test_losses_are_medians_over_seeds_and_below_less_eagers_of_the_same_seed() -> None:
    seeds = {"eager": (1.0, 1.2, 1.1), "whole": (1.3, 1.1, 1.2)}
    runs = [
        record(arm, seed=seed, losses=[[10, 2 * loss], [20, loss]])
        for arm, losses in seeds.items()
        for seed, loss in enumerate(losses)
    ]
    figure = drawn("losses", *runs)
    (above, below) = (
        {line.get_color(): list(line.get_ydata()) for line in axes.get_lines()}  # type: ignore[arg-type,misc]
        for axes in figure.axes
    )
    assert above == {BASELINE: [2.2, 1.1], ARMS[0]: [2.4, 1.2]}
    assert below[ARMS[0]] == pytest.approx([0.2, 0.1])
    assert any("3 seeds" in text for text in texts(figure))
    bands = [band.get_paths()[0].get_extents() for band in figure.axes[1].collections]
    assert [(band.y0, band.y1) for band in bands] == [pytest.approx((-0.2, 0.2)), pytest.approx((-0.2, 0.6))]
    points = [compared(record("eager", losses=[[10, 1.0]]))]
    assert DRAW["losses"](points[0], arm_colours(points)) is None, "a point is no line"


# ---- colours ----------------------------------------------------------------------------------------------------

SEEN = {
    # Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB
    "all": np.eye(3),
    "no red": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "no green": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "no blue": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB, white D65."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_all_arms_can_be_told_apart_and_stand_out_from_the_paper() -> None:
    for one, other in itertools.combinations((*ARMS, BASELINE), 2):
        for who in SEEN.values():
            apart = np.linalg.norm(lab(who @ linear(one)) - lab(who @ linear(other)))
            assert apart >= 15, (one, other)  # about 2 can just be seen side by side
    paper, *others = (float(TO_XYZ[1] @ linear(colour)) for colour in (PAPER, *ARMS, BASELINE, INK, MUTED))
    contrasts = [(paper + 0.05) / (other + 0.05) for other in others]
    assert min(contrasts) >= 3, "WCAG 2: graphics 3, text 4.5"
    assert min(contrasts[-2:]) >= 4.5


def test_an_arm_has_one_colour_everywhere_and_no_neighbour_shares_it(comparisons: list[WorkloadComparison]) -> None:
    palette = arm_colours(comparisons)
    assert palette["eager"] == BASELINE
    for one in comparisons:
        chosen = [palette[row.cell.arm] for row in one.rows]
        assert len(set(chosen)) == len(chosen)
