"""Tables: comparisons for the terminal (rich), as Markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from trainer.evidence.columns import (
    compile_columns,
    decision_columns,
    footnotes,
    kept,
    plain,
    speed_columns,
    warm_columns,
)
from trainer.evidence.comparison import WorkloadComparison
from trainer.evidence.crossings import step_seconds
from trainer.evidence.runs import Run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

GAP = 2
"""Blanks between columns."""
LEAST_NAME = 8
"""Characters of the first column at least."""
TEXT_COLUMNS = ("arm", "runs", "cell", "status", "start")
"""Columns that are read from the left; all others hold figures."""


def show(comparisons: Sequence[WorkloadComparison], console: Console) -> None:
    """Print what ``renderables`` gives, and what the marks mean."""
    for found in comparisons:
        for renderable in renderables(found, width=console.width):
            console.print(renderable)
        console.print()
    for line in footnotes(comparisons):
        console.print(line, markup=False, highlight=False)


def renderables(found: WorkloadComparison, *, width: int) -> Iterator[RenderableType]:
    """For rich: heading, tables no wider than ``width``, verdict, and what to know of the arms."""
    from rich.padding import Padding
    from rich.text import Text

    yield Text(found.workload, style="bold")
    yield Padding(Text(_conditions(found), style="dim"), (0, 0, 0, 2), expand=False)
    for columns in _tables(found):
        for part in _parts(columns, width - 2):
            yield Padding(_table(part, width - 2), (1, 0, 0, 2), expand=False)
    yield Padding(Text(f"verdict: {found.verdict}", style="bold"), (1, 0, 0, 2), expand=False)
    for line in _remarks(found):
        yield Padding(Text(line), (0, 0, 0, 2), expand=False)


def markdown(comparisons: Sequence[WorkloadComparison]) -> str:
    """Pipe tables, a heading for each workload."""
    lines: list[str] = []
    for found in comparisons:
        lines += [f"## {_escaped(found.workload)}", "", _conditions(found), ""]
        for columns in _tables(found):
            lines.append("| " + " | ".join(columns) + " |")
            lines.append("|" + "|".join(" --- " if name in TEXT_COLUMNS else " ---: " for name in columns) + "|")
            lines += ["| " + " | ".join(map(_escaped, row)) + " |" for row in zip(*columns.values(), strict=True)]
            lines.append("")
        lines += [f"**Verdict:** {_escaped(found.verdict)}.", ""]
        if remarks := [_escaped(line) for line in _remarks(found)]:
            lines += [*(f"- {line}" for line in remarks), ""]
        lines += ["Commands:", "", "```bash", *(row.cell.command for row in found.rows), "```", ""]
    lines += [line.replace("*", r"\*", 1) for line in footnotes(comparisons)]
    return "\n".join(lines).rstrip() + "\n"


def as_csv(comparisons: Sequence[WorkloadComparison]) -> str:
    """A line for each cell, a column for each figure; empty where there is none."""
    rows = [plain(row, found) | {"flags": "; ".join(row.flags)} for found in comparisons for row in found.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_json(comparisons: Sequence[WorkloadComparison]) -> str:
    """A list of workloads with their rows, the folders of their runs, crossings and verdict."""
    told: list[dict[str, Any]] = []
    for found in comparisons:
        rows = [
            {
                name: value
                for name, value in plain(row, found).items()
                if name not in ("workload", "task", "run", "device")
            }
            | {"runs": [_run(run) for run in row.cell.runs]}
            for row in found.rows
        ]
        told.append(
            {
                "workload": found.workload,
                "task": found.task,
                "run": found.run,
                "device": found.device,
                "versions": found.versions,
                "baseline": found.baseline,
                "verdict": found.verdict,
                "crossings": [asdict(crossing) for crossing in found.crossings],
                "unlike": found.unlike,
                "notes": found.notes,
                "rows": rows,
            }
        )
    return json.dumps(told, indent=1, allow_nan=False)


def _run(run: Run) -> dict[str, Any]:
    record = run.record
    told = {name: getattr(record, name) for name in ("status", "seed", "round", "start", "warmup_seconds")}
    return {"directory": str(run.directory), **told, "step_seconds": step_seconds(record)}


def _tables(found: WorkloadComparison) -> list[dict[str, list[str]]]:
    tables = [columns(found) for columns in (decision_columns, warm_columns, speed_columns, compile_columns)]
    return [columns for columns in tables if len(columns) > 1]


def _conditions(found: WorkloadComparison) -> str:
    return " · ".join([found.device, *(f"{name} {version}" for name, version in found.versions.items())])


def _remarks(found: WorkloadComparison) -> list[str]:
    """What to know of all and of each; what is to be said of several arms is said once."""
    arms: dict[str, list[str]] = {}
    for row in found.rows:
        for flag in row.flags:
            arms.setdefault(flag, []).append(row.cell.arm)
    return [
        *(f"unlike: {line}" for line in found.unlike),
        *(f"differs: {line}" for line in found.notes),
        *(f"{_listed(names)}: {flag}" for flag, names in arms.items()),
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _parts(columns: dict[str, list[str]], width: int) -> Iterator[dict[str, list[str]]]:
    """The columns in as few tables as it takes for each to fit, each with the arm first and the arm's name broken if
    need be."""
    if "runs" in columns and sum(GAP + _width(name, texts) for name, texts in columns.items()) > width:
        columns = columns | {"runs": [text.replace(", ", ",\n") for text in columns["runs"]]}
    (first, arm), *others = columns.items()
    room = width - min(_width(first, arm), max(LEAST_NAME, *(len(word) for name in arm for word in _words(name))))
    part, left = {first: arm}, room
    for name, texts in others:
        needed = GAP + _width(name, texts)
        if needed > left and len(part) > 1:
            yield part
            part, left = {first: arm}, room
        part[name] = texts
        left -= needed
    yield part


def _width(name: str, texts: Sequence[str]) -> int:
    """Characters that a column takes; headings break between words."""
    return max(len(line) for line in (*name.split(), *(line for text in texts for line in text.split("\n"))))


def plain_lines(columns: dict[str, list[str]], width: int) -> Iterator[str]:
    """The columns as lines of text no longer than ``width``."""
    from rich.console import Console

    for part in _parts(kept(columns), width):
        out = io.StringIO()
        Console(file=out, width=width, highlight=False, color_system=None).print(_table(part, width))
        yield from ("", *(line.rstrip() for line in out.getvalue().splitlines()))


def _table(columns: dict[str, list[str]], width: int) -> RenderableType:
    """For rich: the columns side by side; the first one gets what the others leave of ``width``."""
    from rich.markup import escape
    from rich.table import Table

    # Widths are given because rich shrinks the widest column first, whatever the others could spare.
    widths = {name: _width(name, texts) for name, texts in columns.items()}
    first = next(iter(columns))
    left = width - sum(GAP + widths[name] for name in columns if name != first)
    widths[first] = max(LEAST_NAME, min(widths[first], left))
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name in columns:
        side: Literal["left", "right"] = "left" if name in TEXT_COLUMNS else "right"
        made.add_column(name, justify=side, overflow="fold", width=widths[name])
    for name, *figures in zip(*columns.values(), strict=True):
        made.add_row(escape(_broken(name, widths[first])), *map(escape, figures))
    return made


def _words(name: str) -> list[str]:
    """Where a name may be broken: after a blank, a plus, an equals sign or a dash."""
    return re.findall(r"[^ +=-]*[ +=-]*", name)


def _broken(name: str, width: int) -> str:
    """A long name in lines; rich would break it anywhere."""
    lines = [""]
    for word in _words(name):
        if len(lines[-1] + word.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")
