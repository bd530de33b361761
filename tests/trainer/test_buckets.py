"""``buckets`` in whole runs: captions, resuming, and processes that train together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from strategies import Buckets
from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning, Shapes
from tests.processes import Pair
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.ragged_modules import RAGGED, TextData, Texts, fit
from tests.trainer.runs import last_checkpoint, train
from trainer.callback import Compile

RAGGED_CAPTIONS = ("task.data.pad_to=null", "task.data.train_images=60", "compile.buckets.count=3")
STEPS, STOP_AT = 34, 20


def test_captions_of_any_length_train_in_a_few_shapes(tmp_path: Path) -> None:
    changes = (*RAGGED_CAPTIONS, "trainer.max_steps=30", "trainer.val_every_n_steps=6")
    changes = (*changes, "compile.regional.backend=eager", "compile.buckets.count=2")
    record = train(tmp_path, *changes, strategy="[regional,buckets]")
    assert (record.status, record.label, record.steps) == ("finished", "buckets+regional", 30)
    report = record.report["buckets"]
    assert len(report["edges"]) == 2
    assert sum(report["examples"]) + sum(record.skipped_items.values()) >= 60
    assert report["unexpected_training_batches"] == report["unexpected_validation_batches"] == 0
    assert record.padded_share is not None
    assert report["drawn_batches"] >= 30
    # Encoder block, image embedding, one decoder block and tail for each edge, once more for validation.
    assert record.graphs <= 2 * (2 + 2 * len(report["edges"]))
    assert not [event for event in record.events if event.kind != "recompile"]


def test_a_caption_batch_has_the_loss_and_the_count_that_it_has_without_padding() -> None:
    size = CaptionerSize(image_size=32, encoder_layers=2, decoder_layers=2, decoder_width=32, vocabulary_size=300)
    data = Shapes(batch_size=4, train_images=40, val_images=4, num_workers=0)
    task = Captioning(size=size, data=data, initialise="host")
    declared = task.declare().ragged
    seen: list[tuple[Any, float]] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((batch, float(outputs["loss"])))

    L.seed_everything(1, verbose=False)
    module = task.build_module(max_steps=3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    compile_ = Compile([Buckets(edges=[160])], ragged=declared, save=False)
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0, callbacks=[compile_, Keep()])
    trainer.fit(module, datamodule=task.build_data(seed=1))
    batch, loss = seen[0]
    assert batch.tokens.shape[1] == 161
    assert batch.useful_tokens == int((batch.tokens[:, 1:] != 0).sum())
    counts = task.count(batch)
    assert (counts.tokens, counts.useful_tokens) == (4 * 160, batch.useful_tokens)
    longest = int((batch.tokens != 0).sum(dim=1).max())
    assert longest < 161
    module.load_state_dict(before)
    with torch.no_grad():
        plain = module.net(batch.images, batch.tokens[:, :longest])[0]
    assert loss == pytest.approx(float(plain), rel=1e-6)


def test_eager_goes_on_from_a_checkpoint_of_buckets_within_the_same_epoch(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, *RAGGED_CAPTIONS, "trainer.max_steps=20", strategy="buckets")
    ragged = RAGGED_CAPTIONS[:2]
    assert train(second, *ragged, "trainer.max_steps=22", f"resume={first}", strategy="eager").status == "finished"
    # 60 captions in batches of two: twenty steps are within the first epoch, for the loader as well.
    for folder, batches in ((first, 20), (second, 22)):
        loop = last_checkpoint(folder)["loops"]["fit_loop"]["state_dict"]
        assert loop["combined_loader"] == [{"epoch": 0, "batches": batches}]


def on_a_rank() -> tuple[Any, Any]:
    """Lengths are measured, on the first process for both; 78 texts are no whole number of batches."""
    data = TextData(Texts, count=78)
    compile_ = Compile([Buckets(multiple=8, count=3)], ragged=RAGGED, warmup_steps=1)
    module = fit(data, [compile_], devices=2, strategy="ddp", max_steps=-1, max_epochs=2)
    return module.trained, module.validated


@pytest.mark.xdist_group("two_processes")
def test_two_processes_take_the_same_bucket_at_every_step(pair: Pair) -> None:
    ranks = pair(on_a_rank)
    trained = [rank[0] for rank in ranks]
    batches = 78 // 8 + 1  # of four for each; the last six texts make up two smaller ones
    assert len(trained[0]) == len(trained[1]) == 2 * batches
    assert [width for width, *_ in trained[0]] == [width for width, *_ in trained[1]]
    assert len({width for width, *_ in trained[0]}) == 3
    for epoch in (slice(0, batches), slice(batches, 2 * batches)):
        seen = Counter(name for rank in trained for _, names, _ in rank[epoch] for name in names)
        assert len(seen) == 78
        assert set(seen.values()) == {1}
    assert trained[0][:batches] != trained[0][batches:]
    validated = Counter(name for rank in ranks for _, names, _ in rank[1] for name in names)
    assert set(validated) == {f"text {number}" for number in range(11)}
