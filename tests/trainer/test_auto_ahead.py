"""Whether the device waits for the host: answers of a planted device, in a loop's own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.test_plain_loop import Net, batches
from trainer.auto import ahead
from trainer.auto.ahead import Ahead
from trainer.loops.plain import PlainLoop

POINTS = 6
"""Of a step: its begin, before and after the forward, after the backward, after the update, its end."""


class Device:
    """Answers each ``query`` as planned: True where it has come to that point; without a plan, it has not."""

    def __init__(self, *reached: bool) -> None:
        self.reached, self.marks = list(reached), 0

    def mark(self, _: Any) -> Device:
        self.marks += 1
        return self

    def query(self) -> bool:
        return self.reached.pop(0) if self.reached else False


def watched(device: Any, monkeypatch: pytest.MonkeyPatch, steps: int = 3) -> tuple[list[bool], PlainLoop]:
    if device is not None:
        monkeypatch.setattr(ahead, "mark", device.mark)
    module = Net()
    loop = PlainLoop(module, torch.optim.SGD(module.parameters(), lr=0.1), max_steps=steps)
    watch, seen = Ahead(loop), []

    class Training:
        def batch_begins(self, batch: Any) -> None:
            watch.begin()

        def batch_ends(self, loss: Any, batch: Any) -> None:
            seen.append(watch.end())

    list(loop.fit(batches(steps), Training()))
    return seen, loop


def test_a_step_is_asked_at_every_point_and_once_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    seen, loop = watched(device, monkeypatch)
    assert seen == [True] * 3
    assert device.marks == 3 * POINTS
    assert not loop._around, "the loop is as it was"
    assert "forward_loss" not in vars(loop)


@pytest.mark.parametrize("at", range(2 * POINTS - 1))
def test_one_point_that_the_device_has_come_to_is_enough_to_know_nothing(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first step five are asked; the sixth question is about the time between the two."""
    seen, _ = watched(Device(*[number == at for number in range(3 * POINTS)]), monkeypatch)
    assert seen == [at >= POINTS - 1, at < POINTS - 1, True]


def test_without_a_queue_nothing_is_known_and_the_loop_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainLoop, "around_training_step", None)
    assert watched(None, monkeypatch)[0] == [False] * 3


def test_a_gradient_scaler_is_not_asked_whether_it_left_an_update_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainLoop, "scaler", object())
    monkeypatch.setattr(PlainLoop, "around_update", None)
    device = Device()
    assert watched(device, monkeypatch)[0] == [True] * 3
    assert device.marks == 3 * (POINTS - 2)
