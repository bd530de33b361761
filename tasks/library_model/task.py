"""Library models: other people's networks as their libraries define them, for what compiling gains on them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Task, suggest
from tasks.library_model import MASKED, MODELS

if TYPE_CHECKING:
    import lightning


@dataclass(kw_only=True, slots=True)
class LibraryModel(Task):
    """A model of transformers, timm, torchvision or Torch Geometric with random weights, trained on random batches that
    lie on the device. It declares nothing: strategies find its blocks by themselves, as in anyone's script."""

    name: ClassVar[str] = "library_model"

    model: str = "bert"
    """Which one: docs/tasks/library_model.md lists them."""
    tiny: bool = False
    """A few thousand parameters and small batches, for a CPU, in the place of a real run's size."""
    padded: bool = False
    """Texts of several lengths in one batch, with an ``attention_mask``; of text models of transformers alone."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"task.model={self.model!r} is not one of {tuple(MODELS)}{suggest(self.model, MODELS)}")
        if self.padded and self.model not in MASKED:
            raise ValueError(f"task.padded=true: task.model={self.model} takes no attention_mask")

    @property
    def title(self) -> str:
        """The model's own name: the models have little in common."""
        return self.model

    def check(self) -> None:
        library = MODELS[self.model][1]
        if library is not None and find_spec(library) is None:
            raise ValueError(f"task.model={self.model} needs {library}, which is not installed: pip install {library}")

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.library_model.data import LibraryData

        return LibraryData(self.model, tiny=self.tiny, padded=self.padded)

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        from tasks.library_model.model import make

        return make(self.model, tiny=self.tiny)

    def count(self, batch: Any) -> BatchCounts:
        """Examples; of a graph its nodes."""
        return BatchCounts(samples=len(next(iter(batch.values()))))
