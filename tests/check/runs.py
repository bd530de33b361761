"""Runs of a check that nothing has trained: records of given step times and events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.check.measurement import Measured, measured
from tests.report.records import record
from trainer.report.runs import Run
from trainer.telemetry.record import Event, RunRecord


def in_rounds(
    regional_seconds: Sequence[float], eager_seconds: Sequence[float] | None = None, *, first: int = 1, **changes: Any
) -> list[RunRecord]:
    """A record of eager and one of regional for each round."""
    eager_seconds = [0.1] * len(regional_seconds) if eager_seconds is None else eager_seconds
    return [
        one
        for number, (ours, eager) in enumerate(zip(regional_seconds, eager_seconds, strict=True), first)
        for one in (
            record("eager", step_seconds=eager, round=number, device="AMD EPYC", device_type="cpu"),
            record(
                "regional", step_seconds=ours, round=number, **{"device": "AMD EPYC", "device_type": "cpu", **changes}
            ),
        )
    ]


def arm(records: Sequence[RunRecord], root: Path = Path("/project")) -> Measured:
    """The one arm that compiles."""
    (found,) = measured([Run(Path(str(place)), one) for place, one in enumerate(records)], root=root)
    return found


def steps(seconds: Sequence[float], *, first: int = 1, eager: Sequence[float] | None = None) -> Measured:
    """An arm of which only the time of its steps matters."""
    return arm(in_rounds(seconds, eager, first=first))


def event(kind: str, location: str | None, reason: str = "a reason", step: int = 5) -> Event:
    return Event(kind=kind, reason=reason, location=location, step=step)
