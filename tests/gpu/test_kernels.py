"""On a CUDA device, kernels that Inductor makes: those that a warm start takes over, and a fusion that 2.11 breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx  # what is kept away from runs needs it to be there
from torch import Tensor, nn

from strategies.compose import compiler_settings
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("how", ["regional", "whole"])
def test_a_warm_start_times_no_kernel_again_and_has_the_cold_ones_loss(how: str, tmp_path: Path) -> None:
    records = []
    for start in ("cold", "warm"):
        overrides = (
            *("experiment=smoke", f"compile=[{how},cached]", "trainer.max_steps=20", "trainer.progress=none"),
            *(f"compile.cached.url={tmp_path / 'store'}", f"hydra.run.dir={tmp_path / start}"),
        )
        subprocess.run([sys.executable, "-m", "trainer", *overrides], check=True, timeout=240)
        records.append(RunRecord.load(tmp_path / start))
    cold, warm = records
    assert (cold.cache, warm.cache) == ("cold", "warm")
    assert cold.report["cached"]["kernels_timed"] > 0
    assert warm.report["cached"]["kernels_timed"] == 0
    assert warm.final_loss == cold.final_loss


def test_a_layer_norm_over_all_positions_but_the_last_trains_with_symbolic_lengths() -> None:
    norm = nn.LayerNorm(768, device="cuda")
    linear = nn.Linear(768, 768, device="cuda")

    def loss(x_BSD: Tensor) -> Tensor:
        return linear(norm(x_BSD[:, :-1])).float().square().mean()

    def gradients(function: object, x_BSD: Tensor) -> list[Tensor]:
        for module in (norm, linear):
            module.zero_grad()
        function(x_BSD).backward()  # type: ignore[operator]
        return [parameter.grad.clone() for parameter in norm.parameters() if parameter.grad is not None]

    with compiler_settings({}):
        compiled = torch.compile(loss, dynamic=True)
        for length in (257, 321, 193):
            x_BSD = torch.randn(32, length, 768, device="cuda")
            for found, expected in zip(gradients(compiled, x_BSD), gradients(loss, x_BSD), strict=True):
                assert torch.allclose(found, expected, rtol=1e-2, atol=1e-4)
