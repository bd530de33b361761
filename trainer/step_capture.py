"""Whole training steps in CUDA graphs under Lightning's Trainer: closures, logging and accumulation included."""

from __future__ import annotations

import lightning as L

from strategies import Program


def capture_steps(trainer: L.Trainer, program: Program) -> None:
    """Let ``trainer`` run its optimizer steps through ``program.step``."""
