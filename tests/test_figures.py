"""Figures that are quoted agree with the tables that they come from: README and docs/results/README.md."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import median

from tests.conftest import ROOT
from trainer.report.published import COLD, RATIO, RECORDS, rows_of
from trainer.report.runs import find

RESULTS = ROOT / "docs" / "results"
Row = dict[str, str]


def tables(page: Path, heading: str) -> list[list[Row]]:
    """The tables under a heading. An empty first cell is filled from above; marks around a cell are left out."""
    text = page.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        lines = [[cell.strip(" *`") for cell in line[1:-1].split("|")] for line in block.splitlines()]
        first, rows = "", []
        for cells in lines[2:]:
            first = cells[0] or first
            rows.append(dict(zip(lines[0], [first, *cells[1:]], strict=True)))
        found.append(rows)
    return found


def row(rows: list[Row], **wanted: str) -> Row:
    """The one row whose cells begin with these words."""
    (found,) = [one for one in rows if all(starts(one[name], value) for name, value in wanted.items())]
    return found


def starts(cell: str, value: str) -> bool:
    return re.match(rf"{re.escape(value)}(?![+\w])", cell) is not None


def numbers(cell: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"[\d,]*\d(?:\.\d+)?", cell)]


def rounded(cell: str) -> set[str]:
    """Seconds as a headline gives them: 14.8 to 17.7 -> 15 and 18."""
    return {f"{number:.0f}" for number in numbers(cell)}


def test_the_readme_quotes_the_tables() -> None:
    (quoted,) = tables(ROOT / "README.md", "crucible-train")
    strategies = RESULTS / "h200-strategies.md"
    (static,) = tables(strategies, "Batch 32, captions padded to 64 positions")
    line, source = row(quoted, training="captioning, batch 32"), row(static, strategies="regional+cuda_graph")
    (hosts,) = tables(strategies, "Other hosts")
    others = [numbers(one["regional+cuda_graph over eager"])[0] for one in hosts if one["host"].startswith("H")]
    assert numbers(line["over eager"])[0] == numbers(source["over eager"])[0]
    assert numbers(line["over eager"])[1:] == [round(min(others), 1), round(max(others), 1)]
    assert rounded(line["cold warm-up"]) == rounded(source["cold warm-up s"])

    ragged = [row(rows, strategies="full_stack") for rows in tables(strategies, "Batch 32, ragged captions")]
    line = row(quoted, training="ragged captions")
    assert set(numbers(line["over eager"])) == {numbers(one["over eager with buckets"])[0] for one in ragged}
    assert rounded(line["cold warm-up"]) == set().union(*(rounded(one["warm-up s"]) for one in ragged))

    (source,) = (one for one in rows_of(find([RECORDS / "h200-gpt2.jsonl"])) if one.arm == "regional")
    line = row(quoted, training="GPT-2")
    assert line["over eager"] == f"{median(source.figures[RATIO]):.2f}"
    assert rounded(line["cold warm-up"]) == {f"{median(source.figures[COLD]):.0f}"}


def test_the_geometric_mean_is_that_of_the_best_repeated_rows() -> None:
    page = RESULTS / "h200-workloads.md"
    first, *_ = tables(page, "Training")
    ratios = []
    for rows in tables(page, "Every strategy, two runs"):
        for name in {one["model"] for one in rows} & {one["model"] for one in first}:
            ratios.append(max(numbers(one["over eager"])[0] for one in rows if one["model"] == name))
    ratios.append(round(numbers(row(first, model="LLaMA", strategies="regional")["over eager"])[0], 2))
    assert len(ratios) == len({one["model"] for one in first})
    mean = math.prod(ratios) ** (1 / len(ratios))
    assert f"Geometric mean of the best rows: **{mean:.3f}**" in page.read_text(encoding="utf-8")


def test_the_overview_quotes_the_pages() -> None:
    (quoted,) = tables(RESULTS / "README.md", "One H200")
    pages = {
        "h200-workloads.md": ("Training", "Every strategy, two runs", "Ragged BERT"),
        "h200-strategies.md": ("Batch 32, captions padded to 64 positions", "Batch 32, ragged captions"),
    }
    for line in quoted:
        name = line["training"].split(",")[0]
        page = "h200-strategies.md" if name == "captioning" else "h200-workloads.md"
        rows = [one for heading in pages[page] for found in tables(RESULTS / page, heading) for one in found]
        strategy = line["strategy"].split("`")[0].strip("[]").replace(",", "+")
        sources = [one for one in rows if one["strategies"].strip("*") == strategy]
        column = "over eager with buckets" if "ragged" in line["training"] else "over eager"
        sources = [one for one in sources if column in one and one.get("model", name).startswith(name)]
        assert set(numbers(line["over eager"])) <= {round(numbers(one[column])[0], 2) for one in sources}, line
