"""Figures that the README quotes agree with the tables and records that they come from."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from tests.conftest import ROOT
from trainer.report.published import COLD, RATIO, RECORDS, TOKENS, PublishedRow, range_text, rows_of
from trainer.report.runs import find

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


def published(name: str) -> dict[str, PublishedRow]:
    return {one.arm: one for one in rows_of(find([RECORDS / f"{name}.jsonl"]))}


def test_the_readme_quotes_the_tables() -> None:
    (quoted,) = tables(ROOT / "README.md", "crucible-train")
    h100, h200 = "over eager, H100", "H200"
    for training, arm, name, other in (
        ("GPT-2", "regional", "h100-gpt2", "h200-gpt2"),
        ("captioning, batch 32", "regional+cuda_graph", "h100-captioning", "h200-captioning-rounds"),
        ("ResNet-50", "regional+cuda_graph", "h100-resnet50", None),
    ):
        line, figures = row(quoted, training=training), published(name)[arm].figures
        assert line[h100] == range_text(RATIO, figures[RATIO])
        assert len(figures[RATIO]) == 5
        assert line["cold warm-up"] == f"{median(figures[COLD]):.0f} s"
        assert other is None or numbers(line[h200]) == [round(median(published(other)[arm].figures[RATIO]), 2)]

    line = row(quoted, training="the same in the device's own time")
    for column, name in ((h100, "h100-captioning"), (h200, "h200-captioning-rounds")):
        rows = published(name)
        eager, captured = (rows[arm].figures["device ms a step"] for arm in ("eager", "regional+cuda_graph"))
        assert numbers(line[column]) == [round(median(eager) / median(captured), 2)]

    alone, full = rows_of(find([RECORDS / "h200-captioning-ragged.jsonl"]))
    pairs = zip(full.figures[TOKENS], alone.figures[TOKENS], strict=True)
    line = row(quoted, training="ragged captions")
    assert numbers(line[h200]) == [round(median(mine / theirs for mine, theirs in pairs), 2)]
    assert line["cold warm-up"] == f"{median(full.figures[COLD]):.0f} s"
