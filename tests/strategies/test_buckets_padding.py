"""Padding of batches of any make: declared tensors to one edge, everything else untouched."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from strategies import Ragged
from strategies.base import Padding, edge_of
from strategies.padding import length_of, table_sizes, to_edge

TOKENS = torch.arange(1, 11).reshape(2, 5)


class Named(NamedTuple):
    tokens: Tensor
    useful: int


@dataclass(frozen=True)
class Declared:
    tokens: Tensor
    useful: int


class Plain:
    def __init__(self) -> None:
        self.tokens, self.useful = TOKENS, 7


def read(batch: Any, name: str) -> Any:
    if isinstance(batch, dict | UserDict):
        return batch[name]
    if isinstance(batch, list) or type(batch) is tuple:
        return batch[("tokens", "useful").index(name)]
    return getattr(batch, name)


BATCHES = [
    Named(TOKENS, 7), {"tokens": TOKENS, "useful": 7}, UserDict(tokens=TOKENS, useful=7), Declared(TOKENS, 7), Plain(),
    [TOKENS, 7], (TOKENS, 7),
]  # fmt: skip


def padding(batch: Any, **options: Any) -> Padding:
    field = "0" if isinstance(batch, list) or type(batch) is tuple else "tokens"
    return Padding(name="buckets", ragged=(Ragged(field, 1, -1, 1),), **options)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_batch_of_any_make_is_padded_and_cut_in_a_copy(batch: Any) -> None:
    rule = padding(batch)
    assert length_of(batch, rule.ragged) == 4
    longer, shorter, same = (to_edge(batch, rule.ragged, edge) for edge in (6, 2, 4))
    assert type(longer) is type(batch)
    assert read(longer, "tokens").tolist() == [[1, 2, 3, 4, 5, -1, -1], [6, 7, 8, 9, 10, -1, -1]]
    assert read(longer, "tokens").dtype == torch.int64
    assert read(shorter, "tokens").tolist() == [[1, 2, 3], [6, 7, 8]]
    assert read(shorter, "tokens").is_contiguous()
    assert torch.equal(read(same, "tokens"), TOKENS)
    assert {read(made, "useful") for made in (longer, shorter)} == {7}
    assert torch.equal(read(batch, "tokens"), TOKENS), "the batch itself stays as it was"


def test_all_declared_tensors_share_an_edge_and_keep_their_own_padding() -> None:
    ragged = (Ragged("ids", 1, 0), Ragged("mask", -1, 0.0), Ragged("labels", 1, -100), Ragged("real", 1, 0))
    batch = {
        "ids": torch.ones(2, 3, dtype=torch.int32), "mask": torch.ones(2, 2), "labels": torch.ones(2, 3).long(),
        "real": torch.ones(2, 3, dtype=torch.bool), "image": torch.ones(2, 3),
    }  # fmt: skip
    assert length_of(batch, ragged) == 3
    padded = to_edge(batch, ragged, 4)
    assert {name: list(tensor.shape) for name, tensor in padded.items()} == {
        "ids": [2, 4], "mask": [2, 4], "labels": [2, 4], "real": [2, 4], "image": [2, 3],
    }  # fmt: skip
    assert {name: tensor.dtype for name, tensor in padded.items()} == {name: t.dtype for name, t in batch.items()}
    assert padded["labels"][0].tolist() == [1, 1, 1, -100]
    assert padded["real"][0].tolist() == [True, True, True, False]


def test_a_batch_is_padded_to_the_next_edge_and_beyond_the_last_one_to_the_multiple() -> None:
    assert [edge_of(length, (16, 40), 8) for length in (1, 16, 17, 40, 41, 49)] == [16, 16, 40, 40, 48, 56]
    assert [edge_of(length, (), 8, tables=(20,)) for length in (3, 17, 21)] == [8, 20, 24]


def test_nothing_is_padded_beyond_the_end_of_what_may_be_a_position_table() -> None:
    class Sines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1, 45, 6))

    class Offset(nn.Embedding):
        offset = 2

    module = nn.ModuleList([nn.Embedding(20, 4), nn.Embedding(31, 4, padding_idx=1), Offset(64, 4), Sines()])
    tables = table_sizes(module)
    assert tables == (1, 6, 20, 29, 31, 45, 62, 64)
    lengths = {3: 6, 7: 8, 18: 20, 20: 20, 21: 24, 27: 29, 28: 29, 42: 45, 45: 45, 46: 48, 59: 62, 70: 72}
    assert {length: edge_of(length, (), 8, tables=tables) for length in lengths} == lengths


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": TOKENS}, r"ragged: the batch \(dict\) has no 'tokens'; it has \['ids'\]"),
        ([TOKENS], r"ragged: the batch \(list\) has no 'tokens'; it has \['0'\]"),
        ({"tokens": [1, 2]}, "must be a tensor whose dimension 1 holds positions"),
        ({"tokens": torch.ones(3)}, "must be a tensor whose dimension 1 holds positions"),
    ],
)
def test_a_declaration_that_does_not_fit_the_batch_is_an_error(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        length_of(batch, (Ragged("tokens", 1),))
