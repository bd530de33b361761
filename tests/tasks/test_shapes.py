"""Generated captions and their tokenizer."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning, Lognormal, Shapes
from tasks.resumable_data import load_tokenizer, train_tokenizer
from tests.tasks.conftest import opened


@pytest.mark.parametrize("kind", [Shapes, Lognormal])
def test_an_example_depends_on_seed_split_and_index_alone(kind: type[Shapes | Lognormal]) -> None:
    def split(name: str = "train", *, seed: int = 1, count: int = 8) -> Any:
        return kind(train_images=count, val_images=count).split(name, seed=seed, image_size=48)

    (captions, image), (more, its_image) = split(), split(count=30)
    assert captions == more[:8]
    assert torch.equal(image(5), its_image(5))
    assert (image(5).dtype, tuple(image(5).shape), image(5).is_contiguous()) == (torch.uint8, (3, 48, 48), True)
    for others, other_image in (split(seed=2), split("val")):
        assert captions != others
        assert not torch.equal(image(5), other_image(5))


def test_lognormal_captions_have_such_lengths_in_tokens() -> None:
    captions, _ = Lognormal(train_images=4000).split("train", seed=0, image_size=8)
    tokenizer = train_tokenizer(captions, vocabulary_size=4000)
    logarithms = [math.log(len(encoding.ids) + 1) for encoding in tokenizer.encode_batch_fast(captions)]
    assert math.exp(statistics.median(logarithms)) == pytest.approx(60, rel=0.05)
    assert statistics.stdev(logarithms) == pytest.approx(0.6, rel=0.05)
    assert min(logarithms) >= math.log(4)
    assert max(logarithms) == math.log(256)


def test_every_text_survives_the_tokenizer() -> None:
    tokenizer = train_tokenizer(["a red circle", "two squares"], vocabulary_size=300)
    for text in ("a red circle", "naïve café 猫 🙂", "tab\tand | bar"):
        ids = tokenizer.encode(text).ids
        assert 0 not in ids
        assert tokenizer.decode([1, *ids, 2, 0, 0]).strip() == text
    assert tokenizer.get_vocab_size() <= 300
    assert [tokenizer.token_to_id(token) for token in ("<pad>", "<begin>", "<end>")] == [0, 1, 2]


def test_the_tokenizer_is_kept_and_trained_again_when_captions_change(private_cache: Path) -> None:
    load_tokenizer(["a cat"] * 3, vocabulary_size=280)
    (file,) = private_cache.iterdir()
    assert json.loads(file.read_text())["model"]["type"] == "BPE"
    written = file.stat().st_mtime_ns
    load_tokenizer(["a cat"] * 3, vocabulary_size=280)
    assert file.stat().st_mtime_ns == written
    load_tokenizer(["a dog"] * 3, vocabulary_size=280)
    assert len(list(private_cache.iterdir())) == 2
    file.write_text("{broken")
    load_tokenizer(["a cat"] * 3, vocabulary_size=280)
    assert json.loads(file.read_text())


def test_without_a_place_to_write_the_tokenizer_lives_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, full = tmp_path / "file", tmp_path / "full"
    blocked.write_text("")
    full.mkdir()
    (full / "crucible").symlink_to("/proc/self")  # a folder in which nobody, root included, can make a file
    for place in (blocked, full):
        monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(place))
        assert load_tokenizer(["a cat"], vocabulary_size=280).encode("a cat").ids


def test_batches_are_padded_to_the_longest_or_to_the_asked_length(size: CaptionerSize) -> None:
    ragged = Captioning(size=size, data=Shapes(batch_size=4, train_images=64, val_images=6, num_workers=0))
    data = opened(ragged)
    for batch in data.train_dataloader():
        assert batch.images.shape == (4, 3, 32, 32)
        assert batch.images.dtype == torch.uint8
        assert (batch.tokens[:, 0] == 1).all()
        assert (batch.tokens[:, -1] != 0).any()
        counts = ragged.count(batch)
        assert counts.samples == 4
        assert counts.tokens == 4 * (batch.tokens.shape[1] - 1)
        assert counts.useful_tokens == int((batch.tokens[:, 1:] != 0).sum())
    assert [len(batch.images) for batch in data.val_dataloader()] == [4, 2]

    shapes = Shapes(batch_size=4, train_images=64, val_images=6, num_workers=0, pad_to=30)
    data = opened(Captioning(size=size, data=shapes))
    assert {batch.tokens.shape for batch in data.train_dataloader()} == {(4, 31)}
    skipped = data.skipped
    assert set(skipped) == {"caption too long"}
    assert 0 < skipped["caption too long"] < 35
