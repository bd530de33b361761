"""Finding repeated blocks in a module tree: what is a container of blocks and what is not."""

from __future__ import annotations

import pytest
from torch import nn

from strategies.regions import expand_blocks, find_containers, require_submodules
from tests.strategies.modules import Block, Holder, Stack


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_a_list_or_a_sequence_of_equal_blocks_is_find_containers(container: type[nn.Module]) -> None:
    blocks = [Block(), Block(), Block()]
    layers = container(*blocks) if container is nn.Sequential else container(blocks)
    assert find_containers(Stack(layers)) == ["layers"]  # type: ignore[arg-type]


def test_of_nested_containers_the_outermost_counts() -> None:
    stages = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
    assert find_containers(Stack(stages)) == ["layers"]
    assert expand_blocks(Stack(stages), ["layers"]) == ["layers.0", "layers.1"]


def test_blocks_inside_an_uneven_sequence_are_find_containers() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 8))
    assert find_containers(Holder(net)) == ["net.1"]


@pytest.mark.parametrize(
    "layers",
    [
        nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        nn.ModuleList([Block()]),
        nn.ModuleList([Block(), nn.Sequential(nn.Linear(8, 8))]),
        nn.ModuleList(),
    ],
    ids=["bare layers", "layers and activations", "a single block", "blocks of two kinds", "nothing"],
)
def test_what_does_not_repeat_a_block_is_not_find_containers(layers: nn.ModuleList | nn.Sequential) -> None:
    assert find_containers(Stack(layers)) == []


def test_containers_whose_names_begin_alike_are_both_find_containers() -> None:
    module = Stack(nn.ModuleList([Block(), Block()]))
    module.layers_extra = nn.ModuleList([Block(), Block()])
    assert find_containers(module) == ["layers", "layers_extra"]


def test_a_container_stands_for_its_children_and_a_block_for_itself() -> None:
    module = Stack(nn.ModuleList([Block(), Block()]))
    assert expand_blocks(module, ["layers", "head"]) == ["layers.0", "layers.1", "head"]


def test_a_module_that_is_itself_a_container_can_be_asked_for_its_blocks() -> None:
    module = nn.Sequential(Block(), Block())
    paths = find_containers(module)
    require_submodules(module, "compile.regional.blocks", paths)
    assert [type(module.get_submodule(path)) for path in expand_blocks(module, paths)] == [Block, Block]
