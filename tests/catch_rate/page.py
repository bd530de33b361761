"""The page that is made of the lines: docs/results/catch_rate.md of docs/results/catch_rate.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.catch_rate.case import CHANGES, COUNTED
from tests.catch_rate.run import (
    ALARM,
    AUDIT,
    AVOIDED,
    CAUGHT,
    FAILED,
    FIRST,
    HEALED,
    MISSED,
    REFUSED,
)

Row = dict[str, Any]
LINES, PAGE = Path("docs/results/catch_rate.jsonl"), Path("docs/results/catch_rate.md")

WHY = {
    "the sum of a softmax, rounded down": "Inductor takes the sum for 1, eager's is a rounding more or less, and is "
    "then rounded down: a rounding off, eager itself gives the other number, so that the check allows both",
    "masks of dropout alike in fours": "each place is dropped as often as in eager; where masks are not eager's, means "
    "are compared, and not how places go together",
    "results that the next call overwrites": "a check looks at one call at a time, and results are right until the "
    "next call; captured steps are compared with steps without a graph",
}
"""Of what was not caught, by the name of its case."""
ALARMS = {
    "adaptive pooling, flattened and summed": "Inductor's sum of 3,465 numbers was 5.0e-6 away from the exact one, "
    "eager's 1.0e-7: rounding, but fifty times eager's, and four times the tolerance",
}
"""What a false alarm was about."""


def read(path: Path) -> list[Row]:
    return [json.loads(one) for one in path.read_text().splitlines()]


def versions(rows: Iterable[Row]) -> list[str]:
    return sorted({one["torch"] for one in rows}, key=lambda one: tuple(map(int, one.split(".")[:2])))


def there(rows: Iterable[Row], *, planted: bool, changes: Sequence[str] = CHANGES) -> list[Row]:
    """Lines whose fault is there."""
    return [one for one in rows if one["there"] and one["planted"] is planted and one["changes"] in changes]


def caught(rows: Iterable[Row]) -> list[Row]:
    return [one for one in rows if one["result"] in CAUGHT]


def kinds(rows: Sequence[Row], *, planted: bool, changes: Sequence[str] = CHANGES) -> tuple[int, int]:
    """Of cases: how many are caught in every version that has them, of how many that some version has."""
    found = there(rows, planted=planted, changes=changes)
    names = {one["case"] for one in found}
    return len(names - {one["case"] for one in found if one["result"] not in CAUGHT}), len(names)


def rate(rows: Sequence[Row]) -> str:
    """The last line of the command."""
    parts = []
    for planted in (False, True):
        one, of = kinds(rows, planted=planted, changes=COUNTED)
        every, of_every = kinds(rows, planted=planted)
        share = f" ({one / of:.2f})" if of else ""
        parts.append(
            f"{'planted' if planted else 'real'}: {one} of {of}{share} that change a {', '.join(COUNTED[:-1])} or "
            f"{COUNTED[-1]}, {every} of {of_every} in all"
        )
    healthy = [one for one in rows if not one["there"] and one["result"] != FAILED]
    alarms = [one for one in healthy if one["result"] == ALARM]
    return f"caught: {'; '.join(parts)}; false alarms: {len(alarms)} in {len(healthy)} trainings without a fault"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: bool = False) -> list[str]:
    """A table, its columns from the second on to the right where they hold numbers."""
    line = ["---", *(["---:" if numbers else "---"] * (len(head) - 1))]
    return [f"| {' | '.join(map(str, one))} |" for one in (head, line, *rows)] + [""]


def issues(row: Row) -> str:
    return ", ".join(f"[{one}](https://github.com/pytorch/pytorch/issues/{one})" for one in row["issues"])


def summary(rows: Sequence[Row]) -> list[str]:
    """What became of the faults that are there, a line for the real and one for the planted ones of each version."""
    head = ["faults", "torch", "there", *(FIRST, AUDIT, HEALED, REFUSED, AVOIDED, MISSED), "caught"]
    body = []
    for planted in (False, True):
        for version in versions(rows):
            if found := there([one for one in rows if one["torch"] == version], planted=planted):
                counted = Counter(one["result"] for one in found)
                each = [counted[one] or "" for one in (FIRST, AUDIT, HEALED, REFUSED, AVOIDED, MISSED)]
                kind = "planted" if planted else "real"
                body.append([kind, version, len(found), *each, f"{len(caught(found))} of {len(found)}"])
    return table(head, body, numbers=True)


def explained(rows: Sequence[Row]) -> list[list[str]]:
    """A line a case, with its versions and the reason."""
    body = []
    for name in sorted({one["case"] for one in rows}, key=lambda name: (name not in real_names(rows), name)):
        found = [one for one in rows if one["case"] == name]
        words = name + ", planted" * found[0]["planted"]
        body.append([words, issues(found[0]), ", ".join(versions(found)), WHY[name]])
    return body


def real_names(rows: Iterable[Row]) -> set[str]:
    return {one["case"] for one in rows if not one["planted"]}


def shows(row: Row) -> bool:
    """Whether there is something to read about it: a fault, or an alarm without one."""
    return row["there"] or row["result"] in (ALARM, FAILED)


def page(rows: Sequence[Row]) -> str:
    """All of it."""
    real, of_real = kinds(rows, planted=False, changes=COUNTED)
    all_real, of_all_real = kinds(rows, planted=False)
    twins, of_twins = kinds(rows, planted=True, changes=COUNTED)
    names = {one["case"] for one in rows}
    shown = {one["case"] for one in rows if shows(one)}
    healthy = [one for one in rows if not one["there"] and one["result"] != FAILED]
    alarms = [one for one in healthy if one["result"] == ALARM]
    missed = [one for one in rows if one["there"] and one["result"] not in CAUGHT]
    lines = [
        "# A catch rate: real silent faults of `torch.compile`",
        "",
        "How many wrong results of `torch.compile`, as issues of PyTorch report them, do our checks find? "
        f"{len(names)} small trainings follow such issues. Each is trained in eager, by `torch.compile` alone, and "
        "under our checks with their defaults, on a processor.",
        "",
        f"- **Of {of_real} real faults that change a loss, a gradient or a buffer, {real} are caught "
        f"({real / max(of_real, 1):.2f}).** The aim was 0.9. Of all {of_all_real}, {all_real} are.",
        f"- Of {of_twins} planted faults, {twins} are caught ({twins / max(of_twins, 1):.2f}). They compute the same "
        "kind of wrong result as faults on GPUs, of versions before 2.11, or without a small reproduction.",
        f"- {len(alarms)} false alarm{'s' * (len(alarms) != 1)} in {len(healthy)} trainings with a version that does "
        "not have their fault" + "".join(f": {issues(one)}, {ALARMS[one['case']]}" for one in alarms) + ".",
        "",
        "A fault counts as caught where every version below that has it catches it: before anything is trained with it "
        "(`first check`), or after up to five steps (`audit`). Cases that we missed at first led to better checks "
        "([log](../log.md#checks-faults-and-false-alarms)), so the rate is no estimate for faults that nobody has "
        f"reported. [The lines]({LINES.name}) hold all cases; {len(names - shown)} show no fault under these versions.",
        "",
        "```bash",
        f"python -m tests.catch_rate --out {LINES} --page {PAGE}  # with each torch; here 4 and 12 minutes on one core",
        "```",
        "",
        "## What became of them",
        "",
        "`healed`: found, and what helps was used. `does not show`: settings of ours keep it away.",
        "",
        *summary(rows),
        "## Not caught, and why",
        "",
    ]
    if missed:
        lines += table(["fault", "issues", "torch", "why"], explained(missed))
    else:
        lines += ["Nothing.", ""]
    return "\n".join(lines).rstrip() + "\n"


def write_page(lines: Path, to: Path) -> None:
    to.write_text(page(read(lines)))
