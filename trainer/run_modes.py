"""``run=train|inference``: what is done with a task under its strategies. Plain dataclasses, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

STEPS = ("predict", "validation")
GRAD_MODES = ("inference_mode", "no_grad")
SOURCES = ("device", "loader")


@dataclass(kw_only=True, slots=True)
class RunMode:
    """Base of what can be done with a task."""

    name: ClassVar[str] = "run"
    """Value of ``run=`` and of ``RunRecord.run``."""


@dataclass(kw_only=True, slots=True)
class Train(RunMode):
    """Train the task, with validations and checkpoints; how long is for ``trainer`` to say."""

    name: ClassVar[str] = "train"


@dataclass(kw_only=True, slots=True)
class Inference(RunMode):
    """Run the task's forward alone, without gradients, and time it batch by batch; no optimizer, no checkpoints."""

    name: ClassVar[str] = "inference"

    step: str = "predict"
    """One of ``STEPS``: the module's ``predict_step`` or its ``validation_step``."""
    grad_mode: str = "inference_mode"
    """One of ``GRAD_MODES``: the context of torch that switches gradients off."""
    source: str = "device"
    """One of ``SOURCES``: the first few batches, moved to the device once and taken in turns; or the loader, with the
    time that loading and copying take."""
    batches: int = 100
    """Batches of one timed run."""
    repeats: int = 5
    """Timed runs."""
    warmup_batches: int = 10
    """Batches before the first timed run; more where every distinct batch needs its turn."""
    distinct_batches: int = 8
    """Batches that are moved to the device for ``source=device``."""

    def __post_init__(self) -> None:
        """Check every field. Raises one ValueError that holds all complaints, a line each."""
        complaints = [
            f"run.{name}={getattr(self, name)!r} is not one of {choices}"
            for name, choices in (("step", STEPS), ("grad_mode", GRAD_MODES), ("source", SOURCES))
            if getattr(self, name) not in choices
        ]
        complaints += [
            f"run.{name}={getattr(self, name)} must be at least 1"
            for name in ("batches", "repeats", "warmup_batches", "distinct_batches")
            if getattr(self, name) < 1
        ]
        if complaints:
            raise ValueError("\n".join(complaints))


RUN_MODES: dict[str, type[RunMode]] = {mode.name: mode for mode in (Train, Inference)}
"""What ``run=`` takes."""
