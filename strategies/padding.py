"""Padding: how batches of ragged length are grouped and padded, as a strategy of the SHAPES stage decides it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Padding:
    """Filled in by the strategy; the trainer rebuilds the loaders by it."""
