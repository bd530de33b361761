"""On a CUDA device, kernels that Inductor makes: those that a warm start takes over, and a fusion that 2.11 breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx  # what is kept away from runs needs it to be there
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

from strategies.base import compiler_settings
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


@pytest.mark.parametrize("batch_too", [False, True])
def test_a_layer_norm_over_all_tokens_but_the_last_trains_with_symbolic_lengths(batch_too: bool) -> None:
    embedding, norm = nn.Embedding(1000, 768, device="cuda"), nn.LayerNorm(768, device="cuda")
    linear = nn.Linear(768, 768, device="cuda")

    def loss(tokens_BS: Tensor) -> Tensor:
        return linear(norm(embedding(tokens_BS[:, :-1]))).float().square().mean()

    def gradients(function: object, tokens_BS: Tensor) -> list[Tensor]:
        for module in (embedding, norm, linear):
            module.zero_grad()
        function(tokens_BS).backward()  # type: ignore[operator]
        return [parameter.grad.clone() for parameter in norm.parameters() if parameter.grad is not None]

    with compiler_settings({}):
        torch._dynamo.reset()
        compiled = torch.compile(loss, dynamic=True if batch_too else None)
        for length in (257, 321, 193):
            tokens_BS = torch.randint(0, 1000, (32, length), device="cuda")
            torch._dynamo.mark_dynamic(tokens_BS, 1)
            for found, expected in zip(gradients(compiled, tokens_BS), gradients(loss, tokens_BS), strict=True):
                assert torch.allclose(found, expected, rtol=1e-2, atol=1e-4)


def test_the_gradient_of_an_embedding_is_left_to_eagers_kernel() -> None:
    embedding = nn.Embedding(50, 256, device="cuda")
    tokens_BS = torch.randint(0, 50, (32, 64), device="cuda")
    with compiler_settings({}):
        torch._dynamo.reset()
        compiled = torch.compile(lambda tokens_BS: embedding(tokens_BS))
        _, codes = run_fw_bw_and_get_code(lambda: compiled(tokens_BS).square().sum())
    assert any("torch.ops.aten.embedding_dense_backward" in code for code in codes)
    assert not any("tl.atomic_add" in code for code in codes)
    found = embedding.weight.grad.clone()
    embedding.zero_grad()
    embedding(tokens_BS).square().sum().backward()
    assert torch.allclose(found, embedding.weight.grad, rtol=1e-4)
