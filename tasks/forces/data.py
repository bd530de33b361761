"""Clusters of atoms with the energies and forces of a known pair potential, in memory.

The potential is Morse's, with a depth and a distance for each pair of elements, brought smoothly to zero at the cutoff.
Cluster ``i`` depends on the seed and ``i`` alone. Lengths are in angstrom, energies in electronvolt.

Shape letters: B clusters, A atoms of a cluster, K elements and padding.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from tasks.forces import KINDS
from tasks.resumable_data import ResumableDataModule

DEPTHS = (0.0, 0.3, 0.4, 0.5)
"""Of the potential between two atoms of one element, electronvolt; the first is padding's."""
RADII = (0.0, 1.2, 1.4, 1.6)
"""Half the distance of least energy of two atoms of one element, angstrom."""
STEEPNESS = 1.6
"""Of Morse's potential, an angstrom."""
SPACING, JITTER = 2.9, 0.15
"""Of the cubic lattice that atoms are near, and the standard deviation from its places, angstrom."""


class Clusters(NamedTuple):
    """A batch, padded to its largest cluster or to ``task.pad_to`` atoms."""

    positions: Tensor
    """float32 [B, A, 3], angstrom."""
    elements: Tensor
    """int64 [B, A], from 1; 0 is padding."""
    energies: Tensor
    """float32 [B], electronvolt."""
    forces: Tensor
    """float32 [B, A, 3], electronvolt an angstrom; zero on padding."""
    atoms: int
    """Real atoms of the batch."""

    @staticmethod
    def host_only() -> tuple[str, ...]:
        return ("atoms",)


class ClusterSet(Dataset[int]):
    """Clusters, all padded to one size; an item is its number, of which ``batch`` makes what a loader yields."""

    def __init__(self, keys: Sequence[str], *, least: int, most: int, cutoff: float) -> None:
        """A cluster for each key, of ``least`` to ``most`` atoms, with its energy and forces."""
        self.lengths = [random.Random(key).randint(least, most) for key in keys]
        places_N3 = _lattice(most)
        positions_BA3 = torch.zeros(len(keys), most, 3, dtype=torch.float64)
        self.elements = torch.zeros(len(keys), most, dtype=torch.int64)
        for row, (key, size) in enumerate(zip(keys, self.lengths, strict=True)):
            draw = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            jitter_A3 = torch.randn(size, 3, generator=draw, dtype=torch.float64).clamp(-2, 2)
            positions_BA3[row, :size] = SPACING * places_N3[:size] + JITTER * jitter_A3
            self.elements[row, :size] = torch.randint(1, KINDS + 1, (size,), generator=draw)
        positions_BA3.requires_grad_()
        energies_B = morse(positions_BA3, self.elements, cutoff=cutoff)
        (slopes_BA3,) = torch.autograd.grad(energies_B.sum(), positions_BA3)
        self.positions, self.forces = positions_BA3.detach().float(), -slopes_BA3.float()
        self.energies = energies_B.detach().float()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> int:
        return range(len(self))[number]

    def batch(self, numbers: Sequence[int], width: int | None = None) -> Clusters:
        """``width``: atoms of a row, padding among them; None: as many as the largest cluster has."""
        rows, atoms = torch.tensor(numbers), [self.lengths[number] for number in numbers]
        largest = max(atoms)
        by_atom = (one[rows, :largest] for one in (self.positions, self.elements, self.forces))
        missing = (width or largest) - largest
        positions, elements, forces = (pad(one, (0, 0) * (one.ndim - 2) + (0, missing)) for one in by_atom)
        return Clusters(positions, elements, self.energies[rows], forces, sum(atoms))


class ClusterData(ResumableDataModule):
    """Clusters of between ``task.least_atoms`` and ``task.most_atoms`` atoms."""

    option = "task"

    def open(self) -> None:
        task = self.task
        self.train_set, self.val_set = (
            ClusterSet(
                [f"{self.seed}/{split}/{number}" for number in range(count)],
                least=task.least_atoms,
                most=task.most_atoms,
                cutoff=task.cutoff,
            )
            for split, count in task.counts.items()
        )

    def train_dataloader(self) -> DataLoader[Any]:
        self.collate = partial(self.train_set.batch, width=self.task.pad_to)
        return super().train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        self.collate = partial(self.val_set.batch, width=self.task.pad_to)
        return super().val_dataloader()


def _lattice(count: int) -> Tensor:
    """The ``count`` points of a cubic lattice that are nearest to a point off its symmetries: float64 [N, 3]."""
    reach = math.ceil(count ** (1 / 3)) + 1
    line = torch.arange(-reach, reach + 1, dtype=torch.float64)
    points_N3 = torch.cartesian_prod(line, line, line) - torch.tensor([0.21, 0.34, 0.13], dtype=torch.float64)
    return points_N3[points_N3.square().sum(1).argsort()[:count]]


def morse(positions_BA3: Tensor, elements_BA: Tensor, *, cutoff: float) -> Tensor:
    """Energies [B] of clusters, electronvolt; padding (element 0) has none."""
    depth_K, radius_K = (positions_BA3.new_tensor(values) for values in (DEPTHS, RADII))
    depth_BAA = (depth_K[elements_BA][:, :, None] * depth_K[elements_BA][:, None]).sqrt()
    radius_BAA = radius_K[elements_BA][:, :, None] + radius_K[elements_BA][:, None]
    pair_BAA = pairs(elements_BA)
    apart_BAA = distances(positions_BA3, pair_BAA)
    energy_BAA = depth_BAA * ((1 - torch.exp(STEEPNESS * (radius_BAA - apart_BAA))).square() - 1)
    return 0.5 * (energy_BAA * envelope(apart_BAA, cutoff) * pair_BAA).sum((1, 2))


def pairs(elements_BA: Tensor) -> Tensor:
    """Where two different real atoms meet: bool [B, A, A]."""
    real_BA = elements_BA != 0
    alone_AA = torch.eye(elements_BA.shape[1], dtype=torch.bool, device=elements_BA.device)
    return real_BA[:, :, None] & real_BA[:, None] & ~alone_AA


def distances(positions_BA3: Tensor, pair_BAA: Tensor) -> Tensor:
    """Distances [B, A, A], angstrom; 1 where there is no pair, so that its root has a gradient."""
    squared_BAA = (positions_BA3[:, :, None] - positions_BA3[:, None]).square().sum(-1)
    return torch.where(pair_BAA, squared_BAA, 1.0).sqrt()


def envelope(apart_BAA: Tensor, cutoff: float) -> Tensor:
    """A factor that is 1 at no distance, and 0 with its slope from the cutoff on (Behler 2011,
    https://doi.org/10.1063/1.3553717)."""
    return 0.5 * (torch.cos(torch.pi * apart_BAA.clamp(max=cutoff) / cutoff) + 1)
