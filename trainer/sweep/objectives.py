"""Objectives: the one figure of a record that a search over strategies and options makes small or large."""

from __future__ import annotations

from typing import Literal

from trainer.telemetry.record import RunRecord

OBJECTIVES: dict[str, Literal["minimize", "maximize"]] = {
    "final_loss": "minimize",
    "seconds_to_steps": "minimize",
    "useful_tokens_per_second": "maximize",
}
"""Names, and which way is better."""


def value_of(record: RunRecord, objective: str, *, steps: int | None = None) -> float | None:
    """The figure named by ``objective``; None when the run has not measured it."""
    match objective:
        case "final_loss":
            return record.final_loss
        case "useful_tokens_per_second":
            return record.useful_tokens_per_second
        case _:
            return seconds_to_steps(record, steps)


def seconds_to_steps(record: RunRecord, steps: int | None) -> float | None:
    """Seconds from the start of the process to the end of ``steps`` optimizer steps, or batches in inference: starting,
    warming up (compiling is part of it), and steady steps for the rest. None when a figure is missing.

    ``steps`` None means as many as the run took. Validation and checkpoints are left out: they are alike for all.
    """
    inference = record.run == "inference"
    speed = record.batches_per_second if inference else record.steady_steps_per_second
    count = steps if steps is not None else (record.batches if inference else record.steps)
    if not speed or count is None or record.warmup_seconds is None or record.warmup_steps is None:
        return None
    starting = (record.import_seconds or 0.0) + (record.setup_seconds or 0.0)
    return starting + record.warmup_seconds + max(0, count - record.warmup_steps) / speed
