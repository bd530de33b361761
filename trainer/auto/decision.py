"""Decision: what is worth a trial next, and which of the measured candidates takes the least time; no torch in here."""

from __future__ import annotations

from trainer.auto.estimates import Estimates
from trainer.auto.measured import EAGER, Module, Row

FIRST = "regional"
"""Tried before others that are worth a trial: it costs least, and tells what they can be expected to give."""


def next_trial(estimates: Estimates, margin: float) -> Module | None:
    """What to try next: eager first, then whatever may save more than ``margin`` of the best total time so far."""
    eager = estimates.modules[EAGER]
    if eager.step_seconds is None and eager.failed is None:
        return eager
    leader = _leader(estimates)
    worth = []
    for row in estimates.rows():
        module = estimates.modules[row.module]
        if module.step_seconds is None and module.failed is None and _may_save(row, leader, margin):
            worth.append(module)
    first = [module for module in worth if module.name == FIRST]
    return next(iter(first or worth), None)


def best(estimates: Estimates, margin: float) -> Row:
    """The row to take: of the measured ones that with the least total time, eager unless more than ``margin`` is saved;
    one of them was measured."""
    leader = _leader(estimates)
    eager = estimates.modules[EAGER]
    plain = [row for row in estimates.rows() if row.module == EAGER and row.measured]
    # Captured where that was asked for; otherwise plainly as it is.
    plain = [row for row in plain if row.captured is (estimates.capture == "always")]
    if eager.failed is None and plain and (leader is None or not _may_save(leader, plain[0], margin)):
        return plain[0]
    assert leader is not None
    return leader


def _leader(estimates: Estimates) -> Row | None:
    return next((row for row in estimates.rows() if row.measured and row.total_seconds is not None), None)


def _may_save(row: Row, leader: Row | None, margin: float) -> bool:
    """Whether ``row`` is expected to take less time than ``leader``; where nothing is known, anything may."""
    if leader is None or leader.total_seconds is None:
        return True
    return row.total_seconds is not None and row.total_seconds < (1 - margin) * leader.total_seconds
