"""Caption data module: tokenizer, data sets and loaders of any source of captioned images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tasks.data.batch import CaptionBatch, Collate
from tasks.data.caption_dataset import CaptionDataset
from tasks.data.captions import CaptionData
from tasks.data.order import ResumableLoader, ResumableSampler
from tasks.data.tokenizer import decode, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class CaptionDataModule(L.LightningDataModule):
    """Loads batches of images and captions, in an order that a resumed run continues exactly."""

    tokenizer: Tokenizer
    train_set: CaptionDataset
    val_set: CaptionDataset

    def __init__(
        self, config: CaptionData, *, image_size: int, vocabulary_size: int, max_tokens: int, seed: int
    ) -> None:
        """``max_tokens``: text positions that the model takes; ``image_size`` in pixels."""
        super().__init__()
        self._config = config
        self._image_size = image_size
        self._vocabulary_size = vocabulary_size
        self._max_positions = max_tokens if config.pad_to is None else min(max_tokens, config.pad_to)
        self._seed = seed
        self._is_set_up = False
        self._sampler: ResumableSampler | None = None
        self._resume_at = {"epoch": 0, "batches": 0}

    def setup(self, stage: str | None = None) -> None:
        """List the examples, load or train the tokenizer and tokenize. Raises ValueError for unusable input."""
        if self._is_set_up:
            return
        train, val = self._config.splits(seed=self._seed, image_size=self._image_size)
        self.tokenizer = load_tokenizer(
            train.captions, vocabulary_size=self._vocabulary_size, folder=self._config.tokenizer_folder()
        )
        self.train_set = CaptionDataset(train, self.tokenizer, max_positions=self._max_positions)
        self.val_set = CaptionDataset(val, self.tokenizer, max_positions=self._max_positions)
        if len(self.train_set) < self._config.batch_size * self._replicas()[0]:
            raise ValueError(
                f"task.data.batch_size={self._config.batch_size} on {self._replicas()[0]} devices is more than the "
                f"{len(self.train_set)} training examples of {train.place}"
            )
        for examples in (self.train_set, self.val_set):
            examples[0]  # a set without one image that decodes stops here, not at the first validation
        self._is_set_up = True

    def train_dataloader(self) -> DataLoader[CaptionBatch]:
        """Whole batches only, so that every training step has one batch size."""
        replicas, rank = self._replicas()
        self._sampler = ResumableSampler(
            self.train_set,
            num_replicas=replicas,
            rank=rank,
            seed=self._seed,
            batch_size=self._config.batch_size,
        )
        self._sampler.resume(**self._resume_at)
        loader = self._loader(self.train_set, self._sampler, drop_last=True)
        assert isinstance(loader, ResumableLoader)
        loader.position = self.state_dict
        return loader

    def val_dataloader(self) -> DataLoader[CaptionBatch]:
        """Every validation example in order; the last batch may be smaller."""
        replicas, rank = self._replicas()
        sampler: DistributedSampler[Any] | None = None
        if replicas > 1:
            sampler = DistributedSampler(self.val_set, num_replicas=replicas, rank=rank, shuffle=False)
        return self._loader(self.val_set, sampler, drop_last=False)

    def _loader(
        self, data: CaptionDataset, sampler: DistributedSampler[Any] | None, *, drop_last: bool
    ) -> DataLoader[CaptionBatch]:
        workers = self._config.workers()
        kind = ResumableLoader if isinstance(sampler, ResumableSampler) else DataLoader
        return kind(
            data,  # type: ignore[arg-type]
            batch_size=self._config.batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=Collate(pad_to=self._config.pad_to),
            # Its own generator: making an iterator would otherwise draw from the global one, which a resumed run
            # restores, and the two runs would part.
            generator=torch.Generator().manual_seed(self._seed),
        )

    def transfer_batch_to_device(self, batch: CaptionBatch, device: torch.device, dataloader_idx: int) -> CaptionBatch:
        """Move the two tensors without waiting for the copy; the count stays on the host."""
        return batch._replace(
            images=batch.images.to(device, non_blocking=True), tokens=batch.tokens.to(device, non_blocking=True)
        )

    def state_dict(self) -> dict[str, int]:
        """Where training stands: the epoch and the batches of it that the training loop has taken."""
        trainer = self.trainer
        if trainer is None or self._sampler is None:
            return dict(self._resume_at)
        # What the loop took, not what the loader fetched ahead. A checkpoint written after a training step counts it.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        epoch = trainer.current_epoch
        if batches >= trainer.num_training_batches:
            return {"epoch": epoch + 1, "batches": 0}
        return {"epoch": epoch, "batches": batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at ``state_dict`` with the next loader that is built."""
        self._resume_at = {"epoch": state_dict["epoch"], "batches": state_dict["batches"]}
        if self._sampler is not None:
            self._sampler.resume(**self._resume_at)

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids up to the first end."""
        return decode(self.tokenizer, tokens)

    @property
    def skipped(self) -> dict[str, int]:
        """Training and validation items left out so far, by reason."""
        if not self._is_set_up:
            return {}
        counts: dict[str, int] = {}
        for data in (self.train_set, self.val_set):
            for reason, count in {**data.skipped, "image does not decode": data.undecodable}.items():
                if count:
                    counts[reason] = counts.get(reason, 0) + count
        return counts

    def _replicas(self) -> tuple[int, int]:
        """World size and rank."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer is not None else (1, 0)
