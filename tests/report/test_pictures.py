"""Pictures: what they draw is what the comparison says, and nothing in them is cut off or covered."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.report.records import figures, ragged, record, save, static
from trainer.report import pictures
from trainer.report.comparison import WorkloadComparison
from trainer.report.comparison import compare_runs as compare
from trainer.report.page import svg
from trainer.report.pictures import Bar, draw_bars, duration, lines, progress, step_times, throughput
from trainer.report.runs import Run, find
from trainer.telemetry.record import RunRecord


def compared(*records: RunRecord) -> WorkloadComparison:
    (found,) = compare([Run(Path(f"run{number}"), one) for number, one in enumerate(records)])
    return found


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> list[WorkloadComparison]:
    return compare(find([save([*static(rounds=3), *ragged()], tmp_path_factory.mktemp("runs"))]))


def texts(figure: Figure) -> list[str]:
    return [one.get_text() for one in figure.findobj(Text) if one.get_visible() and one.get_text()]


def test_lines_go_through_the_totals_of_the_table(comparisons: list[WorkloadComparison]) -> None:
    rows = {row.cell.arm: row for row in comparisons[0].rows}
    found = lines(comparisons[0])
    assert {line.arm for line in found if line.start == "cold"} == set(rows)
    for line in found:
        totals = rows[line.arm].total_seconds if line.start == "cold" else rows[line.arm].total_seconds_warm
        for steps, seconds in totals.items():
            assert line.at(steps) == pytest.approx(seconds, rel=1e-6)


def test_lines_meet_where_the_comparison_says_that_compiling_breaks_even() -> None:
    arms = (("eager", 0.1, 0.5), ("whole", 0.05, 30.25))
    runs = [
        record(arm, step_seconds=step, warmup_seconds=warm, round=turn) for arm, step, warm in arms for turn in (1, 2)
    ]
    found = compared(*runs)
    eager, whole = lines(found)
    assert whole.shown
    assert not lines(compared(*runs[1:3]))[1].shown, "single runs"
    # 30 s beyond its five steps against none: 30 s at 0.05 s a step.
    assert whole.at(600) == pytest.approx(eager.at(600))
    assert found.rows[1].break_even_steps == pytest.approx(600)


def test_the_crossing_picture_marks_where_another_arm_takes_over(comparisons: list[WorkloadComparison]) -> None:
    figure = pictures.crossing(comparisons[0])
    assert figure is not None
    shown = texts(figure)
    crossings = [one for one in comparisons[0].crossings if one.from_steps > 0]
    assert crossings
    for crossing in crossings:
        assert f"{crossing.from_steps:,}" in shown
    for row in comparisons[0].rows:
        assert row.cell.arm in shown


def test_without_a_baseline_there_are_times_and_no_ratios() -> None:
    figure = pictures.crossing(compared(record("whole", warmup_seconds=9.0), record("regional", warmup_seconds=3.0)))
    assert figure is not None
    assert not [text for text in texts(figure) if "Times as fast" in text]
    assert {"whole", "regional"} <= set(texts(figure))
    assert not [text for text in texts(figure) if "warm start" in text], "what starts alike is drawn once"


def test_what_has_no_figures_has_no_picture() -> None:
    found = compared(RunRecord(task="toy", status="failed", reason="out of memory"))
    palette = pictures.arm_colours([found])
    assert [picture.draw(found, palette=palette) for picture in pictures.PICTURES] == [None] * len(pictures.PICTURES)


def test_nothing_is_cut_off_even_of_long_names() -> None:
    step, records = 0.1, [record("eager", warmup_seconds=1.0)]
    for number in range(14):
        name = f"cached+buckets+regional+optimizer+cuda_graph_of_the_{number}th"
        records.append(record(name, step_seconds=step / (1.1 + number / 7), warmup_seconds=5.0 + number))
    found = compared(*records)
    palette = pictures.arm_colours([found])
    for figure in [picture.draw(found, palette=palette) for picture in pictures.PICTURES]:
        if figure is None:
            continue
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        box, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
        assert box.x0 > -0.02
        assert box.y0 > -0.02
        assert box.x1 < width + 0.02
        assert box.y1 < height + 0.02


def test_an_arm_has_one_colour_everywhere_and_no_neighbour_shares_it(comparisons: list[WorkloadComparison]) -> None:
    palette = pictures.arm_colours(comparisons)
    assert palette["eager"] == pictures.BASELINE[0]
    for one in comparisons:
        chosen = [palette[row.cell.arm] for row in one.rows]
        assert len(set(chosen)) == len(chosen)


def test_step_times_are_medians_over_runs_with_their_spread() -> None:
    fast, slow = figures(0.1), figures(0.3)
    runs = [record("eager", warmup_seconds=1.0, seed=seed, **values) for seed, values in enumerate((fast, slow))]
    found = compared(*runs)
    figure = step_times(found, palette=pictures.arm_colours([found]))
    assert figure is not None
    median = (fast["steady_step_seconds_median"] + slow["steady_step_seconds_median"]) / 2
    p95 = (fast["steady_step_seconds_p95"] + slow["steady_step_seconds_p95"]) / 2
    assert f"{median * 1e3:.0f} · p95 {p95 * 1e3:.0f}" in texts(figure)


def test_single_runs_bear_no_mark() -> None:
    found = compared(record("eager", warmup_seconds=1.0), record("whole", step_seconds=0.05, warmup_seconds=9.0))
    figure = throughput(found, palette=pictures.arm_colours([found]))
    assert figure is not None
    assert "640 · 2.00x, one run" in texts(figure)
    assert not [text for text in texts(figure) if "~" in text]


def test_a_dollar_is_no_formula() -> None:
    figure = pictures.crossing(compared(record("eager", warmup_seconds=1.0), record("mine$x_1$", warmup_seconds=2.0)))
    assert figure is not None
    assert "mine$x_1$" in svg(figure, "p", "t", "d")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0236, "23.6 ms"), (1.0, "1 s"), (90.0, "1.5 min"), (5400.0, "1.5 h"), (172800.0, "2 d")]
)
def test_durations_are_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_progress_is_drawn_as_recorded_of_one_run_of_each_start() -> None:
    def began(arm: str, start: str, seconds: float, round: int) -> RunRecord:
        return record(arm, start=start, round=round, warmup_seconds=1.0, progress=[[0, seconds], [200, 2 * seconds]])

    runs = [began("whole", "cold", seconds, turn) for turn, seconds in enumerate((30.0, 20.0, 25.0), start=1)]
    found = compared(began("eager", "cold", 5.0, 1), *runs, began("whole", "warm", 7.0, 1))
    figure = progress(found, palette=pictures.arm_colours([found]))
    assert figure is not None
    drawn = {(line.get_color(), *line.get_xdata()) for line in figure.axes[0].get_lines()}  # type: ignore[misc]
    eager, whole = pictures.BASELINE[0], pictures.ARMS[0][0]
    assert drawn == {(eager, 5.0, 10.0), (whole, 25.0, 50.0), (whole, 7.0, 14.0)}
    assert {"eager", "whole", "Optimizer steps done"} <= set(texts(figure))


def test_bars_are_as_long_as_their_values() -> None:
    palette = {"a": "#1e6ff0", "b": "#d97214"}
    figure = draw_bars("Speed", {"a": [Bar(2.0, "2")], "b": [Bar(1.0, "1")]}, palette)
    assert figure is not None
    first, second = (patch.get_width() for patch in figure.axes[0].patches)
    assert first == pytest.approx(2 * second)
