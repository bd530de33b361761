"""Lengths of the lognormal captions are what they are said to be, in tokens, and the same in every process."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
import torch

from tasks.captioning.task import Lognormal
from tasks.loading import train_tokenizer


def test_lengths_in_tokens_are_lognormal(tmp_path: Path) -> None:
    train, _ = Lognormal(train_images=4000, median=60, sigma=0.5, longest=1000).splits(seed=0, image_size=8)
    tokenizer = train_tokenizer(train.captions, vocabulary_size=4000)
    logarithms = [math.log(len(encoding.ids) + 1) for encoding in tokenizer.encode_batch_fast(train.captions)]
    assert math.exp(statistics.median(logarithms)) == pytest.approx(60, rel=0.05)
    assert statistics.stdev(logarithms) == pytest.approx(0.5, rel=0.05)


def test_lengths_are_cut(tmp_path: Path) -> None:
    train, _ = Lognormal(train_images=500, median=20, sigma=2, shortest=5, longest=40).splits(seed=0, image_size=8)
    words = [len(caption.split()) + 1 for caption in train.captions]
    assert (min(words), max(words)) == (5, 40)


def test_an_example_depends_on_the_seed_and_its_index_alone() -> None:
    config = Lognormal(train_images=8, val_images=8)
    (first, held_out), (again, _), (other, _) = (config.splits(seed=seed, image_size=8) for seed in (0, 0, 1))
    assert first.captions == again.captions != other.captions
    assert first.captions != held_out.captions
    assert torch.equal(first.image(3), again.image(3))
    assert not torch.equal(first.image(3), other.image(3))


@pytest.mark.parametrize("option", ["median", "sigma", "shortest", "longest", "train_images"])
def test_values_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"task\.data\.{option}=-1"):
        Lognormal(**{option: -1})
