"""Two processes audit the same steps, and end or go on together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.two_processes import said_by_two

pytestmark = pytest.mark.xdist_group("two_processes")

TWO = """
import json, os, sys
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from strategies import Optimizer, Regional
from tests.trainer import guarded
from tests.trainer.guarded import Traceable
from tests.trainer.audited import FaultFrom, late_backend
from trainer.callback import Compile

folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
wrong = late_backend("two", guarded.scaled(1.01))
facts = {}
for name, given in (
    ("off", {"parity": "off"}), ("clean", {}), ("wrong", {}), ("eager", {"on_difference": "eager"}),
):
    torch._dynamo.reset()
    L.seed_everything(0, verbose=False)
    module = Traceable(dropout=0.0)
    data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    backend = wrong if rank and name in ("wrong", "eager") else "eager"
    optimizer = [Optimizer(backend="eager")] if name in ("off", "clean") else []
    compile_ = Compile([Regional(backend=backend), *optimizer], **given)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=9, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[FaultFrom(3), compile_], default_root_dir=folder,
    )
    error = None
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    audits = compile_.record.audits
    facts[name] = {
        "error": error, "steps": trainer.global_step, "audited": audits and audits.steps,
        "verdict": audits and audits.verdict, "left out": audits and audits.not_compared,
        "compiled": len(compile_.program.regions),
        "weights": [float(tensor.double().sum()) for tensor in module.state_dict().values()],
    }
(folder / f"{rank}.json").write_text(json.dumps(facts))
"""


def test_two_processes_audit_the_same_steps_and_end_or_go_on_together(tmp_path: Path) -> None:
    first, second = said_by_two(TWO, tmp_path)
    for facts in (first, second):
        assert facts["clean"]["error"] is None
        assert facts["clean"]["audited"] == [1, 2, 4, 8]
        assert facts["clean"]["weights"] == facts["off"]["weights"], "no trace"
        assert (facts["wrong"]["audited"], facts["wrong"]["verdict"]) == ([1, 2, 4], "failed")
        assert facts["wrong"]["error"].startswith("ParityError: parity=on: step 4 is not eager's: ")
        assert (facts["eager"]["error"], facts["eager"]["verdict"]) == (None, "went eager")
        assert (facts["eager"]["steps"], facts["eager"]["compiled"]) == (9, 0)
    assert "another process found it so" in first["wrong"]["error"]
    assert "loss " in second["wrong"]["error"]
    assert [facts["eager"]["audited"] for facts in (first, second)] == [[1, 2, 4]] * 2
