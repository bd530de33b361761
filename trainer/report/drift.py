"""Drift: has a strategy become slower? ``crucible drift RUNS --against drift.json``

Rows of a reference file against what the same arms are in newer runs: which figures moved, noise considered.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.report.reference import COUNTS, ReferenceRow, Span, load, machine_of, measured, merged, save
from trainer.report.runs import Run
from trainer.telemetry.facts import number

EITHER_WAY_WORSE = frozenset({"graphs"})
"""Counts of which fewer is not better: less may have been compiled."""
MIN_WARMUP_SECONDS = 1.0
"""Warm-ups that differ by less are taken for the same: processes start that much apart."""
NOISY = 1.2
"""Ends of a ratio's interval that are further apart, relatively, get a warning when a reference is written."""
WIDTH, NAME_WIDTH = 160, 36
"""Least characters of a line, and of the names of rows where they need them."""
ABSENT = "-"
COLUMNS = ("over eager", "warm-up s", "peak GiB", "counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A figure that is not what it was."""

    what: str
    before: str
    now: str
    worse: bool

    def __str__(self) -> str:
        return f"{self.what} {self.before} -> {self.now}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """By how much figures may differ, relatively, beyond their noise."""

    ratio: float = 0.03
    """And of peak memory."""
    warmup: float = 0.25


@dataclass(kw_only=True, slots=True)
class Drift:
    """A row of the reference and what it is now."""

    before: ReferenceRow
    now: ReferenceRow | None
    """None when it was not measured."""
    moves: list[Move] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Why a figure was not judged."""

    @property
    def worse(self) -> bool:
        """Whether anything moved for the worse, or the row has no figures any more."""
        return any(move.worse for move in self.moves)

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if self.now is None:
            return "not measured"
        if self.now.failed is not None:
            return "FAILED"
        if self.worse:
            return "WORSE"
        return "better" if self.moves else "not judged" if self.unknown else "same"


def update(runs: Sequence[Run], file: Path) -> int:
    """Write the rows of ``runs`` into the reference file, in the place of those before; returns the exit code.

    Raises ValueError for runs that make no row, or that are of several machines.
    """
    machines, machine, found = load(file), machine_of(runs), measured(runs)
    if not found:
        raise ValueError("there is nothing but eager in these runs, and so nothing to keep")
    good = []
    for row in found:
        if row.failed is None:
            good.append(row)
        else:
            print(f"error: {row.name}: {row.failed}; its row is left as it was", file=sys.stderr)
    if good:
        machines[machine] = merged(machines.get(machine, []), good)
        save(machines, file)
    _show_rows(good)
    print(f"{file}: {len(good)} row{'' if len(good) == 1 else 's'} written for {machine}")
    return int(len(good) < len(found))


def against(runs: Sequence[Run], file: Path, tolerances: Tolerances, *, strict: bool = False) -> int:
    """Print what each row of the reference file is in ``runs``; returns 1 when one got worse, else 0.

    With ``strict`` 1 also when one got better, or could not be judged. Raises ValueError without rows to compare.
    """
    machines, machine = load(file), machine_of(runs)
    rows = machines.get(machine, [])
    if not rows:
        others = f"; it has {'; '.join(machines)}" if machines else ""
        raise ValueError(
            f"{file} has no reference for the machine of these runs ({machine}){others}\n"
            f"make one: crucible drift RUNS --against {file} --update"
        )
    now = {row.key: row for row in measured(runs)}
    drifts = [drift(row, now.get(row.key), tolerances) for row in rows]
    if all(each.now is None for each in drifts):
        raise ValueError(f"none of these runs is of a row of {file}")
    _show(drifts)
    odd = any(each.verdict != "same" for each in drifts)
    return int(any(each.worse for each in drifts) or (strict and odd))


def drift(before: ReferenceRow, now: ReferenceRow | None, tolerances: Tolerances) -> Drift:
    """What moved between two rows of one key."""
    found = Drift(before=before, now=now)
    if now is None:
        return found
    if now.failed is not None:
        found.moves.append(Move(what="run", before="finished", now=now.failed, worse=True))
        return found
    if busy := now.busy or before.busy:
        found.unknown.append(f"times: {busy}")
    else:
        _compare(found, "ratio", before.ratio, now.ratio, tolerances.ratio, "{:.3f}", "x")
        warm = (before.warmup_seconds, now.warmup_seconds)
        if warm[0] is None or warm[1] is None or abs(warm[1].median - warm[0].median) >= MIN_WARMUP_SECONDS:
            _compare(found, "warm-up", *warm, tolerances.warmup, "{:.1f}", " s")
    memory = (before.peak_device_memory_gib, now.peak_device_memory_gib)
    _compare(found, "peak memory", *memory, tolerances.ratio, "{:.2f}", " GiB")
    for name, value in before.counts.items():
        _compare_counts(found, name, value, now.counts.get(name))
    return found


def _compare(
    found: Drift, what: str, before: Span | None, now: Span | None, tolerance: float, form: str, unit: str
) -> None:
    """A figure moved when it did by more than the tolerance, and the two intervals are apart."""
    if before is None:
        return
    if now is None:
        found.unknown.append(f"{what} was {form.format(before.median)}{unit}, and is not known now")
        return
    if abs(now.median - before.median) <= tolerance * before.median:
        return
    ends = (before.low, before.high, now.low, now.high)
    if what == "ratio" and None in ends:
        found.unknown.append("ratio: single runs do not show their noise; repeat with hydra.launcher.rounds=3")
        return
    low, high = (before.median if end is None else end for end in ends[:2])
    new_low, new_high = (now.median if end is None else end for end in ends[2:])
    move = Move(
        what=what,
        before=before.text(form, unit),
        now=now.text(form, unit),
        worse=(now.median < before.median) == (what == "ratio"),
    )
    if new_low > high or new_high < low:
        found.moves.append(move)
    elif what == "ratio":
        found.unknown.append(f"{move} is within the noise; more rounds or steps would show it")


def _compare_counts(found: Drift, name: str, before: int | list[int], now: int | list[int] | None) -> None:
    what = name.replace("_", " ")
    if now is None:
        found.unknown.append(f"{what}: {_count(before)} before, not known now")
        return
    (low, high), (new_low, new_high) = (value if isinstance(value, list) else [value, value] for value in (before, now))
    if new_low < low or new_high > high:
        worse = name in EITHER_WAY_WORSE or new_high > high
        found.moves.append(Move(what=what, before=_count(before), now=_count(now), worse=worse))


def _count(value: int | list[int]) -> str:
    return f"{value[0]} to {value[1]}" if isinstance(value, list) else str(value)


def _show(drifts: Sequence[Drift]) -> None:
    """Print the table and, a line each, what moved and what could not be judged."""
    columns = {"": [each.verdict for each in drifts]}
    then, now = [_figures(each.before) for each in drifts], [_figures(each.now) for each in drifts]
    for place, name in enumerate(COLUMNS):
        old, new = ([texts[place] for texts in rows] for rows in (then, now))
        if name == "counts":  # alike but for the rows that moved
            columns[name] = [a if a == b else f"{a} -> {b}" for a, b in zip(old, new, strict=True)]
        else:
            columns |= {f"{name} then": old, f"{name} now": new}
    lines = [line for each in drifts for line in _lines(each)]
    _print_table([each.before.name for each in drifts], columns, lines)
    kinds = {
        "worse": [each.worse for each in drifts],
        **{kind: [each.verdict == kind for each in drifts] for kind in ("better", "not judged", "not measured")},
    }
    counted = [f"{sum(hits)} {kind}" for kind, hits in kinds.items() if any(hits)]
    rows = f"{len(drifts)} row{'' if len(drifts) == 1 else 's'}"
    print(f"{rows}: {', '.join(counted) or 'none moved'}")


def _show_rows(rows: Sequence[ReferenceRow]) -> None:
    """Print what a reference was given."""
    for row in rows:
        if row.ratio is not None and row.ratio.low and (row.ratio.high or 0) > NOISY * row.ratio.low:
            print(f"noisy: {row.name}: smaller moves than its interval will not be seen; use more rounds or steps")
    texts = [_figures(row) for row in rows]
    columns = {name: [each[place] for each in texts] for place, name in enumerate(COLUMNS)}
    _print_table([row.name for row in rows], columns, [])


def _print_table(names: Sequence[str], columns: Mapping[str, Sequence[str]], lines: Sequence[str]) -> None:
    """A row for each name, without columns in which no row has a figure; ``lines`` below it."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("row", overflow="fold", min_width=min(NAME_WIDTH, max(map(len, names), default=0)))
    kept = {name: texts for name, texts in columns.items() if any(text != ABSENT for text in texts)}
    for name in kept:
        shown.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for name, *texts in zip(names, *kept.values(), strict=True):
        shown.add_row(*(escape(text) for text in (name, *texts)))
    # As wide as the table needs: in a narrow terminal lines break, but none is cut.
    console = Console(highlight=False, width=max(Console().width, WIDTH))
    console.print(shown)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # whole lines, for grep and mails
    console.print(f"counts are {'/'.join(COUNTS).replace('_', ' ')}", style="dim")


def _figures(row: ReferenceRow | None) -> tuple[str, str, str, str]:
    """Ratio, warm-up, peak memory and counts as text, as in ``COLUMNS``."""
    if row is None:
        return (ABSENT, ABSENT, ABSENT, ABSENT)
    counts = [str(row.counts.get(name, ABSENT)).replace(", ", ":") for name in COUNTS]
    return (
        ABSENT if row.ratio is None else row.ratio.text("{:.3f}"),
        ABSENT if row.warmup_seconds is None else row.warmup_seconds.text("{:.1f}"),
        ABSENT if row.peak_device_memory_gib is None else f"{row.peak_device_memory_gib.median:.2f}",
        "/".join(counts) if row.counts else ABSENT,
    )


def _lines(each: Drift) -> list[str]:
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
            if now.versions.get(what, old) != old
        ]
        if before.git_commit and now.git_commit and before.git_commit != now.git_commit:
            changed.append(f"commit {before.git_commit[:12]} -> {now.git_commit[:12]}")
        since = f"measured on {before.measured}" if before.measured else "the reference"
        lines.append(f"  since {since}: {', '.join(changed) or 'neither versions nor commit changed'}")
        if before.eager_step_seconds and now.eager_step_seconds:
            steps = [number(span.median * 1e3) for span in (before.eager_step_seconds, now.eager_step_seconds)]
            lines.append(f"  eager's step: {steps[0]} ms -> {steps[1]} ms")
    return lines
