"""Telemetry: what a run measures, and how. ``record`` is the only module that reports read; it needs no torch."""
