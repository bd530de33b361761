"""Fixtures of the tasks' tests: a private cache folder, a tiny network, image files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from tasks.captioning.model import CaptionNet
from tasks.captioning.task import CaptionerSize


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tokenizers out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "crucible"


@pytest.fixture
def size() -> CaptionerSize:
    """Three blocks each, a bridge between the widths."""
    return CaptionerSize(
        image_size=32, encoder_layers=3, encoder_width=32, decoder_layers=3, decoder_width=48, vocabulary_size=384
    )


@pytest.fixture
def net(size: CaptionerSize) -> CaptionNet:
    """The network of ``size`` with seeded weights."""
    torch.manual_seed(0)
    return CaptionNet(size)


@pytest.fixture
def write_image(tmp_path: Path) -> Callable[..., Path]:
    """Write a one-coloured image file below tmp_path, in any mode and format."""

    def write(name: str, *, mode: str = "RGB", size: tuple[int, int] = (40, 30), colour: object = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, colour if colour is not None else 100).save(path)  # type: ignore[arg-type]
        return path

    return write
