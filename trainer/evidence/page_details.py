"""Parts of the report that are read, not looked at: warnings, figures, compiler's events, failures, conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from trainer.evidence import pictures_style as style
from trainer.evidence.columns import compile_columns, decision_columns, footnotes, speed_columns, warm_columns
from trainer.evidence.comparison import WorkloadComparison
from trainer.evidence.tables import TEXT_COLUMNS
from trainer.telemetry.record import Event, RunRecord

MOST_EVENTS = 40
"""Different events of a workload that are listed."""
KINDS = {
    "graph_break": "graph break",
    "recompile": "recompile",
    "fallback": "fallback",
    "cudagraph_skip": "CUDA graph skipped",
}


def counted(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def breakable(name: str) -> str:
    """Escaped; a line may end after each of the strategies that a name is made of."""
    return escape(name).replace("+", "+<wbr>")


def where(comparison: WorkloadComparison) -> str:
    """One line on what the runs of a workload ran on."""
    records = _records(comparison)
    versions = [f"{name} {version}" for name, version in comparison.versions.items()]
    precisions = sorted({record.precision for record in records if record.precision})
    kind = "inference" if comparison.run == "inference" else "training"
    return " · ".join([kind, comparison.device, *precisions, *versions, counted(len(records), "run")])


def warnings(comparison: WorkloadComparison) -> str:
    """What makes the comparison doubtful as a whole; nothing where nothing does."""
    if not comparison.unlike:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in comparison.unlike)
    return f'<div class="warning"><strong>These runs are unlike: compare with care.</strong><ul>{lines}</ul></div>\n'


def not_measured(comparison: WorkloadComparison) -> list[str]:
    """Figures that no run has and that share a picture with others."""
    rows = [row for row in comparison.rows if row.cell.finished]
    absent = []
    memory = any(row.peak_device_memory_gib or row.peak_process_memory_gib for row in rows)
    if memory and all(row.joules_per_sample is None for row in rows):
        absent.append("energy: not measured")
    if not any(row.cell.warm for row in rows) and any(row.cell.compiles for row in rows):
        absent.append("warm starts: none among the runs")
    return absent


def figures(comparison: WorkloadComparison, palette: Mapping[str, str]) -> str:
    """All figures, in the tables that the terminal shows."""
    tables = ""
    for columns in (
        decision_columns(comparison),
        warm_columns(comparison),
        speed_columns(comparison),
        compile_columns(comparison),
    ):
        if len(columns) < 2:
            continue
        kinds = ["short" if name in TEXT_COLUMNS else "number" for name in columns]
        head = "".join(
            f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
        )
        body = ""
        for arm, *texts in zip(*columns.values(), strict=True):
            swatch = f'<span class="swatch" style="background:{style.variable(palette[arm])}"></span>'
            cells = zip(texts, kinds[1:], strict=True)
            body += f'<tr><th scope="row">{swatch}{breakable(arm)}</th>'
            body += "".join(f'<td class="{kind}">{escape(text)}</td>' for text, kind in cells) + "</tr>\n"
        tables += _table(head, body)
    notes = "".join(f'<p class="quiet">{escape(line)}</p>' for line in footnotes([comparison]))
    return f"<h3>All figures</h3>\n{tables}{notes}"


def compiler(comparison: WorkloadComparison) -> str:
    """Breaks, recompiles, fallbacks and skips with reason and source line, alike ones in one row."""
    seen: dict[tuple[str, str, str, str], list[Event]] = {}
    for row in comparison.rows:
        for run in row.cell.runs:
            for event in run.record.events:
                key = (row.cell.arm, event.kind, event.reason, event.location or "")
                seen.setdefault(key, []).append(event)
    compiled = [record for record in _records(comparison) if record.graphs is not None]
    if not seen:
        said = "none in any of the runs that compiled" if compiled else "nothing was compiled"
        return f'<h3>Graph breaks and recompiles</h3>\n<p class="quiet">{said.capitalize()}.</p>'
    body = ""
    for (arm, kind, reason, location), events in list(seen.items())[:MOST_EVENTS]:
        steps = sorted({event.step for event in events if event.step is not None})
        when = " to ".join(dict.fromkeys(f"{step:,}" for step in (steps[0], steps[-1]))) if steps else ""
        phases = sorted({event.phase for event in events} - {"training"})
        when = " ".join([when, *phases]).strip() or "-"
        body += (
            f'<tr><th scope="row">{breakable(arm)}</th><td>{escape(KINDS.get(kind, kind))}</td>'
            f'<td class="words">{escape(reason)}</td><td class="words"><code>{escape(location or "-")}</code></td>'
            f'<td class="number">{escape(when)}</td><td class="number">{len(events):,}</td></tr>\n'
        )
    names = [("arm", ""), ("what", ""), ("reason", ""), ("source line", ""), ("step", "number"), ("times", "number")]
    head = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in names)
    more = len(seen) - MOST_EVENTS
    rest = f'<p class="quiet">{more:,} more are in the records.</p>' if more > 0 else ""
    return f"<h3>Graph breaks and recompiles</h3>\n{_table(head, body)}{rest}"


def failed(comparison: WorkloadComparison) -> str:
    """Runs that did not finish, with their reasons; nothing where all did."""
    body = ""
    for row in comparison.rows:
        for run in row.cell.failed:
            record = run.record
            status = "running, or killed" if record.status == "running" else record.status
            body += (
                f'<tr><th scope="row">{breakable(row.cell.arm)}</th><td>{escape(status)}</td>'
                f'<td class="words">{escape(record.reason or "no reason in its record")}</td>'
                f'<td class="words"><code>{escape(str(run.directory))}</code></td></tr>\n'
            )
    if not body:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("arm", "status", "reason", "folder"))
    return f"<h3>Runs that did not finish</h3>\n{_table(head, body)}"


def remarks(comparison: WorkloadComparison) -> str:
    """What a reader must know of single rows, and differences between the runs that need not matter."""
    flags: dict[str, list[str]] = {}
    for row in comparison.rows:
        for flag in row.flags if row.cell.finished else []:
            flags.setdefault(flag, []).append(row.cell.arm)
    items = "".join(f"<li><b>{breakable(', '.join(arms))}</b>: {escape(flag)}</li>" for flag, arms in flags.items())
    items += "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    return f'<h3>Remarks</h3>\n<ul class="quiet">{items}</ul>' if items else ""


def conditions(comparison: WorkloadComparison) -> str:
    """Device, versions, precision and commit of the runs, and a command for each arm."""
    records = _records(comparison)
    facts = [
        ("device", _all(record.device for record in records)),
        ("processes", _all(str(record.world_size) for record in records)),
        ("precision", _all(record.precision for record in records)),
        ("matrix products in", _all(record.matrix_precision for record in records)),
        ("commit", _all(record.git_commit for record in records)),
        ("seeds", _all(str(record.seed) for record in records)),
        ("started", _all((record.started or "")[:10] or None for record in records)),
    ]
    names = dict.fromkeys(name for record in records for name in record.versions)
    versions = {name: _all(record.versions.get(name) for record in records) for name in names}
    facts.append(("versions", " · ".join(f"{name} {version}" for name, version in versions.items()) or "n/a"))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="words">{escape(value)}</td></tr>\n' for name, value in facts
    )
    commands = "".join(
        f"<p>{breakable(row.cell.arm)}</p>\n<pre><code>{escape(row.cell.command)}</code></pre>\n"
        for row in comparison.rows
    )
    return (
        f'<h3>Conditions</h3>\n<div class="scroll"><table><tbody>{body}</tbody></table></div>\n'
        f"<h3>Commands</h3>\n<details><summary>One for each arm</summary>\n{commands}</details>"
    )


def _records(comparison: WorkloadComparison) -> list[RunRecord]:
    return [run.record for row in comparison.rows for run in row.cell.runs]


def _all(values: Iterable[str | None]) -> str:
    found: Sequence[str] = list(dict.fromkeys(value for value in values if value is not None))
    return ", ".join(found) if found else "n/a"


def _table(head: str, body: str) -> str:
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )
