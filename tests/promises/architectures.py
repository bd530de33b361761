"""Random small architectures, each trained a few steps: no check may call a healthy one different from eager.

    python -m tests.promises.architectures 500 [--backend inductor] [--bf16] [--first SEED] [--verbose]

Prints a line for each training that was called different, ended, or whose losses are not eager's, and a sum.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from crucible import Checkpointing, Optimizer, Regional, RunRecord, Strategy, Whole
from torch import Tensor, nn
from torch.nn import functional

from tests.promises.training import Module, Outcome, apart, train

Draw = random.Random
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    *(functional.gelu, functional.silu, torch.relu, torch.tanh, functional.softplus, functional.elu, functional.mish)
]


# ---- blocks of sequences, x_BTD: batch, positions, width ------------------------------------------------------------


def norm_of(draw: Draw, width: int) -> nn.Module:
    return draw.choice([nn.LayerNorm, nn.RMSNorm, lambda width: nn.LayerNorm(width, bias=False)])(width)


class SelfAttention(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.heads, self.rate = norm_of(draw, width), draw.choice([1, 2, 4]), rate
        self.mix, self.out = nn.Linear(width, 3 * width, bias=draw.random() < 0.7), nn.Linear(width, width)
        self.causal, self.biased = draw.random() < 0.5, draw.random() < 0.3
        self.bias = nn.Parameter(torch.zeros(self.heads, 1, 1)) if self.biased else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows, length, width = x_BTD.shape
        mixed = self.mix(self.norm(x_BTD)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = mixed.unbind(0)
        rate = self.rate if self.training else 0.0
        if self.bias is None:
            out = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=self.causal)
        else:
            far = -(torch.arange(length)[:, None] - torch.arange(length)).abs() * self.bias.exp()
            scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5 + far
            out = functional.dropout(scores.softmax(-1), rate) @ value
        return x_BTD + self.out(out.transpose(1, 2).reshape(rows, length, width))


class TorchsAttention(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, rate, draw.choice([torch.relu, functional.gelu]), batch_first=True,
            norm_first=draw.random() < 0.5,
        )  # fmt: skip

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.layer(x_BTD)


class Gated(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.act, self.rate = norm_of(draw, width), draw.choice(ACTIVATIONS), rate
        self.up, self.gate, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = self.norm(x_BTD)
        return x_BTD + functional.dropout(self.down(self.act(self.gate(x)) * self.up(x)), self.rate, self.training)


class Perceptron(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        act = draw.choice(
            [nn.ReLU(inplace=True), nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(0.1, inplace=True), nn.SiLU()]
        )
        self.layers = nn.Sequential(
            norm_of(draw, width), nn.Linear(width, 2 * width), act, nn.Dropout(rate), nn.Linear(2 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.layers(x_BTD)


class Experts(nn.Module):
    """The best two of four, each for the positions that chose it."""

    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.router, self.dense = nn.Linear(width, 4), draw.random() < 0.5
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        shares = self.router(x_BTD).softmax(-1)
        best = shares.topk(2, -1)
        if self.dense:
            every = torch.stack([torch.tanh(expert(x_BTD)) for expert in self.experts], -2)
            chosen = every.gather(-2, best.indices[..., None].expand(*best.indices.shape, x_BTD.shape[-1]))
            return x_BTD + (chosen * best.values[..., None]).sum(-2)
        out = torch.zeros_like(x_BTD)
        for number, expert in enumerate(self.experts):
            share = (best.values * (best.indices == number)).sum(-1, keepdim=True)
            out = out + share * torch.tanh(expert(x_BTD))
        return x_BTD + out


class Tied(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.other.weight = self.linear.weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + torch.tanh(self.other(torch.tanh(self.linear(x_BTD)))) @ self.linear.weight


class InPlace(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x_BTD.detach().float().mean((0, 1)))
        out = self.linear(x_BTD - self.mean)
        out[:, 0] = 0
        return out.mul_(0.5).add_(x_BTD)


class Recurrent(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.cell, self.norm = draw.choice([nn.GRUCell, nn.RNNCell])(width, width), nn.LayerNorm(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        state, out = torch.zeros_like(x_BTD[:, 0]), []
        for x_BD in x_BTD.unbind(1):
            state = self.cell(x_BD, state)
            out.append(state)
        return self.norm(x_BTD + torch.stack(out, 1))


class TorchsRecurrent(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.layer = draw.choice([nn.GRU, nn.LSTM])(width, width, batch_first=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.layer(x_BTD)[0]


class StateSpace(nn.Module):
    """A diagonal linear recurrence, by a sum of all that came before."""

    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.decay, self.mix = nn.Parameter(torch.rand(width)), nn.Linear(width, 2 * width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        value, gate = self.mix(x_BTD).chunk(2, -1)
        rates = functional.softplus(self.decay)
        positions = torch.arange(x_BTD.shape[1], device=x_BTD.device)[:, None]
        weights = torch.exp(-rates * positions)
        summed = (value * weights.flip(0)).cumsum(1) / weights.flip(0).cumsum(0)
        return x_BTD + summed * torch.sigmoid(gate)


class Statistics(nn.Module):
    """Batch, group and instance norms over positions."""

    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1, groups=draw.choice([1, width]))
        self.norm = draw.choice(
            [nn.BatchNorm1d, lambda w: nn.GroupNorm(4, w), lambda w: nn.InstanceNorm1d(w, affine=True), _cumulative]
        )(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + functional.relu(self.norm(self.convolution(x_BTD.transpose(1, 2)))).transpose(1, 2)


def _cumulative(width: int) -> nn.Module:
    return nn.BatchNorm1d(width, momentum=None)


class Structured(nn.Module):
    """Takes and gives more than a tensor."""

    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, *, scale: float = 0.5) -> Any:
        out = self.linear(x_BTD)
        return {"x": x_BTD + scale * out, "aux": out.square().mean(), "best": out.argmax(-1), "name": "structured"}


class StochasticDepth(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(width, width), rate

    def forward(self, x_BTD: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x_BTD))
        if self.training and self.rate:
            out = out * (torch.rand(len(out), 1, 1) > self.rate) / (1 - self.rate)
        return x_BTD + out


SEQUENCE = (
    *(SelfAttention, SelfAttention, TorchsAttention, Gated, Perceptron, Experts, Tied, InPlace, Recurrent),
    *(TorchsRecurrent, StateSpace, Statistics, Structured, StochasticDepth),
)


class Mixed(nn.Module):
    """A block of one to three of them."""

    def __init__(self, draw: Draw, kinds: list[Any], width: int, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(draw, width, rate) for kind in kinds)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x_BTD)
            x_BTD = out["x"] + 0.1 * out["aux"] if isinstance(out, dict) else out
        return x_BTD


class Sequences(nn.Module):
    """Numbers or tokens in, blocks, a pooled or a position's output."""

    def __init__(self, draw: Draw, kinds: list[Any], rate: float) -> None:
        super().__init__()
        width, seed = draw.choice([16, 32]), draw.random()
        self.tokens = draw.random() < 0.4
        self.stem: nn.Module = nn.Embedding(24, width) if self.tokens else nn.Linear(8, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width)) if draw.random() < 0.5 else None
        self.blocks = nn.ModuleList(Mixed(Draw(seed), kinds, width, rate) for _ in range(draw.choice([2, 3])))
        self.norm, self.pooled = norm_of(draw, width), draw.random() < 0.5
        self.head = nn.Linear(width, 24, bias=False)
        if self.tokens and draw.random() < 0.5:
            self.head.weight = self.stem.weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.pooled else x)


# ---- blocks of images -----------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 1)
        kind = draw.choice([nn.BatchNorm2d, lambda w: nn.GroupNorm(4, w), nn.InstanceNorm2d, nn.BatchNorm2d])
        self.norm, self.act = kind(width), draw.choice([nn.ReLU(inplace=True), nn.SiLU(), nn.Hardswish()])
        self.drop = nn.Dropout2d(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.second(self.act(self.norm(self.first(x)))))


class Depthwise(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(width, width, 5, padding=2, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(functional.gelu(self.up(out)))).permute(0, 3, 1, 2)


class Squeezed(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.squeeze, self.excite = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.convolution(x))
        shares = torch.sigmoid(self.excite(functional.relu(self.squeeze(out.mean((2, 3), keepdim=True)))))
        return functional.relu(x + out * shares)


class UpAndDown(nn.Module):
    def __init__(self, draw: Draw, width: int, rate: float) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width, 2, 2), nn.ConvTranspose2d(width, width, 2, 2)
        self.norm, self.pool = nn.GroupNorm(2, width), draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        low = functional.max_pool2d(x, 2) if self.pool else self.down(x)
        return (
            x + functional.relu(self.norm(self.up(low))) + functional.interpolate(low, scale_factor=2, mode="bilinear")
        )


IMAGE = (Convolution, Convolution, Depthwise, Squeezed, UpAndDown)


class Images(nn.Module):
    def __init__(self, draw: Draw, kinds: list[Any], rate: float) -> None:
        super().__init__()
        width, seed = draw.choice([8, 16]), draw.random()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.Sequential(
            *(nn.Sequential(*(kind(Draw(seed), width, rate) for kind in kinds)) for _ in range(draw.choice([2, 3])))
        )
        self.head = nn.Linear(width, 24)
        if draw.random() < 0.3:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


# ---- trainings ------------------------------------------------------------------------------------------------------


class Drawn(Module):
    """A network with a loss and an optimizer."""

    def __init__(self, net: nn.Module, loss: str, optimizer: str, frozen: bool) -> None:
        super().__init__(net)
        self.kind, self.optimizer = loss, optimizer
        if frozen:
            next(net.blocks.children()).requires_grad_(False)  # type: ignore[union-attr]

    def loss(self, batch: Any) -> Tensor:
        x, labels = batch
        out = self.net(x)
        if out.dim() == 3 and labels.dim() == 1:
            labels = labels[:, None].expand(out.shape[:2])
        if self.kind == "cross entropy":
            return functional.cross_entropy(out.flatten(0, -2), labels.flatten(), label_smoothing=0.1)
        if self.kind == "distance":
            return functional.smooth_l1_loss(out, functional.one_hot(labels, 24).float())
        if self.kind == "contrast":
            rows = functional.normalize(out.flatten(1), dim=-1)
            return functional.cross_entropy(rows @ rows.t() / 0.1, torch.arange(len(rows)))
        return functional.binary_cross_entropy_with_logits(out, functional.one_hot(labels, 24).to(out.dtype))

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        optimizer: Any = {
            "sgd": lambda: torch.optim.SGD(trained, lr=0.05, momentum=0.9, nesterov=True),
            "adamw": lambda: torch.optim.AdamW(trained, lr=3e-3),
            "adam": lambda: torch.optim.Adam(trained, lr=3e-3, amsgrad=True),
            "rmsprop": lambda: torch.optim.RMSprop(trained, lr=1e-3),
            "adagrad": lambda: torch.optim.Adagrad(trained, lr=1e-2),
        }[self.optimizer]()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}]


@dataclasses.dataclass
class Training:
    """What a seed drew."""

    seed: int
    words: str
    make: Callable[[], Module]
    strategies: Callable[[], list[Strategy]]
    options: dict[str, Any]
    random: bool
    """Whether it draws random numbers."""


def drawn(seed: int, *, backend: str = "aot_eager", bf16: bool = False) -> Training:
    """The training of that seed."""
    draw = Draw(seed)
    images = draw.random() < 0.25
    kinds = draw.choices(IMAGE if images else SEQUENCE, k=draw.choice([1, 1, 2, 3]))
    rate = draw.choice([0.0, 0.0, 0.2])
    loss = draw.choice(["cross entropy", "cross entropy", "distance", "contrast", "binary"])
    optimizer = draw.choice(["sgd", "adamw", "adamw", "adam", "rmsprop", "adagrad"])
    frozen, ragged, steps = draw.random() < 0.15, draw.random() < 0.3, draw.choice([4, 6, 9])
    arm = draw.choice(["regional", "regional", "regional", "whole", "regional, optimizer", "checkpointing, regional"])
    network = Draw(draw.random())
    state = network.getstate()

    def make() -> Module:
        network.setstate(state)
        return Drawn((Images if images else Sequences)(network, kinds, rate), loss, optimizer, frozen)

    tokens = not images and make().net.tokens
    made = torch.Generator().manual_seed(seed)

    def batch(number: int) -> Any:
        rows = draw.choice([4, 6]) if ragged else 4
        length = draw.choice([5, 8, 11]) if ragged else 8
        if images:
            x = torch.randn(rows, 3, 8, 8, generator=made)
        elif tokens:
            x = torch.randint(24, (rows, length), generator=made)
        else:
            x = torch.randn(rows, length, 8, generator=made)
        return [x, torch.randint(24, (rows,), generator=made)]

    def strategies() -> list[Strategy]:
        given: list[Strategy] = [Whole(backend=backend)] if arm == "whole" else [Regional(backend=backend)]
        if "optimizer" in arm:
            given.append(Optimizer(backend=backend))
        if "checkpointing" in arm:
            given.append(Checkpointing())
        return given

    options = {
        "data": [batch(number) for number in range(steps)],
        "validation": [batch(number) for number in range(2)],
        "val_check_interval": max(steps // 2, 1),
        "accumulate_grad_batches": draw.choice([1, 1, 2]),
        "gradient_clip_val": draw.choice([None, 1.0, 0.1]),
        "precision": "bf16-mixed" if bf16 else "32-true",
    }
    names = "+".join(kind.__name__ for kind in kinds)
    more = f"{', ragged' if ragged else ''}{', frozen' if frozen else ''}"
    words = (
        f"{names}, rate {rate}, {loss}, {optimizer}, {arm}{more}, "
        f"{steps} steps, accumulate {options['accumulate_grad_batches']}, clip {options['gradient_clip_val']}"
    )
    draws = rate > 0 and any(
        kind in (SelfAttention, TorchsAttention, Gated, Perceptron, StochasticDepth, Convolution) for kind in kinds
    )
    return Training(seed, words, make, strategies, options, draws)


def alarm(record: RunRecord) -> str | None:
    """Which check called a region different from eager; None where none did."""
    parity = record.report.get("parity", {})
    if parity.get("verdict") == "failed":
        return f"first checks: {parity.get('reason')}"
    if record.audits is not None and record.audits.verdict in ("failed", "went eager"):
        return f"audit: {record.audits.reason}"
    return None


@dataclasses.dataclass
class Result:
    """What became of one training."""

    outcome: Outcome
    alarm: str | None
    apart: float | None
    """Losses, relative to eager's; None where other random numbers were drawn."""
    verdict: str
    eager_parts: dict[str, str]


def tried(training: Training, *, own_random_numbers: bool) -> Result:
    """Train it, and eager beside it."""
    seen = train(training.make, training.strategies(), **training.options)
    distance = None
    if not (training.random and own_random_numbers):
        distance = apart(seen.losses, train(training.make, None, **training.options).losses)
    record = seen.record
    verdict = str(record.report.get("parity", {}).get("verdict", "none"))
    return Result(seen, alarm(record), distance, verdict, record.eager_parts)


def main() -> None:
    """Train as many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="a line a training")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    found: collections.Counter[str] = collections.Counter()
    close, began = 5e-2 if given.bf16 else 1e-3, time.perf_counter()
    for seed in range(given.first, given.first + given.count):
        training = drawn(seed, backend=given.backend, bf16=given.bf16)
        result = tried(training, own_random_numbers=given.backend == "inductor")
        said = {
            "alarms": result.alarm,
            "ended": None if result.outcome.ended is None else result.outcome.end,
            "losses apart": None if result.apart is None or result.apart <= close else f"{result.apart:.1e}",
            "with eager parts": result.eager_parts or None,
        }
        said = {what: words for what, words in said.items() if words is not None}
        found.update(["trainings", *said, f"verdict {result.verdict}"])
        if given.verbose or said.keys() - {"with eager parts"}:
            print(f"{seed}: {training.words}: {said}", flush=True)
    kind = f"{given.backend} {'bf16' if given.bf16 else 'fp32'}"
    print(f"RESULT {kind} {dict(found)}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
