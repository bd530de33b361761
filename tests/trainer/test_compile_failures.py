"""Compiles that fail or do nothing: the run goes on in eager, or stops where an option asks for it, and says why in one
line, in the record too."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.fx import GraphModule

from strategies import STRATEGIES, Regional, Whole
from tests.strategies import backends
from tests.sweep import MARK
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.runs import MODULE_STRATEGIES, train
from trainer.callback import Compile, CompiledNothing
from trainer.telemetry.record import RunRecord


@pytest.mark.parametrize("strategy", MODULE_STRATEGIES)
def test_a_compiler_that_is_switched_off_is_refused_before_any_work(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ValueError, match="TORCHDYNAMO_DISABLE=1 switches the compiler off"):
        train(tmp_path, strategy=strategy)
    assert not (tmp_path / "record.json").exists()


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> RunRecord:
    return train(tmp_path_factory.mktemp("eager"), task="micro")


@pytest.mark.parametrize("parity", ["on", "off"])
def test_a_compiler_that_is_switched_off_in_torchs_configuration_leaves_eager(
    parity: str, eager: RunRecord, tmp_path: Path
) -> None:
    torch._dynamo.utils.clear_compilation_metrics()
    with torch._dynamo.config.patch(disable=True):
        record = train(tmp_path, f"parity={parity}", strategy="whole", task="micro")
    assert (record.status, record.exit_code, record.regions_compiled) == ("finished", 0, 0)
    assert record.losses == eager.losses
    assert record.ended_in_eager
    assert len(record.eager_parts) == record.regions
    assert RunRecord.load(tmp_path) == record


def test_code_compiled_earlier_in_the_process_does_not_pass_for_compiled(tmp_path: Path) -> None:
    fit(Blocks(), tmp_path, [Compile([Regional(backend="aot_eager")])])
    compile_ = Compile([Regional(backend="aot_eager")])
    with torch._dynamo.config.patch(disable=True):
        fit(Blocks(), tmp_path, [compile_])
    assert (compile_.record.regions_compiled, compile_.record.ended_in_eager) == (0, True)


def test_what_an_earlier_training_of_the_module_compiled_counts_again(tmp_path: Path) -> None:
    compile_, module = Compile([Regional(backend="aot_eager")]), Blocks()
    fit(module, tmp_path, [compile_])
    first = compile_.record
    fit(module, tmp_path, [compile_])
    again = compile_.record
    assert [(one.regions_compiled, one.graphs) for one in (first, again)] == [(3, first.graphs), (3, 0)]
    saved = io.BytesIO()
    torch.save(module.layers, saved)
    assert b"_dynamo" not in saved.getvalue(), "a module that trained eager holds no mark of the compiler's either"


class NeverCalled(Blocks):
    """Its step goes around the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(batch[0]).square().mean()


def test_regions_that_the_step_never_calls_end_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="aot_eager")], on_compile_error="fail")
    with pytest.raises(
        CompiledNothing, match=r"of 3 regions nothing was compiled in 10 optimizer steps: .*never called"
    ):
        fit(NeverCalled(), tmp_path, [compile_], max_steps=12)
    assert (compile_.record.steps, compile_.record.regions_compiled) == (10, 0)


class InCompiledFunction(Blocks):
    """A function that the user compiles holds the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = torch.compile(self.of_all, backend="aot_eager")

    def of_all(self, x: Tensor) -> Tensor:
        return self.head(self.layers[2](self.layers[1](self.layers[0](x)))).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.objective(batch[0])


@pytest.mark.parametrize(
    ("kind", "steps", "said_after", "why"),
    [
        (NeverCalled, 6, 6, r"never called \(a module has to be called itself"),
        (NeverCalled, 12, 10, r"never called \(a module has to be called itself"),
        (InCompiledFunction, 12, 10, rf"it may be part of of_all \({Path(__file__).name}:\d+\), which a torch.compile"),
    ],
)
def test_else_the_run_finishes_and_is_noted_as_eager(
    kind: type[Blocks], steps: int, said_after: int, why: str, tmp_path: Path
) -> None:
    compile_ = Compile([Regional(backend="aot_eager")])
    with pytest.warns(UserWarning, match=f"not compiled in {said_after} optimizer steps.*{why}"):
        fit(kind(), tmp_path, [compile_], max_steps=steps)
    assert (compile_.record.regions_compiled, compile_.record.ended_in_eager) == (0, True)
    assert list(compile_.record.eager_parts) == ["layers.0", "layers.1", "layers.2"]


class GoesAround(nn.Linear):
    """Its class has a call of its own, as each module of GPyTorch's has."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


def test_a_class_with_a_call_of_its_own_is_named_as_the_reason(tmp_path: Path) -> None:
    module, compile_ = Blocks(), Compile([Whole(backend="aot_eager")], whole=["head"])
    module.head = GoesAround(8, 1)
    with pytest.warns(UserWarning, match="head: never called by torch's own call: its class has a __call__"):
        fit(module, tmp_path, [compile_])
    assert list(compile_.record.eager_parts) == ["head"]


class Averaged(Blocks):
    """A frozen copy of the blocks that waits for an evaluation, as timm's ``ModelEmaV3`` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.layers).requires_grad_(False)


def test_averaged_weights_that_no_step_calls_are_no_alarm(tmp_path: Path) -> None:
    compile_ = Compile([Regional(backend="aot_eager", blocks=["layers", "average"])])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*never called")
        fit(Averaged(), tmp_path, [compile_], max_steps=12)
    record = compile_.record
    assert (record.regions, record.regions_compiled, record.eager_parts) == (3, 3, {})
    assert any("average.2: was never called, and holds nothing that is trained" in note for note in record.notes)


class JoinsLater(NeverCalled):
    """Its blocks take part from the fourth step on; the first step has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.global_step == 0:
            return None
        return (super() if self.global_step < 4 else super(NeverCalled, self)).training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", [Regional(backend="aot_eager"), Whole(backend="aot_eager")])
def test_regions_may_join_in_the_first_steps(strategy: Any, tmp_path: Path) -> None:
    eager = fit(JoinsLater(), tmp_path, [], max_steps=8)
    compile_ = Compile([strategy])
    assert fit(JoinsLater(), tmp_path, [compile_], max_steps=8) == pytest.approx(eager, rel=1e-5)
    record = compile_.record
    assert record.regions_compiled == record.regions
    assert (record.ended_in_eager, record.eager_parts) == (False, {})


def failing() -> Iterator[Any]:
    """Each strategy with one of its two compiles; ``./check --all`` with both."""
    for number, strategy in enumerate(MODULE_STRATEGIES):
        for place, direction in enumerate(("forward", "backward")):
            marks = [MARK] if (number + place) % 2 else []
            yield pytest.param(strategy, direction, marks=marks, id=f"{direction}-{strategy}")


@pytest.mark.parametrize(("strategy", "direction"), list(failing()))
def test_a_compile_that_fails_leaves_eager_or_stops_the_run_with_its_reason(
    strategy: str, direction: str, eager: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = {"forward": backends.BROKEN_FORWARD, "backward": backends.BROKEN_BACKWARD}[direction]
    complaint = f"no {direction}"
    # One strategy has no backend of its own, its parts have.
    own = "backend" in STRATEGIES[strategy].__dataclass_fields__
    changes = () if own else (f"compile.{strategy}.parts.blocks.backend={backend}",)
    record = train(tmp_path / "finishes", *changes, strategy=strategy, backend=backend, task="micro")
    assert (record.status, record.exit_code, record.steps) == ("finished", 0, eager.steps)
    assert dict(record.losses) == pytest.approx(dict(eager.losses), rel=1e-5)
    assert any(complaint in reason for reason in record.eager_parts.values())
    assert any(complaint in note for note in record.notes)
    capsys.readouterr()
    changes = (*changes, "on_compile_error=fail")
    record = train(tmp_path, *changes, strategy=strategy, backend=backend, task="micro")
    assert (record.status, record.exit_code) == ("failed", 1)
    assert complaint in record.reason
    assert len(record.reason.splitlines()) == 1
    assert record.regions, "what was known before is kept"
    seen_first = strategy == "second_order"  # a region's first call shows by which arguments it takes gradients
    assert record.steps == 1 + seen_first, "that step has eager's result"
    assert RunRecord.load(tmp_path) == record
    assert complaint in (tmp_path / "error.log").read_text()
    assert "Traceback" in (tmp_path / "error.log").read_text()
    said = capsys.readouterr().out
    assert complaint in next(line for line in said.splitlines() if line.startswith("failed: "))
    assert str(tmp_path / "error.log") in said


class Breaking(Blocks):
    """A block that no graph can hold in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Printing() for _ in range(3))


class Printing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x_BD)


@pytest.mark.parametrize("parity", ["on", "off"])
def test_a_graph_break_under_fullgraph_is_one_line_with_its_place(parity: str, tmp_path: Path) -> None:
    eager, compile_ = fit(Breaking(), tmp_path, []), Compile([Regional(backend="aot_eager")], parity=parity)
    with pytest.warns(UserWarning, match=r"graph_break|graph break"):
        assert fit(Breaking(), tmp_path, [compile_]) == eager
    line = compile_.record.eager_parts["layers.0"]
    assert "test_compile_failures.py" in line
    assert "in forward)" in line, "the line that breaks, not the one that calls"
    assert "\n" not in line


@torch.compiler.disable
def untraced(x_BD: Tensor) -> Tensor:
    return x_BD + 1


class Untraced(torch.nn.Linear):
    def forward(self, x_BD: Tensor) -> Tensor:
        return untraced(super().forward(x_BD))


def test_a_function_that_is_not_traced_is_named(tmp_path: Path) -> None:
    module, compile_ = Blocks(), Compile([Regional(backend="aot_eager")])
    module.layers = nn.ModuleList(Untraced(8, 8) for _ in range(3))
    with pytest.warns(UserWarning, match="untraced"):
        fit(module, tmp_path, [compile_])
    assert ": untraced (" in compile_.record.eager_parts["layers.0"]


def test_hooks_of_lightnings_profiler_are_named(tmp_path: Path) -> None:
    with_names, without = Compile([Regional(backend="aot_eager")]), Compile([Regional(backend="aot_eager")])
    with pytest.warns(UserWarning, match="record_module_names=False"):
        fit(Blocks(), tmp_path, [with_names], profiler="pytorch")
    fit(Blocks(), tmp_path, [without], profiler=PyTorchProfiler(record_module_names=False))
    assert not without.record.eager_parts
    assert without.record.regions_compiled == without.record.regions


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
