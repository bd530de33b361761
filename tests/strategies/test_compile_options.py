"""Options of ``torch.compile`` as strategies take them: checked before any work, and merged where torch refuses to."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from torch._inductor import list_mode_options

from strategies import STRATEGIES, Buckets, Modular, Optimizer, Regional, Whole
from strategies.base import WrongOption
from strategies.compile_options import MODES
from tests.strategies import backends


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "fastest"}, r"mode='fastest' is not one of \('default', 'reduce-"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "backend='aot_eager' takes neither mode nor options"),
        ({"backend": "aot_eager", "options": {"shape_padding": True}}, "backend='aot_eager' takes neither mode nor"),
        ({"backend": "inductr"}, r"backend='inductr' is not one of \(.*'inductor'"),
        ({"options": {"shape_paddin": True}}, "options: .*'shape_paddin'; near: shape_padding"),
        ({"options": {"shape_padding": 3}}, r"options: .*shape_padding.*int.*bool"),
    ],
)
@pytest.mark.parametrize("kind", [Whole, Regional], ids=lambda kind: kind.name)
def test_what_torch_would_not_take_is_refused_with_the_choices(
    kind: type[Whole] | type[Regional], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        kind(**options).check()
    assert re.search(rf"compile\.{kind.name}\.{complaint}", getattr(refused.value, "typed", str(refused.value)))


def test_a_wrong_option_is_named_as_python_has_it_and_as_it_is_typed() -> None:
    """A strategy is made in a script, where nobody translates, and by the command line, which takes the other form."""
    for make, python, typed in (
        (lambda: Regional(mode="fastest"), "Regional(mode='fastest') is", "compile.regional.mode='fastest' is"),
        (lambda: Buckets(edges=[]), "Buckets(edges=[]) must", "compile.buckets.edges=[] must"),
        (lambda: Optimizer(fullgraph=False), "Optimizer(fullgraph=False): an", "compile.optimizer.fullgraph=False: an"),
        (
            lambda: Modular(parts={"net.head": {"how": "x"}}),
            "Modular(parts={'net.head': {'how': 'x'}}) is",
            "compile.modular.parts.net.head.how='x' is",
        ),
    ):
        with pytest.raises(WrongOption) as refused:
            make()
        assert str(refused.value).startswith(python)
        assert refused.value.typed.startswith(typed)
    for name, kind in STRATEGIES.items():
        assert kind.__name__ == name.title().replace("_", ""), "by which the message names the class"


def test_a_backend_that_someone_registered_is_known() -> None:
    backends.register()
    Whole(backend=backends.COUNTING).check()
    Whole(backend="aot_eager").check()
    Whole(options={"shape_padding": True, "triton.cudagraphs": False}).check()


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_spelt_out_as_the_options_it_stands_for(mode: str) -> None:
    preset = {} if mode == "default" else list_mode_options()[mode]
    arguments = Regional(mode=mode).compile_arguments()
    assert arguments["options"] == preset
    assert "mode" not in arguments


def test_options_are_added_to_the_preset_and_win() -> None:
    arguments = Whole(mode="max-autotune", options={"max_autotune": False, "shape_padding": True}).compile_arguments()
    assert arguments["options"] == {**list_mode_options()["max-autotune"], "max_autotune": False, "shape_padding": True}


def test_each_region_gets_its_own_copy_of_the_options() -> None:
    strategy = Whole(options={"shape_padding": True})
    strategy.compile_arguments()["options"].pop("shape_padding")  # as torch does with some keys
    assert strategy.compile_arguments()["options"] == {"shape_padding": True}
    presets = copy.deepcopy(list_mode_options())
    Whole(mode="max-autotune").compile_arguments()["options"].clear()
    assert list_mode_options() == presets
