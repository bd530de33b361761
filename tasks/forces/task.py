"""Forces: a potential fitted to energies and forces of generated clusters, so that its loss holds a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import BatchCounts, Loading, Ragged, TrainedTask, require_fields, require_memory

if TYPE_CHECKING:
    import lightning
    from torch import Tensor

    from tasks.forces.model import ForcesNet


@dataclass(kw_only=True, slots=True)
class Forces(TrainedTask):
    """Energies and forces of clusters of atoms, by a message-passing potential: forces are its gradient, and part of
    the loss. ``compile=second_order`` compiles both as one graph; other strategies leave the network eager."""

    name: ClassVar[str] = "forces"
    derives: ClassVar[bool] = True
    inputs: ClassVar[tuple[str, ...]] = ("positions", "elements", "energies", "forces")
    accuracy: ClassVar[str] = "val/force_error"
    blocks: ClassVar[tuple[str, ...]] = ("net.potential.blocks",)
    parts: ClassVar[tuple[str, ...]] = ("net.potential.energy",)

    batch_size: int = 16
    """Clusters in a batch on each device."""
    least_atoms: int = 4
    """Atoms of the smallest clusters."""
    most_atoms: int = 16
    """Atoms of the largest clusters; all numbers between are drawn equally often."""
    pad_to: int | None = None
    """Atoms of every batch, padding among them; null: as many as its largest cluster has."""
    width: int = 64
    """Features of an atom."""
    layers: int = 3
    """Blocks through which messages pass."""
    radials: int = 16
    """Radial functions by which a distance is told."""
    cutoff: float = 6.0
    """Distance beyond which atoms do not see each other, angstrom."""
    force_weight: float = 10.0
    """Of the mean square error of forces in the loss, beside that of the energy an atom."""
    train_examples: int | None = None
    """Generated training clusters, in memory; null: 64 batches."""
    val_examples: int | None = None
    """Generated validation clusters, none of them a training cluster; null: 4 batches."""

    def __post_init__(self) -> None:
        TrainedTask.__post_init__(self)
        require_fields("task", self, batch_size=1, least_atoms=2, most_atoms=self.least_atoms, pad_to=self.most_atoms)
        require_fields("task", self, width=1, layers=1, radials=1, force_weight=0)
        require_fields("task", self, train_examples=self.batch_size, val_examples=1)
        for name in ("cutoff", "force_weight"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"task.{name}={getattr(self, name)} must be finite")
        if not self.cutoff > 0:
            raise ValueError(f"task.cutoff={self.cutoff} must be above 0 angstrom")

    @property
    def data(self) -> Loading:
        """Without worker processes: what is in memory already would only be copied between them."""
        return Loading(batch_size=self.batch_size, num_workers=0)

    @property
    def counts(self) -> dict[str, int]:
        return {"train": self.train_examples or 64 * self.batch_size, "val": self.val_examples or 4 * self.batch_size}

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.forces.data import ClusterData

        examples = sum(self.counts.values())
        held = f"task.most_atoms={self.most_atoms} of {examples:,} clusters"
        require_memory(held, 8 * 8 * examples * self.most_atoms**2)  # distances and their like, in double precision
        return ClusterData(self, seed=seed)

    def build_net(self) -> ForcesNet:
        from tasks.forces.model import ForcesNet, Potential

        potential = Potential(self.width, layers=self.layers, radials=self.radials, cutoff=self.cutoff)
        return ForcesNet(potential, force_weight=self.force_weight)

    def default_learning_rate(self) -> float:
        """Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        return min(3e-3, 0.2 / self.width)

    def ragged(self) -> Ragged:
        return (("positions", 1, 0.0, 0), ("elements", 1, 0, 0), ("forces", 1, 0.0, 0))

    def count(self, batch: Any) -> BatchCounts:
        """An atom counts as a token."""
        rows, atoms = batch.elements.shape
        return BatchCounts(samples=rows, tokens=rows * atoms, useful_tokens=batch.atoms)

    def max_positions(self) -> int:
        return self.most_atoms

    def example(self, rows: int, positions: int) -> tuple[Tensor, ...]:
        import torch

        places = torch.rand(rows, positions, 3)
        return places, torch.ones(rows, positions, dtype=torch.long), torch.zeros(rows), torch.zeros_like(places)

    def counted_net(self) -> ForcesNet:
        """With memory: autocast, which the network turns off, knows no tensors without."""
        return self.build_net()
