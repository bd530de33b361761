"""Whether the device waits for the host: answers of a planted device, in a loop's own steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.test_plain_loop import Net, batches
from trainer import auto as ahead
from trainer.auto import Ahead
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


class Queue:
    """A device that executes launches in their order, and a host that waits where ``LENGTH`` of them are under way."""

    LENGTH = 1000

    def __init__(self, host_seconds: float, device_seconds: float) -> None:
        self.host_seconds, self.device_seconds = host_seconds, device_seconds
        self.now, self.waited = 0.0, False
        self.finished: list[float] = []

    def launch(self, count: int) -> None:
        for _ in range(count):
            self.now += self.host_seconds
            if len(self.finished) >= self.LENGTH:
                self.now = max(self.now, self.finished[-self.LENGTH])
            idle_since = self.finished[-1] if self.finished else 0.0
            self.waited |= self.now > idle_since
            self.finished.append(max(self.now, idle_since) + self.device_seconds)

    def mark(self, _: Any) -> Any:
        reached_at = self.finished[-1] if self.finished else 0.0
        return SimpleNamespace(query=lambda: self.now >= reached_at)


class Deep(Net):
    """Twelve layers, of 50 launches each in the forward and 100 in the backward; the whole step has 1,800."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12))
        for block in self.blocks:
            block.register_forward_hook(lambda *_: queue.launch(50))
            block[0].weight.register_hook(lambda _: queue.launch(100))


@pytest.mark.parametrize("within_backward", [False, True])
@pytest.mark.parametrize("host_share", [0.1, 0.7, 0.97, 1.03, 3.0])
def test_a_full_queue_hides_the_device_from_points_around_the_backward_and_not_from_those_in_it(
    host_share: float, within_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "PARAMETERS", 2)
    queue, truth = Queue(1e-5 * host_share, 1e-5), []
    monkeypatch.setattr(ahead, "mark", queue.mark)
    module = Deep(queue)
    loop, seen = PlainLoop(module, torch.optim.SGD(module.parameters(), lr=0.1), max_steps=12), []
    watch = Ahead(loop)

    class Training:
        def batch_begins(self, batch: Any) -> None:
            watch.begin(within_backward=within_backward)

        def batch_ends(self, loss: Any, batch: Any) -> None:
            seen.append(watch.end())
            truth.append(not queue.waited)
            queue.waited = False

    list(loop.fit(batches(12), Training()))
    assert all(never for said, never in zip(seen, truth, strict=True) if said), "never said of a device that waited"
    if host_share == 0.1:
        assert truth[1:] == [True] * 11
        assert seen[4:] == [within_backward] * 8
    assert all(parameter._post_accumulate_grad_hooks is None for parameter in module.parameters())


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
    assert "step" not in vars(loop.optimizers[0]), "the optimizer is as it was"
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
