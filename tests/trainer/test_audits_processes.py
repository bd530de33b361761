"""Two processes, under DDP and FSDP2, audit the same steps; what the comparison, an audit or the preflight finds in
one of them, both act on."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from strategies import Optimizer, Regional, Strategy
from tests.processes import Pair
from tests.strategies import backends
from tests.trainer import guarded
from tests.trainer.audited import FaultFrom, late_backend
from tests.trainer.guarded import Traceable
from tests.trainer.lightning_modules import quiet_trainer
from trainer.callback import Compile
from trainer.loops.fsdp2 import FSDP2

pytestmark = pytest.mark.xdist_group("two_processes")


def trained(devices: str, backend: str, *others: Strategy, **options: Any) -> dict[str, Any]:
    """Nine steps."""
    torch._dynamo.reset()
    L.seed_everything(0, verbose=False)
    module = Traceable(dropout=0.0)
    data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    compile_ = Compile([Regional(backend=backend), *others], verbose=False, save=False, **options)
    trainer = quiet_trainer(
        devices=2,
        strategy=FSDP2() if devices == "fsdp2" else devices,
        max_steps=9,
        max_epochs=-1,
        gradient_clip_val=0.5,
        callbacks=[FaultFrom(3), compile_],
    )
    error = None
    try:
        trainer.fit(module, DataLoader(data, batch_size=4))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    record = compile_.record
    tensors = [] if error else module.state_dict().values()
    return {
        "error": error,
        "steps": trainer.global_step,
        "parity": record.report.get("parity", {}).get("verdict"),
        "audited": record.audits and (record.audits.steps, record.audits.verdict),
        "eager": record.ended_in_eager and not compile_.program.regions,
        "weights": [float((one.full_tensor() if isinstance(one, DTensor) else one).double().sum()) for one in tensors],
    }


def all_cases(devices: str) -> dict[str, dict[str, Any]]:
    backends.register()
    late = late_backend("two", guarded.scaled(1.01)) if os.environ["RANK"] == "1" else "eager"
    optimizer = [Optimizer(backend="eager")] if devices == "ddp" else []
    cases = {
        "off": trained(devices, "eager", *optimizer, parity="off"),
        "clean": trained(devices, "eager", *optimizer),
        "late": trained(devices, late, on_difference="eager"),
    }
    if devices == "ddp":
        return cases | {"wrong": trained(devices, late)}
    return cases | {
        "forward": trained(devices, backends.BROKEN_FORWARD, on_compile_error="eager"),
        "backward": trained(devices, backends.BROKEN_BACKWARD, on_compile_error="eager"),
    }


@pytest.mark.parametrize("devices", ["ddp", "fsdp2"])
def test_two_processes_audit_the_same_steps_and_both_act_on_what_one_finds(devices: str, pair: Pair) -> None:
    ranks = pair(all_cases, devices)
    for facts in ranks:
        off, clean = facts["off"], facts["clean"]
        assert (clean["error"], clean["parity"], clean["audited"]) == (None, "passed", ([1, 2, 4, 8], "clean"))
        assert clean["weights"] == off["weights"], "no trace"
        assert facts["late"]["audited"] == ([1, 2, 4], "went eager")
        for case in facts.keys() - {"off", "clean", "wrong"}:
            assert (facts[case]["error"], facts[case]["steps"], facts[case]["eager"]) == (None, 9, True), case
        for case in facts.keys() & {"forward", "backward"}:
            assert facts[case]["weights"] == pytest.approx(off["weights"], rel=1e-5, abs=1e-6)
    if devices == "ddp":
        wrong = [facts["wrong"] for facts in ranks]
        for fact in wrong:
            assert fact["audited"] == ([1, 2, 4], "failed")
            assert fact["error"].startswith("ParityError: parity=on: step 4 is not eager's: ")
        assert "another process found it so" in wrong[0]["error"]
        assert "loss " in wrong[1]["error"]
