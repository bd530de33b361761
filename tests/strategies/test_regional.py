"""``compile=regional``: one compile for each kind of block and for each part, whatever the number of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from strategies import Modular, Part, Program, Regional, Strategy, Whole
from tasks import Declaration
from tests.strategies import backends
from tests.strategies.conftest import in_force
from tests.strategies.modules import Block, Stack


def program_of(module: nn.Module, declared: Declaration) -> Program:
    return Program(module=module, whole=declared.whole, blocks=declared.blocks, parts=declared.parts)


DECODER, ENCODER = ([f"net.{half}.blocks.{index}" for index in range(3)] for half in ("decoder", "encoder"))
PARTS = ["net.encoder.embed", "net.tail"]
UNNAMED = "stay eager: net.encoder.blocks, net.encoder.embed, net.tail"
LINEAR = partial(nn.Linear, 8, 8)


def modular(key: str, how: str = "whole") -> Modular:
    return Modular(parts={key: Part(how=how, backend="eager")})


REGIONS: dict[str, tuple[Strategy, list[str], str]] = {
    "all that is declared": (Regional(), [*ENCODER, *DECODER, *PARTS], ""),
    "what the user names": (Regional(blocks=["net.decoder.blocks", "net.tail"], parts=[]), [*DECODER, "net.tail"], ""),
    "a whole": (modular("net"), ["net"], ""),
    "a declared part": (modular("embed"), ["net.encoder.embed"], ""),
    "a path": (modular("net.decoder"), ["net.decoder"], ""),
    "a block": (modular("net.decoder.blocks.1"), ["net.decoder.blocks.1"], ""),
    "blocks": (modular("net.decoder.blocks.*"), DECODER, ""),
    "blocks of halves": (modular("net.*.blocks.[12]"), [*ENCODER[1:], *DECODER[1:]], ""),
    "repeated blocks": (modular("net.encoder.blocks", "regional"), ENCODER, ""),
    "a half": (modular("encoder", "regional"), [*ENCODER, "net.encoder.embed"], ""),
    "the other half": (modular("decoder", "regional"), DECODER, UNNAMED),
}


@pytest.mark.parametrize("name", REGIONS)
def test_regions_are_what_is_declared_or_named(name: str, module: nn.Module, declared: Declaration) -> None:
    strategy, paths, note = REGIONS[name]
    strategy.apply(program := program_of(module, declared))
    assert [region.path for region in program.regions] == paths
    assert note in " ".join(program.notes)
    kinds = {"net.encoder.blocks.1": "EncoderBlock", "net.decoder.blocks.2": "DecoderBlock", "net.tail": "ScoringTail"}
    assert all(kinds.get(one.path, one.kind) == one.kind for one in program.regions)


@pytest.mark.parametrize(
    ("made", "parts", "regions", "kinds", "note"),
    [
        (Block, (), ["layers.0", "layers.1"], 1, "regional: found repeated blocks in layers"),
        (Block, (), ["layers.0", "layers.1"], 1, "no part beside the blocks"),
        (LINEAR, ("stem", "head"), ["stem", "head"], 2, "regional: no repeated blocks here; compiled stem, head alone"),
        (LINEAR, (), ["stem", "layers.0", "layers.1", "head"], 3, ""),
    ],
)
def test_blocks_are_found_and_the_user_is_told(
    made: Callable[[], nn.Module],
    parts: tuple[str, ...],
    regions: list[str],
    kinds: int,
    note: str,
    graphs: list[GraphModule],
) -> None:
    program = Program(module=Stack(nn.ModuleList([made(), made()])), parts=parts)
    example = torch.randn(2, 8)
    eager = program.module(example)
    Regional(backend=backends.COUNTING).apply(program)
    assert [region.path for region in program.regions] == regions
    assert note in " ".join(program.notes)
    in_force(program)
    torch.testing.assert_close(program.module(example), eager)
    assert len(graphs) == kinds


def test_without_blocks_where_nothing_repeats_there_is_nothing_to_compile() -> None:
    with pytest.raises(ValueError, match=r"no repeated blocks.*compile\.regional\.blocks=\[path,\.\.\.\]"):
        Regional(blocks=[]).apply(Program(module=Stack(nn.ModuleList([LINEAR(), LINEAR()]))))


def _input_sizes(graph: GraphModule) -> list[object]:
    values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    return [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]


class Widening(nn.Module):
    """Its first block has another width than the rest, as in a graph network: features -> hidden -> hidden."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(*pair), nn.Sequential(nn.ReLU())) for pair in pairs)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD


@pytest.mark.parametrize(
    ("widths", "dynamic", "count"),
    [((8, 32, 32, 32), None, 4), ((32, 32, 32, 32), None, 2), ((8, 32, 32, 32), True, 2)],
    ids=["two widths", "one", "asked otherwise"],
)
def test_only_a_size_that_changes_from_batch_to_batch_turns_symbolic(
    widths: tuple[int, ...], dynamic: bool | None, count: int, graphs: list[GraphModule]
) -> None:
    module = Widening(*widths)
    program = Program(module=module, blocks=("layers",))
    Regional(backend=backends.COUNTING, dynamic=dynamic).apply(program)
    in_force(program)
    for number in range(6):
        module(torch.randn(100 + 3 * number, widths[0], requires_grad=True)).square().mean().backward()
        sizes = [size for graph in graphs for size in _input_sizes(graph)]
        assert number or all(isinstance(size, int) for size in sizes) is (dynamic is None)
    assert len(graphs) == count, "for each width one of fixed sizes, and one for any number of rows"
    symbolic = {str(size) for size in sizes if not isinstance(size, int)}
    assert len(symbolic) <= 1 or dynamic, "the widths are not symbolic"


def test_a_wrong_path_names_near_ones_and_the_blocks_there_are(module: nn.Module, declared: Declaration) -> None:
    with pytest.raises(ValueError, match=r"compile\.regional\.blocks: 'net\.decoder\.block' matches no") as raised:
        Regional(blocks=["net.decoder.block"]).apply(program_of(module, declared))
    (line,) = str(raised.value).splitlines()
    assert "near: net.decoder.blocks" in line
    assert "repeated blocks found: net.encoder.blocks, net.decoder.blocks" in line
    with pytest.raises(ValueError, match=r"compile\.regional\.parts: 'net\.tale' matches .*near: net\.tail"):
        Regional(parts=["net.tale"]).apply(program_of(module, declared))
    assert not any(child._compiled_call_impl for child in module.modules())


def test_containers_of_other_layers_do_not_fall_back_together() -> None:
    """They have one class, and nothing else in common."""
    module = nn.Module()
    module.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    module.critic = nn.Sequential(nn.Linear(8, 1))
    module.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    program = Program(module=module)
    Whole(backend="eager").apply(program)
    kinds = {region.path: region.of for region in program.regions}
    assert kinds["generator"] is not kinds["critic"]
    program = Program(module=module, blocks=("blocks",))
    Regional(backend="eager").apply(program)
    assert len({region.of for region in program.regions}) == 1, "equal ones share their code"
