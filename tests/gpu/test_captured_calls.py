"""Captured steps on a device call the user's code once for each batch, and repeat real steps to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strategies import CudaGraph, Regional, Strategy
from tests.trainer.capturing import Captured
from tests.trainer.test_step_capture import UNSEEN, Counted, Net, ReadsInItsBackward, ReadsLoss, fit

pytestmark = pytest.mark.gpu
ON_GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
REGION: Sequence[Strategy] = (Regional(blocks=[], parts=["net"], options={"fallback_random": True}),)
"""With eager's dropout."""


@pytest.mark.parametrize("strategies", [(), REGION], ids=["cuda_graph", "regional-cuda_graph"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_batch_is_called_once_and_graphs_repeat_real_steps(
    precision: str, accumulate: int, strategies: Sequence[Strategy], tmp_path: Path
) -> None:
    options = {**ON_GPU, "precision": precision, "accumulate_grad_batches": accumulate, "rows": 40}
    eager = fit(Net(), tmp_path, **options)
    captured = Captured([*strategies, CudaGraph()], parity="strict")
    captured.audit_at = (12, 16)
    UNSEEN.calls = 0
    seen = fit(Counted(), tmp_path, captured, **options)
    facts = captured.facts
    assert UNSEEN.calls == facts["eager_steps"] + facts["graphs"]
    assert facts["replayed_steps"] + facts["eager_steps"] == len(seen.losses)
    assert facts["replayed_steps"] > len(seen.losses) // 3
    assert (facts["refused"], facts["parity"]["verdict"]) == ([], "passed")
    assert facts["parity"]["audits"] >= 2
    assert seen.losses == pytest.approx(eager.losses, rel=1e-4 if precision == "32-true" else 2e-2)


def test_copies_on_the_host_do_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.cuda_graph.recorded_step.DEVICE_SHARE", 0.0)
    eager = fit(Net(), tmp_path, **ON_GPU)
    captured = Captured([CudaGraph()])
    captured.audit_at = (10,)
    assert fit(Net(), tmp_path, captured, **ON_GPU).losses == pytest.approx(eager.losses, rel=1e-4)
    parity = captured.facts["parity"]
    assert (parity["verdict"], parity["copies_on"], parity["equal_to_the_last_bit"]) == ("passed", "host", 2)


def test_a_step_that_waits_for_the_device_is_never_called_in_vain(tmp_path: Path) -> None:
    class Calls(ReadsLoss):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            UNSEEN.calls += 1
            return super().training_step(batch, batch_idx)

    captured = Captured([CudaGraph()])
    UNSEEN.calls = 0
    fit(Calls(), tmp_path, captured, **ON_GPU)
    assert (UNSEEN.calls, captured.facts["graphs"]) == (20, 0)
    assert "the host waits for the device" in captured.facts["refused"][-1]
    assert "test_step_capture.py" in captured.facts["refused"][-1]


def test_what_a_backward_reads_is_part_of_the_graph(tmp_path: Path) -> None:
    eager = fit(ReadsInItsBackward(), tmp_path, **ON_GPU)
    captured = Captured([CudaGraph()])
    assert fit(ReadsInItsBackward(), tmp_path, captured, **ON_GPU).losses == pytest.approx(eager.losses, rel=1e-4)
    assert captured.facts["graphs"] == 2


def test_an_audit_finds_what_a_backward_reads_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.cuda_graph.host_recorder.HostRecorder._entered", lambda *_: None)
    captured = Captured([CudaGraph()])
    captured.audit_at = (8, 14)
    fit(ReadsInItsBackward(), tmp_path, captured, **ON_GPU)
    assert captured.facts["parity"]["verdict"] == "failed"
    assert any("differs from the step without it" in reason for reason in captured.facts["refused"])


def test_memory_of_a_comparison_is_given_back(tmp_path: Path) -> None:
    peaks = []
    for parity in ("off", "on"):
        torch.cuda.empty_cache()
        captured = Captured([CudaGraph()], parity=parity)
        fit(Net(), tmp_path, captured, **ON_GPU)
        torch.cuda.empty_cache()
        peaks.append(torch.cuda.memory_allocated())
    assert peaks[1] <= peaks[0] + 2**20
