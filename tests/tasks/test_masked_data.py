"""Masked batches: what is hidden, how it is drawn, and that a resumed run and worker processes draw the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.language.data import CollateMasked
from tasks.language.sources import Stdlib, TextFiles
from tasks.language.task import BertNetwork, MaskedLM
from tasks.special_tokens import BEGIN, END, PAD
from tests.tasks.conftest import opened
from tests.tasks.test_resume import train

MASK, TOKENS = 999, 900
WORDS = ("red", "green", "blue", "round", "square", "small", "large", "left", "right", "above", "below", "and", "or")


def collate(*, seed: int = 0, packing: str = "documents", pad_to: int | None = None) -> CollateMasked:
    task = MaskedLM(network=BertNetwork(vocabulary_size=MASK + 1), data=Stdlib(packing=packing, pad_to=pad_to))
    return CollateMasked(seed=seed, token_count=TOKENS, task=task)


def document(length: int, seed: int = 0) -> Tensor:
    ordinary = torch.randint(3, TOKENS, (length - 2,), generator=torch.Generator().manual_seed(seed))
    return torch.cat((torch.tensor([BEGIN]), ordinary, torch.tensor([END])))


def test_each_row_has_its_share_of_targets_and_none_of_them_is_special() -> None:
    rows = [document(length, seed=length) for length in (3, 4, 12, 102, 500)]
    batch = collate()(rows)
    picked = batch.targets != -100
    assert picked.sum(1).tolist() == [1, 1, 2, 15, 75]  # 15% of the ordinary tokens, rounded, at least one
    for row, targets, mask in zip(rows, batch.targets, batch.mask, strict=True):
        assert mask.tolist() == [position < len(row) for position in range(500)]
        chosen = targets != -100
        assert torch.equal(targets[chosen], row[chosen[: len(row)]])
        assert targets[chosen].min() >= 3
    assert batch.useful_tokens == batch.mask.sum() == sum(map(len, rows))


def test_of_the_targets_80_percent_show_the_mask_10_a_random_token_10_themselves() -> None:
    rows = [document(500, seed=seed) for seed in range(200)]
    batch = collate()(rows)
    picked = batch.targets != -100
    shown, true = batch.tokens[picked], batch.targets[picked]
    masked, kept = (shown == MASK), (shown == true)
    assert int(picked.sum()) == 200 * 75
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.01)
    random = shown[~masked & ~kept]
    assert 3 <= int(random.min()) < int(random.max()) < TOKENS
    assert len(random.unique()) > 600
    original = torch.stack(rows)
    assert torch.equal(batch.tokens[~picked], original[~picked])


def test_a_row_is_masked_by_the_seed_and_by_what_it_comes_with() -> None:
    first, second, third = (document(40, seed=seed) for seed in range(3))
    once = collate()([first, second])
    for again in (collate()([first, second]), collate(pad_to=64)([first, second])):
        assert torch.equal(again.targets[:, :40], once.targets)
        assert torch.equal(again.tokens[:, :40], once.tokens)
    for other in (collate()([first, third]), collate(seed=1)([first, second])):
        assert not torch.equal(other.targets[0], once.targets[0])
    assert not torch.equal(collate()([second, first]).targets[1], once.targets[0])


def test_packed_rows_have_no_mask_and_padded_ones_their_width() -> None:
    assert collate(packing="packed")([document(8), document(8)]).mask is None
    batch = collate(pad_to=16)([document(8)])
    assert batch.tokens.shape == batch.targets.shape == batch.mask.shape == (1, 16)
    assert batch.tokens[0, 8:].tolist() == [PAD] * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two dozen text files of different lengths."""
    (tmp_path / "texts").mkdir()
    for index in range(24):
        words = [WORDS[(index + step * step) % len(WORDS)] for step in range(12 + index)]
        (tmp_path / "texts" / f"{index}.txt").write_text(" ".join(words))
    return tmp_path / "texts"


def small(folder: Path, *, attention_dropout: float | None = None, **data: Any) -> MaskedLM:
    network = BertNetwork(
        layers=2,
        width=16,
        heads=2,
        vocabulary_size=320,
        max_tokens=48,
        dropout=0.1,
        attention_dropout=attention_dropout,
    )
    options = {"packing": "documents", "batch_size": 4, "val_share": 0.1, **data}
    return MaskedLM(network=network, data=TextFiles(path=str(folder), **options))


def test_the_masks_token_is_none_of_the_tokenizers(folder: Path) -> None:
    task = small(folder)
    data = opened(task)
    assert data.tokenizer.get_vocab_size() <= 319
    batch = next(iter(data.train_dataloader()))
    assert (batch.tokens == 319).any()
    assert data.train_set.lengths.tolist() == [len(row) for row in data.train_set]
    counts = task.count(batch)
    assert (counts.samples, counts.tokens) == (4, batch.tokens.numel())
    assert counts.useful_tokens == (batch.tokens != PAD).sum()


@pytest.mark.parametrize("packing", ["documents", "packed_documents"])
def test_epochs_are_masked_anew_and_a_resumed_run_or_a_worker_masks_as_the_whole_one(
    folder: Path, tmp_path: Path, packing: str
) -> None:
    task = small(folder, packing=packing, attention_dropout=0.0)
    task.network.dropout = 0.0  # Lightning alone does not restore its random numbers
    whole = train(task, tmp_path / "a")
    masked_rows = [tuple(row) for (_, targets, *_), _ in whole for row in targets]
    assert len(set(masked_rows)) == len(masked_rows), "no row is masked twice alike"
    assert train(task, tmp_path / "b", resume=tmp_path / "a" / "step=7.ckpt") == whole[7:]
    task.data.num_workers = 1
    assert train(task, tmp_path / "c") == whole


def test_validation_masks_alike_each_time(folder: Path) -> None:
    data = opened(small(folder))
    one, other = (next(iter(data.val_dataloader())) for _ in range(2))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.targets, other.targets)
