"""Twins of faults that no version here shows on a processor: the same kind of wrongness, put into a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.catch_rate.case import AOT, DYNAMO, INDUCTOR, Block, case
from tests.promises.planted import Call, Edit, Fault, backend, floating, gradient, stale_gradient, swapped
from tests.promises.training import WIDTH


def twin(
    block: type[Block],
    name: str,
    changes: str,
    part: str,
    *issues: int,
    fault: Fault = Call.run_faulty,
    edit: Edit | None = None,
    **more: Any,
) -> None:
    """Enter a training whose compiler has the fault in it."""
    case(name, changes, part, *issues, **{"planted": lambda: backend(fault, edit), **more})(block)


def returned(change: Callable[[Tensor], Tensor], *, training: bool = True) -> Fault:
    """Another result: of all calls, or of those of an evaluation alone."""
    return lambda call: floating(call.run(), change) if training or not call.training else call.run()


class Normed(Block):
    """With a scale and a shift of its own, as a table has them."""

    holds: ClassVar = {"table": lambda: nn.Parameter(torch.ones(2, WIDTH))}

    def mix(self, h: Tensor) -> Tensor:
        return functional.layer_norm(h, (WIDTH,)) * self.table[0] + self.table[1]


class Dropped(Block):
    def mix(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.5, self.training)


class Masked(Dropped):
    """Looks at its masks."""

    alike = calls = 0.0

    def called(self, x: Tensor) -> Tensor:
        out = self(x)
        fours = (out != x).view(-1, 4).float().mean(1)
        self.alike += float(((fours == 0) | (fours == 1)).float().mean())
        self.calls += 1
        return out

    def observed(self) -> list[float]:
        """One of eight groups of four is alike by chance."""
        return [float(self.alike / self.calls > 0.5)]


class Grouped(Block):
    holds: ClassVar = {"norm": lambda: nn.GroupNorm(2, 4)}

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h.view(8, 4, 2, 2)).reshape(8, WIDTH)


class Padded(Block):
    def mix(self, h: Tensor) -> Tensor:
        return h + functional.pad(h.mean().view(1, 1), (5, WIDTH - 6))


class Scattered(Block):
    def mix(self, h: Tensor) -> Tensor:
        index = torch.zeros(len(h), dtype=torch.long)
        total = torch.zeros(1, WIDTH).index_add(0, index, h)
        return torch.index_select(total, 0, index) * 0.1


class Averaged(Block):
    """Keeps a running mean of what it sees."""

    holds: ClassVar = {"mean": lambda: nn.Buffer(torch.zeros(WIDTH))}

    def mix(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return h - self.mean


class Schedule:
    factor = 0.5


def _now() -> float:
    return Schedule.factor


_factor = torch._dynamo.assume_constant_result(_now)


class Unguarded(Block):
    """Reads an attribute of a class where Dynamo looks once, in any version."""

    def mix(self, h: Tensor) -> Tensor:
        return h * _factor()

    def before_step(self, step: int) -> None:
        Schedule.factor = 0.5 if step < 5 else 1.5


def _first_half(one: Tensor) -> Tensor:
    return torch.cat([one[: len(one) // 2], torch.zeros_like(one[len(one) // 2 :])])


def _in_fours(one: Tensor, rate: float, *_: Any) -> Tensor:
    kept = (torch.rand(one.shape[0], one.shape[1] // 4) >= rate).repeat_interleave(4, 1)
    return one * kept / (1 - rate)


class _TwoMasks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return one * (torch.rand_like(one) >= rate) / (1 - rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (torch.rand_like(gradient) >= ctx.rate) / (1 - ctx.rate), None


def _drawn_twice(one: Tensor, rate: float, *_: Any) -> Tensor:
    return _TwoMasks.apply(one, rate)


def _own_draws(call: Call) -> list[Any]:
    """As Inductor does: numbers that are not eager's, under the same seed."""
    seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return call.run_faulty()


class _Kept(torch.autograd.Function):
    """The identity, in memory that is given."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, kept: Tensor) -> Tensor:
        kept.copy_(one)
        return torch.empty(0).set_(kept.untyped_storage(), 0, kept.shape, kept.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _same_memory(call: Call) -> list[Any]:
    """What one call returns, the next call writes to."""
    out = call.run()
    kept = call.memory.setdefault("out", [one.detach().clone() for one in out])
    return [_Kept.apply(one, old) for one, old in zip(out, kept, strict=True)]


def _unwritten(call: Call) -> list[Any]:
    places = call.at("buffers")
    before = [call.inputs[place].clone() for place in places]
    out = call.run()
    for place, old in zip(places, before, strict=True):
        call.inputs[place].data.copy_(old)
    return out


twin(
    Normed, "a shared table's gradient, written in part", "gradient", INDUCTOR, 193061, reported="2.10 to 2.14 (CUDA)",
    fault=gradient(_first_half, "table"),
)  # fmt: skip
twin(
    Masked, "masks of dropout alike in fours", "random numbers", INDUCTOR, 198333, reported="2.13, open (CUDA)",
    fault=_own_draws, edit=swapped("dropout", _in_fours), own_numbers=True,
)  # fmt: skip
twin(
    Dropped, "a backward with another mask than the forward's", "gradient", INDUCTOR, 198333,
    reported="2.13, open (CUDA)", fault=_own_draws, edit=swapped("dropout", _drawn_twice),
)  # fmt: skip
twin(
    Scattered, "rows read before they are written", "loss", INDUCTOR, 191571, reported="to 2.14 (CUDA)",
    edit=swapped("index_select", lambda one, *_: torch.zeros_like(one).expand(8, WIDTH)),
)  # fmt: skip
twin(
    Block, "a kernel that reads by another's strides", "loss", INDUCTOR, 194281, reported="2.13 (CUDA)",
    fault=returned(lambda one: one + (one.roll(1, -1) - one).detach()),
)  # fmt: skip
twin(
    Block, "all rows but the first from another one", "loss", INDUCTOR, 179931, reported="2.11, open (CUDA)",
    fault=returned(lambda one: torch.cat([one[:1], one[:-1]])),
)  # fmt: skip
twin(
    Block, "a gradient that overwrites what it is computed from", "gradient", AOT, 192840, reported="to 2.14",
    fault=gradient(lambda one: one.flip(0), "linear_parameters_weight"),
)  # fmt: skip
twin(
    Block, "the gradient of the call before", "gradient", INDUCTOR, 106321, reported="2.0, open (CUDA graphs)",
    fault=stale_gradient("parameters_weight"), steps=12,
)  # fmt: skip
twin(
    Block, "results that the next call overwrites", "loss", INDUCTOR, 106321, reported="2.0, open (CUDA graphs)",
    fault=_same_memory, steps=12,
)  # fmt: skip
twin(
    Block, "a gradient by another layout", "gradient", INDUCTOR, 192575, reported="to 2.14 (CUDA)",
    fault=gradient(lambda one: one.t().reshape(one.shape), "linear_parameters_weight"),
)  # fmt: skip
twin(
    Padded, "padding with the number itself", "loss", INDUCTOR, 144462, reported="2.6 (CUDA)",
    edit=swapped("pad", lambda one, pad, *_: one.expand(1, WIDTH)),
)  # fmt: skip
twin(
    Grouped, "a group norm's gradient of channels that come last", "gradient", INDUCTOR, 140913, reported="2.5 (CUDA)",
    fault=gradient(lambda one: one * 4, "norm_parameters_weight"),
)  # fmt: skip
twin(Averaged, "a buffer's write that is left out", "buffer", AOT, 155242, 127561, reported="2.7", fault=_unwritten)
twin(
    Block, "an intermediate result that another overwrites, under autocast", "loss", INDUCTOR, 191433,
    reported="2.14 (CUDA)", precision="bf16-mixed",
    fault=returned(lambda one: one + (one.roll(1, 0) - one).detach() * 0.2),
)  # fmt: skip
twin(
    Block, "an evaluation that is drawn as in training", "evaluation", INDUCTOR, 181692, reported="2.11",
    fault=returned(lambda one: one * 1.1, training=False), validates=True,
)  # fmt: skip
twin(
    Block, "a bfloat16 in the place of a float", "loss", INDUCTOR, 173902, reported="2.10, open (CUDA)",
    fault=returned(lambda one: one + (one.bfloat16().to(one.dtype) - one).detach()),
)  # fmt: skip
twin(
    Unguarded, "an attribute of a class that no guard looks at", "loss", DYNAMO, 176851, reported="2.3 on",
    begins=5, steps=12, planted=lambda: "aot_eager",
)  # fmt: skip
