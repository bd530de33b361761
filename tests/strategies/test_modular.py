"""``compile=modular``: each part in its own way, by declared name, path or wildcard; overlaps and typos are errors."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
from torch import nn
from torch.fx import GraphModule

from strategies import Modular, Part, Program
from tasks import Declaration
from tests.strategies import backends
from tests.strategies.modules import Block, Stack

COUNTING = backends.COUNTING


def program_of(module: nn.Module, declared: Declaration) -> Program:
    return Program(module=module, whole=declared.whole, blocks=declared.blocks, parts=declared.parts)


def modular(backend: str = COUNTING, **how: str) -> Modular:
    return Modular(parts={name.replace("__", "."): Part(how=value, backend=backend) for name, value in how.items()})


def regions_of(program: Program) -> list[str]:
    return [region.path for region in program.regions]


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"encodr": "whole"}, r"parts\.encodr: matches no submodule; near: encoder.*declares: net, encoder, decoder, "),
        ({"net.decodr": "whole"}, r"parts\.net\.decodr: matches no submodule; near: .*net\.decoder"),
        ({"net.*.block": "whole"}, r"parts\.net\.\*\.block: matches no submodule"),
        ({"blocks": "whole"}, r"parts\.blocks: .*several .*: net\.encoder\.blocks, net\.decoder\.blocks; write one"),
        ({"encoder": "whole", "net.encoder": "whole"}, r"'encoder' and 'net\.encoder' both mean net\.encoder"),
        (
            {"encoder": "whole", "net.encoder.blocks": "regional"},
            r"'net\.encoder\.blocks' \(net\.encoder\.blocks\.0\) lies inside 'encoder' \(net\.encoder\)",
        ),
        (
            {"net": "whole", "tail": "off"},
            r"'tail' \(net\.tail\) lies inside 'net' \(net\), which is compiled with all",
        ),
        ({"encoder": "whole", "net": "off"}, r"'encoder' holds no module to compile, all is off because of 'net'"),
        ({"tail": "regional"}, r"parts\.tail: net\.tail holds no repeated blocks.*parts\.tail\.how=whole"),
    ],
)
def test_what_cannot_be_compiled_as_asked_is_said_before_anything_is(
    parts: dict[str, str], complaint: str, module: nn.Module, declared: Declaration
) -> None:
    for order in permutations(parts.items()):
        strategy = Modular(parts={name: Part(how=how) for name, how in order})
        mirrored = re.sub(
            r"'encoder' and 'net\\.encoder'", "('encoder'|'net.encoder') and ('encoder'|'net.encoder')", complaint
        )
        with pytest.raises(ValueError, match=mirrored):
            strategy.apply(program_of(module, declared))
    assert not any(child._compiled_call_impl for child in module.modules())


def test_a_bare_off_in_yaml_is_read_as_off() -> None:
    assert Modular(parts={"tail": {"how": False}}).parts == {"tail": Part(how="off")}


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (Part(backend="inductr"), r"compile\.modular\.parts\.encoder\.backend='inductr' .*; near: inductor"),
        (Part(options={"shape_paddin": True}), r"compile\.modular\.parts\.encoder\.options: .*near: shape_padding"),
    ],
)
def test_each_parts_backend_and_options_are_checked_against_this_torch(part: Part, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Modular(parts={"tail": Part(backend="aot_eager"), "encoder": part}).check()


def test_no_part_or_only_eager_ones_are_refused_with_an_example() -> None:
    for strategy in (Modular(), modular(tail="off")):
        with pytest.raises(ValueError, match=r"names nothing to compile: add for instance \+compile\.modular\.parts"):
            strategy.check()


def test_what_the_parts_ask_for_is_what_the_strategy_asks_for() -> None:
    quiet = Modular(parts={"a": Part(backend="aot_eager"), "b": Part(how="off", mode="reduce-overhead")})
    assert not quiet.needs_inductor
    assert not quiet.uses_cuda_graphs
    loud = Modular(parts={"a": Part(backend="aot_eager"), "b": Part(mode="reduce-overhead")})
    assert loud.needs_inductor
    assert loud.uses_cuda_graphs


def test_a_module_that_declares_nothing_is_addressed_by_paths(graphs: list[GraphModule]) -> None:
    module = Stack(nn.ModuleList([Block(), Block()]))
    program = Program(module=module)
    modular(layers="regional", head="whole").apply(program)
    assert regions_of(program) == ["layers.0", "layers.1", "head"]
    assert any("found repeated blocks in layers" in note for note in program.notes)
    modular(layers="whole").apply(listed := Program(module=Stack(nn.ModuleList([Block(), Block()]))))
    assert regions_of(listed) == ["layers.0", "layers.1"], "a list of modules is never called itself"
    with pytest.raises(ValueError, match="'layers' holds no module to compile"):
        modular(layers="whole").apply(Program(module=Stack(nn.ModuleList())))
    with pytest.raises(ValueError, match=r"parts\.linear: .*near: layers\.0\.linear.*; the module declares no names"):
        modular(linear="whole").apply(Program(module=module))
