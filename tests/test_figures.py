"""Figures that the README and a page of results quote agree with the tables and records that they come from."""

from __future__ import annotations

import re
from statistics import median

from tests.conftest import ROOT
from trainer.report.comparison import compare_runs
from trainer.report.published import (
    COLD,
    CURVES_ALONE,
    RATIO,
    RECORDS,
    SAME,
    STEP,
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
    assert f"[{figure_text(rows['regional+cuda_graph'], RATIO).split()[0]}](docs/results/tasks.md#" in README
    assert f"times as fast, and {median(eager) / median(captured):.2f} in the GPU's own time alone" in README
    rows = published("h100-gpt2")
    by_hand, ours = (figure_text(rows[arm], RATIO).split()[0] for arm in ("peer loop_compile", "regional"))
    assert f"is {by_hand} times as fast as eager in a loop by hand\nwith `torch.compile`, and {ours} with" in README
    summed = SUMMARY.search(README)
    for line in summed[2].splitlines():
        row = published_rows()[line.partition(" ")[0]]
        assert median(row.figures[WARM]) < median(row.figures[COLD]) / 2


def test_what_pages_of_results_say_in_sentences_is_in_the_records() -> None:
    for page, name, arm, figure in (
        ("README", "cpu-micro", "regional", RATIO),
        ("README", "cpu-micro", "whole", RATIO),
        ("tasks", "h100-captioning", "regional+cuda_graph", RATIO),
        ("tasks", "h100-captioning", "whole+cuda_graph", RATIO),
        ("tasks", "h200-captioning-2000", "regional+cuda_graph", STEP),
        ("tasks", "h100-resnet50", "regional+cuda_graph", RATIO),
        ("tasks", "h200-forces-small", "cuda_graph", RATIO),
        ("tasks", "h200-forces-small", "second_order+cuda_graph", RATIO),
        ("h200-peers", "h100-gpt2", "regional", RATIO),
        ("h200-peers", "h200-gpt2-ddp-peers", "regional", STEP),
        ("h200-peers", "h200-captioning-loop-clipped", "whole+cuda_graph", STEP),
    ):
        said = figure_text(published(name)[arm], figure).split(" (")[: None if figure == RATIO else 1]
        text = (RECORDS.parent / f"{page}.md").read_text(encoding="utf-8")
        assert all(one.rstrip(")") in text for one in said), (page, name, arm, said)


def test_what_the_page_on_several_gpus_quotes_is_in_its_records() -> None:
    text = (ROOT / "docs" / "results" / "h200-several-gpus.md").read_text(encoding="utf-8")
    quoted = re.findall(
        r"\| ([\d,]+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| \[records\]\(records/([\w-]+)\.jsonl\)", text
    )
    for samples, of_loops, first, name in quoted:
        ours, loop = (run.record for run in find([RECORDS / f"{name}.jsonl"]))
        assert (samples, first) == (f"{ours.samples_per_second:,.0f}", f"{ours.first_step_seconds:.1f}"), name
        assert of_loops == f"{ours.samples_per_second / loop.samples_per_second:.3f}", name
    assert len(quoted) == 4
    for run in find([RECORDS / "h200-llama-3-8b-models.jsonl"]):
        record = run.record
        tokens, flops = record.tokens_per_second / record.world_size, record.teraflops_per_second
        assert re.search(
            rf"\| \**{tokens:,.0f}\** \| \**{flops:.0f}\** \| .* \| {record.peak_device_memory_gib:.1f} \|", text
        )
    for name in ("one", "four"):
        for run in find([RECORDS / f"h200-captioning-ragged-{name}-gpu{'s' * (name == 'four')}.jsonl"]):
            assert f"{run.record.useful_tokens_per_second:,.0f}" in text


def test_what_auto_takes_beside_the_fastest_fixed_arm_is_in_the_records() -> None:
    page = (ROOT / "docs/results/h200-models.md").read_text(encoding="utf-8")
    for host, tasks in (
        ("h200-auto-models", ("image_classification", "efficientnet", "convnext", "swin")),
        ("h200-auto-second-models", ("language_modelling", "vit")),
        ("h200-auto-third-models", ("bert", "llama", "gemma3", "unet")),
    ):
        ratios = []
        for task in tasks:
            steps = {
                one.record.label: one.record.steady_step_seconds_mean
                for one in find([RECORDS / f"{host}.jsonl"])
                if one.record.task == task
            }
            ratios.append(steps["auto"] / min(step for arm, step in steps.items() if arm != "auto"))
        assert f"| {', '.join(f'{one:.3f}' for one in ratios)} |" in page
