"""Faults of Inductor: kernels, its lowerings, and its caches. Those of its C++ for processors; others are planted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.catch_rate.case import INDUCTOR, Block, case
from tests.promises.training import WIDTH

ON: dict[str, Any] = {"backend": "inductor", "steps": 6}
LATER: dict[str, Any] = {"backend": "inductor", "begins": 3, "steps": 12}


@case("slice_scatter, summed", "gradient", INDUCTOR, 180164, 180771, 183898, reported="to 2.13", **ON)
class SliceScatter(Block):
    holds: ClassVar = {"put": lambda: nn.Parameter(torch.ones(8, 6))}

    def mix(self, h: Tensor) -> Tensor:
        return torch.slice_scatter(h, self.put, 1, 0, 6).sum(1, keepdim=True) * 0.1


@case("diagonal_scatter, summed", "gradient", INDUCTOR, 182012, reported="to 2.13", **ON)
class DiagonalScatter(Block):
    holds: ClassVar = {"put": lambda: nn.Parameter(torch.ones(8))}

    def mix(self, h: Tensor) -> Tensor:
        return torch.diagonal_scatter(h, self.put).sum() * 0.1


@case("interpolate, convolution, pooling and where", "gradient", INDUCTOR, 185509, reported="2.12", **ON)
class PooledWhere(Block):
    holds: ClassVar = {"conv": lambda: nn.Conv2d(1, 4, 3, padding=1)}

    def mix(self, h: Tensor) -> Tensor:
        image = h.view(2, 1, 8, 8)
        large = functional.interpolate(image, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
        conv = self.conv(large[:, :, 1:7, 1:8])
        pool = functional.max_pool2d(conv, 3, stride=1, padding=1)
        mask = (conv > pool.mean((2, 3), keepdim=True)).detach()
        return torch.where(mask, conv, pool).mean() + torch.zeros_like(h)


@case("scatter_add into one row, read in the same graph", "loss", INDUCTOR, 191571, reported="to 2.14 (CUDA)", **ON)
def one_row(h: Tensor) -> Tensor:
    index = torch.zeros(len(h), dtype=torch.long)
    total = torch.zeros(1, WIDTH).scatter_add_(0, index.unsqueeze(1).expand(-1, WIDTH), h)
    return torch.index_select(total, 0, index) * 0.1


@case("a place written twice by one index", "loss", INDUCTOR, 174074, 138908, reported="2.10", **ON)
def twice_indexed(h: Tensor) -> Tensor:
    h = h.clone()
    h[[0, 0]] += h[[0, 0]]
    return h


@case(
    "a batch norm, and padding that cuts", "evaluation", INDUCTOR, 195582, reported="2.14, open", validates=True, **ON
)
class CutAfterNorm(Block):
    holds: ClassVar = {
        "conv": lambda: nn.Conv2d(1, 50, (2, 2)),
        "norm": lambda: nn.BatchNorm2d(50),
        "out": lambda: nn.Linear(50, WIDTH),
    }

    def mix(self, h: Tensor) -> Tensor:
        image = self.norm(self.conv(h.view(-1, 1, 4, 4))).flatten(1)
        return self.out(functional.pad(image, (0, 50 - image.shape[-1])))


@case("RReLU in evaluation", "evaluation", INDUCTOR, 181692, reported="2.11", validates=True, own_numbers=True, **ON)
class RandomSlope(Block):
    """In training its slope is drawn; its evaluation depends on no random number, and is looked at alone."""

    holds: ClassVar = {"act": lambda: nn.RReLU(), "eval_of": lambda: 0.0}

    def mix(self, h: Tensor) -> Tensor:
        return h if self.training else self.act(h)


@case("adaptive pooling, flattened and summed", "loss", INDUCTOR, 179931, reported="2.11, open (CUDA)", **ON)
def pooled_sum(h: Tensor) -> Tensor:
    image = h.view(8, 1, 4, 4).expand(8, 3, 4, 4).repeat(1, 1, 9, 9)
    pooled = functional.adaptive_avg_pool2d(image, (33, 35)).flatten(1)
    return pooled.sum(1, keepdim=True) * 1e-3


@case("replicate padding, used twice", "loss", INDUCTOR, 115157, reported="2.2", **ON)
def replicate_pad(h: Tensor) -> Tensor:
    padded = functional.pad(h.abs().view(2, 4, 16), (0, 24, 3, 0), "replicate")
    return h + (padded + padded).mean() + padded[..., :16].mean()


@case("torch.func.grad of two writes to one column", "loss", INDUCTOR, 136662, reported="2.5, open", **ON)
def column_written(h: Tensor) -> Tensor:
    def energy(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, 0] += x[:, 2].abs()
        y[:, 0] += x[:, 2].abs()
        return y.sum()

    return h * torch.func.grad(energy)(h.detach())


@case("two writes to one column", "gradient", INDUCTOR, 136662, reported="2.5, open", **ON)
def column_added(h: Tensor) -> Tensor:
    y = torch.zeros_like(h)
    y[:, 0] += h[:, 2].abs()
    y[:, 0] += h[:, 2].abs()
    return y


@case("arange times a large number", "loss", INDUCTOR, 175966, reported="2.10, open (CUDA)", **ON)
def large_arange(h: Tensor) -> Tensor:
    place = torch.arange(WIDTH, dtype=torch.int64) * 1_000_000_000
    return h * (place % 7).float() / 7


class _Float(Block):
    holds: ClassVar = {"limit": lambda: 1.0}

    def before_step(self, step: int) -> None:
        self.limit = 1.0 / step


@case("a Python float of clamp that changes", "loss", INDUCTOR, 194976, reported="2.8 to 2.14", **LATER)
class ChangingClamp(_Float):
    def mix(self, h: Tensor) -> Tensor:
        gate, up = torch.chunk(h, 2, -1)
        out = functional.silu(gate).clamp(max=self.limit) * up.clamp(min=-self.limit, max=self.limit)
        return torch.cat([out, out], -1)


@case("a Python float of rms_norm's epsilon that changes", "loss", INDUCTOR, 197889, reported="2.14, open", **LATER)
class ChangingEpsilon(_Float):
    def mix(self, h: Tensor) -> Tensor:
        return functional.rms_norm(h * self.limit, (WIDTH,), eps=self.limit + 1e-3)


@case("a Python float of huber_loss that changes", "loss", INDUCTOR, 197889, reported="2.14, open", **LATER)
class ChangingDelta(_Float):
    def mix(self, h: Tensor) -> Tensor:
        return h * self.limit + functional.huber_loss(h, torch.zeros_like(h), delta=self.limit / 4 + 1e-3)


@case("a Python float of attention's scale that changes", "loss", INDUCTOR, 197889, reported="2.14, open", **LATER)
class ChangingScale(_Float):
    def mix(self, h: Tensor) -> Tensor:
        q = (h * self.limit).view(1, 8, 2, 8).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, q, q, scale=self.limit + 0.1)
        return out.transpose(1, 2).reshape(8, WIDTH)


@case("numbers below the smallest normal one", "loss", INDUCTOR, 126848, reported="2.4", **ON)
def denormal(h: Tensor) -> Tensor:
    return (h.detach() * 2.0**-127) * 2.0**126 * h


SCALE = [0.5]


def _by_scale(h: Tensor) -> Tensor:
    return h * SCALE[0]


_scaled = torch._dynamo.allow_in_graph(_by_scale)


@case(
    "a cached graph with an opaque function that is another now",
    "loss",
    INDUCTOR,
    194658,
    reported="2.14, open",
    after_another=True,
    **ON,
)
class StaleCache(Block):
    """An earlier process of the same script had another scale."""

    def mix(self, h: Tensor) -> Tensor:
        return checkpoint(_scaled, h, use_reentrant=False)

    @classmethod
    def earlier(cls, begins: bool) -> None:
        SCALE[0] = 0.5 if begins else 1.5


@case("max pooling with ceil_mode", "loss", INDUCTOR, 94775, reported="2.0", **ON)
def ceil_pool(h: Tensor) -> Tensor:
    pooled = functional.max_pool2d(h.view(8, 1, 4, 4), 1, stride=(2, 3), ceil_mode=True)
    return h + pooled.flatten(1).mean(1, keepdim=True)


@case("index_add with alpha", "loss", INDUCTOR, 108963, 94778, reported="2.0 to 2.1", **ON)
def index_add(h: Tensor) -> Tensor:
    index = torch.arange(len(h)) // 2
    return torch.zeros_like(h).index_add(0, index, h, alpha=2.0) / 2


@case("dropout of all", "loss", INDUCTOR, 100025, reported="2.0", **ON)
def drop_all(h: Tensor) -> Tensor:
    return h * 0.5 + functional.dropout(h, 1.0)


@case("group norm of channels that come last", "gradient", INDUCTOR, 140913, reported="2.5 (CUDA)", **ON)
class ChannelsLast(Block):
    holds: ClassVar = {"norm": lambda: nn.GroupNorm(2, 4)}

    def mix(self, h: Tensor) -> Tensor:
        image = h.view(8, 4, 2, 2).to(memory_format=torch.channels_last)
        return self.norm(image).reshape(8, WIDTH)


@case("padding of a single element", "loss", INDUCTOR, 144462, reported="2.6 (CUDA)", **ON)
def one_element(h: Tensor) -> Tensor:
    one = h.mean().view(1, 1, 1)
    return h + functional.pad(one, (5, 10)).view(1, WIDTH)


@case("an einsum, an exponential and its sum", "loss", INDUCTOR, 159154, reported="2.7", **ON)
def local_buffer(h: Tensor) -> Tensor:
    each = torch.exp(-torch.einsum("i...,i->i...", h.view(8, 1, 4, 4), h.mean(1)))
    return torch.einsum("i,i...->i...", 1 / torch.einsum("i...->i", each), each).reshape(8, WIDTH)


@case("a layer norm of large numbers", "loss", INDUCTOR, 143182, reported="2.6", **ON)
def large_norm(h: Tensor) -> Tensor:
    return functional.layer_norm(h * 100 + 1000, (WIDTH,))


@case("a softmax of very large numbers", "loss", INDUCTOR, 163932, 161150, 100775, reported="2.1 on, open", **ON)
class LargeSoftmax(Block):
    holds: ClassVar = {"scale": lambda: nn.Buffer(torch.tensor(1e14))}

    def mix(self, h: Tensor) -> Tensor:
        return h + (h.detach() * self.scale).softmax(-1)


@case("the sum of a softmax, rounded down", "loss", INDUCTOR, 189787, reported="2.13, open", **ON)
def floored_sum(h: Tensor) -> Tensor:
    return h * functional.softmax(h.detach() * 3, -1).sum(-1, keepdim=True).floor()


@case("a shift by as many bits as there are", "loss", INDUCTOR, 143555, 143566, reported="2.6", **ON)
def shifted(h: Tensor) -> Tensor:
    bits = torch.full((WIDTH,), 1000) + (h.detach()[0] > 2)
    return h * (1 + torch.bitwise_right_shift(bits, torch.full((WIDTH,), 64)).float() / 1000)


@case("a write in place after the same operation", "loss", INDUCTOR, 94777, reported="2.0", **ON)
def log_twice(h: Tensor) -> Tensor:
    x = h.detach().square() + 1.5
    y = torch.log(x)
    x.log_()
    return h * y


@case("a complex view of a result that is read twice", "loss", INDUCTOR, 122457, reported="2.3 (CUDA)", **ON)
def complex_view(h: Tensor) -> Tensor:
    z = torch.view_as_complex((h + 1).view(8, 8, 2))
    first = torch.view_as_real(z) + 1
    return 0.1 * (first + 0.5 * torch.view_as_real(z + 1)).reshape(8, WIDTH)


@case("addcdiv_ by a number read from a tensor", "loss", INDUCTOR, 185382, reported="2.12", whole=True, **ON)
class ReadNumber(Block):
    holds: ClassVar = {"count": lambda: nn.Buffer(torch.zeros((), dtype=torch.int64))}

    def mix(self, h: Tensor) -> Tensor:
        moved = h.detach().clone()
        for _ in range(3):
            self.count.add_(1)
            size = 0.1 / (1 - 0.9 ** self.count.item())
            moved.addcdiv_(h.detach(), moved.square() + 1, value=-size)
        return h + moved
