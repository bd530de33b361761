"""Two processes whose modules optimize by hand: compared, timed and rolled back alike, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.two_processes import said_by_two

pytestmark = pytest.mark.xdist_group("two_processes")

SCRIPT = """
import json, os, sys
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from strategies import Regional
from tests.strategies import backends
from tests.trainer import guarded
from tests.trainer.manual_modules import Accumulates, Adversaries
from trainer.callback import Compile

folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
backends.register()
with guarded.backend("tests_wrong_on_one", guarded.as_it_is, guarded.scaled(1.5)):
    pass
second = {"rollback": backends.BROKEN_BACKWARD, "wrong": "tests_wrong_on_one"}
facts = {}
for name, kind, modes in (
    ("two optimizers", Adversaries, ("off", "right", "rollback", "wrong")),
    ("accumulation", Accumulates, ("off", "right")),
):
    for mode in modes:
        torch._dynamo.reset()
        L.seed_everything(0, verbose=False)
        module = kind()
        data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
        backend = second.get(mode, "eager") if rank else "eager"
        options = {"parity": "off"} if mode == "off" else {"on_compile_error": "eager"}
        compile_ = Compile([Regional(backend=backend)], **options)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[compile_],
            default_root_dir=folder,
        )
        error = None
        try:
            trainer.fit(module, DataLoader(data, batch_size=4))
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        facts[f"{name}, {mode}"] = {
            "error": error,
            "steps": trainer.global_step,
            "report": compile_.record.report,
            "compiled": len(compile_.program.regions),
            "weights": [float(parameter.detach().double().sum()) for parameter in module.parameters()],
        }
(folder / f"{rank}.json").write_text(json.dumps(facts))
"""
STEPS = {"two optimizers": 6, "accumulation": 1}

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What each of two processes has to say about the same trainings."""
    return said_by_two(SCRIPT, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", list(STEPS))
def test_the_comparison_leaves_nothing_behind(name: str, processes: list[Facts]) -> None:
    for facts in processes:
        fact = facts[f"{name}, right"]
        assert (fact["error"], fact["steps"]) == (None, STEPS[name])
        assert fact["report"]["parity"]["verdict"] == "passed"
        assert fact["report"]["slowdown"]["before_the_first_step"]["eager_seconds"]
        assert fact["weights"] == processes[0][f"{name}, off"]["weights"], "to the last bit, and on both alike"


def test_what_fails_on_one_goes_on_eager_on_both(processes: list[Facts]) -> None:
    for facts in processes:
        fact = facts["two optimizers, rollback"]
        assert (fact["error"], fact["steps"], fact["compiled"]) == (None, STEPS["two optimizers"], 0)
        assert fact["report"]["rollback"]["rolled_back"]
        assert fact["weights"] == pytest.approx(processes[0]["two optimizers, off"]["weights"], rel=1e-5, abs=1e-6)


def test_both_stop_when_one_computes_something_else(processes: list[Facts]) -> None:
    for facts in processes:
        assert facts["two optimizers, wrong"]["error"].startswith("ParityError: parity=on")
        assert facts["two optimizers, wrong"]["steps"] == 0
