"""Telemetry: what a run measures, and how. ``record`` is the only module that reports read; it needs no torch."""

from __future__ import annotations

PROFILE = ("off", "on")
MAX_PROFILE_STEPS = 100
"""Each step adds thousands of events to a trace, and a viewer has to load them all."""


def profile_complaints(profile: str, steps: int) -> list[str]:
    """What is wrong with the two options of the profiler, a line each."""
    complaints = [] if profile in PROFILE else [f"profile={profile!r} is not one of {PROFILE}"]
    if not 1 <= steps <= MAX_PROFILE_STEPS:
        complaints.append(f"profile_steps={steps} must be at least 1 and at most {MAX_PROFILE_STEPS}")
    return complaints
