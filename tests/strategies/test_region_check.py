"""A check: what it has to find, what it has to let pass, and that nothing of it is left behind."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.region_check import check_call
from strategies.tolerance import UNITS
from tests.sweep import some

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


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["attention with dropout", "convolution", "experts", "attention"], every=2))
def test_inductor_passes(name: str) -> None:
    module, args = PASSING[name]()
    outcome = check_call(module, compiled(module, "inductor"), args, {}, draws_alike=False)
    assert (outcome.error, outcome.skipped, outcome.wrong) == (None, None, [])
    assert outcome.how == ("draws" if "dropout" in name else "exact")


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


def without_statistics(module: Convolution) -> Callable[..., Any]:
    norm = module.norm
    return lambda x: functional.batch_norm(
        module.convolution(x), None, None, norm.weight, norm.bias, training=True
    ).relu()


def one_nan(module: nn.Module) -> Callable[..., Any]:
    def call(x_BSD: Tensor) -> Tensor:
        hole = torch.zeros(x_BSD.shape, dtype=torch.bool)
        hole[0, 0, 3] = True
        return module.forward(x_BSD).masked_fill(hole, float("nan"))

    return call


FAULTS: dict[str, tuple[str, Callable[[Any], Callable[..., Any]], str]] = {
    "output 0.1% off": ("attention", lambda m: lambda x: m.forward(x) * 1.001, "output"),
    "a constant in the output": ("attention", lambda m: lambda x: m.forward(x) + 1e-3, "output"),
    "gradients 1% off": ("attention", lambda m: lambda x: Scaled.apply(m.forward(x), 1.01), "gradient"),
    "half a bias's gradient": (
        "attention",
        lambda m: with_weights(m, lambda name, one: Scaled.apply(one, 0.5) if name == "out.bias" else one),
        "gradient",
    ),
    "weights frozen": ("attention", lambda m: with_weights(m, lambda name, one: one.detach()), "gradient"),
    "one weight frozen": (
        "attention",
        lambda m: with_weights(m, lambda name, one: one.detach() if name == "norm.bias" else one),
        "gradient",
    ),
    "the input's gradient lost": ("attention", lambda m: lambda x: m.forward(x.detach()), "gradient of"),
    "a NaN": ("attention", one_nan, "output"),
    "no output where eager has one": ("attention", lambda m: lambda x: (), "output"),
    "in another shape": ("attention", lambda m: lambda x: m.forward(x).flatten(0, 1), "output"),
    "statistics not written": ("convolution", without_statistics, "buffer"),
    "evaluation in training": (
        "convolution",
        lambda m: (
            lambda x: functional.batch_norm(
                m.convolution(x), m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias
            ).relu()
        ),
        "output",
    ),
    "other rows chosen": ("experts", lambda m: lambda x: (m.forward(x)[0], (m.forward(x)[1] + 1) % 3), "output"),
    "an input not written to": (
        "inputs written to",
        lambda m: lambda x, cache: m.forward(x, {name: one.clone() for name, one in cache.items()}),
        "written",
    ),
    "no dropout": ("attention with dropout", lambda m: Attention.forward.__get__(_without_dropout(m)), "mean"),
}


def _without_dropout(module: Attention) -> Attention:
    """The same weights, without dropout."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, "dropout": nn.Identity()}
    return twin


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    name, plant, kind = FAULTS[fault]
    module, args = PASSING[name]()
    outcome = check_call(module, plant(module), args, {})
    assert outcome.error is None
    assert any(one.kind.startswith(kind) for one in outcome.wrong), outcome.wrong


@pytest.mark.parametrize("factor", [1.05, 0.5])
def test_under_bf16_it_takes_larger_ones(factor: float) -> None:
    module, x = Attention(), text()
    with torch.autocast("cpu", torch.bfloat16):
        outcome = check_call(module, lambda x: Scaled.apply(module.forward(x), factor), (x,), {}, unit=BF16)
    assert outcome.wrong


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.25, 0.6])
def test_another_dropout_is_found_by_means(probability: float) -> None:
    module, twin = Attention(dropout=0.3), Attention(dropout=probability)
    twin.load_state_dict(module.state_dict())
    for name, part in module.named_children():
        if name != "dropout":
            setattr(twin, name, part)
    outcome = check_call(module, compiled(twin, "inductor"), (text(),), {}, draws_alike=False)
    assert outcome.how == "seeds"
    assert outcome.wrong


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


def test_which_weights_each_output_reaches_is_known() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 2), nn.Linear(64, 3)

        def forward(self, x_BSD: Tensor) -> Any:
            return {"one": self.one(x_BSD), "rest": (self.two(x_BSD), "words", 3)}

    module = Two()
    outcome = check_call(module, compiled(module), (text(),), {})
    assert outcome.wrong == []
    assert outcome.reached == [{"one.weight", "one.bias"}, {"two.weight", "two.bias"}]


# ---- nothing is left behind ------------------------------------------------------------------------------------------

SETTINGS = {"calls": 0}
CALLS = 0


STATE = types.SimpleNamespace(calls=0, seen=[])


class Registry:
    seen: list[int] = []


def made_with_a_closure() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


class Stateful(nn.Module):
    """Counts its calls in every place that a forward may."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls, self.seen, self.facts = 0, list[int](), {"calls": 0, "nested": {"deep": [0]}}
        self.register_buffer("filled", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.array, self.generator = numpy.zeros(1), torch.Generator()
        self.step, self.hooked = made_with_a_closure(), 0
        self.linear.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.hooked += 1

    def forward(self, x_BD: Tensor, given: dict[str, Any]) -> Tensor:
        global CALLS
        CALLS += 1
        self.calls += 1
        self.seen.append(self.calls)
        self.facts["calls"] += 1
        self.facts["nested"]["deep"].append(self.calls)
        self.filled += 1
        self.replaced = self.replaced + 1
        self.array += 1
        self.step()
        SETTINGS["calls"] += 1
        Registry.seen.append(1)
        STATE.calls += 1
        STATE.seen.append(1)
        type(self).total += 1
        given["calls"] = given.get("calls", 0) + 1
        noise = torch.randn(8) + random.random() + numpy.random.rand() + torch.rand((), generator=self.generator)
        return self.norm(self.linear(x_BD)) + noise

    def state(self, given: dict[str, Any]) -> Any:
        return copy.deepcopy(
            (
                *(self.calls, self.seen, self.facts, float(self.filled), float(self.replaced), self.array.tolist()),
                *(self.hooked, self.norm.running_mean.tolist(), int(self.norm.num_batches_tracked), given),
                *(CALLS, SETTINGS, Registry.seen, STATE, type(self).total, self.generator.get_state().tolist()),
                *(torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
                *([one.tolist() for one in self.parameters()], [one.grad for one in self.parameters()]),
            )
        )


def test_a_check_leaves_everything_as_it_was() -> None:
    module, x_BD, given = Stateful(), torch.randn(4, 8), dict[str, Any]()
    buffers = {name: id(one) for name, one in module.named_buffers()}
    before, inputs = module.state(given), x_BD.clone()
    outcome = check_call(module, module._call_impl, (x_BD, given), {})
    assert outcome.error is None
    assert outcome.wrong == [], "both runs begin with the same state, random numbers included"
    assert module.state(given) == before
    assert {name: id(one) for name, one in module.named_buffers()} == buffers
    assert torch.equal(x_BD, inputs)
    assert module.step() == 1


def test_gradients_that_are_there_stay_and_inputs_keep_theirs() -> None:
    module, x_BSD = Attention(), text()
    module(x_BSD).sum().backward()
    before = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    of_input = x_BSD.grad.clone()
    check_call(module, compiled(module), (x_BSD,), {})
    assert all(torch.equal(one.grad, before[name]) for name, one in module.named_parameters())
    assert torch.equal(x_BSD.grad, of_input)


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
