"""The verdict in words: nothing wrong, or culprits with class and batch; and the command that is suggested."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from scripts.bisect.__main__ import lines, look_line, modular_overrides
from scripts.bisect.search import ComparedModule, Report
from strategies import Modular, Whole
from strategies.optimizer import Optimizer
from trainer.config import compose


def said(*looks: ComparedModule, **facts: Any) -> str:
    console = Console(file=io.StringIO(), width=500)
    for line in lines(Report(looks=list(looks), batch="4 x 8", batches=1, **facts), "mine, whole"):
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_wrong() -> None:
    assert "nothing wrong: mine, whole equals eager within its tolerance" in said(ComparedModule(path="net"))


def test_a_culprit_with_class_and_batch() -> None:
    about = "A, /x/a.py:3"
    first = ComparedModule(
        path="net.a", about=about, wrong="output '0' is off", children=[ComparedModule(path="net.a.x")]
    )
    second = ComparedModule(path="net.c", about=about, wrong="output '0' is off")
    text = said(ComparedModule(path="net", wrong="off", children=[first, ComparedModule(path="net.b"), second]))
    for line in (
        "mine, whole does not equal eager, with the batch 4 x 8",
        "culprit: net.a (A, /x/a.py:3): output '0' is off",
        "nothing that it calls is at fault alone",
        "so is 1 more of its class: net.c",
        "the rest: 2 submodules equal eager: net.a.x, net.b",
    ):
        assert line in text


def test_what_was_not_compared_or_called() -> None:
    text = said(
        ComparedModule(path="net.a"), ComparedModule(path="net.b", skipped="too little memory"), never_called=["head"]
    )
    assert "not compared: net.b: too little memory" in text
    assert "never called in these steps: head" in text


def test_a_line_for_each_look() -> None:
    assert look_line(3, ComparedModule(path="net", wrong="off")) == "  3  net: off"
    assert look_line(3, ComparedModule(path="net")) == "  3  net: equal"
    assert look_line(3, ComparedModule(path="net", skipped="x")) == "  3  net: not compared: x"


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
