"""Which steps run without a graph before they are captured, and what becomes of a capture that fails."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.compile_errors import CannotCapture
from strategies.cuda_graph.host_state import HostState, named
from strategies.cuda_graph.recorded_step import StepRecorder
from strategies.cuda_graph.step_graphs import (
    MAX_CHANGES,
    MAX_OBSERVATIONS,
    MAX_RECORDS,
    MAX_WAIT,
    CaptureFailed,
    CompiledParts,
    NotRun,
    Observation,
    StateChanges,
    StepGraphs,
)
from tests.trainer.recording import RecordingEngine


class Failing(RecordingEngine):
    """Its captures fail as long as ``failures`` are left."""

    failures = 0

    def capture(self, call: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(call)


@pytest.fixture
def engine() -> Failing:
    return Failing(nn.Linear(1, 1))


class Host:
    """What a step reads on the host, and how often it is called."""

    def __init__(self) -> None:
        self.factor, self.problems = 2.0, list[str]()
        self.calls = self.observations = 0


class Multiplies:
    """A step: adds the batch times the factor to its state; see ``StepCalls``."""

    def __init__(self, host: Host, weight: Tensor | None = None) -> None:
        self._host = host
        self._weight = torch.zeros(()) if weight is None else weight

    def run(self, batch: Any) -> Any:
        self._host.calls += 1
        self._weight += batch.sum() * self._host.factor
        return {"loss": batch * self._host.factor}

    def observe(self, batch: Any) -> tuple[Any, Observation]:
        self._host.observations += 1
        state = HostState([named(vars(self._host), "factor", self._host.factor, "")])
        return self.run(batch), Observation(state, self._host.problems)

    def before_replay(self) -> None: ...

    def after_capture(self) -> HostState:
        return HostState()

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"weight": {"weight": self._weight}}

    def scalars(self) -> Sequence[Tensor]:
        return []

    def left(self, results: Any) -> dict[str, dict[str, Tensor]]:
        return {"loss": {"loss": results["loss"]}}

    def is_plain(self) -> bool:
        return True


def multiplied(
    graphs: StepGraphs, rows: int, host: Host, *, kind: str = "step", weight: Tensor | None = None, value: float = 2.0
) -> Tensor:
    """Runs until it is done; what a hook does around it is left out."""
    while True:
        try:
            results = graphs.run(kind, torch.full((rows,), value), Multiplies(host, weight), name="step")
        except CaptureFailed:
            raise
        except NotRun:
            continue
        loss: Tensor = results["loss"]
        return loss


def doubled(graphs: StepGraphs, rows: int, *, kind: str = "step") -> Tensor:
    return multiplied(graphs, rows, Host(), kind=kind)


def compared(graphs: StepGraphs, mode: str = "on", **others: Any) -> StepRecorder:
    recorder = StepRecorder(torch.device("cpu"), mode, random=graphs.random)
    graphs.begin(repeating=recorder, **others)
    return recorder


def test_what_fails_after_it_has_run_is_not_tried_again(engine: Failing) -> None:
    graphs = StepGraphs(engine)
    for _ in range(2):
        doubled(graphs, 4)
    engine.failures = 1
    with pytest.raises(CaptureFailed, match="not permitted"):
        doubled(graphs, 4)
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
        def capture(self, call: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
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
    graphs.drop_graphs()
    gc.collect()
    assert [replay() is None for replay in replays] == [True], "the step runs eager next, and needs the memory"


def test_what_nothing_could_compare_is_observed_again_before_it_is_refused(engine: Failing) -> None:
    graphs, host = StepGraphs(engine), Host()
    host.problems = ["calls time.time"]
    for _ in range(8):
        multiplied(graphs, 4, host)
    assert (graphs.captures, host.observations) == (0, MAX_OBSERVATIONS)
    assert graphs.rejections == ["calls time.time"]


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

    def capture(self, call: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return (lambda: None), call()

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        yield []

    def random_state(self) -> None: ...

    def set_random_state(self, state: None) -> None: ...


def together(
    rows: list[list[int]],
    hosts: list[Host],
    engines: list[Any],
    calls: type[Multiplies] = Multiplies,
    mode: str = "off",
) -> list[tuple[StepGraphs, list[str]]]:
    """Run the steps of two processes side by side, each on its own thread; returns their graphs and errors."""
    wishes, barrier = [0, 0], threading.Barrier(2, timeout=200)
    found: list[tuple[StepGraphs, list[str]]] = []

    def agree(rank: int, wish: int) -> int:
        wishes[rank] = wish
        barrier.wait()
        least = min(wishes)
        barrier.wait()
        return least

    for rank, engine in enumerate(engines):
        found.append((StepGraphs(engine), []))
        if mode == "off":
            found[-1][0].begin(min_over_ranks=partial(agree, rank))
        else:
            compared(found[-1][0], mode, min_over_ranks=partial(agree, rank))

    def process(rank: int) -> None:
        graphs, errors = found[rank]
        weight = torch.zeros(())
        for number in rows[rank]:
            try:
                graphs.run("step", torch.full((number,), 2.0), calls(hosts[rank], weight), name="step")
            except CannotCapture as error:
                errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=process, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "one waits for the other for ever"
    return found


def test_processes_repeat_a_step_that_all_have_recorded() -> None:
    hosts = [Host(), Host()]
    engines = [RecordingEngine(nn.Linear(1, 1)), RecordingEngine(nn.Linear(1, 1))]
    found = together([[4] * 8, [3, 4, 4, 4, 4, 4, 4, 4]], hosts, engines, mode="on")
    for graphs, errors in found:
        assert errors == []
        assert [one.passed for one in graphs.audits] == [True]
    assert found[0][0].replays == found[1][0].replays > 2
    assert [host.calls + graphs.replays - 1 for host, (graphs, _) in zip(hosts, found, strict=True)] == [8, 8]


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
    assert found[1][0].rejections == ["calls time.time"]


def test_one_process_that_gives_up_ends_the_captures_of_all() -> None:
    hosts = [Host(), Host()]

    class Changing(Multiplies):
        def observe(self, batch: Any) -> tuple[Any, Observation]:
            results = super().observe(batch)
            if self._host is hosts[1]:
                self._host.factor += 1
            return results

    steps = MAX_CHANGES + 3
    found = together([[4] * steps, [4] * steps], hosts, [Counted(), Counted()], Changing)
    assert "another process" in found[0][1][0]
    assert "changes too often" in found[1][1][0]


# ---- graphs beside steps that ran without them -----------------------------------------------------------------------


class Faulty(RecordingEngine):
    """Its replays leave 1% more than they should: those from ``begins`` to ``ends``."""

    begins, ends = 0, 1000

    def __init__(self, weight: Tensor) -> None:
        super().__init__(nn.Linear(1, 1))
        self._weight, self.count = weight, 0

    def capture(self, call: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
        replay, results = super().capture(call)

        def wrong() -> None:
            before = self._weight.clone()
            replay()
            if self.begins <= self.count < self.ends:
                self._weight += 0.01 * (self._weight - before)
            self.count += 1

        return wrong, results


def test_a_fault_of_one_replay_is_looked_at_again_and_forgotten() -> None:
    host, weight = Host(), torch.tensor(1.0)
    engine = Faulty(weight)
    engine.ends = 2
    graphs = StepGraphs(engine)
    compared(graphs)
    for step in range(1, 10):
        multiplied(graphs, 4, host, weight=weight)
        assert float(weight) == 1.0 + step * 16.0
    assert [one.passed for one in graphs.audits] == [False, True]
    assert graphs.replays > 4


def test_audits_go_from_graph_to_graph(engine: Failing) -> None:
    graphs, hosts, weight = StepGraphs(engine), {4: Host(), 3: Host()}, torch.tensor(1.0)
    compared(graphs)
    for _ in range(10):
        for rows, host in hosts.items():
            multiplied(graphs, rows, host, weight=weight)
    audited = []
    for _ in range(4):
        graphs.audit_next()
        for rows in (4, 4, 3):
            multiplied(graphs, rows, hosts[rows], weight=weight)
        audited.append(graphs.audits[-1].name)
    assert sorted(audited) == ["step on 3", "step on 3", "step on 4", "step on 4"]
    assert all(one.passed for one in graphs.audits)


@pytest.mark.parametrize(("mode", "count"), [("on", 1), ("strict", 2)])
def test_each_graph_is_proven_with_strict_and_else_the_first(mode: str, count: int, engine: Failing) -> None:
    graphs, hosts, weight = StepGraphs(engine), {4: Host(), 3: Host()}, torch.tensor(1.0)
    compared(graphs, mode)
    for _ in range(10):
        for rows, host in hosts.items():
            multiplied(graphs, rows, host, weight=weight)
    assert graphs.captures == 2
    assert [one.first for one in graphs.audits] == [True] * count


def test_large_copies_lie_on_the_host_and_without_room_nothing_is_captured(engine: Failing) -> None:
    for free, where in (((0.0, math.inf), "host"), ((math.inf, 0.0), "device")):
        graphs, host, weight = StepGraphs(engine), Host(), torch.tensor(1.0)
        compared(graphs).room = lambda device, free=free: free
        for _ in range(6):
            multiplied(graphs, 4, host, weight=weight)
        parity = graphs.facts()["parity"]
        assert (parity["verdict"], parity["copies_on"], float(weight)) == ("passed", where, 1.0 + 6 * 16.0)
    graphs = StepGraphs(engine)
    compared(graphs).room = lambda device: (0.0, 0.0)
    for _ in range(2):
        multiplied(graphs, 4, Host(), weight=torch.tensor(1.0))
    with pytest.raises(StateChanges, match="parity=off captures without comparing"):
        multiplied(graphs, 4, Host(), weight=torch.tensor(1.0))


def test_a_recorded_step_whose_like_does_not_come_again_is_dropped(engine: Failing) -> None:
    graphs, hosts, weight = StepGraphs(engine), {4: Host(), 3: Host()}, torch.tensor(1.0)
    compared(graphs)
    for _ in range(2):
        multiplied(graphs, 4, hosts[4], weight=weight)
    for _ in range(MAX_WAIT + 4):
        multiplied(graphs, 3, hosts[3], weight=weight)
    assert graphs.captures == 1
    assert [one.name for one in graphs.audits] == ["step on 3"]
    assert MAX_RECORDS > 1


def test_what_a_check_within_a_step_waits_for_is_none_of_the_steps(engine: Failing) -> None:
    class Checked(CompiledParts):
        """Compiled code that is compared with eager in some steps."""

        now = True

        def steady(self) -> bool:
            return not self.now

    class Reads(Multiplies):
        def run(self, batch: Any) -> Any:
            if parts.now:
                float(batch.sum())
            return super().run(batch)

    graphs, host, parts = StepGraphs(engine), Host(), Checked()
    graphs.begin(parts=parts)
    for step in range(12):
        parts.now = step < 5
        graphs.run("step", torch.ones(4), Reads(host), name="step")
    assert graphs.rejections == []
    assert graphs.captures == 1


def test_a_step_left_out_of_a_rejected_shape_leaves_captured_modules_out_as_well(engine: Failing) -> None:
    class Reads(Multiplies):
        def run(self, batch: Any) -> Any:
            return super().run(batch * float(batch.sum()))

    graphs, host, replayed = StepGraphs(engine), Host(), list[bool]()

    def beside(for_good: bool) -> AbstractContextManager[None]:
        replayed.append(for_good)
        return nullcontext()

    graphs.begin(beside=beside)
    for _ in range(8):
        graphs.run("step", torch.ones(4), Reads(host), name="step")
    assert replayed[-1], "its modules may be replayed in a step that stays Python"
    with graphs.left_out():
        graphs.run("step", torch.ones(4), Reads(host), name="step")
    assert not replayed[-1]
