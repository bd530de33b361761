"""Eager draws the random numbers of Inductor's code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strategies.inductor_random import InductorDraws, NotAligned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def attention(x_BSD: Tensor) -> Tensor:
    heads_BNSD = x_BSD.unflatten(-1, (4, 8)).transpose(1, 2)
    # A kernel of the device's own draws by itself, for both.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return functional.scaled_dot_product_attention(heads_BNSD, heads_BNSD, heads_BNSD, dropout_p=0.2)


def drop_path(x_BSD: Tensor) -> Tensor:
    return x_BSD * torch.floor(0.7 + torch.rand((len(x_BSD), 1, 1), dtype=x_BSD.dtype, device=x_BSD.device))


def drop_rows(x_BSD: Tensor) -> Tensor:
    return x_BSD * x_BSD.new_empty(len(x_BSD), 1, 1).bernoulli_(0.7)


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.1),
    "of a transposed tensor": lambda x: functional.dropout(x.transpose(0, 1), 0.1).sin(),
    "one after another": lambda x: functional.dropout(functional.dropout(x, 0.1).sin(), 0.5),
    "channels": lambda x: functional.dropout1d(x, 0.3),
    "attention": attention,
    "drop path": drop_path,
    "Bernoulli": drop_rows,
    "uniform": lambda x: x * torch.rand_like(x) + torch.empty_like(x).uniform_(0.1, 0.4),
    "normal": lambda x: x * torch.randn_like(x) + torch.randn(x.shape, device=x.device),
    "Gumbel": functional.gumbel_softmax,
    "several": lambda x: functional.dropout(x, 0.1) * torch.rand_like(x) + drop_rows(x) + torch.randn_like(x),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DRAWING)
def test_numbers_are_those_of_compiled_code(name: str, device: str) -> None:
    call, x = DRAWING[name], torch.randn(8, 16, 32, device=device)
    compiled = torch.compile(call)
    compiled(x)
    torch.manual_seed(3)
    expected = compiled(x)
    with InductorDraws() as counting:
        call(x)
    for draws in (InductorDraws(counting.counted), InductorDraws(counting.counted)):
        torch.manual_seed(3)
        with draws:
            seen = call(x)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    if not draws.passed:
        with InductorDraws(drawn=draws.drawn):  # whatever the generators' state is
            torch.testing.assert_close(call(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_of_lower_precision_are_those_of_compiled_code(dtype: torch.dtype, device: str) -> None:
    """On CPUs torch 2.11 compares with the rate as it is, 2.15 with the rate in that precision."""
    x = torch.ones(64, 64, 64, device=device, dtype=dtype)
    compiled = torch.compile(lambda x: functional.dropout(x, 0.1))
    compiled(x)
    torch.manual_seed(3)
    expected = compiled(x) != 0
    torch.manual_seed(3)
    with InductorDraws({x.device: 1}):
        seen = functional.dropout(x, 0.1) != 0
    assert float((seen != expected).float().mean()) <= (2e-4 if device == "cpu" else 0.0)


def test_what_is_not_known_is_said() -> None:
    with InductorDraws(), pytest.raises(NotAligned):
        torch.randint(5, (3,))
