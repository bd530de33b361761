"""The suggested command lines: what they keep, what they change, and that the command line understands them."""

from __future__ import annotations

from scripts.bisect.__main__ import modular_overrides
from strategies import Modular, Whole
from strategies.optimizer import Optimizer
from trainer.config import compose

ARGUMENTS = {"backend": "inductor", "fullgraph": False, "dynamic": None, "options": {}}


def test_the_rest_is_compiled_with_the_same_options(edge: None) -> None:
    given = ["task=captioning", "compile=[whole,optimizer]", "compile.whole.mode=max-autotune", "seed=3"]
    overrides = modular_overrides(
        given,
        [Whole(mode="max-autotune"), Optimizer()],
        {"net": {**ARGUMENTS, "options": {"max_autotune": True}}},
        ["net.head"],
    )
    assert overrides == [
        "task=captioning",
        "seed=3",
        "compile=[modular,optimizer]",
        '+compile.modular.parts={net.head:{how:"whole",fullgraph:false,options:{max_autotune:true}}}',
    ]
    config = compose(overrides)
    assert config.compile["modular"] == Modular(
        parts={"net.head": {"options": {"max_autotune": True}, "fullgraph": False}}
    )


def test_nothing_left_is_eager() -> None:
    assert modular_overrides(["compile=whole", "seed=1"], [Whole()], {}, []) == ["seed=1", "compile=eager"]


def test_every_kind_of_option_is_written_as_hydra_reads_it(edge: None) -> None:
    options = {"triton.cudagraphs": False, "max_fusion_size": 8, "autotune_local_cache": True}
    region = Whole(dynamic=None, options=options)
    overrides = modular_overrides(["task=micro"], [Whole()], {"net": region.compile_arguments()}, ["net"])
    assert compose(overrides).compile["modular"] == Modular(parts={"net": {"options": options, "fullgraph": False}})
