"""Facts in words: what strategies found and did, a profile, as lines, tables and pages.

Facts come from ``RunRecord.report``; their names hold their units (``_share``, ``_seconds``, ``bytes_``), which is how
a strategy of someone else's is shown too. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.telemetry.record import RankFigures, communication_of

HEADLINES: dict[str, tuple[str, ...]] = {
    "auto": ("chosen", "reason", "planned_steps", "decided_at_step", "setup_seconds", "gained_seconds", "remembered"),
    "background": (
        "switched",
        "regions",
        "helper_seconds",
        "helper_failed",
        "eager_step_seconds_median",
        "longest_eager_step_seconds",
        "longest_switching_step_seconds",
        "cache_hits",
        "cache_misses",
    ),
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
    "optimizer": ("form",),
}
"""The facts that a person looks for first; of a name that is not here, or has none of these, all facts are shown."""
ITEMS = 6
"""Most items of a list that are shown."""
CHARACTERS = 120
"""Longest text that is shown whole."""
MIB = 1 << 20


def headlines(report: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """One line for each name in ``report`` that has facts."""
    lines = {}
    for name, facts in report.items():
        every = dict(flat(facts))
        chosen = [fact for fact in HEADLINES[name] if fact in every] if name in HEADLINES else []
        parts = [f"{_words(fact)} {shown(fact, every[fact])}" for fact in chosen or every]
        if parts:
            lines[name] = " · ".join(parts)
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
    below one, two significant digits."""
    text = f"{value:.3g}"
    if not math.isfinite(value) or (decimals is None and "e" not in text):
        return text
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    smallest = 1 - math.floor(math.log10(abs(value))) if 0 < abs(value) < 1 else 0
    return f"{value:.{max(decimals or 0, smallest)}f}"


def shown(fact: str, value: Any) -> str:
    """``value`` with the unit that is in the name of its fact."""
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


MUCH_SKEW = 0.03
"""Share of a step that a rank waits for the slowest one above which the summary names that."""
SHOWN = 3
"""Kernels or operators in the summary."""


def with_idle_share(facts: Mapping[str, Any], steady_seconds: float | None) -> dict[str, Any]:
    """``facts`` with the device's idle share of a steady step, which no profiler slowed down: its host work makes small
    steps look idler than they are. None where steps vary so much that one has less time than the kernels took."""
    busy = facts.get("busy_seconds_per_step")
    if busy is None:
        return dict(facts)
    share = 1 - busy / steady_seconds if steady_seconds else None
    return {"idle_share": share if share is not None and share >= 0 else None, **facts}


def profile_line(facts: Mapping[str, Any]) -> str:
    if "reason" in facts:
        return f"none: {facts['reason']}"
    parts = [facts["not_seen"]] if "not_seen" in facts else []
    if (share := _idle(facts)) is not None:
        parts.append(f"GPU idle {share:.0%} of the time")
    if (exposed := facts.get("exposed_communication_share")) is not None:
        parts.append(f"communication that nothing hides {exposed:.0%}")
    listed = facts.get("kernels") or facts.get("operators") or []
    parts.append(", ".join(f"{row['name'][:40]} {row['share']:.0%}" for row in listed[:SHOWN]))
    return " · ".join([*parts, facts.get("trace", "")]).strip(" ·")


def profile_page(facts: Mapping[str, Any]) -> str:
    if "reason" in facts:
        return f"No profile: {facts['reason']}"
    listed = ("kernels", "operators")
    lines = [f"- {_words(name)}: {shown(name, value)}" for name, value in flat(facts) if name not in listed]
    for title in listed:
        if facts.get(title):
            lines += ["", f"**{title}**", "", "| name | share | ms a step | calls a step |", "|---|---|---|---|"]
            lines += [_row(row) for row in facts[title]]
    return "\n".join([*lines, "", "The trace of the run's folder opens at https://ui.perfetto.dev."])


def _row(row: Mapping[str, Any]) -> str:
    name = row["name"].replace("|", "\\|")
    return f"| {name} | {row['share']:.1%} | {row['milliseconds_per_step']:.3f} | {row['calls_per_step']:.1f} |"


def _idle(facts: Mapping[str, Any]) -> float | None:
    share = facts.get("idle_share")
    return share if share is not None else facts.get("idle_share_while_profiled")


def communication_line(ranks: Sequence[RankFigures]) -> str:
    """What no compute hides, and the rank that the others wait for, where that matters; empty where nobody knows."""
    found = communication_of(ranks)
    if found is None or found.exposed_share is None or found.step_seconds is None:
        return ""
    shown, late = (
        f"{found.exposed_share:.1%} of a step is not hidden by compute",
        found.skew_seconds / found.step_seconds,
    )
    if late <= MUCH_SKEW:
        return shown
    slowest, wait = found.slowest, number(found.skew_seconds * 1e3)
    where = f"rank {slowest.rank} ({slowest.host}, {slowest.device})"
    return f"{shown}; {where} is the slowest: another waits {wait} ms of each step for it ({late:.0%})"
