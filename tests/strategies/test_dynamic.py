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
        if program.padding is not None and program.padding.observe is not None:
            program.padding.observe(batch)
        loss = module.net(batch["image"], batch["tokens"])
        loss.backward()
        result.append(float(loss.detach()))
    return result


def compiled(how: str, kind: type[Any], *, multiple: int = 8, rows: int = 2) -> list[float]:
    return losses([Dynamic(how=how, multiple=multiple), kind(backend=backends.COUNTING)], multiple=multiple, rows=rows)


@pytest.fixture(scope="module")
def eager() -> list[float]:
    return losses([], multiple=8)


@pytest.mark.parametrize(
    ("how", "kind", "graphs"),
    [
        ("mark", Whole, 1),
        ("always", Whole, 1),
        ("automatic", Whole, 2),
        # Encoder block, decoder block, head: the second and third anew when their first new length comes.
        ("mark", Regional, 3),
        ("automatic", Regional, 5),
    ],
)
def test_losses_are_eagers_at_every_length_with_few_graphs(
    how: str, kind: type[Any], graphs: int, eager: list[float]
) -> None:
    assert compiled(how, kind) == pytest.approx(eager, rel=1e-5)
    assert len(backends.graphs) == graphs


def test_batches_of_one_row_are_no_different() -> None:
    compiled("mark", Whole, rows=1)
    assert len(backends.graphs) == 1


def test_what_a_module_strategy_says_about_shapes_by_hand_stands() -> None:
    losses([Dynamic(how="always"), Whole(backend=backends.COUNTING, dynamic=False)], multiple=32)
    assert len(backends.graphs) == len({edge_of(length, (), 32) for length in LENGTHS})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "naive"}, r"Dynamic\(how='naive'\) is not one of \('mark', 'always', 'automatic'\)"),
        ({"multiple": 0}, r"Dynamic\(multiple=0\) must be at least 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dynamic(**options)
