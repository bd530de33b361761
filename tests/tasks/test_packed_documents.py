"""Packed documents: what a row holds, and that a BERT scores it as it scores the same documents, padded and masked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tasks.language import packing
from tasks.language.data import MaskedBatch
from tasks.language.model import Bert
from tasks.language.packing import WINDOW, CollatePacked, PackedSampler, first_fit, warn_without_kernel
from tasks.language.sources import Stdlib
from tasks.language.task import BertNetwork, MaskedLM
from tests.tasks.conftest import counted_flops, opened
from tests.tasks.test_masked_data import collate, document

NETWORK = BertNetwork(layers=3, width=48, heads=2, vocabulary_size=1000, max_tokens=40)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(4.0, 0.8, 600), 3, 400).astype(int).tolist()
DOCUMENTS = [document(length, seed=length) for length in (24, 7, 15, 3, 40)]


def packed(rows: list[Tensor], *, positions: int = 100) -> MaskedBatch:
    task = MaskedLM(network=NETWORK, data=Stdlib(packing="packed_documents"))
    return CollatePacked(seed=0, token_count=900, task=task, positions=positions, sequences=10)([rows])


def nets() -> tuple[Bert, Bert]:
    """One network in both forms, its weights larger than at the start."""
    torch.manual_seed(0)
    plain, other = Bert(NETWORK), Bert(NETWORK)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    other.load_state_dict(plain.state_dict())
    return plain, other


def test_first_fit_fills_rows_and_keeps_the_order_but_for_a_window() -> None:
    rows = list(first_fit(range(600), LENGTHS, positions=1000, most=40))
    assert sorted(itertools.chain(*rows)) == list(range(600))
    used = [sum(LENGTHS[example] for example in row) for row in rows]
    assert max(used) <= 1000
    assert min(used[: len(used) // 2]) >= 980
    assert max(map(len, rows)) <= 40
    place = {example: index for index, row in enumerate(rows) for example in row}
    places = [place[example] for example in range(600)]
    assert all(at - min(places[example:]) <= WINDOW for example, at in enumerate(places))
    for index, row in enumerate(rows[:-1]):  # the longest waiting one is in the next row
        assert row[0] == min(example for example, at in place.items() if at >= index)


def test_a_row_takes_no_more_examples_than_it_may() -> None:
    assert [len(row) for row in first_fit(range(10), [1] * 10, positions=100, most=4)] == [4, 4, 2]


def sampler(rank: int = 0, replicas: int = 1, *, shuffle: bool = True) -> PackedSampler:
    return PackedSampler(LENGTHS, positions=1000, most=40, shuffle=shuffle, num_replicas=replicas, rank=rank, seed=1)


def test_an_epoch_has_every_example_at_most_once_and_leaves_less_out_than_a_row_and_the_padding() -> None:
    whole, left_out = sampler(), list[set[int]]()
    for epoch in range(3):
        whole.set_epoch(epoch)
        rows = list(whole)
        assert len(rows) == len(whole) == sum(LENGTHS) // 1000
        drawn = list(itertools.chain(*rows))
        assert len(set(drawn)) == len(drawn)
        left_out.append(set(range(600)) - set(drawn))
        padding = 1000 * len(rows) - sum(LENGTHS[example] for example in drawn)
        assert sum(LENGTHS[example] for example in left_out[-1]) <= padding + 1000
        assert padding < 0.02 * 1000 * len(rows)
    assert not set.intersection(*left_out), "others each epoch"


@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_draw_equally_many_rows_and_none_of_each_others(replicas: int) -> None:
    parts = [list(sampler(rank, replicas)) for rank in range(replicas)]
    assert {len(part) for part in parts} == {sum(LENGTHS) // 1000 // replicas} == {len(sampler(0, replicas))}
    drawn = list(itertools.chain(*itertools.chain(*parts)))
    assert len(set(drawn)) == len(drawn)
    in_order = [list(sampler(rank, replicas, shuffle=False)) for rank in range(replicas)]
    assert len({len(part) for part in in_order}) == 1
    assert set(itertools.chain(*itertools.chain(*in_order))) == set(range(600)), "validation takes all"


def test_validation_has_every_example_once_the_same_each_time() -> None:
    rows = list(sampler(shuffle=False))
    assert sorted(itertools.chain(*rows)) == list(range(600))
    assert rows == list(sampler(shuffle=False))


def test_a_row_is_masked_as_the_same_documents_unpacked_and_positions_begin_again() -> None:
    batch, padded = packed(DOCUMENTS), collate()(DOCUMENTS)
    used = sum(map(len, DOCUMENTS))
    assert torch.equal(batch.tokens[0, :used], padded.tokens[padded.mask])
    assert torch.equal(batch.targets[0, :used], padded.targets[padded.mask])
    assert batch.positions[0].tolist() == [*itertools.chain(*(range(len(row)) for row in DOCUMENTS)), *range(11)]
    assert batch.offsets.tolist() == [0, 24, 31, 46, 49, 89, 100, 100, 100, 100, 100]
    assert batch.offsets.dtype == torch.int32
    assert not batch.tokens[0, used:].any()
    assert (batch.targets[0, used:] == -100).all()
    assert (batch.useful_tokens, batch.documents) == (used, 5)
    assert batch.attended == sum(len(row) ** 2 for row in DOCUMENTS) + 11**2


def test_padding_is_no_longer_sequence_than_a_document() -> None:
    batch = packed([DOCUMENTS[0]])
    assert batch.offsets.tolist() == [0, 24, 64, *[100] * 8]
    assert int(batch.positions.max()) == 39


def by_offsets(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    """What torch's variable-length attention computes, sequence by sequence."""
    assert rest[0] is offsets
    assert rest[1:] == (40, 40)
    assert query.shape == key.shape == value.shape == (100, 2, 24)
    parts = []
    for begin, end in itertools.pairwise(offsets.tolist()):
        scores = torch.einsum("qhk,shk->hqs", query[begin:end], key[begin:end]) / 24**0.5
        parts.append(torch.einsum("hqs,shk->qhk", scores.softmax(-1), value[begin:end]))
    return torch.cat(parts)


@pytest.mark.parametrize("path", ["padded rows", "kernel's arguments"])
def test_loss_and_gradients_are_those_of_the_padded_network(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path != "padded rows":  # the kernel itself needs a GPU
        monkeypatch.setattr(packing, "fits_kernel", lambda *given: True)
        monkeypatch.setattr(packing, "varlen_attn", by_offsets)
    plain, other = nets()
    batch, padded = packed(DOCUMENTS), collate()(DOCUMENTS)
    loss = other(batch.tokens, None, batch.targets, batch.positions, batch.offsets)[0]
    reference = plain(padded.tokens, padded.mask, padded.targets)[0]
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)
    loss.backward()
    reference.backward()
    for (name, one), two in zip(other.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(
            one.grad, two.grad, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_forward_and_loss_compile_as_one_graph_for_every_row(counter: CompileCounter) -> None:
    _, net = nets()
    net.compile(backend=counter, fullgraph=True)
    for rows in (DOCUMENTS, DOCUMENTS[:2], DOCUMENTS[::-1]):
        batch = packed(rows)
        net(batch.tokens, None, batch.targets, batch.positions, batch.offsets)[0].backward()
    assert counter.frame_count == 1


def test_the_kernel_is_traced_without_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *given: (torch.zeros(1, 100, 48),)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(packing, "fits_kernel", lambda given, heads: packing.has_kernel(0, 24))
    attend = torch.compile(packing.attend_packed, backend=backend, fullgraph=True)
    attend(torch.zeros(1, 100, 144, dtype=torch.bfloat16), 2, packed(DOCUMENTS).offsets, longest=40)
    assert called.count("torch_attn._varlen_attn") == 1
    torch._dynamo.reset()


def task_of(**changes: Any) -> MaskedLM:
    network = BertNetwork(layers=2, width=16, heads=2, vocabulary_size=320, max_tokens=48)
    data = {"packing": "packed_documents", "batch_size": 4, "max_documents": 60, "val_share": 0.2, **changes}
    return MaskedLM(network=network, data=Stdlib(**data))


def test_rows_are_fitted_to_the_data_and_all_of_one_shape() -> None:
    task = task_of()
    data = opened(task)
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    tensors = [[each for each in batch if isinstance(each, Tensor)] for batch in batches]
    assert {len(row) for row in tensors} == {4}
    assert len({tuple(tuple(each.shape) for each in row) for row in tensors}) == 1
    lengths = data.train_set.lengths
    positions = batches[0].tokens.shape[1]
    assert positions % 128 == 0
    assert 0 <= positions - 4 * lengths.mean() <= 128
    counts = task.count(batches[0])
    assert (counts.tokens, counts.useful_tokens) == (positions, int((batches[0].tokens != 0).sum()))


def test_documents_are_padded_to_the_longest_of_the_data_and_not_of_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel does not run: rows of the network's 512 took twelve times the step of documents of 64."""
    task, shapes = task_of(max_tokens=24), []
    attend = packing.attend
    monkeypatch.setattr(
        packing, "attend", lambda rows, *given, **mask: shapes.append(rows) or attend(rows, *given, **mask)
    )
    batch = next(iter(opened(task).train_dataloader()))
    task.build_net()(*(getattr(batch, name) for name in task.inputs))
    assert {rows.shape[1] for rows in shapes} == {24}


def test_operations_are_those_that_torch_counts_for_each_sequence_alone() -> None:
    task, tokens = task_of(), torch.zeros(1, 34, dtype=torch.long)
    net = Bert(task.network)
    alone = [partial(lambda row: net(row, None, row)[0], tokens[:, :length]) for length in (5, 9, 34)]
    assert task.training_flops(packed([document(5), document(9)], positions=48)) == counted_flops(*alone)


def test_ranks_without_lightnings_trainer_share_rows_and_are_refused_without_one() -> None:
    small, data = (task_of(batch_size=size).build_data(seed=0) for size in (4, 512))
    small.trainer = SimpleNamespace(world_size=2, global_rank=1)
    small.setup("fit")
    assert 2 * len(small.train_dataloader()) <= sum(small.train_set.lengths) // 128
    data.trainer = SimpleNamespace(world_size=8, global_rank=0)
    with pytest.raises(ValueError, match=r"a row of \d+ positions on each of 8 devices is more than the .* tokens"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("precision", "width", "capability", "kernel"),
    [
        ("bf16-mixed", 16, (9, 0), True),
        ("32-true", 16, (9, 0), False),
        ("16-true", 16, (7, 5), False),
        ("bf16-true", 12, (9, 0), False),
    ],
)
def test_a_gpu_without_the_kernel_is_warned_about(
    precision: str,
    width: int,
    capability: tuple[int, int],
    kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    warn_without_kernel(torch.device("cuda:0"), precision, BertNetwork(width=width, heads=2))
    assert ("documents attend as padded rows" in capsys.readouterr().err) is not kernel
