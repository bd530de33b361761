"""The one comparer: what counts as a difference, and what is rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from strategies.tolerance import MULTIPLES, SINGLE, TF32, UNITS, compare, exceeding, rounding_unit


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(tensor: Tensor, relative: float, seed: int = 1) -> Tensor:
    """Each element off by about ``relative`` of itself, up or down."""
    sign = drawn(*tensor.shape, seed=seed).sign()
    return tensor * (1 + relative * sign)


def test_rounding_passes_and_the_largest_difference_comes_first() -> None:
    exact = {"one": drawn(64, 64), "two": drawn(32)}
    eager = {name: rounded(one, 1e-6) for name, one in exact.items()}
    seen = {name: rounded(one, 1e-6, seed=2) for name, one in exact.items()}
    assert exceeding(compare("gradient", eager, seen, exact)) == []
    wrong = {"one": eager["one"] * 1.01, "two": eager["two"] * 1.5}
    assert [one.name for one in exceeding(compare("gradient", eager, wrong, exact))] == ["two", "one"]


@pytest.mark.parametrize("noise", [1e-7, 1e-3], ids=["fp32", "bf16"])
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_common_factor_is_found_below_the_noise(noise: float, factor: float) -> None:
    exact = {"weight": drawn(256, 256)}
    eager = {"weight": rounded(exact["weight"], noise)}
    unit = SINGLE if noise < 1e-5 else UNITS["bf16"] / 8
    assert exceeding(compare("gradient", eager, {"weight": eager["weight"] * factor}, exact, unit=unit))


def test_what_is_zero_in_exact_arithmetic_is_all_noise() -> None:
    exact = {"weight": drawn(64, 64), "key.bias": torch.zeros(64)}
    eager = {"weight": rounded(exact["weight"], 1e-6), "key.bias": 1e-7 * drawn(64, seed=3)}
    seen = {"weight": rounded(exact["weight"], 1e-6, seed=4), "key.bias": 1e-7 * drawn(64, seed=5)}
    assert exceeding(compare("gradient", eager, seen, exact)) == []
    seen["key.bias"] = 0.1 * drawn(64, seed=5)
    (found,) = exceeding(compare("gradient", eager, seen, exact))
    assert found.name == "key.bias"


def test_what_is_equal_to_the_last_bit_gives_the_others_their_scale() -> None:
    zeros, rounding = torch.zeros(64), 1e-7 * drawn(64)
    large = {"weight": 1e3 * drawn(64, 64)}
    assert exceeding(compare("gradient", {"bias": zeros, **large}, {"bias": rounding, **large})) == []
    assert exceeding(compare("gradient", {"bias": zeros}, {"bias": rounding}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_counts_where_eager_has_one(value: float) -> None:
    eager = {"loss": drawn(8)}
    seen = {"loss": eager["loss"].clone()}
    seen["loss"][3] = value
    (found,) = exceeding(compare("loss", eager, seen))
    assert not found.share <= 1
    assert exceeding(compare("loss", seen, {"loss": seen["loss"].clone()})) == [], "eager has it, too"


def test_what_one_side_lacks_or_has_in_another_shape_is_infinitely_far_away() -> None:
    eager = {"one": drawn(4), "two": drawn(4), "three": drawn(4)}
    found = compare("weight", eager, {"one": drawn(4), "two": drawn(2), "four": drawn(4)})
    assert {one.name for one in found if one.difference == math.inf} == {"two", "three", "four"}
    assert compare("weight", {}, {}) == []
    assert compare("weight", {"empty": drawn(0)}, {"empty": drawn(0)}) == []


def test_stored_values_are_judged_by_how_far_they_moved() -> None:
    starts = {"weight": drawn(64, 64)}
    step = 1e-3 * drawn(64, 64, seed=1)
    eager = {"weight": starts["weight"] + step}
    seen = {"weight": starts["weight"] + 1.05 * step}
    exact = {"weight": starts["weight"] + rounded(step, 1e-5)}
    assert exceeding(compare("weight", eager, seen, exact, starts=starts)), "5% of a step"
    moved = {"weight": starts["weight"] + rounded(step, 1e-5, seed=4)}
    assert exceeding(compare("weight", eager, moved, exact, starts=starts)) == []
    once_rounded = {"weight": eager["weight"] * (1 + 2.0**-24)}
    assert exceeding(compare("weight", eager, once_rounded, exact, starts=starts)) == []
    assert exceeding(compare("weight", eager, {"weight": starts["weight"]}, exact, starts=starts)), "it did not move"


@pytest.mark.parametrize(("rows", "times"), [(7, 4.5), (8, 3.0)], ids=["few elements", "more"])
def test_strict_allows_half_as_much(rows: int, times: float) -> None:
    exact = {"one": drawn(rows, 8)}
    eager = {"one": rounded(exact["one"], 1e-5)}
    noise = (eager["one"] - exact["one"]).norm() / eager["one"].numel() ** 0.5
    seen = {"one": eager["one"] + times * noise * drawn(rows, 8, seed=6).sign()}
    shares = [compare("output", eager, seen, exact, multiple=MULTIPLES[mode])[0].share for mode in ("on", "strict")]
    assert shares[0] < 1 < shares[1]
    assert shares[1] == pytest.approx(2 * shares[0])


def test_a_sparse_gradient_is_compared() -> None:
    dense = torch.zeros(8, 4).index_fill(0, torch.tensor([2]), 1.0)
    assert exceeding(compare("gradient", {"one": dense.to_sparse()}, {"one": dense.to_sparse()})) == []
    assert exceeding(compare("gradient", {"one": dense.to_sparse()}, {"one": 2 * dense}))


@pytest.mark.parametrize(
    ("precision", "device", "module", "unit"),
    [
        ("32-true", "cpu", nn.Linear(1, 1), SINGLE),
        ("bf16-mixed", "cpu", nn.Linear(1, 1), 2.0**-9),
        ("bf16-true", "cuda", nn.Linear(1, 1), 2.0**-9),
        ("16-mixed", "cuda", nn.Linear(1, 1), 2.0**-12),
        ("64-true", "cpu", nn.Linear(1, 1), 2.0**-53),
        ("32-true", "cuda", nn.Conv2d(1, 1, 1), TF32),
        ("32-true", "cuda", nn.LSTM(1, 1), TF32),
    ],
)
def test_the_rounding_of_an_operation_is_known(precision: str, device: str, module: nn.Module, unit: float) -> None:
    assert rounding_unit(precision, torch.device(device), module) == unit


def test_matrix_products_may_round_to_tf32_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, module = torch.device("cuda"), nn.Linear(1, 1)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert rounding_unit("32-true", cuda, module) == SINGLE
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert rounding_unit("32-true", cuda, module) == TF32
