"""Comment: what a check says, in the terminal and as Markdown for a pull request: verdict, table, reasons."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from scripts.check.judge import Judgement
from scripts.check.measurement import Measured, Place
from trainer.advice import program
from trainer.report.runs import DECISIVE_VERSIONS
from trainer.report.tables import ABSENT, Columns, kept, piped, plain_lines
from trainer.wording import counted, first_few

KINDS = {"graph_break": "graph break", "recompile": "recompile"}
FAILED, PASSED = "❌", "✅"
MARK = "<!-- crucible check -->"
"""First line of the comment, by which a workflow may find it."""


def verdict(judgements: Sequence[Judgement], base: str | None) -> str:
    """One line: what is worse, or that nothing is."""
    several = len(judgements) > 1
    worse = [
        f"{each.this.name}: {', '.join(each.worse)}" if several else ", ".join(each.worse)
        for each in judgements
        if each.worse
    ]
    if worse:
        return f"failed: {'; '.join(worse)}"
    if base is None:
        return "passed: checks are clean; nothing was compared"
    without = [each.this.name for each in judgements if each.base is None or not each.base.rounds]
    if without:
        return f"passed: checks are clean, and {base} has nothing to compare with of {', '.join(without)}"
    return f"passed: nothing is worse than {base}"


def terminal(judgements: Sequence[Judgement], base: str | None, width: int) -> Iterator[str]:
    """Lines of plain text."""
    yield verdict(judgements, base)
    for each in judgements:
        yield ""
        yield each.this.name
        yield from (f"  {line}" for line in plain_lines(columns(each, "! "), width - 2) if line)
        for place in each.new_places:
            yield ""
            yield f"  new {KINDS[place.kind]}: {_where(place)}{_times(place)}"
            if place.code:
                yield f"    {place.code}"
            yield f"    {place.reason}"
        for names, reason in _by_reason(each.new_not_clean):
            yield f"  not clean: {names}: {reason}"
        yield from (f"  did not finish: {reason}" for reason in each.this.failed)
        if each.new_places:
            yield f"  {shlex.join(program('scripts.explain'))} has the compiler's hints"
            yield ""
        yield from (f"  note: {note}" for note in each.notes)
        yield from (f"  {line}" for line in _origins(each))


def markdown(judgements: Sequence[Judgement], base: str | None, command: str) -> str:
    """The comment: ten seconds are enough for its first line and the table."""
    failed = any(each.worse for each in judgements)
    said = verdict(judgements, base).partition(": ")[2]
    lines = [
        MARK,
        f"### {FAILED if failed else PASSED} crucible check {'failed' if failed else 'passed'}",
        "",
        f"**{_plain(said)}.**",
    ]
    for each in judgements:
        lines += ["", f"#### {_plain(each.this.name)}", "", *piped(columns(each, f"{FAILED} "))]
        for place in each.new_places:
            lines += ["", f"**New {KINDS[place.kind]}** at `{_where(place)}`{_times(place)}", ""]
            lines += ["```python", place.code, "```"] if place.code else []
            lines.append(_quoted(place.reason))
        for names, reason in _by_reason(each.new_not_clean):
            lines += ["", f"**Not clean**: {_plain(names)}", "", _quoted(reason)]
        for reason in each.this.failed:
            lines += ["", "**Did not finish**", "", _quoted(reason)]
        lines += ["", *(f"- {_plain(note)}" for note in [*each.notes, *_origins(each)])]
    lines += ["", f"`{command}`"]
    return "\n".join(lines) + "\n"


def columns(judgement: Judgement, mark: str) -> Columns:
    """The table, without a row that neither side has; ``mark`` stands before what is worse."""
    rows = [row for row in judgement.rows if (row.base, row.this) != (ABSENT, ABSENT)]
    changes = [f"{mark}{row.change}" if row.worse else row.change for row in rows]
    made = {
        "what": [row.what for row in rows],
        "base": [row.base for row in rows],
        "this": [row.this for row in rows],
        **({"change": changes} if any(changes) else {}),
    }
    return kept(made)


def _by_reason(found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names of what is not clean for one reason, which is often that of each copy of a block."""
    for reason in dict.fromkeys(found.values()):
        names = [name for name, why in found.items() if why == reason]
        yield first_few(names), reason


def _where(place: Place) -> str:
    line = f"{place.file}:{place.line}" if place.line is not None else place.file or "no line given"
    return f"{line} in {place.function}" if place.function else line


def _times(place: Place) -> str:
    return "" if place.count == 1 else f", {place.count} times"


def _origins(judgement: Judgement) -> Iterator[str]:
    for name, each in (("base", judgement.base), ("this", judgement.this)):
        if each is not None and (each.rounds or each.conditions):
            yield f"{name}: {_origin(each)}"


def _origin(measured: Measured) -> str:
    commit, versions = measured.commit or "", measured.conditions
    parts = [
        versions.get("device", ""),
        *(f"{name} {versions[name]}" for name in DECISIVE_VERSIONS if name in versions),
        f"commit {commit[:10]}{commit[40:]}" if commit else "",  # or "+dirty"
        (measured.started or "")[:10],
        counted(len(measured.rounds), "round"),
    ]
    return " · ".join(filter(None, parts))


def _quoted(text: str) -> str:
    return f"> {_plain(text)}"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{sign}" if sign in "\\`*_<>[]#|" else sign for sign in text)
