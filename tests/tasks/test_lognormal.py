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
    train = Lognormal(train_images=4000).split("train", seed=0, image_size=8)
    tokenizer = train_tokenizer(train.captions, vocabulary_size=4000)
    logarithms = [math.log(len(encoding.ids) + 1) for encoding in tokenizer.encode_batch_fast(train.captions)]
    assert math.exp(statistics.median(logarithms)) == pytest.approx(60, rel=0.05)
    assert statistics.stdev(logarithms) == pytest.approx(0.6, rel=0.05)
    assert min(logarithms) >= math.log(4)
    assert max(logarithms) == math.log(256)


def test_an_example_depends_on_the_seed_and_its_index_alone() -> None:
    config = Lognormal(train_images=8, val_images=8)
    first, again, other = (config.split("train", seed=seed, image_size=8) for seed in (0, 0, 1))
    held_out = config.split("val", seed=0, image_size=8)
    assert first.captions == again.captions != other.captions
    assert first.captions != held_out.captions
    assert torch.equal(first.image(3), again.image(3))
    assert not torch.equal(first.image(3), other.image(3))
