"""The former place of ``eager``, for importers that have not moved yet."""

from __future__ import annotations

from strategies.compose import eager
from strategies.optimizer_step import own_step

__all__ = ["eager", "own_step"]
