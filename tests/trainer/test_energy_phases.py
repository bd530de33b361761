"""Joules by phase: what the board's counter says between two changes of phase, where that is long enough to mean it."""

from __future__ import annotations

import pytest

from trainer.telemetry import machine as energy
from trainer.telemetry.machine import PAUSES, PhaseEnergy
from trainer.telemetry.record import RunRecord


class Board:
    """A counter and a clock that move together: 100 W."""

    def __init__(self) -> None:
        self.seconds = 50.0

    def perf_counter(self) -> float:
        return self.seconds

    def joules(self) -> float:
        return 100 * self.seconds


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    board = Board()
    monkeypatch.setattr(energy, "time", board)
    return board


def test_each_phase_gets_what_passed_in_it(board: Board) -> None:
    phases = PhaseEnergy(board.joules)
    for phase, seconds in (("warmup", 3), ("steady", 10), ("validation", 1), ("steady", 5), ("validation", 1.5)):
        phases.enter(phase)
        board.seconds += seconds
    phases.enter(None)
    board.seconds += 100
    phases.enter("steady")
    assert phases.figures() == {"warmup": 300, "steady": 1500, "validation": 250}


def test_short_phases_mean_nothing(board: Board) -> None:
    phases = PhaseEnergy(board.joules)
    phases.enter("preflight")
    board.seconds += 1.9
    phases.enter(None)
    assert phases.figures() == {}


def test_without_a_counter_there_are_no_phases() -> None:
    phases = PhaseEnergy(None)
    phases.enter("steady")
    phases.enter(None)
    assert phases.figures() == {} == RunRecord(task="any").joules_by_phase


def test_after_the_end_nothing_is_counted() -> None:
    assert PAUSES["finishing"] is None
