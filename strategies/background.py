"""``compile=[regional,background]``: train in eager at once; a second process compiles, its code takes over later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from strategies.base import Program, Stage, Strategy

MIN_CORES = 4
"""Below this many, the helper process takes from the training what it gives it later."""


@dataclass(kw_only=True, slots=True)
class Background(Strategy):
    """Begin in eager, compile in a helper process, and switch region by region between steps.

    The helper builds the same regions with empty weights, runs forward and backward of each on inputs of the same
    shapes, and so fills torch's own caches on disk. The training then traces each region, finds its code in the cache
    and compares it with eager on the inputs of a real step before it is used. A helper that fails costs a warning: the
    run continues in eager. ``trainer.background`` does the work.
    """

    name: ClassVar[str] = "background"
    stage: ClassVar[Stage] = Stage.BACKGROUND
    takeover: ClassVar[str | None] = "trainer.background.takeover:Takeover"

    regions_per_step: int = 1
    """Regions that take over before one step; each costs that step its tracing and loading."""
    at_step: int | None = None
    """First optimizer step that runs compiled code, 3 or later in a run; the run waits there for the helper. Repeats
    the switches of an earlier run, also where a run is resumed. null = as soon as each region is compiled."""
    workers: int | None = None
    """Compile workers of the helper; null = half of the cores, at most 8."""
    niceness: int = 10
    """How far the helper stands back from the training on the processor, 0 to 19."""
    max_device_gib: float = 8.0
    """Device memory that the helper may use, GiB, beside CUDA's own context."""
    max_host_gib: float = 16.0
    """Host memory of the helper above which it ends itself, GiB, without its compile workers."""
    timeout_seconds: float = 1800.0
    """Time after which the helper is ended."""
    force: bool = False
    """Whether a helper is started on fewer than four cores as well, where it slows the training down."""

    def __post_init__(self) -> None:
        """Raise one ValueError with a line for each value out of range."""
        key = f"compile.{self.name}"
        complaints = [
            f"{key}.{option}={getattr(self, option)} must be at least 1"
            for option in ("regions_per_step", "at_step", "workers")
            if getattr(self, option) is not None and getattr(self, option) < 1
        ]
        if not 0 <= self.niceness <= 19:
            complaints.append(f"{key}.niceness={self.niceness} must be between 0 and 19")
        complaints += [
            f"{key}.{option}={getattr(self, option)} must be above 0"
            for option in ("max_device_gib", "max_host_gib", "timeout_seconds")
            if not getattr(self, option) > 0
        ]
        if complaints:
            raise ValueError("\n".join(complaints))

    @property
    def left_out(self) -> str | None:
        """Why no helper is started on this machine, so that everything compiles in the foreground."""
        cores = usable_cores()
        if self.force or cores >= MIN_CORES:
            return None
        return (
            f"left out, {cores} cores are too few for a helper beside the training; compiled in the foreground. "
            f"compile.{self.name}.force=true starts it all the same"
        )

    @property
    def takes_over_later(self) -> bool:
        """Not on a machine of few cores."""
        return self.left_out is None

    @property
    def worker_count(self) -> int:
        """Compile workers of the helper."""
        return self.workers or max(1, min(8, usable_cores() // 2))

    def apply(self, program: Program) -> None:
        """Raise ValueError where there is nothing that can be compiled in the background."""
        for other in program.strategies:
            if other.chooser is not None:
                raise ValueError(f"compile: {other.name!r} has a helper of its own; leave {self.name!r} out")
            if other.name not in TOGETHER:
                raise ValueError(
                    f"compile: {self.name!r} does not go with {other.name!r}: what that one prepares is not known to "
                    "the helper process; leave one of them out"
                )
        if not program.regions:
            raise ValueError(f"compile.{self.name}: nothing to compile; add regional or whole")
        if self.left_out is not None:
            program.notes.append(f"{self.name}: {self.left_out}")
        elif program.sharded:
            program.notes.append(
                f"{self.name}: left out, the helper has no other process to gather parameters from that are sharded; "
                "compiled in the foreground"
            )


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


TOGETHER = (
    *("background", "regional", "whole", "modular", "cuda_graph", "cached"),
    *("buckets", "dynamic", "checkpointing", "optimizer"),
)
"""Strategies whose regions the helper can compile, or which do not change them."""
