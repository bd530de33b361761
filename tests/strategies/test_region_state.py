"""What a region's forward reaches is copied within bounds, and what lies beyond them is neither advanced nor missed."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from strategies import Program, region_state
from strategies.base import compiler_settings
from strategies.region import State
from strategies.region_state import RegionState
from strategies.regions import compile_in_place
from tests.strategies.conftest import one_step

TABLE: dict[str, Any] = {}
HISTORY: list[Any] = []


@pytest.fixture(autouse=True)
def in_a_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In which little is copied."""
    monkeypatch.setattr(region_state, "MOST_BYTES", 16_384)
    TABLE.clear()
    HISTORY.clear()
    with compiler_settings({}):
        yield


class Thing:
    """An object of a user's, with another inside."""

    def __init__(self) -> None:
        self.count, self.inner = 0, {"count": 0}


class Reads(nn.Module):
    """Its forward reads what a global dictionary holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD) * torch.as_tensor(TABLE["large"])[:8].sum()


class Writes(Reads):
    def forward(self, x_BD: Tensor) -> Tensor:
        TABLE["large"][:8] += 1
        return super().forward(x_BD)


class Remembers(Reads):
    def forward(self, x_BD: Tensor) -> Tensor:
        HISTORY.append(len(HISTORY))
        return self.linear(x_BD) * len(HISTORY)


class Prints(Remembers):
    def forward(self, x_BD: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x_BD)


def stepped(module: nn.Module, steps: int = 4) -> Program:
    """Steps with the module as a region."""
    program = Program(module=nn.ModuleList([module]))
    compile_in_place(program, "0", {"backend": "eager"})
    for _ in range(steps):
        with one_step(program):
            module(torch.ones(2, 8)).sum().backward()
    return program


def of_numpy() -> Any:
    return numpy.ones(4096)


def of_torch() -> Any:
    return torch.ones(4096)


@pytest.mark.parametrize("made", [of_numpy, of_torch])
def test_what_is_too_large_to_be_copied_and_only_read_holds_up_nothing(made: Any) -> None:
    TABLE["large"] = made()
    state = RegionState(Reads())
    assert [str(one) for one in state.large] == ["TABLE.large (0 MiB)"]
    program = stepped(Reads(), steps=1)
    assert program.regions[0].state is State.CHECKING, "the first call shows that the forward leaves it alone"
    assert not next(iter(program.regions[0].of.proofs.values())).looks
    program = stepped(Reads(), steps=3)
    assert program.regions[0].state is State.COMPILED
    assert program.eager_parts == {}


@pytest.mark.parametrize("made", [of_numpy, of_torch])
def test_what_is_too_large_to_be_copied_and_written_to_is_named_and_never_advanced_twice(made: Any) -> None:
    TABLE["large"] = made()
    program = stepped(Writes())
    assert float(TABLE["large"][0]) == 1 + 4
    assert "its forward changes TABLE.large (0 MiB), too large to be copied" in program.eager_parts["0"]


def test_what_begins_to_be_written_to_later_is_found_when_it_is_checked_again() -> None:
    class WritesLater(Reads):
        def forward(self, x_BD: Tensor) -> Tensor:
            if len(x_BD) > 2:
                TABLE["large"][:8] += 1
            return super().forward(x_BD)

    TABLE["large"] = of_torch()
    module = WritesLater()
    program = stepped(module)
    assert program.regions[0].state is State.COMPILED
    with one_step(program):
        module(torch.ones(4, 8))
    assert "too large to be copied" in program.eager_parts["0"]


def test_a_large_list_that_a_forward_lengthens_is_as_long_as_in_eager() -> None:
    HISTORY.extend(range(10_000))
    assert RegionState(Remembers()).may_change == ["HISTORY (list, 10,000 entries)"]
    program = stepped(Remembers())
    assert len(HISTORY) == 10_004
    assert program.eager_parts == {}, "the compiler says that it changes, and it is copied then"


def test_where_the_compiler_does_not_see_all_the_region_runs_eager_and_names_it() -> None:
    HISTORY.extend(range(10_000))
    program = stepped(Prints())
    assert len(HISTORY) == 10_004
    assert "its forward may change HISTORY (list, 10,000 entries)" in program.eager_parts["0"]


def test_no_more_objects_are_followed_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_state, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(region_state, "MOST_OBJECTS", 100)
    HISTORY.extend(Thing() for _ in range(1000))
    HISTORY[0].inner = HISTORY  # a circle
    state = RegionState(Remembers())
    assert len(state._found) < 200
    assert state.may_change == ["HISTORY (one of more than 100 objects)"]
    HISTORY[0].count = 5
    HISTORY.pop()
    state.restore()
    assert (len(HISTORY), HISTORY[0].count) == (1000, 0)


class Endless(list[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Loads(dict[str, Any]):
    def items(self) -> Any:
        raise AssertionError("this loads a data set")


def test_containers_are_read_without_their_own_iterators() -> None:
    held = [Endless([1, 2]), Loads(a=[1])]
    HISTORY.extend(held)
    state = RegionState(Remembers())
    held[0].append(3)
    held[1]["a"].append(2)
    state.restore()
    assert (list.__len__(held[0]), held[1]["a"]) == (2, [1])


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
        ({"a": 1}, lambda held: held.update(a=2)),
        ([1, 2], lambda held: held.reverse()),
        (deque("ab"), lambda held: held.rotate(1)),
    ],
    ids=["order", "dictionary", "list", "deque"],
)
def test_what_a_small_container_holds_is_among_what_a_run_has_left(held: Any, change: Callable[[Any], Any]) -> None:
    HISTORY.append(held)
    state = RegionState(Remembers())
    before = state.left()
    change(held)
    assert state.left() != before
    state.restore()
    assert state.left() == before


def test_files_and_arrays_that_nobody_writes_to_are_not_copied(tmp_path: Path) -> None:
    file = numpy.memmap(tmp_path / "file", numpy.float64, "w+", shape=(100_000,))
    fixed = numpy.ones(100_000)
    fixed.flags.writeable = False
    TABLE.update(file=file, of_a_file=numpy.asarray(file)[10:], fixed=fixed)
    state = RegionState(Reads())
    assert (state.large, state.may_change, state.cannot_restore) == ([], [], [])


@pytest.mark.parametrize("place", [0, 5000, 99_999])
def test_a_number_that_changes_in_a_large_array_is_seen(place: int) -> None:
    TABLE.update(numpy=numpy.zeros(100_000, numpy.float32), torch=torch.zeros(50_000, 2).t())
    by_name = {one.name: one for one in RegionState(Reads()).large}
    assert list(by_name) == ["TABLE.numpy", "TABLE.torch"]
    TABLE["numpy"][place] = 1e-30
    moved = next(one for one in RegionState(Reads()).large if one.name == "TABLE.numpy")
    assert by_name["TABLE.numpy"].changed()
    TABLE["numpy"][place], TABLE["numpy"][place - 2] = 0, 1e-30
    assert moved.changed()
    assert not by_name["TABLE.torch"].changed()
    TABLE["torch"].t().view(-1)[place] = 1e-30
    assert by_name["TABLE.torch"].changed()
