"""The batches of a look: the first ones, and one of each new kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.explain.batches import ChosenBatches, kind_of


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
    chosen = ChosenBatches(of(1, 1, 1, 1, 1, 2, 1, 2, 3), first=4, most=60)
    assert sizes(chosen) == [1, 1, 1, 1, 2, 3]
    assert (chosen.looked_at, chosen.run) == (9, 6)
    assert chosen.kinds == {"float32 1": 6, "float32 2": 2, "float32 3": 1}


def test_no_more_batches_are_looked_at_than_asked_for() -> None:
    def forever() -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1)

    chosen = ChosenBatches(forever(), first=4, most=7)
    assert sizes(chosen) == [1] * 4
    assert chosen.looked_at == 7
