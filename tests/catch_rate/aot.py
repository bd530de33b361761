"""Faults of AOTAutograd: views, writing in place, what is computed again, the graph of gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.catch_rate.case import AOT, Block, case
from tests.promises.training import WIDTH

LATER: dict[str, Any] = {"begins": 5, "steps": 12}
ON: dict[str, Any] = {"backend": "inductor"}
PARTITIONED: dict[str, Any] = {"backend": "aot_eager_decomp_partition"}


@case("a view of an input that aliases another, after a write", "loss", AOT, 198095, reported="2.14, open")
class AliasedView(Block):
    def forward(self, x: Tensor, base: Tensor, part: Tensor) -> Any:
        base.mul_(2)
        return torch.tanh(self.linear(x)), part[0]

    def called(self, x: Tensor) -> Tensor:
        base = x.detach().clone()
        h, first = self(x, base, base[1:])
        return x + h * first


@case("a write to an input that aliases another from some step on", "loss", AOT, 139789, reported="2.5, open", **LATER)
class AliasLater(Block):
    step = 0

    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> Any:
        left.mul_(2)
        return torch.tanh(self.linear(x)) * (left + right)

    def before_step(self, step: int) -> None:
        AliasLater.step = step

    def called(self, x: Tensor) -> Tensor:
        numbers = torch.linspace(0.1, 1.0, WIDTH + 4)
        left, right = numbers[:WIDTH], numbers[4:]
        if AliasLater.step < 5:
            left, right = left.clone(), right.clone()
        return x + self(x, left, right)


@case("a detached result that shares its tensor with another", "gradient", AOT, 195664, reported="to 2.14", **ON)
class DetachedTwin(Block):
    def forward(self, x: Tensor) -> Any:
        h = x + torch.tanh(self.linear(x))
        return h * 1.0, h.detach()

    def called(self, x: Tensor) -> Tensor:
        h, still = self(x)
        return h + 0.5 * still


@case("parts of a result, and the whole of it detached", "gradient", AOT, 195664, reported="to 2.14", **ON)
class DetachedBase(Block):
    def forward(self, x: Tensor) -> Any:
        h = x + torch.tanh(self.linear(x))
        return h[0:4], h[4:8], h.detach()

    def called(self, x: Tensor) -> Tensor:
        first, second, still = self(x)
        return torch.cat([first, second]) + 0.5 * still


class _Masked(Block):
    """Dropout on a parameter: where the result is zero, so is the parameter's gradient."""

    holds: ClassVar = {"gain": lambda: nn.Parameter(torch.ones(8, WIDTH)), "unlike": lambda: 0.0}

    def drop(self, gain: Tensor) -> Tensor:
        return functional.dropout(torch.cos(gain).cos(), 0.5)

    def forward(self, x: Tensor) -> Any:
        return x + 0.1 * self.drop(self.gain) * torch.tanh(self.linear(x))

    def called(self, x: Tensor) -> Tensor:
        out = self(x)
        self.kept = (out - x).detach() != 0
        return out

    def before_step(self, step: int) -> None:
        if self.gain.grad is not None:
            self.unlike += float(((self.gain.grad != 0) != self.kept).float().mean())

    def observed(self) -> list[float]:
        return [float(self.unlike > 0.1)]


@case(
    "dropout drawn anew in the backward, by a memory budget",
    "gradient",
    AOT,
    190758,
    190717,
    reported="2.13, open",
    own_numbers=True,
    **PARTITIONED,
)
class Budget(_Masked):
    def prepare(self) -> None:
        functorch_config.activation_memory_budget = 0.0


@case(
    "dropout drawn anew in the backward, under checkpoint",
    "gradient",
    AOT,
    198333,
    reported="2.13, open (CUDA)",
    own_numbers=True,
    **ON,
)
class Recomputed(_Masked):
    def forward(self, x: Tensor) -> Any:
        return x + 0.1 * checkpoint(self.drop, self.gain, use_reentrant=False) * torch.tanh(self.linear(x))


@case(
    "autocast switched off within, and the backward",
    "gradient",
    AOT,
    179804,
    153044,
    reported="2.11",
    precision="bf16-mixed",
)
class InnerAutocast(Block):
    def mix(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return h.float() @ self.linear.weight.float().t()


@case("a gradient of one result by another", "loss", AOT, 132929, reported="2.4, open")
class ByAnother(Block):
    def forward(self, x: Tensor) -> Any:
        z = torch.tanh(self.linear(x))
        return z * z, z

    def called(self, x: Tensor) -> Tensor:
        out, z = self(x)
        (slope,) = torch.autograd.grad(out.sum(), z, create_graph=True, allow_unused=True)
        return x + out + (0.1 * slope if slope is not None else 0.0)


@case("autograd.grad with create_graph on a compiled result", "gradient", AOT, 181581, reported="to 2.12", whole=True)
class CreateGraph(Block):
    def forward(self, x: Tensor) -> Any:
        energy = torch.relu(self.linear(x)).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + force


class _Seen(torch.autograd.Function):
    """The identity; its backward keeps the gradient's largest value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        ctx.save_for_backward(largest)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (largest,) = ctx.saved_tensors
        largest.copy_(torch.maximum(largest, gradient.abs().max()))
        return gradient, None


@case("a buffer that a backward writes", "buffer", AOT, 155242, 127561, reported="2.7")
class BackwardBuffer(Block):
    holds: ClassVar = {"largest": lambda: nn.Buffer(torch.zeros(()))}

    def mix(self, h: Tensor) -> Tensor:
        return _Seen.apply(h, self.largest)


@case("a write to a strided view of an input", "loss", AOT, 93363, reported="2.0, open")
class StridedView(Block):
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.linear(torch.cat([x, x], 1)))
        x.mul_(0.5)
        return h

    def called(self, x: Tensor) -> Tensor:
        base = x * 1.0
        return self(base[:, ::2]) + base


@case("a write through an alias under no_grad", "gradient", AOT, 122436, 95167, reported="2.3")
class HiddenWrite(Block):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.linear.weight.view(-1).clamp_(-0.2, 0.2)
        return super().forward(x)


@case("the same operation with and without gradients", "gradient", AOT, 114338, reported="2.2")
def twice_computed(h: Tensor) -> Tensor:
    with torch.no_grad():
        still = torch.sin(h)
    return torch.sin(h) * still


@case("an embedding that is scaled down in its forward", "buffer", AOT, 95167, reported="2.0")
class MaxNorm(Block):
    holds: ClassVar = {"table": lambda: nn.Embedding(8, WIDTH, max_norm=0.5)}

    def mix(self, h: Tensor) -> Tensor:
        return h + self.table(torch.arange(len(h)) % 8)


@case("a write to a diagonal", "loss", AOT, 104463, reported="2.1")
def diagonal_written(h: Tensor) -> Tensor:
    h = h * 1.0
    h.diagonal().mul_(2.0)
    return h
