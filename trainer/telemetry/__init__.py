"""Telemetry: what a run measures, and how. ``record`` is the only module that reports read; it needs no torch."""

from __future__ import annotations

PROFILE = ("off", "on")
