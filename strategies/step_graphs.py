"""Step graphs: whole training steps captured in CUDA graphs, one a shape, and replayed."""

from __future__ import annotations


class StepGraphs:
    """Runs a training step, from its CUDA graph when there is one for the shapes at hand."""
