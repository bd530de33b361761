"""Advice in the user's own words: the command that was typed, or Python in a script."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import crucible
import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from strategies import STRATEGIES, CudaGraph, Regional
from tests.report.scenarios import FASTER, NOISY, SLOWER
from tests.report.scenarios import run as record
from tests.trainer.lightning_modules import quiet_trainer
from trainer.advice import PACKAGES, in_python, program, strategies_in_python
from trainer.callback import Compile
from trainer.report.run_verdict import verdict_lines
from trainer.sweep.plan import again

COMMAND = re.compile(r"compile[.=]|(?<!Compile\()\b(?:parity|on_\w+)=\w|=(?:true|false|null)\b|hydra\.")
"""Options as only the command line has them."""


class Lines(L.LightningModule):
    """Without a block that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.line(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("started", "train", "explain"),
    [
        ("/opt/mine/bin/crucible", "crucible train", "crucible explain"),
        ("/opt/crucible/__main__.py", "python -m crucible train", "python -m crucible explain"),
        (str(PACKAGES / "trainer" / "__main__.py"), "python -m trainer", "python -m scripts.explain"),
        (str(PACKAGES / "scripts" / "report.py"), "python -m trainer", "python -m scripts.explain"),
        ("/home/me/scripts/mine.py", "crucible train", "crucible explain"),
    ],
)
def test_advice_has_the_command_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, started: str, train: str, explain: str
) -> None:
    monkeypatch.setattr("sys.argv", [started, "task=toy"])
    assert program() == train.split()
    assert f"next: {train} task=toy compile=eager  #" in verdict_lines(record(SLOWER))[-1]
    assert f"next: {explain} task=toy compile=regional" in verdict_lines(record(FASTER, graph_breaks=1))[-1]
    assert again(["-m", "seed=1"], Path("there")) == f"{train} -m seed=1 sweep=there"


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("use compile=whole", "use Whole()"),
        ("use compile=eager", "use Compile([])"),
        ("as in compile=[regional,cuda_graph]", "as in [Regional(), CudaGraph()]"),
        ("compile=[...,cached] starts warm", "[..., Cached()] starts warm"),
        ("compile=[eager,mine]", "compile=[eager,mine]"),
        ("compile.regional.blocks=[path,...] names them", "Regional(blocks=[path,...]) names them"),
        ("compile.regional.mode='fastest' is not", "Regional(mode='fastest') is not"),
        ("set compile.cuda_graph.required=false.", "set CudaGraph(required=False)."),
        ("compile.buckets.on_recompile=warn: a", 'Buckets(on_recompile="warn"): a'),
        ("compile.modular.parts: empty", "Modular.parts: empty"),
        ("parity=off compiles it unchecked", 'parity="off" compiles it unchecked'),
        ("on_compile_error=eager; fullgraph=false", 'on_compile_error="eager"; fullgraph=False'),
        ("repeat with hydra.launcher.rounds=3", "repeat with rounds=3"),
    ],
)
def test_options_are_those_of_python_in_a_script(text: str, python: str) -> None:
    assert in_python(text) == python
    assert in_python(python) == python, "said twice it is the same"


def test_what_python_says_can_be_run() -> None:
    known = [Regional(mode="max-autotune", parts=["head"]).facts(), CudaGraph().facts()]
    text = strategies_in_python(["cached", "regional", "cuda_graph"], known)
    assert text == "Compile([Cached(), Regional(mode='max-autotune', parts=['head']), CudaGraph()])"
    kinds = {kind.__name__: kind for kind in STRATEGIES.values()}
    made = eval(text, {**kinds, "Compile": list})
    assert made[1] == Regional(mode="max-autotune", parts=["head"])


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (record(names=(), script="mine.py"), "next: the script with Compile([Auto()])"),
        (record(SLOWER, script="mine.py"), "next: the script with Compile([])"),
        (record(FASTER, script="mine.py"), "next: the script with Compile([Cached(), Regional()])"),
        (record(NOISY, script="mine.py"), "next: crucible.compare(module, data)"),
        (record(NOISY, script="mine.py", graph_breaks=1), "next: crucible.explain_module(module, loader, strategies)"),
        (record(script="mine.py", config={"parity": "off"}), 'compared with eager: parity="off" leaves out steps'),
    ],
)
def test_the_verdict_of_a_script_speaks_python(one: object, says: str) -> None:
    one.command = []  # type: ignore[attr-defined]
    lines = "\n".join(verdict_lines(one))  # type: ignore[arg-type]
    assert says in lines
    assert not COMMAND.search(lines)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("compile_trainer", "compile_trainer(trainer, [Cached(), Regional()])"),
        ("crucible.compile", "crucible.compile(model, optimizer, [Cached(), Regional()])"),
    ],
)
def test_the_verdict_names_what_the_script_calls_and_nothing_that_needs_lightning(entry: str, says: str) -> None:
    assert f"next: the script with {says}" in "\n".join(verdict_lines(record(FASTER, script="mine.py", entry=entry)))
    for one in (record(NOISY, script="mine.py", entry=entry), record(FASTER, graph_breaks=1, script="a", entry=entry)):
        assert "crucible.compare(" not in (lines := "\n".join(verdict_lines(one)))
        assert "explain_module" not in lines


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Compile([], stpes=1), "Compile() has no argument 'stpes'"),
        (lambda: Compile(Regional(), CudaGraph()), "Compile() takes one list of strategies, "),
        (lambda: Compile([], on_slow="eager"), "Compile() has no argument 'on_slow'; near: on_slower"),
        (
            lambda: crucible.compile(Lines(), [], planned_step=9),
            "crucible.compile() has no argument 'planned_step'; near: planned_steps",
        ),
        (
            lambda: crucible.compile_trainer(None, party="off"),
            "compile_trainer() has no argument 'party'; near: parity, parts",
        ),
    ],
)
def test_a_wrong_call_is_named_as_what_was_called(call: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(says)}"):
        call()


def test_what_a_script_is_refused_with_speaks_python(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    compile_ = Compile([Regional(backend="eager", parts=[])])
    trainer = quiet_trainer(max_steps=1, callbacks=[compile_], default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="no repeated blocks") as refused:
        trainer.fit(Lines(), data)
    assert str(refused.value).endswith("name them with Regional(blocks=[path,...]) or use Whole()")
    assert not COMMAND.search(str(refused.value))
