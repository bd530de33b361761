"""Packed documents under the strategies: eager's losses, one shape, and refused with what groups by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from strategies import Regional
from tasks.language.task import BertNetwork
from tests.sweep import MARK
from tests.tasks.test_packed_documents import task_of
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.runs import curve, train
from tests.trainer.test_step_capture import Recorded, Watch
from trainer.callback import Compile

STEPS = 20
PACKED = (
    f"trainer.max_steps={STEPS}",
    "task.data.packing=packed_documents",
    "task.data.pad_to=null",
    "task.data.max_tokens=60",
    "task.data.batch_size=4",
    "trainer.val_every_n_steps=3",
)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("eager")
    train(folder, *PACKED, task="masked_lm")
    return curve(folder)


@pytest.mark.parametrize("arm", [pytest.param("regional", marks=MARK), "whole", "[regional,cached]"])
def test_losses_are_eagers_and_nothing_is_compiled_for_a_second_shape(
    arm: str, eager: dict[int, float], tmp_path: Path
) -> None:
    changes = (f"compile.cached.url={tmp_path / 'store'}",) if "cached" in arm else ()
    record = train(tmp_path / "run", *PACKED, *changes, strategy=arm, task="masked_lm")
    assert (record.status, record.steps, record.graph_breaks) == ("finished", STEPS, 0)
    # In training and in validation a graph each: a block, the embedding, the tail; or the whole.
    assert record.graphs == (2 if arm == "whole" else 6)
    assert curve(tmp_path / "run") == pytest.approx(eager, rel=1e-5)
    assert 0 < record.padded_share < 0.2


@pytest.mark.parametrize("arm", ["buckets", "dynamic"])
def test_what_groups_by_length_is_refused(arm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^compile\.{arm}: no tensor .* ragged \(packed rows are not\)"):
        train(tmp_path, *PACKED, strategy=arm, task="masked_lm")


def captured(strategies: list[Any], folder: Path) -> tuple[Watch, Any]:
    L.seed_everything(0, verbose=False)
    task = task_of(batch_size=2)
    task.network = BertNetwork(
        layers=2, width=16, heads=2, vocabulary_size=320, max_tokens=48, dropout=0.1, attention_dropout=0.0
    )
    watch, compile_ = Watch(), Compile(strategies, blocks=["net.blocks"], parts=["net.embed", "net.tail"], save=False)
    trainer = quiet_trainer(
        callbacks=[watch, compile_], default_root_dir=folder, max_steps=24, max_epochs=-1, limit_val_batches=0
    )
    module = task.build_module(max_steps=24)
    trainer.fit(module, datamodule=task.build_data(seed=0))
    return watch, compile_.record.report.get("recorded")


@pytest.mark.parametrize("regions", [[], [Regional(backend="eager")]], ids=["alone", "with regions"])
def test_a_captured_step_is_one_graph_for_all_rows(regions: list[Any], tmp_path: Path) -> None:
    torch._dynamo.reset()
    eager, _ = captured([], tmp_path)
    watch, report = captured([*regions, Recorded()], tmp_path)
    assert watch.losses == pytest.approx(eager.losses, rel=1e-5)
    assert (report["graphs"], report["refused"]) == (1, [])
    assert report["replayed_steps"] >= 5
    torch._dynamo.reset()
