"""Inference under strategies that fail: outputs that are not eager's, compiles that break, graphs that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from strategies import CudaGraph, Program, Regional
from strategies.cuda_graph.capture import StepGraphs
from tests.strategies import backends
from tests.trainer.guarded import backend, scaled
from tests.trainer.inferences import Block, Plain, Quiet, infer_with
from tests.trainer.recording import RecordingEngine


@pytest.mark.parametrize(("parity", "status"), [("on", "failed"), ("strict", "failed"), ("off", "finished")])
def test_outputs_that_are_not_eagers_end_the_run_unless_parity_is_off(parity: str, status: str, tmp_path: Path) -> None:
    with backend(f"tests_scaled_{parity}", scaled(1.01), scaled(1.0)) as name:
        record = infer_with(Quiet(), tmp_path, Regional(backend=name), options={"parity": parity})
    assert record.status == status
    if parity != "off":
        assert record.reason is not None
        assert record.reason.startswith(f"ParityError: parity={parity}: the compiled outputs are not eager's")
        assert record.report["parity"]["verdict"] == "failed"
        assert record.steady_steps == 0


def test_a_step_whose_regions_draw_random_numbers_is_not_compared(tmp_path: Path) -> None:
    class Noisy(Quiet):
        def forward(self, batch: list[Tensor]) -> Tensor:
            return super().forward(batch) + torch.rand(())

    class NoisyBlock(Block):
        def forward(self, x_BD: Tensor) -> Tensor:
            return super().forward(x_BD) + torch.rand(())

    within = Quiet()
    within.layers = nn.ModuleList(NoisyBlock() for _ in range(3))
    record = infer_with(within, tmp_path / "within", Regional(backend="aot_eager"))
    assert record.report["parity"]["reason"] == "the step draws random numbers"
    beside = infer_with(Noisy(), tmp_path / "beside", Regional(backend="aot_eager"))
    assert beside.report["parity"]["verdict"] == "passed", "draws beside the regions are eager's own"


@pytest.mark.parametrize(("on_compile_error", "status"), [("fail", "failed"), ("eager", "finished")])
def test_what_does_not_compile_ends_the_run_or_goes_on_eager(
    on_compile_error: str, status: str, tmp_path: Path
) -> None:
    strategy = Regional(backend=backends.BROKEN_FORWARD)
    record = infer_with(Quiet(), tmp_path, strategy, options={"on_compile_error": on_compile_error})
    assert record.status == status
    if status == "finished":
        assert (record.regions, record.regions_compiled, record.steady_steps) == (3, 0, 8)
        (event,) = [event for event in record.events if "on_compile_error=eager" in event.reason]
        assert event.kind == "fallback"
        assert any("all of it runs eager" in note for note in record.notes)
    else:
        assert record.reason is not None
        assert "this backend compiles no forward" in record.reason


def test_a_compiler_that_is_switched_off_is_an_error(tmp_path: Path) -> None:
    torch._dynamo.utils.clear_compilation_metrics()
    with torch._dynamo.config.patch(disable=True):
        record = infer_with(Quiet(), tmp_path, Regional(backend="aot_eager", fullgraph=False))
    assert record.reason is not None
    assert record.reason.startswith("CompiledNothing: regional: the compiler was handed 3 regions")


class Recorded(CudaGraph):
    """``cuda_graph`` with an engine that works on a CPU."""

    def check(self) -> None:
        """Any machine will do."""

    def begin(self, program: Program) -> None:
        program.step = StepGraphs(RecordingEngine(program.module), eager_steps=1, max_graphs=4)


def test_predictions_are_replayed_and_compared_with_eager(tmp_path: Path) -> None:
    record = infer_with(Quiet(), tmp_path, Recorded())
    facts = record.report["cuda_graph"]
    # One shape: run once, captured and replayed from the second batch on, the comparison's one included.
    assert (facts["graphs"], facts["eager_steps"], facts["refused"]) == (1, 1, [])
    assert facts["replayed_steps"] == 5 + 8 + 1
    assert record.warmup_steps == 6, "two distinct batches, three rounds"
    assert record.report["parity"]["verdict"] == "passed"


def test_a_prediction_that_leaves_something_behind_is_not_captured(tmp_path: Path) -> None:
    record = infer_with(Plain(), tmp_path, Recorded())
    facts = record.report["cuda_graph"]
    assert (record.status, facts["graphs"]) == ("finished", 0)
    assert facts["refused"] == ["changes the entries of self.seen, which a replay would not"]


def test_a_prediction_that_cannot_be_captured_runs_eager(tmp_path: Path) -> None:
    class ReadsBack(Quiet):
        def forward(self, batch: list[Tensor]) -> Tensor:
            results = super().forward(batch)
            return results if float(results.sum()) > -1e9 else -results

    record = infer_with(ReadsBack(), tmp_path, Recorded())
    assert (record.status, record.steady_steps) == ("finished", 8)
    (reason,) = record.report["cuda_graph"]["refused"]
    assert "operation not permitted when stream is capturing" in reason
