"""What strategies found and did, for people: a short line for each of them, and every fact with its unit.

Facts come from ``RunRecord.report``; their names say what they are (``_share``, ``_seconds``, ``bytes_``), which is how
a strategy of someone else's is shown too. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

HEADLINES: dict[str, tuple[str, ...]] = {
    "auto": ("chosen", "reason", "planned_steps", "tried", "probe_seconds", "remembered"),
    "buckets": (
        "edges",
        "expected_padded_share",
        "seen_padded_share",
        "padded_share_of_random_batches",
        "unexpected_training_batches",
        "unexpected_validation_batches",
    ),
    "cached": ("state", "reason", "artifacts_loaded", "load_seconds", "artifacts_saved", "refused", "save_error"),
    "cuda_graph": ("graphs", "replayed_steps", "eager_steps", "parity.verdict", "refused"),
    "optimizer": (
        "form",
        "compiled_milliseconds",
        "fused_milliseconds",
        "foreach_milliseconds",
        "not_compared",
        "replayed_steps",
        "launched_steps",
    ),
    "watchdog": (
        "slower",
        "before_the_first_step.eager_step_seconds",
        "before_the_first_step.compiled_step_seconds",
        "steady_step_seconds",
        "rolled_back",
    ),
}
"""The facts that a person looks for first; of a name that is not here, or has none of these, all facts are shown."""
ITEMS = 6
"""Most items of a list that are shown."""
CHARACTERS = 120
"""Longest text that is shown whole."""
MIB = 1 << 20


def headlines(report: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """One line for each name in ``report`` that has something to say."""
    lines = {}
    for name, facts in report.items():
        every = dict(flat(facts))
        chosen = [fact for fact in HEADLINES[name] if fact in every] if name in HEADLINES else []
        said = [f"{_words(fact)} {shown(fact, every[fact])}" for fact in chosen or every]
        if said:
            lines[name] = " · ".join(said)
    return lines


def rows(report: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Name, fact and value of everything in ``report``; what does not exist is left out."""
    for name, facts in report.items():
        for fact, value in flat(facts):
            yield name, fact, shown(fact, value)


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Facts by dotted name; those that are None or empty are left out."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None and value != [] and value != "":
            yield f"{prefix}{name}", value


def number(value: float, decimals: int | None = None) -> str:
    """``value`` without an exponent, thousands apart: with three digits, or with so many ``decimals`` and, where it is
    below one, two digits that say something."""
    text = f"{value:.3g}"
    if not math.isfinite(value) or (decimals is None and "e" not in text):
        return text
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    smallest = 1 - math.floor(math.log10(abs(value))) if 0 < abs(value) < 1 else 0
    return f"{value:.{max(decimals or 0, smallest)}f}"


def shown(fact: str, value: Any) -> str:
    """``value`` with the unit that the name of its fact says."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        listed = ", ".join(shown(fact, item) for item in value[:ITEMS])
        return listed if len(value) <= ITEMS else f"{listed}, ... ({len(value)} in all)"
    if isinstance(value, (int, float)):
        return _measured(fact.rpartition(".")[2].split("_"), value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 3]}..."


def _measured(words: list[str], value: float) -> str:
    if "bytes" in words:
        return f"{value / MIB:.1f} MiB"
    if "milliseconds" in words:
        return f"{number(value)} ms"
    if "seconds" in words:
        return f"{number(value, 2)} s" if value >= 1 else f"{number(value * 1e3)} ms"
    if "share" in words:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else number(value)


def _words(fact: str) -> str:
    """``eager_step_seconds`` as a person would write it; the unit stands beside the value."""
    name = fact.rpartition(".")[2]
    for unit in ("_milliseconds", "_seconds"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")
