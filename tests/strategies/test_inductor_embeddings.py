"""Gradients of embeddings under Inductor: eager's kernel adds them up, in eager's order."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.compile_fx  # what is changed needs it to be there
from torch import nn
from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code

from strategies.base import compiler_settings


def compiled_code(vocabulary: int) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, 8))
    tokens_BS = torch.randint(0, vocabulary, (4, 32))
    compiled = torch.compile(module, backend="inductor")
    _, codes = run_fw_bw_and_get_code(lambda: compiled(tokens_BS).square().sum())
    gradient = module[0].weight.grad.clone()
    module.zero_grad()
    module(tokens_BS).square().sum().backward()
    assert torch.allclose(gradient, module[0].weight.grad, rtol=1e-4)
    return "\n".join(codes)


def test_eagers_kernel_is_called_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # where torch refuses to call kernels that it could decompose
    with fresh_cache(), compiler_settings({}), compiler_settings({}):  # settings twice, as `auto` does it
        code = compiled_code(5)
    assert "torch.ops.aten.embedding_dense_backward" in code
    assert "atomic_add" not in code
    with fresh_cache():
        code = compiled_code(6)
    assert "torch.ops.aten.embedding_dense_backward" not in code, "torch is as it was"


def test_torch_is_restored() -> None:
    from torch._inductor import decomposition

    before = decomposition.decomp_embedding_dense_backward
    with compiler_settings({}):
        assert decomposition.decomp_embedding_dense_backward is not before
    assert decomposition.decomp_embedding_dense_backward is before
    with compiler_settings({"embedding_gradient": "inductor"}):
        assert decomposition.decomp_embedding_dense_backward is before
