"""Whole steps in CUDA graphs on a device: eager's losses step by step, dropout, schedules and accumulation included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies import CudaGraph, Optimizer, Strategy
from strategies.cuda_graph.step_graphs import CudaEngine
from tests.gpu.test_cuda import ON_GPU
from tests.trainer.runs import curve, train
from tests.trainer.test_step_capture import CountsSteps, Net, ReadsLoss, fit
from trainer.callback import Compile
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.gpu
STEPS = ("trainer.max_steps=24", "trainer.log_every_n_steps=1")
RAGGED = ("task.data.pad_to=null", "task.data.max_objects=2")


def both(
    kind: type[Net], folder: Path, *arguments: Any, strategies: Sequence[Strategy] = (), **options: Any
) -> dict[str, Any]:
    options = {"accelerator": "gpu", "devices": 1, **options}
    measured = Compile()
    eager = fit(kind(*arguments), folder, measured, **options)
    compile_ = Compile([*strategies, CudaGraph()])
    graphed = fit(kind(*arguments), folder, compile_, **options)
    assert graphed.losses == pytest.approx(eager.losses, rel=1e-4)
    assert graphed.steps == eager.steps
    assert graphed.rates == eager.rates
    for before, after in zip(
        eager.optimizer["state"].values(),
        graphed.optimizer["state"].values(),
        strict=True,  # type: ignore[attr-defined]
    ):
        assert list(before) == list(after)
        if "step" in before:
            assert before["step"].device == after["step"].device
            assert before["step"] == after["step"]
    peaks = [each.record.peak_device_memory_gib for each in (measured, compile_)]
    assert peaks[1] > 0.9 * peaks[0], "the memory pool of the graphs is not counted"  # type: ignore[operator]
    report: dict[str, Any] = compile_.record.report["cuda_graph"]
    return report


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw"])
def test_losses_are_eagers_step_by_step(optimizer: str, accumulate: int, tmp_path: Path) -> None:
    report = both(Net, tmp_path, optimizer, accumulate_grad_batches=accumulate, max_steps=12)
    assert report["refused"] == []
    assert report["captured"][-1].startswith("whole step")


def test_a_replay_draws_its_own_random_numbers_where_the_gpu_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(graph: torch.cuda.CUDAGraph, *arguments: Any, **options: Any) -> None:
        torch.cuda._sleep(10**8)  # cycles, on the stream of the capture: another process has the GPU
        begin(graph, *arguments, **options)

    def step() -> torch.Tensor:
        torch.cuda._sleep(10**9)
        return torch.nn.functional.dropout(ones)

    begin = torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    ones = torch.ones(1024, device="cuda")
    torch.nn.functional.dropout(ones)  # an offset of 0 would be right by chance
    state = torch.cuda.get_rng_state()
    expected = step()
    torch.cuda.set_rng_state(state)
    replay, drawn = CudaEngine(torch.device("cuda", 0)).capture(step)
    replay()
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_gradient_scaler_keeps_the_optimizer_out(precision: str, tmp_path: Path) -> None:
    report = both(Net, tmp_path, "adamw", precision=precision)
    assert report["captured"][0].startswith("whole step" if precision == "bf16-mixed" else "forward and backward")


def test_betas_that_change_leave_the_optimizer_out(tmp_path: Path) -> None:
    report = both(Net, tmp_path, "one_cycle")
    assert report["captured"][0].startswith("forward and backward")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw", "sgd", "one_cycle"])
def test_a_compiled_optimizer_is_part_of_the_graph(optimizer: str, accumulate: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": accumulate, "max_steps": 16, "gradient_clip_val": 0.5}
    report = both(Net, tmp_path, optimizer, strategies=[Optimizer()], **options)
    assert report["refused"] == []
    assert report["captured"][-1].startswith("whole step")


@pytest.mark.parametrize("kind", [ReadsLoss, CountsSteps])
def test_a_step_that_cannot_be_captured_trains_on(kind: type[Net], tmp_path: Path) -> None:
    report = both(kind, tmp_path, "adamw_fused")
    assert report["graphs"] == 0
    assert report["refused"]
    x = torch.randn(8, device="cuda")
    assert torch.isfinite(x.sum())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_captioning_learns_as_without_graphs(dropout: float, tmp_path: Path) -> None:
    given = (*ON_GPU, *STEPS, *RAGGED, f"task.size.dropout={dropout}", "trainer.precision=32-true")
    train(tmp_path / "eager", *given, strategy="eager")
    train(tmp_path / "graphs", *given, strategy="cuda_graph")
    eager, graphs = curve(tmp_path / "eager"), curve(tmp_path / "graphs")
    assert list(graphs.values()) == pytest.approx(list(eager.values()), rel=1e-4)
    report = RunRecord.load(tmp_path / "graphs").report["cuda_graph"]
    assert report["graphs"] > 1
    assert report["refused"] == []


def test_compiled_regions_are_captured(tmp_path: Path) -> None:
    given = (*ON_GPU, *STEPS, "trainer.max_steps=8")
    train(tmp_path / "regional", *given, strategy="regional", backend="inductor")
    train(tmp_path / "both", *given, "compile=[regional,cuda_graph]", strategy="regional", backend="inductor")
    regional, graphs = curve(tmp_path / "regional"), curve(tmp_path / "both")
    assert list(graphs.values()) == pytest.approx(list(regional.values()), rel=1e-3)
    assert RunRecord.load(tmp_path / "both").report["cuda_graph"]["graphs"] == 1
