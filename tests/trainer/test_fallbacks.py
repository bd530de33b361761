"""What does not compile goes on eager, kind by kind and loudly, and the rest stays compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strategies import Regional, Whole
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


class Growing(Blocks):
    """From the third step on its blocks are given a shape that is new."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= 2:
            batch = [torch.cat([tensor] * 3) for tensor in batch]
        return super().training_step(batch, batch_idx)


def _small_only(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    if max(tensor.shape[0] for tensor in example_inputs if isinstance(tensor, Tensor) and tensor.ndim) > 8:
        raise RuntimeError("no new shape")
    return graph.forward


@pytest.mark.parametrize("parity", ["on", "off"])
def test_a_compile_that_fails_in_the_middle_of_the_training_leaves_eager_from_there_on(
    parity: str, tmp_path: Path
) -> None:
    if "tests_small_only" not in torch.compiler.list_backends(()):
        torch._dynamo.register_backend(_small_only, name="tests_small_only")
    eager = fit(Growing(), tmp_path, [])
    compile_ = Compile([Regional(backend="tests_small_only", dynamic=False)], parity=parity)
    with pytest.warns(UserWarning, match="run eager from step 4 on: .*no new shape"):
        assert fit(Growing(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    done = compile_.record.report["rollback"]["rolled_back"]
    assert [entry["step"] for entry in done] == [3]
    assert compile_.record.regions_compiled == 3, "they were, for two steps"


class KeepsGraph(Blocks):
    """Adds up the gradients of two backwards through one graph."""

    def backward(self, loss: Tensor, *_: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class KeepsGraphLater(KeepsGraph):
    def backward(self, loss: Tensor, *_: Any) -> None:
        if self.global_step < 2:
            loss.backward()
        else:
            super().backward(loss)


@pytest.mark.parametrize("kind", [KeepsGraph, KeepsGraphLater])
def test_a_backward_that_keeps_its_graph_is_compiled_for_that(kind: type[Blocks], tmp_path: Path) -> None:
    eager, compile_ = fit(kind(), tmp_path, []), Compile([Whole(backend="aot_eager", dynamic=True)])
    assert fit(kind(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    assert (compile_.record.regions_compiled, compile_.record.ended_in_eager) == (5, False)
    assert compile_.record.eager_parts == {}
    assert torch._functorch.config.donated_buffer, "as it was"
