"""Labelled images: drawn, of a folder; what is left out, what stops in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import datasets

from tasks.image_classification.task import ImageClassification, ImageFolder, LabelledData, LabelledShapes
from tests.tasks.conftest import opened

Write = Callable[..., Path]


def load(data: LabelledData) -> Any:
    return opened(ImageClassification(image_size=16, data=data))


def test_a_drawn_image_and_its_class_depend_on_seed_split_and_index_alone() -> None:
    (one, val), (more, _) = (LabelledShapes(train_images=n).sets(seed=1, image_size=48) for n in (8, 30))
    other, _ = LabelledShapes().sets(seed=2, image_size=48)
    image, label = one[5]
    assert torch.equal(image, more[5][0])
    assert (image.dtype, tuple(image.shape), image.is_contiguous()) == (torch.uint8, (3, 48, 48), True)
    for split in (other, val):
        assert not torch.equal(image, split[5][0])
    assert label == more[5][1]


def test_the_class_is_the_colour_and_kind_that_are_drawn() -> None:
    data = LabelledShapes()
    assert data.class_count() == 30
    train, _ = data.sets(seed=0, image_size=96)
    for index in range(40):
        image, label = train[index]
        colours = {tuple(colour) for colour in image.flatten(1).T.tolist()}
        assert ((220, 40, 40) in colours) is (label % 6 == 0)
    assert {train[index][1] for index in range(400)} == set(range(30))


def test_distinct_images_are_drawn_once_and_repeat() -> None:
    plain, _ = LabelledShapes(train_images=10).sets(seed=0, image_size=16)
    kept, val = LabelledShapes(train_images=10, val_images=10, distinct=4).sets(seed=0, image_size=16)
    assert (len(kept), len(val)) == (10, 10)
    for index in (*range(10), 1):
        image, label = kept[index]
        assert image is kept[index % 4][0]
        assert torch.equal(image, plain[index % 4][0])
        assert label == plain[index % 4][1]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_bytes_and_classes(workers: int) -> None:
    task = ImageClassification(
        image_size=16,
        data=LabelledShapes(batch_size=4, train_images=16, val_images=6, num_workers=workers, distinct=3),
    )
    data = opened(task)
    for batch in data.train_dataloader():
        assert (batch.images.dtype, tuple(batch.images.shape)) == (torch.uint8, (4, 3, 16, 16))
        assert (batch.targets.dtype, tuple(batch.targets.shape)) == (torch.int64, (4,))
        assert task.count(batch).samples == 4
        assert task.count(batch).tokens is None
    assert [len(batch.targets) for batch in data.val_dataloader()] == [4, 2]
    assert data.skipped == {}


def fill(write_image: Write, split: str, classes: dict[str, int], **more: object) -> None:
    for grey, (name, count) in enumerate(classes.items()):
        for number in range(count):
            suffix = ("png", "JPG", "jpeg")[number % 3]
            write_image(f"{split}{name}/deep/{number}.{suffix}", colour=(40 * grey,) * 3, **more)


def test_a_folder_is_read_in_the_order_of_torchvisions_image_folder(tmp_path: Path, write_image: Write) -> None:
    fill(write_image, "train/", {"zebra": 3, "ant": 2, "Bee": 4})
    fill(write_image, "val/", {"Bee": 2, "ant": 1, "zebra": 1})
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    config = ImageFolder(root=str(tmp_path), batch_size=2, num_workers=0)
    data = load(config)
    assert data.train_set.classes == datasets.ImageFolder(tmp_path / "train").classes
    assert (len(data.train_set), len(data.val_set)) == (9, 4)
    batch = next(iter(data.val_dataloader()))
    assert batch.targets.tolist() == [0, 0]
    assert (batch.images.float().mean(dim=(1, 2, 3)) - 0).abs().max() < 3
    assert data.skipped == {}


def test_a_broken_image_ends_the_loading_with_its_name(tmp_path: Path, write_image: Write) -> None:
    for split in ("train/", "val/"):
        fill(write_image, split, {"a": 4, "b": 4})
    (tmp_path / "train" / "b" / "broken.png").write_bytes(b"broken")
    module = load(ImageFolder(root=str(tmp_path), batch_size=3, num_workers=1))
    with pytest.raises(
        ValueError, match=r"=10 on 1 devices is more than the 9 training examples of task\.data\.root='/"
    ):
        load(ImageFolder(root=str(tmp_path), batch_size=10, num_workers=0))
    with pytest.raises(ValueError, match=r"broken\.png does not decode"):
        list(module.train_dataloader()), list(module.val_dataloader())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ([], "No such file or directory"),
        (["train/"], "Couldn't find any class folder in "),
        (["train/", "train/a/", "train/b/1.png"], "Found no valid file for the classes a."),
        (["train/a/1.png", "val/b/1.png"], "training and validation images are of different classes"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, write_image: Write, make: list[str], message: str
) -> None:
    for name in make:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            write_image(name)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(ImageFolder(root=str(tmp_path), batch_size=1))
    assert str(caught.value).startswith(("task.data.root='/", f"{tmp_path}: "))
    assert "\n" not in str(caught.value)
