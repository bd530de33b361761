"""Of the tasks' tests: a private cache folder, a tiny network, image files; data opened, a training, operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from PIL import Image
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks import Task
from tasks.captioning.model import CaptionNet
from tasks.captioning.size import CaptionerSize
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.runs import SMALLEST
from trainer.config import compose


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tokenizers out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "crucible"


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    """A backend that counts graphs, with no compiled code from other tests, and none left to them."""
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


MORE = {
    "captioning of two widths": ["task.size.decoder_width=32"],
    "language_modelling in chunks": ["task.loss_chunks=2"],
    "image_classification by convolutions": ["task.model=resnet18", "task.image_size=64"],
    "image_classification with buffers": ["task.model=timm/test_resnet"],
    "language_modelling with llama": ["task/network=llama_tiny"],
    "masked_lm": ["task.network.dropout=0"],
}
MICRO = {
    "micro simple_linear": ["task.width=16"],
    "micro convnet": ["task.width=4", "task.image_size=16"],
    "micro transformer_block": ["task.width=64", "task.positions=8"],
    "micro graph_breaker": ["task.width=16"],
}
"""The models beside the ragged one, as ``SMALLEST`` has it."""


def small(name: str, *overrides: str) -> Any:
    """A task by name and a word of what is special about it, small."""
    given, _, model = name.partition(" ")
    options = [f"task.model={model}", "task.batch_size=8", *MICRO[name]] if name in MICRO else SMALLEST[given]
    return compose([f"task={given}", *options, *MORE.get(name, []), *overrides]).task


def opened(task: Task) -> Any:
    """The task's data module, ready to load."""
    data = task.build_data(seed=0)
    data.setup("fit")
    return data


class Recorder(L.Callback):
    """Keeps the weights before the first step, and of each step the tensors of its batch, as lists, and its loss."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}
        self.batches: list[list[Any]] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append([field.tolist() for field in batch if isinstance(field, torch.Tensor)])
        self.losses.append(float(outputs["loss"]))


def fit(
    task: Task, *callbacks: L.Callback, steps: int, module: L.LightningModule | None = None, **options: Any
) -> tuple[L.Trainer, Recorder]:
    """Train ``steps`` steps of ``module``, by default one with seeded weights, on data in the order of the seed 0."""
    if module is None:
        torch.manual_seed(0)
        module = task.build_module(max_steps=steps)
    resume, recorder = options.pop("ckpt_path", None), Recorder()
    settings = {"max_steps": steps, "max_epochs": -1, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    trainer = quiet_trainer(callbacks=[recorder, *callbacks], **settings)
    trainer.fit(module, datamodule=task.build_data(seed=0), ckpt_path=resume)
    return trainer, recorder


def counted_flops(*losses: Callable[[], torch.Tensor]) -> int:
    """Operations of forward and backward that torch counts, with the plain kernel of attention: fused ones differ in
    what the counter knows of them from release to release."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        for loss in losses:
            loss().backward()
    return flops.get_total_flops()


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
