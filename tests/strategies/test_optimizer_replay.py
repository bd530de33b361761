"""Updates from graphs of their own: replayed where gradients recur, launched where they have moved, eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from strategies import Optimizer, Program
from strategies.optimizer.graphs import MAX_CAPTURES, MAX_GRAPHS, Replays
from strategies.optimizer.step import installed
from tests.strategies import backends
from tests.strategies.modules import Block, Stack
from tests.trainer.recording import RecordingEngine


class Pair:
    """Two equal modules: one stepped by torch, one by the compiled update with replays on the CPU."""

    def __init__(self, engine: Any = None, make: Any = torch.optim.AdamW) -> None:
        self.modules: list[nn.Module] = []
        for _ in range(2):
            torch.manual_seed(0)
            self.modules.append(Stack(nn.ModuleList([Block() for _ in range(2)])))
        self.optimizers = [make(module.parameters(), lr=1e-2) for module in self.modules]
        self.program = Program(module=self.modules[1], optimizers=(self.optimizers[1],))
        self.strategy = Optimizer(backend=backends.COUNTING)
        self.strategy.begin(self.program)
        self.told: list[str] = []
        self.update: Any = installed(self.optimizers[1])
        self.update.replays = Replays(
            engine or RecordingEngine(self.modules[1]),
            report=self.told.append,
            wanted=lambda: self.program.step is None,
        )
        self.places: dict[str, list[torch.Tensor]] = {}
        self.number = 0

    def step(self, place: str = "here", clip: float | None = None) -> None:
        """One step of both, with the second one's gradients at ``place``."""
        self.number += 1
        parameters = [list(module.parameters()) for module in self.modules]
        for parameter in parameters[0]:
            parameter.grad = torch.randn_like(parameter)
        gradients = self.places.setdefault(place, [torch.empty_like(parameter) for parameter in parameters[1]])
        for parameter, other, gradient in zip(*parameters, gradients, strict=True):
            other.grad = gradient.copy_(parameter.grad)  # type: ignore[arg-type]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters[0], clip)
            self.update.max_norm = clip
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 / self.number
            optimizer.step()

    def assert_same(self) -> None:
        """Parameters and state are those of torch's own step."""
        torch.testing.assert_close(self.modules[1].state_dict(), self.modules[0].state_dict(), rtol=1e-5, atol=1e-6)
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-6)

    def counts(self) -> tuple[int, int]:
        """Steps launched and replayed."""
        counts = self.update.counts()
        return counts["launched_steps"], counts["replayed_steps"]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_gradients_that_stay_are_replayed_with_eagers_numbers(make: Any, graphs: list[GraphModule]) -> None:
    pair = Pair(make=make)
    for _ in range(12):
        pair.step()
    pair.assert_same()
    assert pair.counts() == (1, 11)
    assert len(graphs) == 2


def test_gradients_that_moved_are_launched_and_those_that_recur_replayed(graphs: list[GraphModule]) -> None:
    pair = Pair()
    for place in "aabacbbcd":
        pair.step(place)
    pair.assert_same()
    assert pair.counts() == (4, 5)
    assert pair.update.replays.captures == 3


def test_weights_that_moved_are_noticed(graphs: list[GraphModule]) -> None:
    pair = Pair()
    for _ in range(3):
        pair.step()
    for parameter in pair.modules[1].parameters():
        parameter.data = parameter.data.clone()
    for _ in range(3):
        pair.step()
    pair.assert_same()
    assert pair.counts() == (2, 4)


def test_clipping_may_come_and_go(graphs: list[GraphModule]) -> None:
    pair = Pair(make=torch.optim.SGD)
    for clip in (None, None, 0.01, 0.01, None, 0.01, 0.02, 0.02, None):
        pair.step(clip=clip)
    pair.assert_same()
    assert pair.counts() == (3, 6)


def test_state_put_back_or_loaded_is_gone_on_from(graphs: list[GraphModule]) -> None:
    pair = Pair()
    for _ in range(3):
        pair.step()
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        pair.step()
    for optimizer in pair.optimizers:
        for state in optimizer.state.values():
            state["step"].fill_(1)
    for _ in range(3):
        pair.step()
    pair.assert_same()
    assert pair.counts() == (3, 6)


def test_autograd_sees_that_a_replay_overwrote_what_it_saved(graphs: list[GraphModule]) -> None:
    pair = Pair()
    for _ in range(3):
        pair.step()
    x = torch.ones(2, 8, requires_grad=True)
    loss = pair.modules[1](x).square().mean()
    pair.step()
    assert pair.counts() == (1, 3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_capture_that_fails_is_said_once_and_steps_are_launched(graphs: list[GraphModule]) -> None:
    class Failing:
        def eager(self, call: Callable[[], Any]) -> Any:
            return call()

        def capture(self, call: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    pair = Pair(Failing())
    for place in "aaabbb":
        pair.step(place, clip=0.01)
    pair.assert_same()
    assert pair.counts() == (6, 0)
    assert len(pair.told) == 1
    assert "operation not permitted" in pair.told[0]


def test_within_captured_training_steps_nothing_is_captured_and_the_end_frees_graphs(graphs: list[GraphModule]) -> None:
    pair = Pair()
    pair.program.step = object()  # type: ignore[assignment]
    for _ in range(3):
        pair.step()
    assert pair.counts() == (3, 0)
    pair.program.step = None
    for _ in range(3):
        pair.step()
    assert pair.counts() == (4, 2)
    pair.strategy.end(pair.program)
    report = pair.program.report["optimizer"]
    assert (report["launched_steps"], report["replayed_steps"]) == (4, 2)
    assert not pair.update.replays._graphs
    pair.step()
    pair.assert_same()


def test_graphs_are_few_and_captures_end() -> None:
    class Counting:
        def eager(self, call: Callable[[], Any]) -> Any:
            return call()

        def capture(self, call: Callable[[], Any]) -> Any:
            return call, None

    told: list[str] = []
    replays = Replays(Counting(), report=told.append, wanted=lambda: True)
    for key in range(2 * MAX_CAPTURES):
        assert not replays.run(key, lambda: None), "seen for the first time"
        assert replays.run(key, lambda: None) == (key < MAX_CAPTURES)
    assert len(replays._graphs) == MAX_GRAPHS
    assert replays.captures == MAX_CAPTURES
    assert len(told) == 1


def test_without_a_gpu_there_are_no_graphs(graphs: list[GraphModule]) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    program = Program(module=module, optimizers=(optimizer,))
    Optimizer(backend=backends.COUNTING).begin(program)
    update: Any = installed(optimizer)
    assert update.replays is None
