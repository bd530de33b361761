"""On a CUDA device, to the last bit: captured networks train as in eager, and what is stopped goes on as if it had not
been, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from strategies import CudaGraph
from tests.conftest import ROOT
from tests.gpu.test_cuda import ON_GPU
from tests.trainer.runs import curve, last_checkpoint, overrides, train
from tests.trainer.test_resume_exactness import send_in_step
from tests.trainer.test_step_capture import Net, fit
from trainer.callback import Compile

pytestmark = pytest.mark.gpu
STEPS, STOP_AT = 24, 14
"""The captured run has replayed steps before it stops."""
THREE_SHAPES = [
    list(range(first, first + size)) for first, size in ((0, 4), (4, 6), (10, 8), (18, 4), (22, 6), (28, 8))
]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_200_steps_of_a_captured_network_are_eagers(accumulate: int, precision: str, tmp_path: Path) -> None:
    options = {"accelerator": "gpu", "devices": 1, "precision": precision, "max_steps": 200}
    options |= {"accumulate_grad_batches": accumulate, "batches": THREE_SHAPES}
    eager = fit(Net(), tmp_path, **options)
    compile_ = Compile([CudaGraph(scope="network")])
    captured = fit(Net(), tmp_path, compile_, **options)
    assert captured.losses == eager.losses
    different = [name for name, value in eager.state.items() if not torch.equal(value, captured.state[name])]  # type: ignore[attr-defined]
    assert different == []
    networks = compile_.record.report["cuda_graph"]["networks"]
    assert len(captured.losses) == (200 if accumulate == 1 else 600)  # 6 batches an epoch: 4, and then 2
    assert sum(one["replays"] for one in networks) > len(captured.losses) * 3 // 4, networks


@pytest.mark.parametrize(
    ("arm", "scope"),
    [("regional", ()), ("cuda_graph", ("step",)), ("cuda_graph", ("network",))],
    ids=["regional", "step", "network"],
)
def test_a_run_goes_on_in_a_new_process_as_if_it_had_not_been_stopped(
    arm: str, scope: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout: Inductor's own, or eager's in graphs. Not where both are in use: before a new process captures, one
    step is observed in eager, which has other dropout masks and rounds otherwise than Inductor's kernels. The same for
    checks, so that it is ``parity=off``."""
    given = [*ON_GPU, f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "task.size.dropout=0.1"]
    given += ["parity=off", "trainer.precision=32-true", *(f"compile.cuda_graph.scope={one}" for one in scope)]
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    assert train(whole, *given, strategy=arm, backend="inductor").status == "finished"
    with monkeypatch.context() as patch:
        send_in_step(patch, STOP_AT, signal.SIGINT)
        assert train(first, *given, strategy=arm, backend="inductor").status == "interrupted"
    again = [*overrides(arm, backend="inductor"), *given, f"resume={first}", f"hydra.run.dir={second}"]
    subprocess.run([sys.executable, "-m", "trainer", *again], cwd=ROOT, check=True, timeout=300)
    assert list(curve(second)) == list(range(STOP_AT + 1, STEPS + 1))
    assert {**curve(first), **curve(second)} == curve(whole)
    weights, went_on = (last_checkpoint(run_dir)["state_dict"] for run_dir in (whole, second))
    torch.testing.assert_close(went_on, weights, rtol=0, atol=0)
