"""COCO folders: what is read, what is left out and counted, what stops with one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import CaptionData, Captioning, Coco
from tasks.images import read_image
from tests.tasks.conftest import opened

Write = Callable[..., Path]


def load(size: CaptionerSize, data: CaptionData) -> Any:
    return opened(Captioning(size=size, data=data))


def write_coco(file: Path, captions: dict[str, list[str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    images = [{"id": number, "file_name": name} for number, name in enumerate(captions)]
    annotations = [
        {"id": 1, "image_id": number, "caption": caption}
        for number, texts in enumerate(captions.values())
        for caption in texts
    ]
    file.write_text(json.dumps({"images": images, "annotations": annotations}))


@pytest.mark.parametrize(
    ("name", "mode", "colour"),
    [
        ("rgb.jpg", "RGB", (90, 90, 90)),
        ("grey.jpg", "L", 90),
        ("grey.png", "L", 90),
        ("cmyk.jpg", "CMYK", (0, 0, 0, 165)),
        ("rgba.png", "RGBA", (90, 90, 90, 255)),
        ("palette.png", "P", 0),
        ("two.png", "1", 1),
        ("deep.png", "I;16", 90 * 257),
    ],
)
def test_images_of_every_mode_become_rgb_of_the_asked_size(
    write_image: Write, name: str, mode: str, colour: object
) -> None:
    image = read_image(write_image(name, mode=mode, colour=colour, size=(50, 30)), image_size=24)
    assert image.shape == (3, 24, 24)
    assert image.dtype == torch.uint8
    assert image.is_contiguous()
    expected = {"P": None, "1": 255}.get(mode, 90)
    if expected is not None:
        assert (image.int() - expected).abs().max() <= 3


def test_a_coco_folder_is_read_with_every_caption_of_an_image(
    tmp_path: Path, write_image: Write, size: CaptionerSize
) -> None:
    for split, count in (("train2017", 4), ("val2017", 2)):
        for number in range(count):
            write_image(f"{split}/{number}.jpg")
        # A lone surrogate is not text to a tokenizer.
        captions = {f"{number}.jpg": [f"picture {number}", "a  grey\narea\ud800"] for number in range(count)}
        write_coco(tmp_path / "annotations" / f"captions_{split}.json", captions)
    data = load(size, Coco(root=str(tmp_path), batch_size=2, num_workers=0))
    assert (len(data.train_set), len(data.val_set)) == (8, 4)
    batch = next(iter(data.val_dataloader()))
    assert [data.tokenizer.decode(row).strip() for row in batch.tokens.tolist()] == ["picture 0", "a grey area?"]
    assert data.skipped == {}


def test_captions_that_cannot_be_used_are_left_out_and_counted(
    tmp_path: Path, write_image: Write, size: CaptionerSize
) -> None:
    captions = {f"{number}.png": [f"picture {number}"] for number in range(3)}
    for split in ("train", "val"):
        for name in captions:
            write_image(f"{split}/{name}")
        write_coco(tmp_path / "annotations" / f"captions_{split}.json", captions)
        captions |= {"0.png": ["fine", " ", "word " * 300]}
    task = Captioning(size=size, data=Coco(root=str(tmp_path), batch_size=1, num_workers=1))
    data = opened(task)
    assert sum(1 for loader in (data.train_dataloader(), data.val_dataloader()) for _ in loader) == 6
    assert data.skipped == {"empty caption": 1, "caption too long": 1}


def coco_with(tmp_path: Path, content: str) -> Coco:
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / "annotations" / f"captions_{split}.json").write_text(content, errors="surrogateescape")
    return Coco(root=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "captions_train.json is not a COCO caption file"),
        ("[]", "captions_train.json is not a COCO caption file (TypeError: "),
        ('{"images": []}', "captions_train.json is not a COCO caption file (KeyError: 'annotations')"),
        ('{"images": [{}], "annotations": []}', "captions_train.json is not a COCO caption file (KeyError: 'id')"),
        ('{"images": [{"id": 1, "file_name": null}], "annotations": []}', "is not a COCO caption file (TypeError: "),
        ("[" * 100_000, "captions_train.json is not a COCO caption file"),
        ("\udcff", "captions_train.json is not a COCO caption file"),
        ('{"images": [], "annotations": []}', "captions_train.json has no annotations"),
        (
            '{"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 1, "caption": " "}]}',
            "' (train) holds no usable example ({'empty caption': 1})",
        ),
    ],
)
def test_a_broken_annotation_file_is_named(tmp_path: Path, size: CaptionerSize, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(size, coco_with(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_missing_folders_and_files_are_named(tmp_path: Path, size: CaptionerSize) -> None:
    with pytest.raises(ValueError, match=r"^task\.data\.root='.+' has no annotations/captions_train\*\.json$"):
        load(size, Coco(root=str(tmp_path)))


def test_a_broken_image_stops_the_run_before_it_trains(tmp_path: Path, size: CaptionerSize) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.png").write_bytes(b"broken")
        write_coco(tmp_path / "annotations" / f"captions_{split}.json", {"0.png": ["a b"]})
    with pytest.raises(ValueError, match=r"0\.png does not decode"):
        load(size, Coco(root=str(tmp_path), batch_size=1, num_workers=0))
