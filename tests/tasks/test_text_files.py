"""Text files and JSON lines: what is read, and what stops with one line."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from tasks.language.sources import TextFiles

WORDS = "gr\u00fc\u00dfe, \u4e16\u754c"


def all_texts(documents: tuple[list[str], list[str]]) -> list[str]:
    return sorted(text for side in documents for text in side)


def test_a_folder_is_read_with_everything_below_it_but_blank_files(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "sub/deeper/c.txt", "sub/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "blank.txt").write_text(" \n\n")
    documents = TextFiles(path=str(tmp_path)).documents()
    assert all_texts(documents) == ["a.txt", "sub/b.txt", "sub/deeper/c.txt"]
    assert len(documents[1]) == 1


def test_byte_order_marks_and_line_ends_of_other_systems_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + f"{WORDS}\r\ntwo\rthree".encode())
    train, val = TextFiles(path=str(tmp_path / "a.txt")).documents()
    assert train[0] + val[0] == f"{WORDS}\ntwo\nthree"


def test_a_held_out_document_keeps_its_side_when_others_are_added(tmp_path: Path) -> None:
    for folder, count in (("a", 60), ("b", 120)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number}.txt").write_text(f"text {number}")
    few, many = (TextFiles(path=str(tmp_path / name), val_share=0.2).documents()[1] for name in "ab")
    assert set(few) <= set(many)
    assert len(few) == pytest.approx(12, abs=8)


def test_a_line_of_json_is_a_document(tmp_path: Path) -> None:
    lines = [json.dumps({"body": f"text {number} {WORDS}", "id": number}) for number in range(6)]
    lines[5] = lines[5].replace("text", "\\ud800text")  # no character: no tokenizer takes it
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + "\n".join([*lines[:3], "", lines[3]]).encode())
    (tmp_path / "b.jsonl").write_text("\n".join(lines[4:]))
    texts = [f"text {number} {WORDS}" for number in range(5)]
    assert all_texts(TextFiles(path=str(tmp_path), key="body").documents()) == [f"?text 5 {WORDS}", *texts]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, r"task\.data\.path='.*none' is not a file, or a folder with \.txt or \.jsonl files$"),
        ("a.txt", b"\x80abc", r".*a\.txt cannot be read as UTF-8 text .* position 0"),
        ("a.txt", b" \n", r"^task\.data\.path='.*a\.txt' holds too little text to train on and to validate$"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut o', r".*a\.jsonl line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, r".*a\.jsonl line 1 is not JSON"),
        ("a.jsonl", b"[1]", r".*a\.jsonl line 1 has no text under the key 'text' \(task\.data\.key\)"),
        ("a.jsonl", b'{"body": "x"}', r".*line 1 has no text under the key 'text'"),
        ("a.jsonl", b'{"text": 5}', r".*line 1 has no text under the key 'text'"),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        TextFiles(path=str(tmp_path / name)).documents()
    assert "\n" not in str(refused.value)
