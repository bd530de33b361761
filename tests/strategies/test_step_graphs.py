"""Which steps run without a graph before they are captured, and what becomes of a capture that fails."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from strategies.cuda_graph.capture import (
    MAX_CHANGES,
    MAX_OBSERVATIONS,
    CannotCapture,
    NotYet,
    Observation,
    StateChanges,
    StepGraphs,
)
from strategies.cuda_graph.state import HostState, named
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


class Host:
    """What a step reads on the host."""

    def __init__(self) -> None:
        self.factor, self.observations, self.problems = 2.0, 0, list[str]()

    def observe(self) -> Observation:
        self.observations += 1
        return Observation(HostState([named(vars(self), "factor", self.factor, "")]), self.problems)


def multiplied(graphs: StepGraphs, rows: int, host: Host, *, kind: str = "step") -> Tensor:
    result: Tensor = graphs.run(
        kind,
        torch.full((rows,), 2.0),
        lambda x_B: x_B * host.factor,
        name="step",
        before_replay=lambda: None,
        observe=host.observe,
    )
    return result


def doubled(graphs: StepGraphs, rows: int, *, kind: str = "step") -> Tensor:
    return multiplied(graphs, rows, Host(), kind=kind)


def test_every_shape_runs_before_its_capture(engine: Failing) -> None:
    graphs = StepGraphs(engine)
    for rows in (4, 4, 4, 3, 3, 3):
        assert doubled(graphs, rows).tolist() == [4.0] * rows
    assert (graphs.eager_count, graphs.captures) == (4, 2), "once before it is observed, and once while it is"


def test_once_all_shapes_are_warmed_only_the_first_of_a_kind_does(engine: Failing) -> None:
    graphs = StepGraphs(engine)
    graphs.warmed = True
    for rows in (4, 3, 2, 4):
        assert doubled(graphs, rows).tolist() == [4.0] * rows
    assert (graphs.eager_count, graphs.captures) == (1, 3)
    doubled(graphs, 2, kind="another step")
    assert graphs.eager_count == 2


def test_a_warmed_shape_that_cannot_be_captured_at_once_runs_and_is_tried_again(engine: Failing) -> None:
    graphs = StepGraphs(engine)
    graphs.warmed = True
    doubled(graphs, 4)
    engine.failures = 1
    with pytest.raises(NotYet):
        doubled(graphs, 3)
    for _ in range(2):
        assert doubled(graphs, 3).tolist() == [4.0] * 3
    assert (graphs.eager_count, graphs.captures) == (2, 1)


def test_what_fails_after_it_has_run_is_not_tried_again(engine: Failing) -> None:
    graphs = StepGraphs(engine)
    for _ in range(2):
        doubled(graphs, 4)
    engine.failures = 1
    with pytest.raises(CannotCapture) as raised:
        doubled(graphs, 4)
    assert not isinstance(raised.value, NotYet)
    assert "not permitted" in str(raised.value)
    for _ in range(2):
        assert doubled(graphs, 4).tolist() == [4.0] * 4
    assert (graphs.eager_count, graphs.captures) == (4, 0)


def test_a_state_that_comes_back_has_kept_its_graph(engine: Failing) -> None:
    graphs, host = StepGraphs(engine), Host()
    for factor in (1.0, 1.0, 1.0, 3.0, 3.0, 1.0, 3.0, 1.0):
        host.factor = factor
        assert multiplied(graphs, 4, host).tolist() == [2.0 * factor] * 4
    assert (graphs.captures, graphs.changes, graphs.replays) == (2, 1, 5)
    assert (graphs.eager_count, host.observations) == (3, 2), "a new state runs once before it is captured"


def test_a_state_that_changes_at_every_step_is_never_captured_and_given_up(engine: Failing) -> None:
    graphs, host = StepGraphs(engine), Host()
    for step in range(1, MAX_CHANGES + 3):
        host.factor = float(step)
        assert multiplied(graphs, 4, host).tolist() == [2.0 * step] * 4
    host.factor = 9.0
    with pytest.raises(StateChanges, match=r"factor changes \(8, then 9\): register it as a buffer"):
        multiplied(graphs, 4, host)
    assert (graphs.captures, graphs.changes) == (0, MAX_CHANGES + 1)


def test_graphs_are_let_go_while_the_error_that_ends_them_is_handled() -> None:
    replays: list[weakref.ref[Callable[[], None]]] = []

    class Watched(RecordingEngine):
        def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            replay, results = super().capture(call)
            replays.append(weakref.ref(replay))
            return replay, results

    graphs, host = StepGraphs(Watched(nn.Linear(1, 1))), Host()
    for _ in range(3):
        multiplied(graphs, 4, host)
    host.factor, graphs.unfit = 3.0, StateChanges("factor changes")
    with pytest.raises(StateChanges) as error:
        multiplied(graphs, 4, host)
    assert error.traceback, "of frames that know the shape"
    assert [replay() is None for replay in replays] == [False]
    graphs.forget()
    gc.collect()
    assert [replay() is None for replay in replays] == [True], "the step runs eager next, and needs the memory"


def test_what_nothing_could_compare_is_observed_again_before_it_is_refused(engine: Failing) -> None:
    graphs, host = StepGraphs(engine), Host()
    host.problems = ["calls time.time"]
    for _ in range(8):
        multiplied(graphs, 4, host)
    assert (graphs.captures, host.observations) == (0, MAX_OBSERVATIONS)
    assert graphs.refusals == ["calls time.time"]


def test_few_graphs_are_kept_of_a_shape_whose_state_changes_now_and_then(engine: Failing) -> None:
    graphs, host = StepGraphs(engine), Host()
    for epoch in range(12):
        host.factor = float(epoch)
        for _ in range(20):
            multiplied(graphs, 4, host)
    assert graphs.captures == 12
    assert len(graphs.facts()["captured"]) == 4


class Counted:
    """Captures by calling; counts the calls, in which a real step would wait for the other process."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.eager_calls = fails, 0

    def eager(self, call: Callable[[], Any]) -> Any:
        self.eager_calls += 1
        return call()

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (lambda: None), call()


class Again:
    """Asks for a comparison of every graph."""

    facts: ClassVar[dict[str, Any]] = {}

    def wants(self, name: str) -> bool:
        return True

    def reference(self, run: Callable[[], Any], batch: Any) -> None:
        run()

    def compare(self, results: Any) -> None: ...


def together(rows: list[list[int]], hosts: list[Host], engines: list[Counted]) -> list[tuple[StepGraphs, list[str]]]:
    """Run the steps of two processes side by side, each on its own thread; returns their graphs and errors."""
    wishes, barrier = [0, 0], threading.Barrier(2, timeout=200)
    found: list[tuple[StepGraphs, list[str]]] = []
    for engine in engines:
        found.append((StepGraphs(engine), []))
        found[-1][0].verifier = Again()

    def agree(rank: int, wish: int) -> int:
        wishes[rank] = wish
        barrier.wait()
        least = min(wishes)
        barrier.wait()
        return least

    def process(rank: int) -> None:
        graphs, errors = found[rank]
        graphs.agree = partial(agree, rank)
        for number in rows[rank]:
            try:
                multiplied(graphs, number, hosts[rank])
            except CannotCapture as error:
                errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=process, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "one waits for the other for ever"
    return found


def test_processes_capture_and_compare_at_the_same_step() -> None:
    engines = [Counted(), Counted()]
    # The first process has seen shape 4 twice when the second one sees it for the first time.
    found = together([[4, 4, 4, 4, 4], [3, 4, 4, 4, 4]], [Host(), Host()], engines)
    assert [graphs.captures for graphs, _ in found] == [1, 1]
    assert [graphs.replays for graphs, _ in found] == [2, 2]
    assert engines[0].eager_calls == engines[1].eager_calls == 4, "three steps and the reference of the fourth"


def test_what_one_process_cannot_capture_is_refused_in_all() -> None:
    found = together([[4] * 3, [4] * 3], [Host(), Host()], [Counted(), Counted(fails=True)])
    assert [graphs.captures for graphs, _ in found] == [0, 0]
    (mine,), (others,) = (errors for _, errors in found)
    assert "another process could not capture it" in mine
    assert "not permitted" in others


def test_what_one_process_cannot_observe_runs_without_a_graph_in_all() -> None:
    hosts = [Host(), Host()]
    hosts[1].problems = ["calls time.time"]
    found = together([[4] * 6, [4] * 6], hosts, [Counted(), Counted()])
    assert [(graphs.captures, graphs.eager_count, errors) for graphs, errors in found] == [(0, 6, [])] * 2
    assert found[1][0].refusals == ["calls time.time"]


def test_one_process_that_gives_up_ends_the_captures_of_all() -> None:
    class Changing(Host):
        def observe(self) -> Observation:
            raise StateChanges("factor changes all the time")

    found = together([[4] * 2, [4] * 2], [Host(), Changing()], [Counted(), Counted()])
    assert "another process" in found[0][1][0]
    assert "all the time" in found[1][1][0]
