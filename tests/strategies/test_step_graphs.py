"""Which steps run without a graph before they are captured, and what becomes of a capture that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.graph_engine import CannotCapture, NotYet
from strategies.step_graphs import StepGraphs
from tests.trainer.recording import RecordingEngine


class Failing(RecordingEngine):
    """Its captures fail as long as ``failures`` are left."""

    failures = 0

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(call)


@pytest.fixture
def engine() -> Failing:
    return Failing(nn.Linear(1, 1))


def doubled(graphs: StepGraphs, rows: int, *, kind: str = "step") -> Tensor:
    result: Tensor = graphs.run(
        kind, torch.full((rows,), 2.0), lambda x_B: x_B * 2, name="step", before_replay=lambda: None
    )
    return result


def test_every_shape_runs_before_its_capture(engine: Failing) -> None:
    graphs = StepGraphs(engine, eager_steps=1, max_graphs=8)
    for rows in (4, 4, 3, 3):
        assert doubled(graphs, rows).tolist() == [4.0] * rows
    assert (graphs.eager_count, graphs.captures) == (2, 2)


def test_once_all_shapes_are_warmed_only_the_first_of_a_kind_does(engine: Failing) -> None:
    graphs = StepGraphs(engine, eager_steps=1, max_graphs=8)
    graphs.warmed = True
    for rows in (4, 3, 2, 4):
        assert doubled(graphs, rows).tolist() == [4.0] * rows
    assert (graphs.eager_count, graphs.captures) == (1, 3)
    doubled(graphs, 2, kind="another step")
    assert graphs.eager_count == 2


def test_a_warmed_shape_that_cannot_be_captured_at_once_runs_and_is_tried_again(engine: Failing) -> None:
    graphs = StepGraphs(engine, eager_steps=1, max_graphs=8)
    graphs.warmed = True
    doubled(graphs, 4)
    engine.failures = 1
    with pytest.raises(NotYet):
        doubled(graphs, 3)
    for _ in range(2):
        assert doubled(graphs, 3).tolist() == [4.0] * 3
    assert (graphs.eager_count, graphs.captures) == (2, 1)


def test_what_fails_after_it_has_run_is_not_tried_again(engine: Failing) -> None:
    graphs = StepGraphs(engine, eager_steps=1, max_graphs=8)
    doubled(graphs, 4)
    engine.failures = 1
    with pytest.raises(CannotCapture) as raised:
        doubled(graphs, 4)
    assert not isinstance(raised.value, NotYet)
    assert "not permitted" in str(raised.value)
    for _ in range(2):
        assert doubled(graphs, 4).tolist() == [4.0] * 4
    assert (graphs.eager_count, graphs.captures) == (3, 0)
