"""The Task noun: a LightningModule, its LightningDataModule and what they declare to the compiler.

Importing this module must stay cheap (no torch): the command line imports every task to know its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import lightning


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a task tells the compiler about its module. Paths are those of ``module.get_submodule(path)``."""

    whole: tuple[str, ...] = ()
    """Submodules whose forward calls together are the step's forward **and loss**; one graph each under ``whole``."""
    blocks: tuple[str, ...] = ()
    """Containers (ModuleList or Sequential) of repeated blocks; ``regional`` compiles each kind of block once."""
    parts: tuple[str, ...] = ()
    """Other submodules worth a region of their own: embeddings, the final norm with head and loss."""
    ragged: tuple[tuple[str, int, float, int], ...] = ()
    """Tensors of ragged length in a batch: (field, dimension, padding value, positions beyond the computed length),
    see ``strategies.Ragged``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """What one batch holds on this rank, known on the host without a device synchronisation."""

    samples: int
    """Examples in the batch."""
    tokens: int | None = None
    """Token positions computed, padding included; None for a task without tokens."""
    useful_tokens: int | None = None
    """Token positions that are not padding; None for a task without tokens."""


@dataclass(kw_only=True, slots=True)
class Task:
    """Base of every task. The dataclass fields are the task's configuration (``task.<field>=`` on the command line)."""

    name: ClassVar[str] = "task"
    """Directory and chart name of the task."""
    monitor: ClassVar[str | None] = None
    """Validation metric, lower is better, by which ``checkpoints/best.ckpt`` is chosen; None keeps no best one."""

    @property
    def title(self) -> str:
        """What records, tables and consoles call it: the name, and which model where the task has several."""
        return self.name

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        """Build the data module. Raises ValueError for unusable user input (a missing folder, a broken file)."""
        raise NotImplementedError

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        """Build the module that trains for ``max_steps`` optimizer steps (the length of its schedule)."""
        raise NotImplementedError

    def declare(self) -> Declaration:
        """What the module declares to the compiler; an empty declaration means: find the blocks by yourself."""
        return Declaration()

    def count(self, batch: Any) -> BatchCounts:
        """Count one host or device batch without reading device memory."""
        raise NotImplementedError

    def training_flops(self, batch: Any) -> int | None:
        """Floating-point operations of forward and backward for this batch (matrix products, 2 per multiply-add)."""
        return None

    def inference_flops(self, batch: Any) -> int | None:
        """Floating-point operations of forward alone for this batch, counted like those of ``training_flops``."""
        return None

    def skipped_items(self, data: lightning.LightningDataModule) -> dict[str, int]:
        """Items of the user's data left out so far, by reason; empty when nothing was skipped."""
        return {}
