"""Strategies in somebody else's Lightning project: ``L.Trainer(callbacks=[Compile([Regional()])])``."""

from __future__ import annotations

import csv
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from strategies import Regional, Strategy, Whole
from tests.trainer.conftest import FLOOR
from tests.trainer.lightning_modules import Blocks, Losses, fit, quiet_trainer
from trainer.callback import Compile


@pytest.mark.parametrize(
    ("strategy", "regions"),
    [
        (Regional(backend="aot_eager"), 3),
        (Regional(backend="aot_eager", parts=["head"]), 4),
        (Whole(backend="aot_eager"), 5),
    ],
    ids=["regional", "with a part", "whole"],
)
def test_a_strange_module_trains_compiled_with_the_same_losses(
    strategy: Strategy, regions: int, tmp_path: Path
) -> None:
    settings = {name: getattr(torch._dynamo.config, name) for name in ("recompile_limit", "optimize_ddp")}
    eager = fit(Blocks(), tmp_path, [])
    module, compile_ = Blocks(), Compile([strategy], warmup_steps=1)
    keys = list(module.state_dict())
    losses = fit(module, tmp_path, [compile_])
    assert losses == pytest.approx(eager, rel=FLOOR)
    assert list(module.state_dict()) == keys
    record = compile_.record
    assert record.regions == regions
    assert record.graphs
    assert record.steps == 6
    assert record.final_loss == pytest.approx(sum(losses[-2:]) / 2)
    assert record.final_metrics["train_loss"] == pytest.approx(losses[-1])
    assert record.notes, "the module declared nothing, which the user is told"
    assert {name: getattr(torch._dynamo.config, name) for name in settings} == settings


def test_a_traceback_of_the_users_step_is_lightnings_own(tmp_path: Path) -> None:
    class Fails(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise RuntimeError("the user's")
            return super().training_step(batch, batch_idx)

    frames: list[list[str]] = []
    for callbacks in ([], [Compile([Regional(backend="aot_eager")])]):
        with pytest.raises(RuntimeError, match="the user's") as error:
            fit(Fails(), tmp_path, callbacks)
        frames.append([frame.name for frame in traceback.extract_tb(error.tb)])
    assert frames[1] == frames[0]


def test_a_loss_may_be_a_row_of_one_number(tmp_path: Path) -> None:
    class Row(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx).reshape(1, 1)

    eager = fit(Row(), tmp_path, [])
    for strategies in ([], [Regional(backend="aot_eager")]):
        compile_ = Compile(strategies, warmup_steps=1)
        assert fit(Row(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
        assert compile_.record.final_loss == pytest.approx(sum(eager[-2:]) / 2)


def test_batches_are_counted_by_the_function_that_is_given(tmp_path: Path) -> None:
    compile_ = Compile(warmup_steps=1, count=lambda batch: (len(batch[0]), None, None, None))
    fit(Blocks(), tmp_path, [compile_])
    record = compile_.record
    assert record.samples_per_second == pytest.approx(4 * (record.steady_steps_per_second or 0))
    assert record.tokens_per_second is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whole": ["nope"]}, "whole: 'nope' matches no submodule"),
        ({"whole": "layers"}, r"whole='layers' is a text, not a list: write \['layers'\]"),
        ({"blocks": "layers"}, r"blocks='layers' is a text, not a list"),
        ({"parts": [torch.nn.Linear]}, r"parts=\[<class .*>\] is not a list of names, such as \['net.layers'\]"),
        ({"ragged": ["0"]}, r"ragged=\['0'\]: each is \(name, dimension, padding, extra\)"),
        ({"ragged": [("0",)]}, r"ragged=\[\('0',\)\]: each is"),
        ({"ragged": [("0", "1")]}, r"ragged=\[\('0', '1'\)\]: each is"),
        ({"count": 3}, "count=3 is not a function of a batch"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
        ({"count": lambda batch: 3}, "count returned 3: it has to return a tuple of four"),
    ],
)
def test_what_the_module_cannot_be_told_is_said(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Blocks(), tmp_path, [Compile([Whole(backend="eager")], **options)])


def compiled_whole() -> Any:
    return torch.compile(Blocks(), backend="eager")


def compiled_within() -> Any:
    module: Any = Blocks()
    module.head = torch.compile(module.head, backend="eager")
    return module


def compiled_in_place() -> Any:
    module = Blocks()
    module.head.compile(backend="eager")
    return module


def compiled_later() -> Any:
    class Compiles(Blocks):
        def on_fit_start(self) -> None:
            self.layers[0].compile(backend="eager")

    return Compiles()


@pytest.mark.parametrize(
    ("make", "theirs", "left"),
    [
        (compiled_whole, "Blocks", {f"layers.{number}": "the module" for number in range(3)}),
        (compiled_within, "head", {}),
        (compiled_in_place, "head", {}),
        (compiled_later, "", {"layers.0": "layers.0"}),
    ],
)
def test_what_is_compiled_already_is_left_to_that(make: Any, theirs: str, left: dict[str, str], tmp_path: Path) -> None:
    eager = fit(make(), tmp_path, [])
    for strategies in ([], [Regional(backend="aot_eager")]):
        compile_ = Compile(strategies)
        assert fit(make(), tmp_path, [compile_]) == pytest.approx(eager, rel=FLOOR)
        record = compile_.record
        assert not theirs or f"compiled by torch.compile already, in eager steps too: {theirs}" in record.notes
    assert record.eager_parts == {path: f"{own} is compiled by torch.compile already" for path, own in left.items()}
    assert (record.regions, record.regions_compiled) == (3 - len(left), 3 - len(left))
    assert record.ended_in_eager is (len(left) == 3)
    assert theirs or "layers.0 runs as written: layers.0 is compiled by torch.compile already" in record.notes


def demo(callbacks: list[L.Callback], module: L.LightningModule | None = None) -> list[float]:
    losses = Losses()
    L.seed_everything(0, verbose=False)
    trainer = quiet_trainer(max_steps=4, limit_val_batches=2, callbacks=[losses, *callbacks])
    trainer.fit(BoringModel() if module is None else module)
    return losses.values


def test_where_nothing_repeats_regional_compiles_the_children_and_says_so() -> None:
    compile_ = Compile([Regional(backend="aot_eager")], save=False)
    assert demo([compile_]) == pytest.approx(demo([]), rel=FLOOR)
    assert (compile_.record.regions, compile_.record.regions_compiled) == (1, 1)
    notes = [note for note in compile_.record.notes if "no repeated blocks" in note]
    assert notes == ["regional: no repeated blocks found in this module; compiled its children layer, each as a whole"]


@pytest.mark.parametrize("strategy", [Regional, Whole])
def test_a_module_without_children_trains_eager_and_says_so(strategy: type[Strategy]) -> None:
    class Bare(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            del self.layer
            self.weight = torch.nn.Parameter(torch.ones(2, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T

    compile_ = Compile([strategy()], save=False)
    assert demo([compile_], Bare()) == demo([], Bare())
    assert compile_.record.eager_parts == {strategy.name: "the module has no child with parameters to compile"}


def test_another_logger_gets_the_figures_too(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(Blocks(), tmp_path, [Compile([Regional(backend="aot_eager")], warmup_steps=1)], logger=logger)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "warmup/graphs", "warmup/first_step_seconds"} <= set(header)


def test_a_curve_of_the_modules_own_is_not_mixed_with_ours(tmp_path: Path) -> None:
    class Template(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, on_step=False, on_epoch=True)
            return loss

    def logged(*callbacks: L.Callback) -> list[str]:
        logger = CSVLogger(tmp_path)
        fit(Template(), tmp_path, list(callbacks), logger=logger)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            return [row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]]

    assert logged(Compile(warmup_steps=1)) == logged()
