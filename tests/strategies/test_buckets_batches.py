"""Bucket batches: whole, shuffled, the same bucket on every rank, and continued exactly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from strategies.buckets.batches import BucketBatchSampler, PlannedBatch, batch_sizes, optimal
from tests.strategies.test_buckets_edges import padded_share

EDGES = (16, 32, 48, 96)


def lengths(examples: int = 1000, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(3, 0.7, examples), 1, 96).astype(np.int64)


def sampler(
    rank: int = 0,
    replicas: int = 1,
    *,
    tokens: int | None = None,
    examples: int = 1000,
    drop_last: bool = True,
    warm: bool = False,
) -> BucketBatchSampler:
    sizes = batch_sizes(EDGES, rows=8, tokens_per_batch=tokens)
    return BucketBatchSampler(
        lengths(examples), sizes, replicas=replicas, rank=rank, seed=5, drop_last=drop_last, warm=warm
    )


def epoch(batches: BucketBatchSampler, number: int = 0) -> list[PlannedBatch]:
    batches.set_epoch(number)
    return list(batches)  # type: ignore[arg-type]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("tokens", [None, 512])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_ranks_take_the_same_bucket_at_every_step_and_share_the_examples(
    replicas: int, tokens: int | None, drop_last: bool
) -> None:
    ranks = [sampler(rank, replicas, tokens=tokens, examples=1003, drop_last=drop_last) for rank in range(replicas)]
    of, first = lengths(1003), ranks[0]
    for number in range(2):
        batches = [epoch(rank, number) for rank in ranks]
        assert {len(mine) for mine in batches} == {len(first)}
        for step in zip(*batches, strict=True):
            assert len({(batch.edge, len(batch)) for batch in step}) == 1
            rows = first.batch_sizes[step[0].edge]
            assert {len(batch) for batch in step} <= ({rows} if drop_last else {*first.rows_by_edge[step[0].edge]})
            assert max(of[example] for batch in step for example in batch) <= step[0].edge
        taken = Counter(example for mine in batches for batch in mine for example in batch)
        assert len(taken) + first.left_out == 1003
        if drop_last:
            assert set(taken.values()) == {1}
            assert first.left_out < min(first.batch_sizes.values()) * replicas
        else:
            assert first.left_out == 0
            assert sum(taken.values()) - 1003 < replicas, "only what does not divide is repeated"
            assert len({len(batch) for batch in batches[0][:-1] if batch.edge == batches[0][-1].edge}) == 1


@pytest.mark.parametrize("short", [0, 3])
def test_what_is_left_out_rotates_through_all_examples(short: int) -> None:
    """Three short examples are fewer than a batch of eight, and would be left out of every epoch."""
    of = np.array([4] * short + [40] * (83 - short))
    batches = BucketBatchSampler(of, dict.fromkeys(EDGES, 8), seed=5, drop_last=True)
    assert batches.left_out == 3
    missing = [set(range(83)) - {e for batch in epoch(batches, number) for e in batch} for number in range(28)]
    assert all(len(examples) == 3 for examples in missing)
    times = Counter(example for examples in missing for example in examples)
    assert set(times) == set(range(83)), "28 epochs leave each example out"
    assert max(times.values()) <= 2
    assert {(len(batch), batch.edge) for batch in epoch(batches)} == {(8, 48)}


def test_each_epoch_has_an_order_of_its_own_that_seed_and_epoch_decide() -> None:
    first, second = epoch(sampler(), 0), epoch(sampler(), 1)
    assert first != second
    assert epoch(sampler(), 1) == second
    same = BucketBatchSampler(lengths(), dict.fromkeys(EDGES, 8), seed=5, same_every_epoch=True)
    assert epoch(same, 0) == epoch(same, 1) == first


def test_buckets_take_turns_in_proportion_all_through_the_epoch() -> None:
    batches = sampler(examples=20_000)
    whole = [batch.edge for batch in epoch(batches)]
    shares = {edge: count / len(whole) for edge, count in Counter(whole).items()}
    bound = len(EDGES) + 1
    for edge, share in shares.items():
        so_far = np.cumsum(np.array(whole) == edge)
        off = np.abs(so_far - share * np.arange(1, len(whole) + 1))
        assert off.max() <= bound
    # And it is no fixed pattern.
    assert [batch.edge for batch in epoch(batches, 1)] != whole


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_training_may_begin_with_one_batch_of_each_shape(replicas: int, drop_last: bool) -> None:
    options = {"tokens": 512, "examples": 1003, "drop_last": drop_last}
    for rank in range(replicas):
        plain, warm = (sampler(rank, replicas, warm=warm, **options) for warm in (False, True))  # type: ignore[arg-type]
        usual, first = epoch(plain), epoch(warm)
        began = first[: len(EDGES)]
        assert [batch.edge for batch in began] == sorted(EDGES, reverse=True)
        assert [len(batch) for batch in began] == [warm.batch_sizes[batch.edge] for batch in began]
        assert first[len(EDGES) :] == [batch for batch in usual if batch not in began], "the others keep their order"
        assert sorted(first) == sorted(usual)
        assert epoch(warm, 1) == epoch(plain, 1), "only a training begins so, not every epoch"


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_epoch_goes_on_where_it_was(replicas: int, number: int) -> None:
    whole = [epoch(sampler(0, replicas, warm=True), each) for each in (number, number + 1)]
    for taken in (0, 1, 7, len(whole[0])):
        resumed = sampler(0, replicas, warm=True)
        resumed.resume(epoch=number, batches=taken)
        # Lightning may tell an epoch less at first, and asks for an iterator more than once.
        assert epoch(resumed, max(0, number - 1)) == epoch(resumed, number) == whole[0][taken:]
        assert epoch(resumed, number + 1) == whole[1]
        assert len(resumed) == len(whole[0])


def test_what_is_padded_is_what_was_expected_and_within_two_percent_of_the_optimum() -> None:
    of = np.clip(np.random.default_rng(1).lognormal(np.log(180), 0.9, 100_000), 1, 2048).astype(np.int64)
    edges = optimal(of, count=8, multiple=16)
    batches = BucketBatchSampler(of, dict.fromkeys(edges, 32), seed=0)
    for batch in batches:
        assert isinstance(batch, PlannedBatch)
    drawn = batches.drawn
    seen = 1 - drawn["useful_positions"] / drawn["positions"]
    assert drawn["batches"] == len(batches)
    assert seen == pytest.approx(batches.planned()["expected_padded_share"], rel=1e-3)
    assert seen <= 1.02 * padded_share(of, edges)
    assert seen <= 0.22


def test_examples_beyond_the_last_edge_and_too_few_for_a_batch_are_errors() -> None:
    with pytest.raises(ValueError, match="no batch size; set tokens_per_batch"):
        batch_sizes((16,), rows=None, tokens_per_batch=None)
    with pytest.raises(ValueError, match=r"1 of 3 training examples are longer than the last edge 16.* 17 positions"):
        BucketBatchSampler([4, 16, 17], {8: 1, 16: 1})
    with pytest.raises(ValueError, match="3 training examples make no batch of 2 on 2 devices"):
        BucketBatchSampler([4, 16, 15], {16: 2}, replicas=2, drop_last=True)
