"""What is known of a training beside its ``Loop``, as the framework that runs it says: where it logs, its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_STARTED = "not started"
"""Status of a record whose training is still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInfo:
    """What a framework's binding knows of a training beside its ``Loop``."""

    folder: Path | None
    """Where the training's logs go; None for no file."""
    shared: bool = False
    """Whether other trainings log into the same folder."""
    batch_size: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Options of the framework's trainer that a step depends on."""
    entry: str = "Compile"
    """See ``RunRecord.entry``."""
    resumed_from: str | None = None
    seed: int | None = None
