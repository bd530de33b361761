"""Random batches for library models, kept on the device: what is measured is the training step, not its data."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

CLASSES, VOCABULARY = 10, 97
"""Classes of images, pixels, frames and nodes; tokens of tiny models, which are all that batches hold."""
DISTINCT, EPOCH = 3, 100_000
"""Batches that are drawn, and given out again and again; batches of an epoch."""
IMAGES = {
    "vit": (32, 64, 224), "naflexvit": (32, 64, 224), "convnext": (32, 64, 224), "swin": (32, 64, 224),
    "efficientnet": (64, 64, 224), "maxvit": (64, 32, 224), "segformer": (32, 16, 224), "unet": (16, 32, 64),
}  # fmt: skip
"""Pixels of the tiny model's images, then rows and pixels of the real one's."""
TEXTS = {"t5": (32, 128), "whisper": (8, 64), "mamba2": (4, 512), "lstm": (32, 256)}
"""Rows and tokens of real batches of text; 8 rows of 512 tokens where nothing is said."""
GRAPHS = {True: (24, 96, 8), False: (20_000, 200_000, 128)}
"""Nodes, edges and features of a graph, by whether it is the tiny model's."""

Batch = dict[str, Tensor]


class Drawn(Dataset[Batch]):
    """A few batches, drawn once and given out again and again."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]


class LibraryData(L.LightningDataModule):
    """The batches of one model, the same for every seed."""

    def __init__(self, model: str, *, tiny: bool, padded: bool) -> None:
        super().__init__()
        self._model, self._tiny, self._padded = model, tiny, padded

    def train_dataloader(self) -> DataLoader[Batch]:
        """On the device that trains, so that Lightning has nothing to move."""
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return loader(self._model, tiny=self._tiny, steps=EPOCH, device=device, padded=self._padded)


def loader(
    model: str, *, tiny: bool, steps: int, device: torch.device | str = "cpu", padded: bool = False
) -> DataLoader[Batch]:
    """``steps`` batches for ``model`` on ``device``."""
    draw = torch.Generator().manual_seed(1)
    drawn = [batch_of(model, tiny=tiny, padded=padded, draw=draw) for _ in range(DISTINCT)]
    there = [{name: value.to(device) for name, value in batch.items()} for batch in drawn]
    return DataLoader(Drawn(there, steps), batch_size=None)


def batch_of(model: str, *, tiny: bool, padded: bool, draw: torch.Generator) -> Batch:
    """Tensors by the names of the model's arguments."""

    def tokens(*shape: int) -> Tensor:
        return torch.randint(5, VOCABULARY, shape, generator=draw)

    def classes(*shape: int) -> Tensor:
        return torch.randint(0, CLASSES, shape, generator=draw)

    if model == "gatv2":
        nodes, edges, width = GRAPHS[tiny]
        ends = torch.randint(0, nodes, (2, edges), generator=draw)
        return {"x": torch.randn(nodes, width, generator=draw), "edge_index": ends, "labels": classes(nodes)}
    if model in IMAGES:
        rows, pixels = (4, IMAGES[model][0]) if tiny else IMAGES[model][1:]
        images = torch.randn(rows, 3, pixels, pixels, generator=draw)
        labelled = (rows, pixels, pixels) if model == "segformer" else (rows,)
        return {"pixel_values": images, "labels": classes(*labelled)}
    rows, length = (2, 12) if tiny else TEXTS.get(model, (8, 512))
    if model == "whisper":
        features = torch.randn(rows, 16 if tiny else 80, 40 if tiny else 3000, generator=draw)
        return {"input_features": features, "labels": tokens(rows, length)}
    batch = {"input_ids": tokens(rows, length), "labels": tokens(rows, length)}
    if padded:
        lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=draw)
        batch["attention_mask"] = (torch.arange(length) < lengths).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch
