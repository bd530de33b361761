"""The modules of ``tests.trainer.test_captured_python_state`` on a device: captured, they train as in eager."""

from __future__ import annotations

from pathlib import Path

import pytest

from strategies import CudaGraph, Regional, Strategy
from tests.trainer.test_captured_python_state import MODULES, STEPS, losses
from trainer.callback import Compile

pytestmark = pytest.mark.gpu
TWICE_DERIVED = {"TakesAGradientByItsBatch"}
"""One step is replayed before it is known that no graph can be derived twice: its gradients add up in another order."""
OF_THE_REGION = {"AddsAHookLater", "ReplacesALayer", "AttributeOfASubmodule"}
"""What changes lies within the compiled region, which is compiled anew outside of a graph first."""


@pytest.mark.parametrize("regional", [False, True], ids=["cuda_graph", "regional-cuda_graph"])
@pytest.mark.parametrize("name", list(MODULES))
def test_losses_are_eagers_step_by_step(name: str, regional: bool, tmp_path: Path) -> None:
    strategies: list[Strategy] = [
        *([Regional(blocks=[], parts=["net"], fullgraph=False)] if regional else []),
        CudaGraph(),
    ]
    compile_ = Compile(strategies)
    captured = losses(name, tmp_path, compile_, accelerator="gpu")
    assert captured == pytest.approx(losses(name, tmp_path, Compile(), accelerator="gpu"), rel=1e-4)
    report, (_, reason) = compile_.record.report["cuda_graph"], MODULES[name]
    print(name, "regional" if regional else "-", report["graphs"], report["replayed_steps"], report["refused"])
    if regional and name in OF_THE_REGION:
        return
    if reason is None:
        assert report["refused"] == []
        assert report["replayed_steps"] > STEPS // 2
    else:
        assert any(reason in refusal for refusal in report["refused"]), report["refused"]


@pytest.mark.parametrize("name", list(MODULES))
def test_a_captured_network_ends_at_eagers_losses(name: str, tmp_path: Path) -> None:
    """To the last bit, whatever the step around it does on the host."""
    compile_ = Compile([CudaGraph(scope="network")])
    captured, eager = losses(name, tmp_path, compile_, accelerator="gpu"), losses(name, tmp_path, accelerator="gpu")
    assert captured == (pytest.approx(eager, rel=1e-5) if name in TWICE_DERIVED else eager)
    print(name, compile_.record.report["cuda_graph"]["networks"])
