"""Each planted case is found at its line, with torch's hint; what torch handles by now is no alarm."""

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
from trainer.telemetry.source_lines import line_at

Look = Callable[..., Explanation]
FILE = str(Path(planted.__file__).resolve())


def line_of(kind: type[nn.Module]) -> int:
    """Number of the line that says ``# planted``."""
    lines, first = inspect.getsourcelines(kind)
    return next(first + offset for offset, line in enumerate(lines) if "# planted" in line)


def at(where: str | None) -> tuple[str, int]:
    line = line_at(where)
    return str(Path(line.file).resolve()), line.number


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (planted.Prints, "reorderable_logging_functions"),
        (planted.Branch, "torch.where"),
        (planted.Hook, "capture_scalar_outputs"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_break_is_found_at_its_line_with_torchs_hint(looked: Look, kind: type[nn.Module], hint: str) -> None:
    explanation = looked(kind())
    found = [each for each in explanation.breaks if at(each.where) == (FILE, line_of(kind))]
    assert found, [each.where for each in explanation.breaks]
    (one,) = found
    assert hint in "".join(one.texts)
    if kind in (planted.Prints, planted.Branch):
        assert explanation.recompiles == [], "a break alone is no recompile"


@pytest.mark.parametrize(
    ("kind", "guard"),
    [
        (planted.EvalInside, "dropout"),
        (planted.GlobalVariable, "FACTOR"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_value_that_changes_is_found_at_its_line(looked: Look, kind: type[nn.Module], guard: str) -> None:
    explanation = looked(kind())
    assert explanation.breaks == []
    (one,) = explanation.unexpected
    assert guard in one.texts[0]
    assert at(one.where) == (FILE, line_of(kind))


def test_a_closure_over_what_changes_is_found_at_the_line_that_reads_it(looked: Look) -> None:
    (one,) = looked(planted.closure()).unexpected
    assert "factor" in one.texts[0]
    lines = Path(FILE).read_text().splitlines()
    assert at(one.where) == (FILE, 1 + next(index for index, line in enumerate(lines) if "# planted closure" in line))


def test_a_closure_in_an_attribute_is_found_where_torch_guards_it(looked: Look) -> None:
    found = [at(one.where) for one in looked(planted.ClosureAttribute()).unexpected]
    # Before 2.15 torch leaves the guard out, unless it is kept from skipping those of unchanged dictionaries.
    assert found == [(FILE, line_of(planted.ClosureAttribute))]


@pytest.mark.parametrize(
    ("batches", "guard"),
    [
        (like(2, 2, 2, 3), "size mismatch at index 0. expected 2, actual 3"),
        ([*like(2, 2, 2), *(batch.double() for batch in like(2))], "dtype mismatch. expected Float, actual Double"),
    ],
    ids=["shape", "dtype"],
)
def test_a_batch_that_differs_is_found_at_the_function_that_takes_it(
    looked: Look, batches: list[Any], guard: str
) -> None:
    class AnyType(planted.Planted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.to(self.linear.weight.dtype))

    (one,) = looked(AnyType(), batches).unexpected
    assert guard in one.texts[0]
    assert at(one.where) == (str(Path(__file__).resolve()), AnyType.forward.__code__.co_firstlineno)


def test_keys_that_change_are_found(looked: Look) -> None:
    one_key, two_keys = {"a": like(2)[0]}, {"a": like(2)[0], "b": like(2)[0]}
    (one,) = looked(planted.ChangingKeys(), [one_key, two_keys]).unexpected
    assert "len(args[0])" in one.texts[0]
    assert at(one.where)[0] == FILE


@pytest.mark.parametrize("kind", [planted.NumPy, planted.InPlaceOnView], ids=lambda kind: kind.__name__)
def test_what_torch_traces_by_now_is_no_alarm(looked: Look, kind: type[nn.Module]) -> None:
    assert looked(kind()).problems == 0
