"""The batches of a look: the first ones, one of each new kind, whole optimizer steps, copies to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.explain.recorder import FIRST_BATCHES, ChosenBatches, kind_of


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Batch:
    images: Tensor
    more: dict[str, Any]


def sizes(loader: ChosenBatches) -> list[int]:
    return [len(batch) for batch in loader]


def of(*lengths: int) -> list[Tensor]:
    return [torch.zeros(length) for length in lengths]


def test_kinds_name_every_tensor_with_dtype_and_shape() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)
    assert kind_of([x, y]) == "0 float32 2 x 3, 1 int64 4"
    assert kind_of(Pair(x, y)) == "x float32 2 x 3, y int64 4"
    assert kind_of(Batch(x, {"ids": y, "name": "a", "scale": torch.tensor(1.0), "none": None})) == (
        "images float32 2 x 3, more.ids int64 4, more.name str, more.scale float32 scalar"
    )


def test_the_first_batches_and_one_of_each_new_kind_are_run() -> None:
    chosen = ChosenBatches(of(1, 1, 1, 1, 1, 2, 1, 2, 3), batches=None, seconds=60)
    assert sizes(chosen) == [1, 1, 1, 1, 2, 3]
    assert FIRST_BATCHES == 4
    assert (chosen.looked_at, chosen.run, chosen.stopped) == (9, 6, None)
    assert chosen.kinds == {"float32 1": 6, "float32 2": 2, "float32 3": 1}


def test_an_accumulation_is_never_left_half_done() -> None:
    chosen = ChosenBatches(of(1, 1, 1), batches=None, seconds=60, accumulate=2)
    assert sizes(chosen) == [1, 1, 1, 1]


def test_no_more_batches_are_looked_at_than_asked_for() -> None:
    chosen = ChosenBatches(of(*[1] * 100), batches=7, seconds=60)
    assert sizes(chosen) == [1] * 4
    assert (chosen.looked_at, chosen.stopped) == (7, "--batches 7")


def test_an_epoch_without_end_is_left_after_the_time() -> None:
    def forever() -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1)

    chosen = ChosenBatches(forever(), batches=None, seconds=0.05)
    assert sizes(chosen) == [1] * 4
    assert chosen.stopped == "--seconds 0.05 were over"
