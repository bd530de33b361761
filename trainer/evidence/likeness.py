"""Likeness: what should be the same in all runs of a comparison, what had better be, and which runs differ."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.evidence.runs import Run
from trainer.evidence.workloads import loose_settings
from trainer.telemetry.record import RunRecord

DECISIVE_VERSIONS = ("torch", "triton", "cuda")
"""Software that decides how fast compiled code is."""


def conditions(record: RunRecord) -> dict[str, str]:
    """What runs of one workload must share to be compared. What a record does not say is left out."""
    told: dict[str, str | None] = {
        "device": record.device,
        **{name: record.versions.get(name) for name in DECISIVE_VERSIONS},
        "precision": record.precision,
        "matrix products": record.matrix_precision,
        "world size": str(record.world_size),
    }
    return {name: value for name, value in told.items() if value is not None}


def unlike(runs: Sequence[Run]) -> list[str]:
    """Conditions that differ, a line each with the values and how many runs have them."""
    return _differing([conditions(run.record) for run in runs])


def notes(runs: Sequence[Run]) -> list[str]:
    """Differences that need not matter: commits, other versions, settings beside the step."""
    return _differing([_circumstances(run.record) for run in runs])


def _circumstances(record: RunRecord) -> dict[str, str]:
    versions = {name: value or "none" for name, value in record.versions.items() if name not in DECISIVE_VERSIONS}
    commit = {} if record.git_commit is None else {"git commit": record.git_commit[:12] + _dirty(record.git_commit)}
    return {**commit, **versions, **loose_settings(record)}


def _dirty(commit: str) -> str:
    return "+dirty" if commit.endswith("+dirty") and len(commit) > 12 else ""


def _differing(told: Sequence[dict[str, str]]) -> list[str]:
    """``name: value (2 runs), other (1 run)`` for each name that has several values."""
    names = dict.fromkeys(name for each in told for name in each)
    lines = []
    for name in names:
        counts: dict[str, int] = {}
        for each in told:
            if name in each:
                counts[each[name]] = counts.get(each[name], 0) + 1
        if len(counts) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} ({_runs(count)})" for value, count in counts.items()))
    return lines


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"
