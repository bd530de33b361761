"""Rows of tokens: packed without a gap or a document each, the same in every run, quick to start a second time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strategies import Ragged
from strategies.padding import length_of
from tasks.language.sources import Stdlib, TextData, TextFiles, definitions
from tasks.language.task import Gpt2Network, LanguageModelling
from tasks.resumable_data import encode, train_tokenizer
from tasks.special_tokens import BEGIN, END, PAD
from tests.tasks.conftest import opened


def load(data: TextData, *, max_tokens: int = 16) -> Any:
    network = Gpt2Network(vocabulary_size=300, max_tokens=max_tokens)
    return opened(LanguageModelling(data=data, network=network))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files of different lengths."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"file {number} " + "word " * number)
    return tmp_path


def test_packed_rows_are_the_documents_one_after_the_other(folder: Path) -> None:
    module = load(TextFiles(path=str(folder), batch_size=2))
    rows = [module.train_set[index] for index in range(len(module.train_set))]
    assert {len(row) for row in rows} == {17}
    for row, following in itertools.pairwise(rows):
        assert row[-1] == following[0], "the last target is the next row's first input"
    stream = torch.cat([rows[0], *(row[1:] for row in rows[1:])]).tolist()
    texts = TextFiles(path=str(folder)).documents()[0]
    expected = encode(texts, module.tokenizer).tolist()
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) < 16
    assert expected.count(END) == len(texts)


def test_a_document_row_begins_ends_and_is_cut(folder: Path) -> None:
    module = load(TextFiles(path=str(folder), batch_size=4, packing="documents"), max_tokens=24)
    texts = TextFiles(path=str(folder)).documents()[0]
    stream = encode(texts, module.tokenizer)
    whole = [[BEGIN, *ids] for ids in np.split(stream, np.flatnonzero(stream == END) + 1)[:-1]]
    rows = [module.train_set[index].tolist() for index in range(len(module.train_set))]
    assert rows == [row[:25] for row in whole]
    cut = sum(len(row) > 25 for row in whole)
    assert 0 < cut < len(rows)
    val_cut = module.val_set.skipped.get("rest of a document that is too long", 0)
    assert module.skipped == {"rest of a document that is too long": cut + val_cut}
    ragged = (Ragged("tokens", 1, PAD, 1),)
    assert module.train_set.lengths.tolist() == [
        length_of(module.collate([module.train_set[index]]), ragged) for index in range(len(rows))
    ]


@pytest.mark.parametrize("pad_to", [None, 20])
def test_documents_are_padded_on_the_right(folder: Path, pad_to: int | None) -> None:
    module = load(TextFiles(path=str(folder), batch_size=4, packing="documents", pad_to=pad_to), max_tokens=24)
    for batch in module.train_dataloader():
        assert batch.tokens.dtype == torch.long
        assert batch.tokens.is_contiguous()
        assert (batch.tokens[:, 1:] != PAD).sum() == batch.useful_tokens
        longest = int((batch.tokens != PAD).sum(1).max())
        assert batch.tokens.shape == (4, longest if pad_to is None else 21)


def test_a_text_that_spells_a_special_token_holds_none() -> None:
    ids = encode(["a <end> of <pad> and <begin>", ""], train_tokenizer(["some text", "<end>"], vocabulary_size=300))
    assert (ids == END).sum() == 2
    assert not np.isin(ids, [PAD, BEGIN]).any()


def test_the_embedded_text_is_split_alike_in_every_run_and_order() -> None:
    first, second = (Stdlib(max_documents=300).documents() for _ in range(2))
    assert first == second
    train, val = first
    assert len(train) + len(val) == 300
    assert 1 <= len(val) <= 30
    lengths = sorted(map(len, train))
    assert lengths[-30] > 8 * lengths[30], "ragged, as real documents are"


def test_definitions_are_the_files_in_pieces() -> None:
    text = "import a\n\n@deco\n@other(1)\ndef f():\n    def inner(): ...\n\nclass C:\n    x = 1\nasync def g(): ...\n"
    parts = definitions(text)
    assert "".join(parts) == text
    assert [part.split("\n")[0] for part in parts] == ["import a", "@deco", "class C:", "async def g(): ..."]


def test_tokens_are_kept_for_the_next_start(folder: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TextFiles(path=str(folder), batch_size=2)
    first = load(data)
    kept = sorted(private_cache.rglob("tokens-*.npy"))
    assert len(kept) == 2
    with monkeypatch.context() as patched:
        patched.setattr("tasks.resumable_data.encode", lambda *_: pytest.fail("encoded again"))
        again = load(data)
    assert all(torch.equal(first.train_set[index], again.train_set[index]) for index in range(len(first.train_set)))
    kept[0].write_bytes(b"half a file")
    assert len(load(data).train_set) == len(first.train_set)
    (folder / "00.txt").write_text("other text")
    load(data)
    assert len(list(private_cache.rglob("tokens-*.npy"))) == 4


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    for text, option in (("ab cd", "max_tokens"), ("ab cd " * 40, "val_share")):
        (tmp_path / "a.txt").write_text(text)
        with pytest.raises(ValueError, match=rf"^task\.data\.{option}: too little .* row of 16 in .*a\.txt'$"):
            load(TextFiles(path=str(tmp_path / "a.txt"), batch_size=1))


def test_folders_that_are_called_like_files_are_looked_through(folder: Path) -> None:
    before = len(list(TextFiles(path=str(folder)).read()))
    (folder / "en.txt").mkdir()
    (folder / "en.txt" / "a.txt").write_text("text")
    assert len(list(TextFiles(path=str(folder)).read())) == before + 1


def test_one_file_is_split_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("".join(f"{number} " for number in range(2000)))
    train, val = TextFiles(path=str(tmp_path / "all.txt"), val_share=0.1).documents()
    assert train[0] + val[0] == (tmp_path / "all.txt").read_text()
    assert len(val[0]) == pytest.approx(0.1 * len(train[0]), rel=0.15)
