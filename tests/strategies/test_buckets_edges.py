"""Edges of buckets: the fewest padded positions for a count, and what it is compared with."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strategies import Buckets, Program, Ragged, buckets
from strategies.buckets.batches import clear_of_64, optimal
from strategies.compile_options import cudnn_attention_fails


def lognormal(examples: int = 100_000) -> np.ndarray:
    """Lengths of median 180 and sigma 0.9, cut at 2,048."""
    drawn = np.random.default_rng(0).lognormal(np.log(180), 0.9, examples)
    return np.clip(drawn, 1, 2048).astype(np.int64)


def padded_share(lengths: Any, edges: Any) -> float:
    """Padding over all positions when each example is padded up to its edge."""
    return 1 - sum(lengths) / int(np.asarray(edges)[np.searchsorted(edges, lengths)].sum())


def best_of_all(lengths: np.ndarray, count: int, multiple: int) -> float:
    """Least padded share of all sets of at most ``count`` multiples."""
    *others, last = sorted({-(-int(length) // multiple) * multiple for length in lengths})
    sets = (s for size in range(min(count, len(others) + 1)) for s in itertools.combinations(others, size))
    return min(padded_share(lengths, [*edges, last]) for edges in sets)


@pytest.mark.parametrize("seed", range(40))
def test_no_set_of_edges_pads_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, rng.integers(1, 60))
    count, multiple = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    edges = optimal(lengths, count=count, multiple=multiple)
    if len(set(lengths)) == 1:
        assert edges == (lengths[0],)
        return
    assert len(edges) <= count
    assert list(edges) == sorted(set(edges))
    assert all(edge % multiple == 0 for edge in edges)
    assert padded_share(lengths, edges) == pytest.approx(best_of_all(lengths, count, multiple), abs=1e-12)


@pytest.mark.parametrize(
    ("edges", "multiple", "limit", "clear"),
    [
        ((32, 64, 128, 192, 256), 16, None, (32, 80, 128, 208, 256)),
        ((48, 64, 80), 16, None, (48, 80)),
        ((64,), 64, None, (128,)),
        ((64, 320), 64, 320, (128, 320)),  # the model takes no more
        ((64,), 16, 70, (70,)),
        ((128, 256), 128, None, (128, 256)),
    ],
)
def test_edges_keep_clear_of_64_modulo_128(
    edges: tuple[int, ...], multiple: int, limit: int | None, clear: tuple[int, ...]
) -> None:
    assert clear_of_64(edges, multiple=multiple, limit=limit) == clear


def test_only_where_cudnns_attention_is_wrong_edges_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [
        cudnn_attention_fails(torch_version, capability)
        for torch_version, capability in (
            ("2.10.1", (9, 0)),
            ("2.11.0+cu130", (9, 0)),
            ("2.13.1", (9, 0)),
            ("2.14.0a0+git", (9, 0)),
            ("2.12.0", (8, 0)),
        )
    ] == [False, True, True, False, False]

    def padding(**options: Any) -> tuple[Program, tuple[int, ...]]:
        program = Program(
            module=nn.Linear(1, 1), strategies=(), ragged=(Ragged("tokens", 1),), device=torch.device("cpu")
        )
        Buckets(**options).apply(program)
        return program, program.padding.choose_edges([60] * 9 + [100] * 9 + [190] * 9)

    assert padding()[1] == (64, 112, 192)
    monkeypatch.setattr(buckets, "_cudnn_fails", lambda program: True)
    program, edges = padding()
    assert edges == (80, 112, 208)
    assert program.notes == []
    program, edges = padding(edges=[64, 192])
    assert edges == (64, 192), "what was asked for"
    assert "at 64, 192 positions the backward of cuDNN's attention can give NaN" in program.notes[0]
