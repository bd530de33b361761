"""What a decision says to the user: one line with the choice, its total time, and what it was chosen over."""

from __future__ import annotations

from collections.abc import Iterable

from strategies import Strategy
from strategies.auto import Auto
from trainer.auto.estimates import Estimates
from trainer.auto.measured import EAGER, Row

UNITS = ((3600, "h"), (60, "min"))
"""Seconds of a unit that is used from two of it on."""


def say(estimates: Estimates, chosen: Row) -> str:
    """The line, but for where its figures come from."""
    rows = {row.name: row for row in estimates.rows()}
    expected = f"{'at most' if chosen.at_most else 'about'} {_time(chosen.total_seconds)}"
    told = [f"{expected} for {estimates.steps:,} steps{_each(chosen)}"]
    plain = rows.get(EAGER)
    if plain is not None and chosen.name != EAGER and plain.total_seconds is not None:
        told.append(f"eager {_time(plain.total_seconds)}")
    others = [row for row in rows.values() if row.name not in (chosen.name, EAGER)]
    told += [
        f"{row.name} {_time(row.total_seconds)}{'' if row.measured else ' expected, not tried'}"
        for row in others
        if row.total_seconds is not None
    ]
    for row in others:
        plain = rows.get(row.module)
        if row.why and not (row.captured and plain is not None and plain.why):  # for both in the same words
            told.append(f"{row.name} is out: {row.why}")
    return f"auto: {chosen.name}, {'; '.join(told)}"


def refuse_choice(strategies: Iterable[Strategy]) -> None:
    """Raise ValueError where ``auto`` is among strategies that are looked at: only a run has steps to choose for."""
    if any(isinstance(strategy, Auto) for strategy in strategies):
        raise ValueError(
            "compile=auto: only a run chooses; python -m trainer with the same arguments says what (`auto: ...`), name "
            "that here, as in compile=[regional,cuda_graph]"
        )


def _each(row: Row) -> str:
    return "" if row.step_seconds is None else f" of {row.step_seconds * 1e3:,.1f} ms"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
