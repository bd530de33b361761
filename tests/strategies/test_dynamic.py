"""``dynamic``: one graph for ragged lengths, for a network with attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Dynamic, Program, Ragged, Regional, Strategy, Whole
from strategies.base import apply, edge_of
from tests.strategies import backends
from tests.strategies.conftest import in_force

WIDTH, IMAGE_TOKENS = 32, 16
LENGTHS = [
    # Among them the width and the number of image tokens, which are no ragged dimensions.
    *(9, 30, WIDTH, 17, IMAGE_TOKENS, 44, 9, 61, 3)
]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    backends.register()
    backends.graphs.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attend(nn.Module):
    """A block with causal self attention and attention to image tokens of a fixed number."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.image, self.out = (nn.Linear(WIDTH, size * WIDTH) for size in (3, 2, 1))

    def forward(self, x_BSD: Tensor, image_BND: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.query(x_BSD).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.image(image_BND).chunk(2, -1))
        mixed = mixed + nn.functional.scaled_dot_product_attention(query, key, value)
        return x_BSD + self.out(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Image tokens through one block, text through two others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.encoder = nn.ModuleList([Attend()])
        self.decoder = nn.ModuleList(Attend() for _ in range(2))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, image_BND: Tensor, tokens_BS: Tensor) -> Tensor:
        for block in self.encoder:
            image_BND = block(image_BND, image_BND)
        x_BSD = self.embed(tokens_BS[:, :-1])
        for block in self.decoder:
            x_BSD = block(x_BSD, image_BND)
        return nn.functional.cross_entropy(self.head(x_BSD).flatten(0, 1), tokens_BS[:, 1:].flatten())


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()


def losses(strategies: list[Strategy], *, multiple: int, rows: int = 2) -> list[float]:
    """Loss of a forward and backward at each length, padded up to ``multiple``."""
    torch.manual_seed(0)
    module = Holder()
    program = Program(
        module=module, whole=("net",), blocks=("net.encoder", "net.decoder"), parts=("net.head",),
        ragged=(Ragged("tokens", 1, 0, 1),),
    )  # fmt: skip
    apply(strategies, program)
    in_force(program)
    result = []
    for length in LENGTHS:
        width = edge_of(length, (), multiple) + 1
        batch = {"image": torch.randn(rows, IMAGE_TOKENS, WIDTH), "tokens": torch.randint(0, 50, (rows, width))}
        loss = module.net(batch["image"], batch["tokens"])
        loss.backward()
        result.append(float(loss.detach()))
    return result


def compiled(kind: type[Any], *, rows: int = 2) -> list[float]:
    return losses([Dynamic(multiple=8), kind(backend=backends.COUNTING)], multiple=8, rows=rows)


@pytest.fixture(scope="module")
def eager() -> list[float]:
    return losses([], multiple=8)


# Encoder block, decoder block, head: each one graph for all lengths. Torch takes the first length, as large as the
# number of image tokens, for the same size, so that the decoder's block has one more.
@pytest.mark.parametrize(("kind", "graphs"), [(Whole, 1), (Regional, 4)])
def test_losses_are_eagers_at_every_length_with_few_graphs(kind: type[Any], graphs: int, eager: list[float]) -> None:
    assert compiled(kind) == pytest.approx(eager, rel=1e-5)
    assert len(backends.graphs) == graphs


def test_batches_of_one_row_are_no_different() -> None:
    compiled(Whole, rows=1)
    assert len(backends.graphs) == 1


def test_what_a_module_strategy_says_about_shapes_by_hand_stands() -> None:
    losses([Dynamic(), Whole(backend=backends.COUNTING, dynamic=False)], multiple=32)
    assert len(backends.graphs) == len({edge_of(length, (), 32) for length in LENGTHS})
