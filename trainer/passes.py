"""The former name of Lightning's adapter, for importers that have not moved yet."""

from __future__ import annotations

from strategies.loop import Inspect, SkippedStep, Span
from trainer.loops.lightning import LightningLoop as Passes
from trainer.loops.lightning import why_not

__all__ = ["Inspect", "Passes", "SkippedStep", "Span", "why_not"]
