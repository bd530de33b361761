"""Drift: has a strategy become slower? ``crucible compare RUNS --against FILE``

The file is what ``--json FILE`` wrote of earlier runs. Each of its arms is compared with the same arm now: which
figures moved, noise considered.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.report import tables
from trainer.report.comparison import WorkloadComparison
from trainer.report.flags import BUSY
from trainer.report.runs import LOOSE, SILENT
from trainer.telemetry.files import printable

TOLERANCE, WARMUP_TOLERANCE = 0.03, 0.25
"""By how much a ratio or memory, and a warm-up, may differ, relatively, beyond their noise."""
MIN_WARMUP_SECONDS = 1.0
"""Warm-ups that differ by less are taken for the same: processes start that much apart."""
COUNTS = ("graphs", "graph_breaks", "recompiles")
"""Figures that are the same in every run of the same code."""
EITHER_WAY_WORSE = frozenset({"graphs"})
"""Counts of which fewer is not better: less may have been compiled."""
NO_WORKLOAD = frozenset({"task", "compile", "repeat", "resume", "peer"}) | LOOSE | SILENT
"""Overrides that do not tell one workload from another; the task is named by itself."""


@dataclass(kw_only=True, slots=True)
class Drift:
    """An arm of the file, and what it is now."""

    name: str
    measured: bool = True
    """Whether it is among the runs of today."""
    worse: list[str] = field(default_factory=list)
    """What moved for the worse: ``ratio 1.500x (1.480 to 1.520) -> 1.400x (1.390 to 1.410)``."""
    better: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Why a figure was not judged."""
    since: str = ""
    """Versions and commit that changed."""

    @property
    def verdict(self) -> str:
        kinds = {"worse": self.worse, "better": self.better, "not judged": self.unknown}
        found = next((kind for kind, lines in kinds.items() if lines), "same")
        return found if self.measured else "not measured"

    def lines(self) -> list[str]:
        """What there is to say of it, whole lines for grep and mails."""
        if not self.measured:
            return [f"not measured: {self.name}"]
        kinds = (("WORSE", self.worse), ("better", self.better), ("not judged", self.unknown))
        lines = [f"{kind}: {self.name}: {line}" for kind, moved in kinds for line in moved]
        return [*lines, f"  since then: {self.since}"] if self.worse or self.better else lines


def against(comparisons: Sequence[WorkloadComparison], file: Path, tolerance: float) -> list[Drift]:
    """What each arm of ``file`` is in ``comparisons``.

    Args:
        comparisons: Of today's runs, with the baseline that the file has.
        file: What ``tables.as_json`` made of earlier runs.
        tolerance: By how much a ratio, and memory, may differ, relatively, beyond the noise.

    Raises:
        ValueError: The file is not one of ours, is of another machine, or has no arm that was measured now.
    """
    then, now = _arms(_loaded(file)), _arms(json.loads(tables.as_json(comparisons)))
    if not any(name in now for name in then):
        raise ValueError(f"none of these runs is of an arm of {file}")
    for name, before in then.items():
        for what in ("device", "processor"):
            if name in now and before[what] != now[name][what]:
                raise ValueError(f"{file} was measured on {before[what]}, and these runs on {now[name][what]}")
    return [drift(name, before, now.get(name), tolerance) for name, before in then.items()]


def summary(drifts: Sequence[Drift]) -> str:
    """``2 arms: 1 worse``."""
    verdicts = [each.verdict for each in drifts]
    counts = {kind: verdicts.count(kind) for kind in ("worse", "better", "not judged", "not measured")}
    counted = [f"{count} {kind}" for kind, count in counts.items() if count]
    return f"{len(drifts)} arm{'' if len(drifts) == 1 else 's'}: {', '.join(counted) or 'none moved'}"


def _loaded(file: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = printable(json.loads(file.read_text(encoding="utf-8")))
        _arms(found)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; crucible compare RUNS --json {file} makes one") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not what crucible compare --json writes ({error})") from error
    return found


def _arms(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows by the name of workload and arm, baselines left out; each with its workload's device and versions."""
    found: dict[str, dict[str, Any]] = {}
    for one in comparisons:
        conditions = {name: one[name] for name in ("device", "processor", "versions")}
        base = [row for row in one["rows"] if row["arm"] == one["baseline"]]
        for row in one["rows"]:
            if row not in base:
                name = " ".join([one["task"], *_overrides(shlex.split(row["command"])), row["arm"]])
                flags = [flag for each in (row, *base) for flag in each["flags"]]
                found[name] = row | conditions | {"flags": flags}
    return found


def _overrides(command: Sequence[str]) -> list[str]:
    """Overrides of a command that describe its workload: neither strategies nor where it runs and how often."""
    named = {word: word.lstrip("+~").partition("=")[0] for word in command if "=" in word}
    apart = ("compile.", "hydra", "-")
    return sorted(word for word, name in named.items() if name not in NO_WORKLOAD and not name.startswith(apart))


def drift(name: str, before: Mapping[str, Any], now: Mapping[str, Any] | None, tolerance: float = TOLERANCE) -> Drift:
    """What moved between two rows of one arm."""
    found = Drift(name=name, measured=now is not None)
    if now is None:
        return found
    if now["runs_failed"]:
        found.worse.append(f"{now['runs_failed']} of its runs failed")
        return found
    if busy := next((flag for row in (now, before) for flag in row["flags"] if flag.startswith(BUSY)), None):
        found.unknown.append(f"times: {busy}")
    else:
        _compare(found, "ratio", "{:.3f}x", before, now, tolerance)
        _compare(found, "cold_warmup_seconds", "{:.1f} s", before, now, WARMUP_TOLERANCE)
    _compare(found, "peak_device_memory_gib", "{:.2f} GiB", before, now, tolerance)
    for count in COUNTS:
        _compare(found, count, "{}", before, now, 0.0)
    changed = [
        f"{what} {old} -> {now['versions'].get(what)}"
        for what, old in before["versions"].items()
        if now["versions"].get(what) != old
    ]
    commits = [row["runs"][0].get("git_commit") for row in (before, now)]
    if all(commits) and commits[0] != commits[1]:
        changed.append(f"commit {commits[0][:12]} -> {commits[1][:12]}")
    found.since = ", ".join(changed) or "neither versions nor commit changed"
    return found


def _compare(
    found: Drift, name: str, form: str, before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float
) -> None:
    """A figure moved when it did by more than the tolerance, and the two intervals are apart."""
    old, new, what = before[name], now[name], name.replace("_", " ")
    if old is None:
        return
    if new is None:
        (found.worse if name == "ratio" else found.unknown).append(
            f"{what} was {form.format(old)}, and is not known now"
        )
        return
    smallest = MIN_WARMUP_SECONDS if name == "cold_warmup_seconds" else 0.0
    if abs(new - old) <= max(tolerance * old, smallest):
        return
    ends = [row.get(f"{name}_{end}") for row in (before, now) for end in ("low", "high")]
    if name == "ratio" and None in ends:
        found.unknown.append("ratio: single runs do not show their noise; repeat with hydra.launcher.rounds=3")
        return
    low, high = (old if end is None else end for end in ends[:2])
    new_low, new_high = (new if end is None else end for end in ends[2:])
    move = f"{what} {_text(form, old, ends[:2])} -> {_text(form, new, ends[2:])}"
    if new_low > high or new_high < low:
        worse = name in EITHER_WAY_WORSE or (new < old) == (name == "ratio")
        (found.worse if worse else found.better).append(move)
    elif name == "ratio":
        found.unknown.append(f"{move} is within the noise; more rounds or steps would show it")


def _text(form: str, value: float, ends: Sequence[float | None]) -> str:
    """``1.550x (1.530 to 1.570)``."""
    middle = form.format(value)
    if None in ends or ends[0] == ends[1]:
        return middle
    return f"{middle} ({' to '.join(form.format(end).rstrip(' sx') for end in ends)})"
