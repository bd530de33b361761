"""A Lightning project of somebody else with ragged texts: its own module, data module and collate function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from tests.strategies.modules import Block
from tests.trainer.lightning_modules import quiet_trainer

IGNORED = -100


class Texts(Dataset[tuple[Tensor, int]]):
    """Texts of 1 to 60 tokens, the first of which is the number of the text."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(count, generator=generator) * 0.8 + 2.5).exp().long().clamp(1, 60)
        self.texts = [
            torch.cat((torch.tensor([number]), torch.randint(1, count, (int(length) - 1,), generator=generator)))
            for number, length in enumerate(drawn)
        ]
        self.read = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        return self.texts[index], index


class TextsWithLengths(Texts):
    """The same, knowing their lengths."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        super().__init__(count, seed=seed)
        self.lengths = [len(text) for text in self.texts]


def collate(items: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
    """Pad to the longest of the batch."""
    texts = [text for text, _ in items]
    return {
        "tokens": pad_sequence(texts, batch_first=True),
        "labels": pad_sequence(texts, batch_first=True, padding_value=IGNORED),
        "names": [f"text {index}" for _, index in items],
    }


RAGGED = [("tokens", 1), ("labels", 1, IGNORED)]


class TextData(L.LightningDataModule):
    """Training and validation loaders; knows nothing of buckets."""

    def __init__(self, kind: type[Texts] = TextsWithLengths, *, count: int = 80, workers: int = 0) -> None:
        super().__init__()
        self.train_set, self.val_set = kind(count), kind(11, seed=1)
        self._options: dict[str, Any] = {"batch_size": 4, "collate_fn": collate, "num_workers": workers}

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, shuffle=True, **self._options)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, **self._options)


class TextModel(L.LightningModule):
    """Predicts each token from itself through two blocks; remembers every batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 100)
        self.trained: list[tuple[int, list[str], float]] = []
        """Width, names and loss of each training batch."""
        self.validated: list[tuple[int, list[str], float]] = []

    def loss(self, batch: Any) -> Tensor:
        x_BSD = self.embed(batch["tokens"])
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return nn.functional.cross_entropy(self.head(x_BSD).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.trained.append((batch["tokens"].shape[1], batch["names"], float(loss.detach())))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((batch["tokens"].shape[1], batch["names"], float(self.loss(batch))))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(
    data: Any, callbacks: Sequence[L.Callback], *, module: TextModel | None = None, resume: Any = None, **options: Any
) -> TextModel:
    """Seed, train ten steps (or as ``options`` say) and return the module."""
    L.seed_everything(0, verbose=False)
    module = module or TextModel()
    options = {"max_steps": 10, "num_sanity_val_steps": 0, "enable_checkpointing": False, "devices": 1, **options}
    trainer = quiet_trainer(callbacks=list(callbacks), **options)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module
