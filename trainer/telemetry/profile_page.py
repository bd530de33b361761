"""What a profile says, for people: a line of the summary and a page of TensorBoard. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """The summary's row."""
    if "reason" in facts:
        return f"none: {facts['reason']}"
    parts = [facts["not_seen"]] if "not_seen" in facts else []
    if (share := _idle(facts)) is not None:
        parts.append(f"GPU idle {share:.0%} of the time")
    listed = facts.get("kernels") or facts.get("operators") or []
    parts.append(", ".join(f"{row['name'][:40]} {row['share']:.0%}" for row in listed[:SHOWN]))
    return " · ".join([*parts, facts.get("trace", "")]).strip(" ·")


def profile_page(facts: Mapping[str, Any]) -> str:
    """Markdown for TensorBoard."""
    if "reason" in facts:
        return f"No profile: {facts['reason']}"
    said = f"{facts['steps']} steps" + (f" from step {facts['first_step']} on" if facts.get("first_step") else "")
    lines = [f"{said}, {facts['seconds']:.3g} s while profiled.", ""]
    for name, form, meaning in (
        ("not_seen", "{}", "device"),
        ("idle_share", "{:.1%}", "device idle, of a steady step"),
        ("idle_share_while_profiled", "{:.1%}", "device idle while profiled, which slows the host"),
        ("kernels_per_step", "{:,.1f}", "kernels and copies in a step"),
        ("launches_per_step", "{:,.1f}", "launches by the host in a step (a CUDA graph is one launch)"),
    ):
        if facts.get(name) is not None:
            lines.append(f"- {meaning}: {form.format(facts[name])}")
    if _replayed(facts):
        lines.append("- kernels come from CUDA graphs: in the trace they stand without launches of their own")
    for title, rows in (("Kernels", facts.get("kernels")), ("Operators on the host", facts.get("operators"))):
        if rows:
            lines += ["", f"**{title}**", "", "| name | share | ms a step | calls a step |", "|---|---|---|---|"]
            lines += [_row(row) for row in rows]
    if "trace" in facts:
        lines += ["", f"Open `{facts['trace']}` of the run's folder at https://ui.perfetto.dev"]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    name = row["name"].replace("|", "\\|")
    return f"| {name} | {row['share']:.1%} | {row['milliseconds_per_step']:.3f} | {row['calls_per_step']:.1f} |"


def _idle(facts: Mapping[str, Any]) -> float | None:
    share = facts.get("idle_share")
    return share if share is not None else facts.get("idle_share_while_profiled")


def _replayed(facts: Mapping[str, Any]) -> bool:
    """Fewer than half as many launches as kernels: the rest were replayed."""
    return "kernels_per_step" in facts and facts["launches_per_step"] < facts["kernels_per_step"] / 2
