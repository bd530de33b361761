"""Choices that ``Compile`` offers in anybody's project, and the configuration here: without tasks, without torch."""

from __future__ import annotations

PARITY = ("on", "off", "strict")
ON_COMPILE_ERROR = ("fail", "eager")
ON_SLOWER = ("warn", "eager")
ON_DIFFERENCE = ("fail", "eager")
PROFILE = ("off", "on")
MAX_PROFILE_STEPS = 100
"""Each step adds thousands of events to a trace, and a viewer has to load them all."""


def profile_complaints(profile: str, steps: int) -> list[str]:
    """What is wrong with the two options of the profiler, a line each."""
    complaints = [] if profile in PROFILE else [f"profile={profile!r} is not one of {PROFILE}"]
    if not 1 <= steps <= MAX_PROFILE_STEPS:
        complaints.append(f"profile_steps={steps} must be at least 1 and at most {MAX_PROFILE_STEPS}")
    return complaints
