"""No strategy ends a run that eager would finish: what cannot be compiled runs eager, with a warning and in the record.

Modules as people write them: a counter in a block, a metric read in a loop, lazy layers, a sparse embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import STRATEGIES, Checkpointing, Optimizer, Regional, Strategy, Whole
from strategies.modules import Auto
from tests.strategies.modules import Block
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.simulated import steps_take
from trainer.auto import chooser
from trainer.callback import Compile, CompileFailed


class ReadsInLoop(nn.Module):
    """Reads a number of each block's output, which breaks the graph in a loop: torch leaves this frame out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.largest = 0.0

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
            self.largest = max(self.largest, x_BD.detach().abs().max().item())
        return x_BD


class WithNet(Blocks):
    """One net with the blocks, between stem and head."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.net(self.stem(batch[0]))), batch[1])


def test_a_break_in_a_regions_own_loop_is_no_region_that_compiled_nothing(tmp_path: Path) -> None:
    eager = fit(WithNet(ReadsInLoop()), tmp_path, [])
    for _ in range(2):  # a second training of the process compiles nothing anew
        compile_ = Compile([Whole(backend="aot_eager")], whole=["net"])
        assert fit(WithNet(ReadsInLoop()), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
        record = compile_.record
        assert (record.regions, record.regions_compiled, record.ended_in_eager) == (1, 1, False)


class Counting(Block):
    """A block that counts its calls and computes by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x_BD) * (1.0 + 0.01 * self.steps)


class CountingBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(3))


class CountingInLoop(ReadsInLoop):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))


@pytest.mark.parametrize(("fullgraph", "parity"), [(True, "on"), (False, "off")])
def test_a_counter_in_a_block_runs_eager_from_the_limit_on_and_is_named(
    fullgraph: bool, parity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.regions.RECOMPILE_LIMIT", 4)
    eager = fit(CountingBlocks(), tmp_path, [], max_steps=10)
    module, compile_ = CountingBlocks(), Compile([Regional(backend="aot_eager", fullgraph=fullgraph)], parity=parity)
    with pytest.warns(UserWarning, match=r"layers\.0.* run eager from step .*recompile_limit allows.*self\.steps"):
        assert fit(module, tmp_path, [compile_], max_steps=10) == pytest.approx(eager, rel=FLOOR)
    assert [layer.steps for layer in module.layers] == [10] * 3, "no call ran twice"
    record = compile_.record
    assert (record.ended_in_eager, list(record.eager_parts)) == (True, ["layers.0", "layers.1", "layers.2"])
    assert any(event.kind == "fallback" and "self.steps" in event.reason for event in record.events)
    assert any("self.steps" in note for note in record.notes)


@pytest.mark.parametrize("parity", ["on", "off"])
def test_a_block_that_each_call_compiles_anew_runs_eager_long_before_the_limit(
    parity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.region.MAX_RECOMPILED", 3)
    eager = fit(CountingBlocks(), tmp_path, [], max_steps=10)
    compile_ = Compile([Regional(backend="aot_eager")], parity=parity)
    with pytest.warns(UserWarning, match=r"layers\.2 run eager from step .* compiled it anew: .*last: .*self\.steps"):
        assert fit(CountingBlocks(), tmp_path, [compile_], max_steps=10) == pytest.approx(eager, rel=FLOOR)
    assert (compile_.record.ended_in_eager, compile_.record.recompiles) == (True, 3)


def test_graphs_of_several_blocks_are_none_of_one_block_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.region.MAX_RECOMPILED", 3)
    compile_ = Compile([Regional(backend="aot_eager")])
    fit(NumberedBlocks(), tmp_path, [compile_])
    assert (compile_.record.eager_parts, compile_.record.regions_compiled) == ({}, 6)


def test_the_limit_within_a_region_whose_own_frame_is_left_out_is_that_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.regions.RECOMPILE_LIMIT", 4)
    eager = fit(WithNet(CountingInLoop()), tmp_path, [], max_steps=10)
    module, compile_ = WithNet(CountingInLoop()), Compile([Whole(backend="aot_eager")], whole=["net"])
    with pytest.warns(UserWarning, match="net runs eager from step .*recompile_limit allows.*steps"):
        assert fit(module, tmp_path, [compile_], max_steps=10) == pytest.approx(eager, rel=FLOOR)
    assert compile_.record.ended_in_eager
    assert [block.steps for block in module.net.blocks] == [10] * 3


class Numbered(Block):
    """Blocks of one class with a number each: a graph for every one of them, as router logits make of a Mixtral's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x_BD: Tensor) -> Tensor:
        return super().forward(x_BD) * (1.0 + 0.01 * self.number)


class NumberedBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(number) for number in range(6))


@pytest.mark.parametrize("options", [{}, {"parity": "off"}], ids=str)
def test_the_limit_in_the_first_steps_leaves_that_kind_eager_and_the_others_compiled(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.regions.RECOMPILE_LIMIT", 4)
    eager = fit(NumberedBlocks(), tmp_path, [])
    compile_ = Compile([Regional(backend="aot_eager", blocks=["layers"], parts=["head"])], **options)
    with pytest.warns(UserWarning, match=r"layers\.0, .* and 3 more run eager.*recompile_limit allows.*number"):
        assert fit(NumberedBlocks(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    record = compile_.record
    assert (record.ended_in_eager, len(record.eager_parts)) == (False, 6)
    assert "head" not in record.eager_parts


class LazyBlock(nn.Module):
    """A block that finds out about its width when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(8), nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.second(self.first(x_BD))


class LazyBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LazyLinear(8)
        self.layers = nn.ModuleList(LazyBlock() for _ in range(3))


LAZY: list[list[Strategy]] = [
    [Regional(backend="aot_eager")],
    [Whole(backend="aot_eager"), Optimizer(backend="aot_eager")],
    [Checkpointing(), Regional(backend="aot_eager")],
    [Auto(planned_steps=10**9, remember=False)],
]


@pytest.mark.parametrize("strategies", LAZY, ids=lambda each: "+".join(strategy.name for strategy in each))
def test_lazy_layers_train_as_in_eager(
    strategies: list[Strategy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {name: lambda kind=STRATEGIES[name]: kind(backend="aot_eager") for name in ("regional", "whole")}
    monkeypatch.setattr(chooser, "STRATEGIES", {**STRATEGIES, **kinds})
    eager = fit(LazyBlocks(), tmp_path, [])
    compile_ = Compile(strategies)
    assert fit(LazyBlocks(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    record = compile_.record
    if record.regions:
        assert record.regions_compiled == record.regions
        assert record.report["parity"]["verdict"] == "passed"


class Penalised(Blocks):
    """A gradient penalty on the input of blocks and head."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD = batch[0].requires_grad_()
        hidden_BD = self.stem(x_BD)
        for layer in self.layers:
            hidden_BD = layer(hidden_BD)
        out_B1 = self.head(hidden_BD)
        (slope_BD,) = torch.autograd.grad(out_B1.sum(), x_BD, create_graph=True)
        return nn.functional.mse_loss(out_B1, batch[1]) + 0.01 * slope_BD.square().sum()


class PenalisedLater(Penalised):
    """From its fourth step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kind = Penalised if self.global_step >= 3 else Blocks
        return kind.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("parity", ["on", "off"])
@pytest.mark.parametrize("kind", [Penalised, PenalisedLater])
def test_a_gradient_penalty_trains_in_eager_and_is_named(kind: type[Blocks], parity: str, tmp_path: Path) -> None:
    eager = fit(kind(), tmp_path, [])
    compile_ = Compile([Regional(backend="aot_eager")], parity=parity)
    with pytest.warns(UserWarning, match=r"layers\.0, .*a gradient of its gradient is taken \(create_graph=True"):
        assert fit(kind(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    record = compile_.record
    assert record.ended_in_eager
    assert record.report["rollback"]["rolled_back"][0]["step"] == (4 if kind is PenalisedLater else 1)
    compile_ = Compile([Regional(backend="aot_eager")], parity=parity, on_compile_error="fail")
    with pytest.raises(CompileFailed, match=r"^on_compile_error=\"fail\": .*a gradient of its gradient is taken"):
        fit(kind(), tmp_path, [compile_])


def test_a_step_may_take_entries_out_of_its_batch(tmp_path: Path) -> None:
    class Pops(Blocks):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return dict(zip("xy", batch, strict=True))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch.pop("x"), batch.pop("y")], batch_idx)

    eager = fit(Pops(), tmp_path, [])
    compile_ = Compile([Regional(backend="aot_eager")])
    assert fit(Pops(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    assert compile_.record.report["parity"]["verdict"] == "passed"


class Sparse(Blocks):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8, sparse=True)
        nn.init.ones_(self.embedding.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        embedded_BD = self.embedding((batch[0][:, 0] > 0).long())
        return super().training_step([batch[0] + embedded_BD, batch[1]], batch_idx)


@pytest.mark.parametrize("beside", [False, True])
def test_an_optimizer_that_is_left_out_counts_as_eager(beside: bool, tmp_path: Path) -> None:
    eager = fit(Sparse(), tmp_path, [])
    regional: list[Strategy] = [Regional(backend="aot_eager")] if beside else []
    compile_ = Compile([*regional, Optimizer(backend="aot_eager")])
    assert fit(Sparse(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
    record = compile_.record
    assert record.ended_in_eager is not beside
    assert "sparse" in record.eager_parts["optimizer"]
    assert [event.kind for event in record.events if "sparse" in event.reason] == ["fallback"]


def test_where_nothing_was_to_be_compiled_nothing_is_said_of_eager(tmp_path: Path) -> None:
    for strategies in ([], [Checkpointing()]):
        compile_ = Compile(strategies)
        fit(Blocks(), tmp_path, [compile_])
        assert (compile_.record.ended_in_eager, compile_.record.eager_parts) == (None, {})


def on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates compile for ``aot_eager`` and are tried within a few steps; all but eager take half its time."""
    steps_take(monkeypatch, "aot_eager", eager=1.0, regional=0.5, whole=0.5)


def test_a_key_that_is_pressed_in_a_trial_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any, **__: Any) -> Any:
        raise SystemExit(3)

    on_trial(monkeypatch)
    monkeypatch.setattr(Regional, "apply", pressed)
    with pytest.raises(SystemExit):
        fit(Blocks(), tmp_path, [Compile([Auto(planned_steps=10**9, remember=False)])], max_steps=12)


def test_what_auto_chose_for_one_module_is_no_choice_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_trial(monkeypatch)
    compile_ = Compile([Auto(planned_steps=10**9, remember=False)])
    fit(Blocks(), tmp_path, [compile_], max_steps=12)
    assert compile_.record.report["auto"]["chosen"] == "regional"
    eager = fit(WithNet(nn.Linear(8, 8)), tmp_path, [], max_steps=24)
    assert fit(WithNet(nn.Linear(8, 8)), tmp_path, [compile_], max_steps=24) == pytest.approx(eager, rel=FLOOR)
    assert compile_.record.report["auto"]["chosen"] == "whole"
