"""Each planted case is found at its line, with its fix; what torch handles by now is no alarm."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts.explain import Explanation
from tests.explain import planted
from tests.explain.planted import like
from trainer.telemetry.source import Line

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
Look = Callable[..., Explanation]
FILE = str(Path(planted.__file__).resolve())


def line_of(kind: type[nn.Module]) -> int:
    """Number of the line that says ``# planted``."""
    lines, first = inspect.getsourcelines(kind)
    return next(first + offset for offset, line in enumerate(lines) if "# planted" in line)


def at(line: Line | None) -> tuple[str, int]:
    assert line is not None
    return str(Path(line.file).resolve()), line.number


@pytest.mark.parametrize(
    ("kind", "says", "fix"),
    [
        (planted.Prints, "print", "reorderable_logging_functions"),
        (planted.Item, "item", "capture_scalar_outputs"),
        (planted.Branch, "Data-dependent branching", "torch.where"),
        (planted.Extension, "zlib.crc32", "custom_op"),
        (planted.Hook, "item", "capture_scalar_outputs"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_break_is_found_at_its_line_with_its_fix(looked: Look, kind: type[nn.Module], says: str, fix: str) -> None:
    explanation = looked(kind())
    found = [each for each in explanation.breaks if at(each.where) == (FILE, line_of(kind))]
    assert found, [str(each.where) for each in explanation.breaks]
    one = next(each for each in found if says in f"{each.kind} {each.reason}")
    assert fix in one.fix
    assert one.where is not None
    assert "# planted" in (one.where.code or "")
    assert one.region == kind.__name__
    if kind in (planted.Prints, planted.Branch, planted.Extension):
        assert explanation.recompiles == [], "a break alone is no recompile"


def test_a_number_that_a_break_leaves_behind_is_blamed_on_the_break(looked: Look) -> None:
    (one,) = looked(planted.Item()).unexpected
    assert one.kind == "value carried over a break"
    assert "goes away with the graph break" in one.fix
    assert at(one.where) == (FILE, line_of(planted.Item))


@pytest.mark.parametrize(
    ("kind", "changed", "what", "changes"),
    [
        (planted.EvalInside, "training flag", "dropout", ["True -> ?"]),
        (planted.ChangingFloat, "number", "self.scale", ["0.5 -> ?"]),
        (planted.GlobalVariable, "global variable", "FACTOR", ["1.0 -> ?"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_value_that_changes_is_found_with_what_it_was(
    looked: Look, kind: type[nn.Module], changed: str, what: str, changes: list[str]
) -> None:
    explanation = looked(kind())
    assert explanation.breaks == []
    (one,) = explanation.unexpected
    assert (one.kind, one.changes) == (changed, changes)
    assert what in one.what
    assert at(one.where) == (FILE, line_of(kind))
    assert one.fix


def test_a_closure_over_what_changes_is_found_at_the_line_that_reads_it(looked: Look) -> None:
    (one,) = looked(planted.closure()).unexpected
    assert (one.kind, one.what, one.changes) == ("number", "factor", ["1.0 -> ?"])
    lines = Path(FILE).read_text().splitlines()
    assert at(one.where) == (FILE, 1 + next(index for index, line in enumerate(lines) if "# planted closure" in line))


def test_a_closure_in_an_attribute_is_found_where_torch_guards_it(looked: Look) -> None:
    found = looked(planted.ClosureAttribute()).unexpected
    if TORCH < (
        2,
        15,
    ):  # no guard: compiled code goes on with the first value, which only a comparison with eager shows
        assert found == []
    else:
        assert [(one.what, at(one.where)) for one in found] == [("factor", (FILE, line_of(planted.ClosureAttribute)))]


@pytest.mark.parametrize(
    ("batches", "changed", "changes"),
    [
        (like(2, 2, 2, 3), "shape", ["2 -> 3"]),
        ([*like(2, 2, 2), *(batch.double() for batch in like(2))], "dtype", ["Float -> Double"]),
    ],
    ids=["shape", "dtype"],
)
def test_a_batch_that_differs_is_found_at_the_function_that_takes_it(
    looked: Look, batches: list[Any], changed: str, changes: list[str]
) -> None:
    class AnyType(planted.Planted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.to(self.linear.weight.dtype))

    (one,) = looked(AnyType(), batches).unexpected
    assert (one.kind, one.what.split(",")[0], one.changes) == (changed, "tensor x", changes)
    assert at(one.where) == (str(Path(__file__).resolve()), AnyType.forward.__code__.co_firstlineno)
    assert one.where is not None
    assert one.where.function == "forward"


def test_keys_that_change_are_found_with_the_number_of_items(looked: Look) -> None:
    one_key, two_keys = {"a": like(2)[0]}, {"a": like(2)[0], "b": like(2)[0]}
    (one,) = looked(planted.ChangingKeys(), [one_key, two_keys]).unexpected
    assert (one.kind, one.what, one.changes) == ("length", "x", ["1 -> ? items"])
    assert at(one.where)[0] == FILE


@pytest.mark.parametrize("kind", [planted.NumPy, planted.InPlaceOnView], ids=lambda kind: kind.__name__)
def test_what_torch_traces_by_now_is_no_alarm(looked: Look, kind: type[nn.Module]) -> None:
    explanation = looked(kind())
    assert explanation.problems == 0
    (graphs,) = explanation.graphs
    assert (graphs.region, graphs.paths, graphs.forward) == (kind.__name__, ["planted"], 1)


def test_an_error_that_eager_does_not_raise_is_a_failure_of_the_compiled_code(looked: Look) -> None:
    explanation = looked(planted.Percentile())
    if explanation.failures:  # up to torch 2.15
        (failure,) = explanation.failures
        assert failure.startswith("TypeError: ")
        assert f"{FILE}:{line_of(planted.Percentile)} in " in failure
        assert "eager raises nothing on this batch" in failure
    with pytest.raises(TypeError, match="mine"):
        looked(planted.RaisesInEager())


def test_a_numpy_function_without_a_counterpart_is_a_break(looked: Look) -> None:
    explanation = looked(planted.NumPyObject())
    assert (FILE, line_of(planted.NumPyObject)) in [at(each.where) for each in explanation.breaks]
