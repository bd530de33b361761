"""Figures that the README quotes agree with the tables and records that they come from."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from tests.conftest import ROOT
from trainer.report.published import COLD, RATIO, RECORDS, TOKENS, rows_of
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


def test_the_readme_quotes_the_tables() -> None:
    (quoted,) = tables(ROOT / "README.md", "crucible-train")
    page = RESULTS / "without_records.md"
    (hosts,) = tables(page, "Other hosts")
    measured = {one.arm: one.figures for one in rows_of(find([RECORDS / "h200-captioning-rounds.jsonl"]))}
    captured, line = measured["regional+cuda_graph"], row(quoted, training="captioning, batch 32")
    device = median(measured["eager"]["device ms a step"]) / median(captured["device ms a step"])
    others = [numbers(one["[regional,cuda_graph]` over eager"])[0] for one in hosts]
    wanted = [round(median(captured[RATIO]), 2), round(device, 2), round(min(others), 1), round(max(others), 1)]
    assert numbers(line["over eager"]) == wanted
    assert line["cold warm-up"] == f"{median(captured[COLD]):.0f} s"

    alone, full = rows_of(find([RECORDS / "h200-captioning-ragged.jsonl"]))
    pairs = zip(full.figures[TOKENS], alone.figures[TOKENS], strict=True)
    (ragged,) = tables(page, "Ragged batches")
    others = [
        number
        for name in ("regional+buckets+cuda_graph", "full_stack")
        for number in numbers(row(ragged, strategies=name)["captions, batch 32"].partition(";")[0])
    ]
    line = row(quoted, training="ragged captions")
    wanted = [round(median(mine / theirs for mine, theirs in pairs), 2), round(min(others), 1), round(max(others), 1)]
    assert numbers(line["over eager"]) == wanted
    assert line["cold warm-up"] == f"{median(full.figures[COLD]):.0f} s"

    (regional,) = (one for one in rows_of(find([RECORDS / "h200-gpt2.jsonl"])) if one.arm == "regional")
    line = row(quoted, training="GPT-2")
    assert line["over eager"] == f"{median(regional.figures[RATIO]):.2f}"
    assert line["cold warm-up"] == f"{median(regional.figures[COLD]):.0f} s"
