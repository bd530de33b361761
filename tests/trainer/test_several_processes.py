"""With two processes: both draw the same weights and resume their own random states, and what one of them finds in the
preflight, or in its cache, both act on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import train
from tests.trainer.two_processes import said_by_two

pytestmark = pytest.mark.xdist_group("two_processes")

SCRIPT = """
import dataclasses, json, os, sys
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from strategies import STRATEGIES, Optimizer, Regional, Stage, Strategy, regions
from strategies.modules import Auto
from tests.strategies import backends
from tests.strategies.modules import Block
from tests.trainer import guarded
from tests.trainer.lightning_modules import Blocks
from trainer.auto import chooser
from trainer.callback import Compile
from trainer.telemetry.compiler import CompilerMonitor

folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
backends.register()
with guarded.backend("tests_wrong_on_one", guarded.as_it_is, guarded.scaled(1.5)):
    pass
class Numbered(Block):
    def __init__(self, number, counts):
        super().__init__()
        self.number, self.counts = number, counts

    def forward(self, x):
        self.number += self.counts
        return super().forward(x) * (1.0 if self.number < 100 else 2.0)

limited = {"limit": (1, 0), "late limit": (0, 1)}  # one process has a graph for each block, or one for each step
regions.RECOMPILE_LIMIT = 2

class Warm(Strategy):
    # As compile=cached with a bundle, on one process: what an earlier run found, and that all graphs were there.
    name, stage = "cached", Stage.CACHE
    def apply(self, program):
        program.findings.update(found)
        figures = CompilerMonitor.figures
        CompilerMonitor.figures = lambda watch: dataclasses.replace(figures(watch), cache="warm")

chooser.STRATEGIES = {**STRATEGIES, "regional": lambda: Regional(backend="eager")}
chooser.SETTLE_STEPS, chooser.TIMED_STEPS, chooser.MAX_TIMED_STEPS = 1, 1, 1
# Each process has a clock of its own, and the first one decides.
chooser.Chooser._measured = lambda self, arm, *_: (1.0 if (arm.module == "eager") == (rank == 0) else 0.5, {})

second = {"rollback": backends.BROKEN_BACKWARD, "wrong": "tests_wrong_on_one"}
facts, found = {}, {}
for mode in ("eager", "right", "warm", "optimizer", "auto", "rollback", "wrong", *limited):
    torch._dynamo.reset()
    L.seed_everything(0, verbose=False)
    module = Blocks()
    data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    if mode in limited:
        each, counts = limited[mode] if rank else (0, 0)
        kept = [layer.state_dict() for layer in module.layers]
        module.layers = torch.nn.ModuleList(Numbered(each * number, counts) for number in range(3))
        for layer, weights in zip(module.layers, kept):
            layer.load_state_dict(weights)
    backend = second.get(mode, "eager") if rank else "eager"
    strategies = [] if mode == "eager" else [Regional(backend=backend)]
    if mode == "optimizer":
        strategies.append(Optimizer(backend=backends.BROKEN_FORWARD if rank else "eager"))
    if mode == "auto":
        strategies = [Auto(candidates=["regional"], planned_steps=10**9, remember=False)]
    if mode == "warm" and rank:
        strategies.append(Warm())
    compile_ = Compile(strategies, on_compile_error="eager", parity="off" if mode == "late limit" else "on")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=6, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[compile_], default_root_dir=folder,
    )
    error = None
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    facts[mode] = {
        "error": error,
        "steps": compile_.record.steps,
        "report": compile_.record.report,
        "ended_in_eager": compile_.record.ended_in_eager,
        "compiled": [any(one.module is layer for one in compile_.program.regions) for layer in module.layers],
        "weights": [float(parameter.detach().sum()) for parameter in module.parameters()],
    }
    if mode == "right":
        found = compile_.program.findings
(folder / f"{rank}.json").write_text(json.dumps(facts))
"""

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What each of two processes has to say about the same trainings."""
    folder = tmp_path_factory.mktemp("processes")
    return said_by_two(SCRIPT, folder)


@pytest.mark.parametrize("mode", ["right", "warm", "optimizer", "auto", "rollback"])
def test_both_go_on_alike_with_eagers_weights(mode: str, processes: list[Facts]) -> None:
    eager = processes[0]["eager"]["weights"]
    for facts in processes:
        fact = facts[mode]
        assert (fact["error"], fact["steps"]) == (None, 6)
        assert fact["compiled"] == [mode != "rollback"] * 3
        assert fact["weights"] == pytest.approx(eager, rel=1e-5, abs=1e-6)
        assert fact["report"]["parity"]["verdict"] == ("skipped" if mode == "rollback" else "passed")
        assert "compared" not in fact["report"]["parity"]  # here, and not by an earlier run
        assert ("rollback" in fact["report"]) == (mode in ("rollback", "optimizer"))


@pytest.mark.parametrize(("mode", "eager"), [("limit", [True, True]), ("late limit", [False, True])])
def test_the_limit_of_graphs_on_one_ends_neither(mode: str, eager: list[bool], processes: list[Facts]) -> None:
    for facts in processes:
        assert (facts[mode]["error"], facts[mode]["steps"]) == (None, 6)
        assert facts[mode]["weights"] == pytest.approx(processes[0]["eager"]["weights"], rel=1e-5, abs=1e-6)
    assert [facts[mode]["ended_in_eager"] for facts in processes] == eager, "before the first step both agree"


def test_both_stop_when_one_computes_something_else(processes: list[Facts]) -> None:
    for facts in processes:
        assert facts["wrong"]["error"].startswith("ParityError: parity=on")
        assert facts["wrong"]["steps"] == 0


DRAWING = """
import dataclasses, json, os, sys
from pathlib import Path
import lightning as L
import torch
from tasks.captioning.task import CaptionerSize
import tasks.module
from tasks.captioning.task import Captioning
from tasks.captioning.task import Shapes

folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
L.seed_everything(0, verbose=False)
size = CaptionerSize(
    image_size=32, encoder_layers=1, encoder_width=16, decoder_layers=1, decoder_width=16, vocabulary_size=300
)
data = Shapes(batch_size=2, train_images=8, val_images=2, num_workers=0)
task = Captioning(size=size, data=data)
tasks.module.LARGE = 1  # weights are drawn on the device
module = task.build_module(max_steps=2)
torch.rand(1 + rank)  # what a process draws of its own between building and training
sums, draw = [], module.configure_model

def total():
    sums.append(sum(float(parameter.detach().double().abs().sum()) for parameter in module.parameters()))

def configure_model():
    draw()
    total()  # before DDP makes the first process's weights everyone's

module.configure_model = configure_model
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, default_root_dir=folder,
)
trainer.fit(module, datamodule=task.build_data(seed=0))
total()
(folder / f"{rank}.json").write_text(json.dumps({"sums": sums, "steps": trainer.global_step}))
"""


def test_both_draw_the_same_weights_on_their_devices(tmp_path: Path) -> None:
    one, other = said_by_two(DRAWING, tmp_path)
    assert one == other
    assert one["steps"] == 2
    assert one["sums"][0] != one["sums"][1]


RESUMING = """
import json, os, random, signal, sys
from pathlib import Path
import numpy
import torch
from tasks.module import ScoredModule
from tests.trainer.runs import train

folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
seen, stopping = [], False

def on_train_batch_start(module, batch, batch_idx):
    if stopping and rank == 1 and module.global_step == 2:
        os.kill(os.getpid(), signal.SIGINT)
    seen.append([random.random(), numpy.random.rand()])

ScoredModule.on_fit_start = lambda module: [draw(rank) for draw in (random.seed, numpy.random.seed, torch.manual_seed)]
ScoredModule.on_train_batch_start = on_train_batch_start
ScoredModule.on_train_batch_end = lambda module, outputs, batch, batch_idx: seen[-1].append(float(outputs["loss"]))
facts = {}
for name, resume in (("whole", ()), ("first", ()), ("second", (f"resume={folder / 'first'}",))):
    stopping = name == "first"
    record = train(folder / name, "trainer.devices=2", "trainer.max_steps=5", "task.size.dropout=0.3", *resume)
    facts[name] = {"status": record.status, "signal": record.signal, "seen": seen.copy()}
    seen.clear()

(folder / f"{rank}.json").write_text(json.dumps(facts))
"""


def test_each_process_resumes_its_own_random_numbers_and_stops_with_the_other(tmp_path: Path) -> None:
    processes = said_by_two(RESUMING, tmp_path)
    for facts in processes:
        assert (facts["first"]["status"], facts["first"]["signal"]) == ("interrupted", signal.SIGINT)
        assert facts["second"]["status"] == "finished"
        assert len(facts["first"]["seen"]) == 4, "the step after the one that was asked"
        assert facts["first"]["seen"] + facts["second"]["seen"] == facts["whole"]["seen"]
    one, other = (facts["whole"]["seen"] for facts in processes)
    assert not {number for step in one for number in step} & {number for step in other for number in step}
    alone = train(tmp_path / "alone", "trainer.max_steps=5", f"resume={tmp_path / 'first'}")
    assert (alone.status, alone.steps) == ("finished", 5)
