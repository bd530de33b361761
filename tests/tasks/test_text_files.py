"""Text files and JSON lines: what is read, what is left out and counted, what stops with one line."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path

import pytest

from tasks.language.sources import Documents, JsonLines, TextError, TextFiles, read_text

WORDS = "gr\u00fc\u00dfe, \u4e16\u754c"


def all_texts(documents: tuple[Documents, Documents]) -> list[str]:
    return sorted(text for side in documents for text in side.texts)


@pytest.mark.parametrize(
    "data",
    [
        WORDS.encode(),
        codecs.BOM_UTF8 + WORDS.encode(),
        codecs.BOM_UTF16_LE + WORDS.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + WORDS.encode("utf-16-be"),
        codecs.BOM_UTF32_LE + WORDS.encode("utf-32-le"),
    ],
    ids=["utf-8", "utf-8 with a mark", "utf-16-le", "utf-16-be", "utf-32-le"],
)
def test_encodings_that_files_name_themselves_are_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_text(tmp_path / "a.txt", encoding="utf-8") == WORDS


def test_other_encodings_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("gr\u00fc\u00dfe\r\nzwei\rdrei".encode("latin-1"))
    assert read_text(tmp_path / "a.txt", encoding="latin-1") == "gr\u00fc\u00dfe\nzwei\ndrei"
    with pytest.raises(TextError, match=r"a\.txt is not utf-8 text: byte 2 .*task\.data\.encoding"):
        read_text(tmp_path / "a.txt", encoding="utf-8", option="task.data.encoding")
    with pytest.raises(ValueError, match=r"task\.data\.encoding='latin-9000' is not an encoding"):
        TextFiles(path="a.txt", encoding="latin-9000")


def test_a_folder_is_read_with_everything_below_it(tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "sub/deeper/c.txt", "sub/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    documents = TextFiles(path=str(tmp_path)).documents()
    assert all_texts(documents) == ["a.txt", "sub/b.txt", "sub/deeper/c.txt"]
    assert len(documents[1].texts) == 1
    everything = TextFiles(path=str(tmp_path / "**" / "*.*"))
    assert all_texts(everything.documents()) == ["a.txt", "sub/b.txt", "sub/d.md", "sub/deeper/c.txt"]
    assert everything.tokenizer_folder() == tmp_path
    other = TextFiles(path=str(tmp_path), suffix=".md", val_path=str(tmp_path / "a.txt"))
    assert [side.texts for side in other.documents()] == [["sub/d.md"], ["a.txt"]]


def test_paragraphs_are_documents_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\nstill one\n\n \n\ntwo\n \nthree\n\n")
    documents = TextFiles(path=str(tmp_path / "a.txt"), unit="paragraph").documents()
    assert [text.strip() for text in all_texts(documents)] == ["one\nstill one", "three", "two"]


def test_broken_and_blank_files_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfa\x00 no text")
    train, val = TextFiles(path=str(tmp_path)).documents()
    assert len(train.texts) + len(val.texts) == 5
    assert train.skipped == {"file does not decode": 1, "blank document": 1}
    assert re.search(r"left out: .*broken\.txt is not utf-8 text", capsys.readouterr().err)


def test_sides_do_not_change_when_files_are_added_or_move(tmp_path: Path) -> None:
    for folder, count in (("a", 60), ("b", 120)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number}.txt").write_text(f"text {number}")
    few, many = (TextFiles(path=str(tmp_path / name), val_share=0.2).documents()[1].texts for name in "ab")
    assert set(few) <= set(many)
    assert len(few) == pytest.approx(12, abs=8)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none", r"task\.data\.path='.*none' is not a file and not a folder"),
        ("none/*.txt", r"task\.data\.path='.*' matches no file"),
        ("empty", r"task\.data\.path='.*empty' holds no files whose names end in '\.txt'"),
        ("bad.txt", r".*bad\.txt is not utf-8 text: byte 0"),
        ("bad*.txt", r".*bad\.txt is not utf-8 text: byte 0 .*; so it is with all 2 files"),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.txt").write_bytes(b"\x80abc")
    (tmp_path / "bad2.txt").write_bytes(b"\x80abc")
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        TextFiles(path=str(tmp_path / path)).documents()
    assert "\n" not in str(refused.value)


def test_json_lines_are_read_by_their_key(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"body": f"text {number} {WORDS}", "id": number}) for number in range(6)]
    file.write_bytes(codecs.BOM_UTF8 + "\n".join([*lines[:3], "", *lines[3:]]).encode())
    documents = JsonLines(file=str(file), key="body").documents()
    assert all_texts(documents) == [f"text {number} {WORDS}" for number in range(6)]
    assert documents[0].skipped == {}
    other = tmp_path / "b.jsonl"
    other.write_text(json.dumps({"body": "held out"}))
    train, val = JsonLines(file=str(file), key="body", val_file=str(other)).documents()
    assert (len(train.texts), val.texts, val.place) == (6, ["held out"], str(other))


def test_broken_lines_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"text {number}"}).encode() for number in range(3)]
    bad = [b'{"text": "cut o', b"[1]", b'{"other": "x"}', b'{"text": 5}', b'{"text": "\xff"}', b"[" * 100_000]
    file.write_bytes(b"\n".join([*good, *bad]))
    train, val = JsonLines(file=str(file)).documents()
    assert len(train.texts) + len(val.texts) == 3
    assert train.skipped == {"broken line": 6}
    errors = capsys.readouterr().err.splitlines()
    assert [re.search(r"line (\d)", error).group(1) for error in errors] == ["4", "5", "6", "7", "8", "9"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r".*a\.jsonl cannot be read \(No such file or directory\)"),
        (b"not json\n{", r".*a\.jsonl line 1 is not JSON .*; no line of it can be used"),
        (b'{"body": "x"}', r".*a\.jsonl line 1 has no key 'text' \(task\.data\.key\); it has 'body'"),
        (b"", r".*a\.jsonl holds too little text"),
    ],
)
def test_a_file_without_a_line_that_can_be_used_is_named(tmp_path: Path, data: bytes | None, message: str) -> None:
    file = tmp_path / "a.jsonl"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ValueError, match=f"^{message}"):
        JsonLines(file=str(file)).documents()
