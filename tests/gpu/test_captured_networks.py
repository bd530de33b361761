"""Networks that a step calls, captured on a device: autograd's nodes have streams there, which no CPU has."""

from __future__ import annotations

import pytest
import torch

from strategies import CudaGraph
from tests.trainer.test_network_graphs import CASES, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [name for name, (_, _, refused) in CASES.items() if refused is None])
def test_losses_and_weights_are_eagers(name: str) -> None:
    kind, paths, _ = CASES[name]
    expected, twin, _ = trained(kind, accelerator="gpu", devices=1)
    seen, module, compile_ = trained(kind, CudaGraph(scope="network"), accelerator="gpu", devices=1)
    facts = compile_.record.report["cuda_graph"]
    print(name, facts["networks"], facts["without_a_graph"], "equal" if seen == expected else "close")
    assert facts["without_a_graph"] == []
    assert sorted(one["path"] for one in facts["networks"] if one["replays"] and one["graphs"]) == paths
    assert seen == pytest.approx(expected, rel=1e-4)
    for (path, one), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=path)
