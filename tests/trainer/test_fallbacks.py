"""What does not compile goes on eager, kind by kind and loudly, and the rest stays compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strategies import Regional
from tests.strategies import backends
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile


class Odd(nn.Module):
    """A part with an operation that no other part has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD).tanh()


class WithPart(Blocks):
    """Blocks and, between stem and blocks, an odd part."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.odd(batch[0]), batch[1]], batch_idx)


def _refuses_tanh(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    if "tanh" in graph.code:
        raise RuntimeError("no tanh here")
    return graph.forward


def _refuses_tanh_backward(graph: GraphModule, example_inputs: list[Any]) -> Any:
    from torch._dynamo.backends.common import aot_autograd

    broken = backends._refuse_backward if "tanh" in graph.code else backends._as_it_is
    return aot_autograd(fw_compiler=backends._as_it_is, bw_compiler=broken)(graph, example_inputs)


@pytest.fixture(autouse=True)
def odd_backends() -> None:
    for name, backend in (("tests_no_tanh", _refuses_tanh), ("tests_no_tanh_backward", _refuses_tanh_backward)):
        if name not in torch.compiler.list_backends(()):
            torch._dynamo.register_backend(backend, name=name)


@pytest.mark.parametrize("parity", ["on", "off"])
@pytest.mark.parametrize(
    ("backend", "complaint"), [("tests_no_tanh", "no tanh here"), ("tests_no_tanh_backward", "no backward")]
)
def test_the_part_at_fault_goes_on_eager_and_the_others_compiled(
    backend: str, complaint: str, parity: str, tmp_path: Path
) -> None:
    eager = fit(WithPart(), tmp_path, [])
    compile_ = Compile([Regional(backend=backend, parts=["odd"])], parity=parity)
    module = WithPart()
    with pytest.warns(UserWarning, match=rf"^Odd: odd runs eager from step 2 on: .*{complaint}"):
        losses = fit(module, tmp_path, [compile_])
    assert losses == pytest.approx(eager, rel=FLOOR)
    record = compile_.record
    assert (record.regions, record.regions_compiled) == (4, 3)
    assert list(record.eager_parts) == ["odd"]
    assert record.ended_in_eager is False
    fallback = next(event for event in record.events if event.kind == "fallback")
    assert complaint in fallback.reason
    assert any(complaint in note for note in record.notes)
    assert record.report["rollback"]["rolled_back"][0]["parts"] == ["odd"]
