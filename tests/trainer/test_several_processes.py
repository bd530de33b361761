"""With two processes: both draw the same weights, and what one of them finds in the rehearsal, both act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.two_processes import said_by_two

SCRIPT = """
import json, os, sys
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from strategies import Regional, inplace
from tests.strategies import backends
from tests.strategies.modules import Block
from tests.trainer import guarded
from tests.trainer.lightning_modules import Blocks
from trainer.callback import Compile

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
inplace.RECOMPILE_LIMIT = 2
second = {"rollback": backends.BROKEN_BACKWARD, "wrong": "tests_wrong_on_one"}
facts = {}
for mode in ("eager", "right", "rollback", "wrong", *limited):
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
    backend = second.get(mode, "aot_eager") if rank else "aot_eager"
    compile_ = Compile([] if mode == "eager" else [Regional(backend=backend)], on_compile_error="eager",
                       parity="off" if mode == "late limit" else "on")
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
        "compiled": [layer._compiled_call_impl is not None for layer in module.layers],
        "weights": [float(parameter.detach().sum()) for parameter in module.parameters()],
    }
(folder / f"{rank}.json").write_text(json.dumps(facts))
os._exit(0)  # a group in which a step was broken off is not taken down in order
"""

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What each of two processes has to say about the same four trainings."""
    folder = tmp_path_factory.mktemp("processes")
    return said_by_two(SCRIPT, folder)


@pytest.mark.parametrize("mode", ["right", "rollback"])
def test_both_go_on_alike_with_eagers_weights(mode: str, processes: list[Facts]) -> None:
    eager = processes[0]["eager"]["weights"]
    for facts in processes:
        fact = facts[mode]
        assert (fact["error"], fact["steps"]) == (None, 6)
        assert fact["compiled"] == [mode == "right"] * 3
        assert fact["weights"] == pytest.approx(eager, rel=1e-5, abs=1e-6)
        assert fact["report"]["parity"]["verdict"] == ("passed" if mode == "right" else "skipped")
        assert ("rollback" in fact["report"]) == (mode == "rollback")


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
import json, os, sys
from pathlib import Path
import lightning as L
import torch
from tasks.captioner_size import CaptionerSize
from tasks.captioning import Captioning
from tasks.data.shapes import Shapes

folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
L.seed_everything(0, verbose=False)
size = CaptionerSize(
    image_size=32, encoder_layers=1, encoder_width=16, decoder_layers=1, decoder_width=16, vocabulary_size=300
)
data = Shapes(batch_size=2, train_images=8, val_images=2, num_workers=0)
task = Captioning(size=size, data=data, initialise="device")
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
