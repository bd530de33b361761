"""Figures that the README quotes agree with the tables and records that they come from."""

from __future__ import annotations

from statistics import median

from tests.conftest import ROOT
from trainer.report.comparison import compare_runs
from trainer.report.published import (
    COLD,
    CURVES_ALONE,
    RATIO,
    RECORDS,
    SAME,
    SUMMARY,
    WARM,
    PublishedRow,
    figure_text,
    published_rows,
    refreshed,
    rows_in,
    rows_of,
    workloads,
)
from trainer.report.runs import find, is_profiled
from trainer.report.tables import number

README = (ROOT / "README.md").read_text(encoding="utf-8")


def published(name: str) -> dict[str, PublishedRow]:
    return {one.arm: one for one in rows_of(find([RECORDS / f"{name}.jsonl"]))}


def test_a_published_ratio_is_what_compare_says_of_the_same_records() -> None:
    differ = []
    for file in sorted(RECORDS.glob("*.jsonl")):
        if not file.name.startswith((SAME, CURVES_ALONE)):
            runs = find([file])
            said = {(found.workload, one.cell.arm): one.ratio for found in compare_runs(runs) for one in found.rows}
            for found in [] if all(map(is_profiled, runs)) else workloads(runs):
                for one in rows_in(found, runs):
                    ratio, text = said[found.workload, one.arm], figure_text(one, RATIO)
                    if RATIO in one.figures and not (ratio and text.startswith(number(ratio.value))):
                        differ.append((file.stem, one.arm, text, ratio))
    assert differ == []


def test_the_table_of_the_readme_is_that_of_its_records() -> None:
    assert refreshed(README) == README, "crucible verify --tables makes it anew"
    assert SUMMARY.search(README) is not None


def test_what_the_readme_says_beside_its_table_is_in_the_records() -> None:
    rows = published("h100-captioning")
    eager, captured = (rows[arm].figures["device ms a step"] for arm in ("eager", "regional+cuda_graph"))
    assert f"[{figure_text(rows['regional+cuda_graph'], RATIO).split()[0]}](docs/results/h100-records.md#" in README
    assert f"times as fast, and {median(eager) / median(captured):.2f} in the GPU's own time alone" in README
    rows = published("h100-gpt2")
    by_hand, ours = (figure_text(rows[arm], RATIO).split()[0] for arm in ("peer loop_compile", "regional"))
    assert f"is {by_hand} times as fast as eager in a loop by hand\nwith `torch.compile`, and {ours} with" in README
    summed = SUMMARY.search(README)
    for line in summed[2].splitlines():
        row = published_rows()[line.partition(" ")[0]]
        assert median(row.figures[WARM]) < median(row.figures[COLD]) / 2
