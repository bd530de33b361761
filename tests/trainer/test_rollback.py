"""Rollback: what does not compile goes on eager, loudly, and the rest stays compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strategies import Program, Regional, Stage, Strategy, Whole
from strategies.errors import REMEDY
from tests.strategies import backends
from tests.strategies.modules import Block
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile
from trainer.guards.rollback import Rollback


class Odd(nn.Module):
    """A part with an operation that no other part has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD).tanh()


class Picks(Odd):
    """Branches on a size that the data decide, as mixtures of experts do."""

    def forward(self, x_BD: Tensor) -> Tensor:
        rows = (x_BD[:, 0] > 0).nonzero()[:, 0]
        return x_BD.index_add(0, rows, self.linear(x_BD[rows])) if len(rows) else x_BD


class Wide(Odd):
    """There is memory for it compiled alone."""

    def forward(self, x_BD: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x_BD)


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
    compile_ = Compile([Regional(backend=backend, parts=["odd"])], on_compile_error="eager", parity=parity)
    module = WithPart()
    with pytest.warns(UserWarning, match=rf"on_compile_error=eager: odd runs eager.*{complaint}"):
        losses = fit(module, tmp_path, [compile_])
    assert losses == pytest.approx(eager, rel=FLOOR)
    record = compile_.record
    assert (record.regions, record.regions_compiled) == (4, 3)
    assert compile_.program is not None
    assert [region.module for region in compile_.program.regions] == list(module.layers)
    fallback = next(event for event in record.events if event.kind == "fallback")
    assert complaint in fallback.reason
    assert any(complaint in note for note in record.notes)
    assert record.report["rollback"]["rolled_back"][0]["parts"] == ["odd"]


@pytest.mark.parametrize("backend", [backends.BROKEN_FORWARD, backends.BROKEN_BACKWARD])
def test_a_run_of_which_nothing_compiles_is_eager_and_says_so(backend: str, tmp_path: Path) -> None:
    eager = fit(Blocks(), tmp_path, [])
    compile_ = Compile([Regional(backend=backend)], on_compile_error="eager")
    with pytest.warns(UserWarning, match=r"layers\.0, layers\.1, layers\.2 run eager, they"):
        losses = fit(Blocks(), tmp_path, [compile_])
    assert losses == eager
    assert (compile_.record.regions, compile_.record.regions_compiled) == (3, 0)
    assert any("the run is eager" in note for note in compile_.record.notes)
    assert compile_.record.report["parity"]["verdict"] == "skipped"


@pytest.mark.parametrize(
    ("part", "complaint"), [(Odd, "no tanh here"), (Wide, "no tanh here"), (Picks, "data-dependent expression")]
)
def test_fail_ends_the_run_before_the_first_step(part: type[Odd], complaint: str, tmp_path: Path) -> None:
    compile_, module = Compile([Regional(backend="tests_no_tanh", parts=["odd"])]), WithPart()
    module.odd = part()
    with pytest.raises(Exception, match=complaint) as raised:
        fit(module, tmp_path, [compile_])
    assert compile_.record.steps == 0
    assert raised.value.__notes__ == [REMEDY]
    assert (compile_.record.reason or "").endswith(REMEDY)


class Breaks(Blocks):
    """The user's own mistake."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise LookupError("the user's own")


def test_an_error_that_eager_has_too_is_the_users(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="aot_eager")], on_compile_error="eager")
    with pytest.raises(LookupError, match="the user's own"):
        fit(Breaks(), tmp_path, [compile_])
    assert "rollback" not in compile_.record.report


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


@pytest.mark.parametrize(("mode", "said"), [("eager", "on_compile_error=eager"), ("fail", "after the first step")])
def test_a_compile_that_fails_in_the_middle_of_the_training_is_rolled_back(
    mode: str, said: str, tmp_path: Path
) -> None:
    if "tests_small_only" not in torch.compiler.list_backends(()):
        torch._dynamo.register_backend(_small_only, name="tests_small_only")
    eager = fit(Growing(), tmp_path, [])
    compile_ = Compile([Regional(backend="tests_small_only", dynamic=False)], on_compile_error=mode, parity="off")
    with pytest.warns(UserWarning, match=f"{said}: .* run eager, they did not compile: .*no new shape"):
        assert fit(Growing(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    done = compile_.record.report["rollback"]["rolled_back"]
    assert [entry["step"] for entry in done] == [3]
    assert compile_.record.regions_compiled == 3, "they were, for two steps"


@dataclass(kw_only=True, slots=True)
class BrokenOptimizer(Strategy):
    """An optimizer strategy whose step does not compile."""

    name: ClassVar[str] = "broken_optimizer"
    stage: ClassVar[Stage] = Stage.OPTIMIZER

    def begin(self, program: Program) -> None:
        optimizer = program.optimizers[0]
        own = type(optimizer).step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            torch.compile(lambda: own(optimizer), backend=backends.BROKEN_FORWARD)()
            return loss

        optimizer.step = step  # type: ignore[method-assign]


def test_an_optimizer_that_does_not_compile_steps_eager(tmp_path: Path) -> None:
    eager = fit(Blocks(), tmp_path, [])
    strategies = [Regional(backend="aot_eager"), BrokenOptimizer()]
    compile_ = Compile(strategies, on_compile_error="eager")
    with pytest.warns(UserWarning, match="compile=broken_optimizer runs eager"):
        assert fit(Blocks(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    assert compile_.record.regions_compiled == 3
    assert compile_.record.report["rollback"]["rolled_back"][0]["parts"] == ["broken_optimizer"]


class Penalised(Blocks):
    """From the third step on its loss has a gradient in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        loss = super().training_step([inputs, batch[1]], batch_idx)
        if self.global_step >= 2:
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + slope.square().sum()
        return loss


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


@pytest.mark.parametrize("kind", [Penalised, KeepsGraphLater])
def test_a_backward_that_no_longer_goes_through_compiled_code_is_repeated_in_eager(
    kind: type[Blocks], tmp_path: Path
) -> None:
    eager, compile_ = fit(kind(), tmp_path, []), Compile([Regional(backend="aot_eager")])
    with pytest.warns(UserWarning, match=r"after the first step: layers\.0, .* run eager.* This step ran twice"):
        assert fit(kind(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    assert compile_.record.ended_in_eager
    assert compile_.record.report["rollback"]["rolled_back"][0]["step"] == 3


def test_where_a_step_cannot_be_repeated_the_record_says_what_helps(tmp_path: Path) -> None:
    class Second(Penalised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else Blocks.training_step(self, batch, 0)

    compile_ = Compile([Regional(backend="aot_eager")], on_compile_error="eager")
    with pytest.raises(RuntimeError, match="create_graph"):
        fit(Second(), tmp_path, [compile_], accumulate_grad_batches=2)
    assert compile_.record.status == "failed"
    assert any("cannot be repeated in eager" in note for note in compile_.record.notes)


def test_a_backward_that_keeps_its_graph_is_compiled_for_that(tmp_path: Path) -> None:
    eager, compile_ = fit(KeepsGraph(), tmp_path, []), Compile([Whole(backend="aot_eager", dynamic=True)])
    assert fit(KeepsGraph(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    assert (compile_.record.regions_compiled, compile_.record.ended_in_eager) == (5, False)
    assert torch._functorch.config.donated_buffer, "as it was"


def test_with_several_processes_the_one_where_a_late_compile_fails_runs_eager() -> None:
    class OneOfTwo:
        world_size, steps_done = 2, 7

    class Watch:
        events, phase = list[Any](), ""

        def collect(self) -> None: ...

    module, x = nn.Sequential(Block()), torch.randn(2, 8)
    eager, program = module(x), Program(module=module)
    Whole(backend=backends.BROKEN_FORWARD).apply(program)
    Rollback("fail", OneOfTwo(), program, Watch()).trained = True  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"after the first step: 0 runs eager, it did not compile: .*no forward"):
        assert torch.equal(module(x), eager)
    assert program.report["rollback"]["rolled_back"][0]["step"] == 8
