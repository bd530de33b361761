"""``buckets`` in whole runs: captions, and processes that train together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strategies import Buckets
from tests.processes import Pair
from tests.trainer.ragged_modules import RAGGED, TextData, Texts, fit
from tests.trainer.runs import train
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
