"""Table of ``scripts.drift``: what each row was and is, then what moved, in lines that a mail can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.evidence.baselines import BaselineRow, Span
from trainer.evidence.drifts import COUNTS, Drift
from trainer.telemetry.facts import number

WIDTH = 160
"""Fewest characters of a line."""
NAME_WIDTH = 36
"""Characters that the names of rows get at least, where they need them."""
ABSENT = "-"
COUNTED = "graphs/breaks/recompiles/cache misses"
NOISY = 1.2
"""Ends of a ratio's interval that are further apart, relatively, are told when a baseline is made."""
FIGURES = ("over eager", "warm-up s", "peak GiB", "counts")


def show(drifts: Sequence[Drift]) -> None:
    """Print the table and, a line each, what moved and what could not be judged."""
    console = console_()
    console.print(table([each.before.name for each in drifts], columns_of(drifts)))
    for each in drifts:
        for line in said(each):
            console.print(line, markup=False, soft_wrap=True)  # whole lines, for grep and mails
    console.print(f"counts are {COUNTED}", style="dim")
    console.print(conclusion(drifts), markup=False)


def show_rows(rows: Sequence[BaselineRow]) -> None:
    """Print what a baseline was given."""
    for row in rows:
        if row.ratio is not None and row.ratio.low and (row.ratio.high or 0) > NOISY * row.ratio.low:
            print(
                f"noisy: {row.name}: smaller moves than its interval will not be seen; more --rounds or steps narrow it"
            )
    told = [figures(row) for row in rows]
    console_().print(
        table(
            [row.name for row in rows],
            {name: [texts[place] for texts in told] for place, name in enumerate(FIGURES)},
        )
    )

    console_().print(f"counts are {COUNTED}", style="dim")


def columns_of(drifts: Sequence[Drift]) -> dict[str, list[str]]:
    """Figures of the baseline beside those of now."""
    columns = {"": [each.verdict for each in drifts]}
    for place, name in enumerate(FIGURES):
        then, now = ([figures(row)[place] for row in rows] for rows in both(drifts))
        if name == "counts":  # alike but for the rows that moved
            columns[name] = [old if old == new else f"{old} -> {new}" for old, new in zip(then, now, strict=True)]
        else:
            columns |= {f"{name} then": then, f"{name} now": now}
    return columns


def both(drifts: Sequence[Drift]) -> tuple[list[BaselineRow | None], list[BaselineRow | None]]:
    """Rows of the baseline, and those of now."""
    return [each.before for each in drifts], [each.now for each in drifts]


def table(names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Table:
    """A row for each name, without columns in which no row has a figure."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("row", overflow="fold", min_width=min(NAME_WIDTH, max(map(len, names), default=0)))
    kept = {name: texts for name, texts in columns.items() if any(text != ABSENT for text in texts)}
    for name in kept:
        shown.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for name, *texts in zip(names, *kept.values(), strict=True):
        shown.add_row(*(escape(text) for text in (name, *texts)))
    return shown


def figures(row: BaselineRow | None) -> tuple[str, str, str, str]:
    """Ratio, warm-up, peak memory and counts as text."""
    if row is None:
        return (ABSENT, ABSENT, ABSENT, ABSENT)
    counts = [row.counts.get(name) for name in COUNTS]
    told = "/".join(ABSENT if count is None else str(count).replace(", ", ":") for count in counts)
    return (
        spread(row.ratio, "{:.3f}"),
        spread(row.warmup_seconds, "{:.1f}"),
        spread(row.peak_device_memory_gib, "{:.2f}", ends=False),
        told if any(count is not None for count in counts) else ABSENT,
    )


def spread(span: Span | None, form: str, *, ends: bool = True) -> str:
    """``1.550 (1.530 to 1.570)``."""
    if span is None:
        return ABSENT
    if span.low is None or span.high is None or not ends:
        return form.format(span.median)
    return f"{form.format(span.median)} ({form.format(span.low)} to {form.format(span.high)})"


def said(each: Drift) -> list[str]:
    """What moved in a row, for better or worse, and since which versions."""
    name, before, now = each.before.name, each.before, each.now
    if now is None:
        return [f"not measured: {name}"]
    lines = [f"{'WORSE' if move.worse else 'better'}: {name}: {move}" for move in each.moves]
    lines += [f"not judged: {name}: {reason}" for reason in each.unknown]
    if each.moves:
        changed = [
            f"{what} {old} -> {now.versions[what]}"
            for what, old in before.versions.items()
            if what in now.versions and now.versions[what] != old
        ]
        if before.git_commit and now.git_commit and before.git_commit != now.git_commit:
            changed.append(f"commit {before.git_commit[:12]} -> {now.git_commit[:12]}")
        since = f"measured on {before.measured}" if before.measured else "the baseline"
        lines.append(f"  since {since}: {', '.join(changed) or 'neither versions nor commit changed'}")
        if before.eager_step_seconds and now.eager_step_seconds:
            steps = [each_step.median * 1e3 for each_step in (before.eager_step_seconds, now.eager_step_seconds)]
            lines.append(f"  eager's step: {number(steps[0])} ms -> {number(steps[1])} ms")
    return lines


def conclusion(drifts: Sequence[Drift]) -> str:
    """The last line: how many rows are what."""
    counts = {
        "worse": sum(each.worse for each in drifts),
        "better": sum(each.verdict == "better" for each in drifts),
        "not judged": sum(each.verdict == "not judged" for each in drifts),
        "not measured": sum(each.now is None for each in drifts),
    }
    told = [f"{count} {what}" for what, count in counts.items() if count]
    rows = f"{len(drifts)} row{'' if len(drifts) == 1 else 's'}"
    return f"{rows}: {', '.join(told)}" if told else f"{rows}: none moved"


def console_() -> Console:
    """The terminal, taken to be as wide as the table needs."""
    console = Console(highlight=False)
    return Console(highlight=False, width=max(console.width, WIDTH))  # in a narrow one lines break, but none is cut
