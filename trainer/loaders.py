"""Loaders under a padding rule: batches grouped by length and padded to an edge, whoever built the loader."""

from __future__ import annotations

import lightning as L

from strategies import Program


def pad_loaders(trainer: L.Trainer, program: Program) -> None:
    """Let ``trainer`` load its data under ``program.padding``."""
