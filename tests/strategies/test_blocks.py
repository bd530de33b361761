"""Finding repeated blocks in a module tree: what is a container of blocks and what is not."""

from __future__ import annotations

import pytest
from torch import nn

from strategies.regions import expand_blocks, find_containers
from tests.strategies.modules import Block, Holder, Stack


def blocks(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


LAYERS: dict[str, tuple[nn.Module, list[str]]] = {
    "a list": (blocks(3), ["net"]),
    "a sequence": (nn.Sequential(*blocks(3)), ["net"]),
    "sequences in a list": (nn.ModuleList([nn.Sequential(*blocks()), nn.Sequential(*blocks())]), ["net"]),
    "lists in a list": (nn.ModuleList(blocks() for _ in range(3)), ["net"]),
    "lists in a dictionary": (nn.ModuleDict({"down": blocks(3), "up": blocks(3)}), ["net"]),
    "within an uneven sequence": (
        nn.Sequential(nn.Linear(8, 8), nn.Sequential(*blocks()), nn.Linear(8, 8)),
        ["net.1"],
    ),
    "bare layers": (nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), []),
    "layers and activations": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), []),
    "a single block": (blocks(1), []),
    "blocks of two kinds": (nn.ModuleList([Block(), nn.Sequential(nn.Linear(8, 8))]), []),
    "blocks and a bare layer": (nn.ModuleList([Block(), Block(), nn.Linear(8, 8)]), []),
    "lists of bare layers in a list": (
        nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2)),
        [],
    ),
    "nothing": (nn.ModuleList(), []),
}


@pytest.mark.parametrize(("layers", "found"), LAYERS.values(), ids=LAYERS)
def test_containers_of_repeated_blocks_are_found(layers: nn.Module, found: list[str]) -> None:
    assert find_containers(Holder(layers)) == found


def test_a_block_named_by_its_container_is_each_of_its_children() -> None:
    stages = nn.ModuleList([nn.Sequential(*blocks()), nn.Sequential(*blocks())])
    assert expand_blocks(Stack(stages), ["layers"]) == ["layers.0", "layers.1"]
    nested: dict[str, nn.Module] = {
        name: LAYERS[name][0] for name in ("lists in a list", "lists in a dictionary")
    } | {  # as a U-Net has them: a block, a bare layer; a dictionary of blocks
        "mixed": nn.ModuleList(nn.ModuleList([Block(), Block(), nn.Linear(8, 8)]) for _ in range(3)),
        "dict": nn.ModuleDict({str(number): Block() for number in range(6)}),
    }
    for name, layers in nested.items():
        assert len(expand_blocks(Holder(layers), ["net"])) == 6, name
