"""A check: what it has to find, what it has to let pass, and that nothing of it is left behind."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.region_check import check_call
from strategies.tolerance import UNITS

BF16 = UNITS["bf16"]


class Attention(nn.Module):
    """Its key's bias has a gradient that is zero in exact arithmetic."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        normed = self.norm(x_BSD)
        heads = [one(normed).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x_BSD + self.dropout(self.out(mixed))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.norm(self.convolution(x_BCHW)).relu()


class Experts(nn.Module):
    """Sends each row to one of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 3), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        chosen_BS = self.router(x_BSD).argmax(-1)
        every = torch.stack([expert(x_BSD) for expert in self.experts], -2)
        return every.gather(-2, chosen_BS[..., None, None].expand(*chosen_BS.shape, 1, 64)).squeeze(-2), chosen_BS


class WritesToInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x_BSD: Tensor, cache: dict[str, Tensor]) -> Tensor:
        cache["sum"].add_(x_BSD.detach().sum(1))
        return self.linear(x_BSD) + cache["sum"][:, None]


class Encoder(nn.Module):
    """Returns an object of a library, and appends to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x_BSD: Tensor, losses: list[Tensor]) -> torch.distributions.Normal:
        losses.append(self.scale(x_BSD).square().mean())
        return torch.distributions.Normal(self.mean(x_BSD), self.scale(x_BSD).exp())

    def off(self, x_BSD: Tensor, losses: list[Tensor], *, mean: float = 1.0, loss: float = 1.0) -> Any:
        found = self.forward(x_BSD, losses)
        losses[-1] = losses[-1] * loss
        return torch.distributions.Normal(found.mean * mean, found.scale)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)
        self.two.weight = self.one.weight

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.two(self.one(x_BSD).tanh())


def text() -> Tensor:
    return torch.randn(4, 16, 64, requires_grad=True)


def images() -> Tensor:
    return torch.randn(4, 3, 12, 12)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def compiled(module: nn.Module, backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(module.forward, backend=backend)


PASSING: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "attention": lambda: (Attention(), (text(),)),
    "attention with dropout": lambda: (Attention(dropout=0.3), (text(),)),
    "convolution": lambda: (Convolution(), (images(),)),
    "experts": lambda: (Experts(), (text(),)),
    "GRU": lambda: (nn.GRU(64, 32, batch_first=True), (text(),)),
    "inputs written to": lambda: (WritesToInputs(), (text(), {"sum": torch.zeros(4, 64)})),
    "results in objects": lambda: (Encoder(), (text(), [])),
    "tied weights": lambda: (Tied(), (text(),)),
    "embedding": lambda: (nn.Embedding(50, 16), (torch.randint(0, 50, (4, 8)),)),
    "evaluation": lambda: (Convolution().eval(), (images(),)),
    "frozen": lambda: (Attention().requires_grad_(False), (text(),)),
    "a number": lambda: (nn.Sequential(nn.Linear(64, 1), nn.Flatten(0)), (text(),)),
}


@pytest.mark.parametrize("lowered", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PASSING)
def test_a_compiler_that_does_what_eager_does_passes(name: str, lowered: bool) -> None:
    module, args = PASSING[name]()
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        outcome = check_call(module, compiled(module), args, {}, unit=BF16 if lowered else 2.0**-24)
    assert (outcome.error, outcome.skipped, outcome.wrong) == (None, None, [])
    assert outcome.differences


class Scaled(torch.autograd.Function):
    """The identity; gradients come out larger by a factor."""

    @staticmethod
    def forward(context: Any, x: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient * context.factor, None


def with_weights(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> Callable[..., Any]:
    """Its call with other weights in their place."""

    def call(*args: Any) -> Any:
        weights = {name: change(name, one) for name, one in module.named_parameters()}
        return torch.func.functional_call(module, weights, args)

    return call


FAULTS: dict[str, tuple[str, Callable[[Any], Callable[..., Any]], str]] = {
    "one weight frozen": (
        "attention",
        lambda m: with_weights(m, lambda name, one: one.detach() if name == "norm.bias" else one),
        "gradient",
    ),
    "the input's gradient lost": ("attention", lambda m: lambda x: m.forward(x.detach()), "gradient of"),
    "a constant in the output": ("attention", lambda m: lambda x: m.forward(x) + 1e-3, "output"),
    "no output where eager has one": ("attention", lambda m: lambda x: (), "output"),
    "in another shape": ("attention", lambda m: lambda x: m.forward(x).flatten(0, 1), "output"),
    "other rows chosen": ("experts", lambda m: lambda x: (m.forward(x)[0], (m.forward(x)[1] + 1) % 3), "output"),
    "an output in an object": ("results in objects", lambda m: partial(m.off, mean=1.01), "output"),
    "a gradient of one": ("results in objects", lambda m: partial(m.off, mean=1.01), "gradient"),
    "a tensor in a list that it is given": ("results in objects", lambda m: partial(m.off, loss=1.01), "output"),
    "an input not written to": (
        "inputs written to",
        lambda m: lambda x, cache: m.forward(x, {name: one.clone() for name, one in cache.items()}),
        "written",
    ),
}
"""What ``tests/promises/faults.py`` does not plant into a training."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    name, plant, kind = FAULTS[fault]
    module, args = PASSING[name]()
    outcome = check_call(module, plant(module), args, {})
    assert outcome.error is None
    assert any(one.kind.startswith(kind) for one in outcome.wrong), outcome.wrong


class _AnotherMask(torch.autograd.Function):
    """A dropout whose backward draws anew."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, again: bool) -> Tensor:
        ctx.mask = torch.rand_like(one) >= 0.3
        ctx.again = again
        return one * ctx.mask / 0.7

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mask = torch.rand_like(gradient) >= 0.3 if ctx.again else ctx.mask
        return gradient * mask / 0.7, None


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_that_draws_another_mask_than_its_forward_is_found(again: bool) -> None:
    module = Attention(dropout=0.3)
    other = copy.deepcopy(module)
    other.dropout.forward = lambda one: _AnotherMask.apply(one, again)  # type: ignore[method-assign]

    def call(x_BSD: Tensor) -> Tensor:
        torch.rand(3)  # its numbers are not eager's
        return torch.func.functional_call(other, dict(module.named_parameters()), (x_BSD,))

    outcome = check_call(module, call, (text(),), {})
    assert outcome.how == "seeds"
    assert [one.name for one in outcome.wrong] == (["by its own forward"] if again else [])


class WritesToOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x_BSD: Tensor, left: Tensor, right: Tensor) -> Tensor:
        left.mul_(2)
        return self.linear(x_BSD) * (left + right)


@pytest.mark.parametrize("shared", [False, True])
def test_arguments_that_share_memory_share_it_in_a_check(shared: bool) -> None:
    numbers = torch.randn(80)
    left, right = (numbers[:64], numbers[16:]) if shared else (numbers[:64].clone(), numbers[16:].clone())
    module = WritesToOne()

    def unaware(x_BSD: Tensor, left: Tensor, right: Tensor) -> Tensor:
        before = right.clone()
        left.mul_(2)
        return module.linear(x_BSD) * (left + before)

    kept = numbers.clone()
    outcome = check_call(module, unaware, (text(), left, right), {})
    assert bool(outcome.wrong) == shared
    assert torch.equal(numbers, kept)
    assert not check_call(module, module.forward, (text(), left, right), {}).wrong


class CastsItself(nn.Module):
    """In bfloat16 within a model of single precision; ``alone``: by a kernel that takes no other numbers."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.linear, self.alone = nn.Linear(64, 64), alone

    def forward(self, x_BSD: Tensor) -> Tensor:
        hidden = self.linear(x_BSD).bfloat16()
        assert not self.alone or hidden.dtype == torch.bfloat16
        return x_BSD + ((hidden * 1.1 + 0.3).tanh() * hidden.sigmoid()).float()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_region_that_lowers_its_precision_itself_may_be_computed_with_more_digits(factor: float, alone: bool) -> None:
    module = CastsItself(alone)

    def fused(x_BSD: Tensor) -> Tensor:  # as Inductor does: casts between operations are left out
        hidden = module.linear(x_BSD).bfloat16().float()
        return x_BSD + ((hidden * 1.1 + 0.3).tanh() * hidden.sigmoid()).bfloat16().float() * factor

    outcome = check_call(module, fused, (text(),), {})
    assert outcome.how == ("rounding" if alone else "exact")
    assert bool(outcome.wrong) == (factor > 1)


@pytest.mark.slow
def test_beside_dropout_a_small_fault_is_found_once_masks_have_agreed() -> None:
    module, x = Attention(dropout=0.3), text()
    optimized = compiled(module, "inductor")
    options: dict[str, Any] = {"draws_alike": False, "drew_as_inductor": True}
    assert check_call(module, optimized, (x,), {}, **options).wrong == []
    outcome = check_call(module, lambda x: Scaled.apply(optimized(x), 1.01), (x,), {}, **options)
    assert outcome.how == "draws"
    assert {one.kind for one in outcome.wrong} == {"gradient", "gradient of"}


def test_what_eager_does_not_know_either_is_no_fault() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x_BSD: Tensor) -> Tensor:
            return self.linear(x_BSD) / (x_BSD[..., :1] > 0)  # infinities

    module = Divides()
    assert check_call(module, compiled(module), (text(),), {}).wrong == []


def test_what_does_not_compile_is_an_error_and_what_eager_refuses_is_raised() -> None:
    def fails(x_BSD: Tensor) -> Tensor:
        raise RuntimeError("the compiler's own")

    module = Attention()
    outcome = check_call(module, fails, (text(),), {})
    assert isinstance(outcome.error, RuntimeError)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        check_call(module, compiled(module), (torch.randn(2, 3, 5),), {})


def test_too_little_memory_is_said() -> None:
    def fails(x_BSD: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    outcome = check_call(Attention(), fails, (text(),), {})
    assert outcome.skipped == "there is too little memory to run it twice"


# ---- nothing is left behind ------------------------------------------------------------------------------------------


def test_hooks_for_saved_tensors_do_not_see_it() -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    module = Attention()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outcome = check_call(module, module._call_impl, (text(),), {})
        assert seen == []
        module(text())
        assert seen, "they are there again"
    assert outcome.wrong == []


def test_outputs_are_let_go_with_the_check() -> None:
    """Not once garbage is collected: they are as large as the region's own, and hold autograd's nodes of its weights,
    which no capture may meet."""

    @dataclasses.dataclass
    class Output:
        hidden: Tensor
        by_name: dict[str, Any]

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 7)

        def forward(self, x_BD: Tensor) -> Output:
            hidden_BD = self.layer(x_BD)
            return Output(hidden_BD, {"twice": 2 * hidden_BD, "rows": len(x_BD)})

    def held() -> int:
        found = [one for one in gc.get_objects() if type(one) is Tensor and one.shape == (3, 7)]
        return sum(one.grad_fn is not None for one in found)

    module = Returns()
    gc.collect()
    gc.disable()
    try:
        kept = module(torch.randn(3, 5))
        assert held() == 2
        del kept
        outcome = check_call(module, module._call_impl, (torch.randn(3, 5),), {})
        assert (outcome.skipped, outcome.error) == (None, None)
        assert held() == 0
    finally:
        gc.enable()
