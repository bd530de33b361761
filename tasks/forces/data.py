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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tasks.forces import KINDS
from tasks.loading import ResumableDataModule

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


class Cluster(NamedTuple):
    """One example, without padding."""

    positions: Tensor
    elements: Tensor
    energy: Tensor
    forces: Tensor


class ClusterSet(list[Cluster]):
    @property
    def lengths(self) -> list[int]:
        return [len(cluster.elements) for cluster in self]


class ClusterData(ResumableDataModule):
    """Clusters of between ``task.least_atoms`` and ``task.most_atoms`` atoms."""

    option = "task"

    def open(self) -> None:
        task = self.task
        self.collate = self._padded
        self.train_set, self.val_set = (
            make_clusters(
                [f"{self.seed}/{split}/{number}" for number in range(count)],
                least=task.least_atoms,
                most=task.most_atoms,
                cutoff=task.cutoff,
            )
            for split, count in task.counts.items()
        )

    def _padded(self, clusters: Sequence[Cluster]) -> Clusters:
        atoms = [len(cluster.elements) for cluster in clusters]
        width = self.task.pad_to or max(atoms)

        def stacked(name: str) -> Tensor:
            rows = [getattr(cluster, name) for cluster in clusters]
            return torch.stack([pad(row, (0, 0) * (row.ndim - 1) + (0, width - len(row))) for row in rows])

        energies = torch.stack([cluster.energy for cluster in clusters])
        return Clusters(stacked("positions"), stacked("elements"), energies, stacked("forces"), sum(atoms))


def make_clusters(keys: Sequence[str], *, least: int, most: int, cutoff: float) -> ClusterSet:
    """A cluster for each key, of ``least`` to ``most`` atoms, with its energy and forces."""
    sizes = [random.Random(key).randint(least, most) for key in keys]
    places_N3 = _lattice(most)
    positions_BA3 = torch.zeros(len(keys), most, 3, dtype=torch.float64)
    elements_BA = torch.zeros(len(keys), most, dtype=torch.int64)
    for row, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        draw = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        jitter_A3 = torch.randn(size, 3, generator=draw, dtype=torch.float64).clamp(-2, 2)
        positions_BA3[row, :size] = SPACING * places_N3[:size] + JITTER * jitter_A3
        elements_BA[row, :size] = torch.randint(1, KINDS + 1, (size,), generator=draw)
    positions_BA3.requires_grad_()
    energies_B = morse(positions_BA3, elements_BA, cutoff=cutoff)
    (slopes_BA3,) = torch.autograd.grad(energies_B.sum(), positions_BA3)
    columns = (positions_BA3.detach().float(), elements_BA, energies_B.detach().float(), -slopes_BA3.float())
    return ClusterSet(
        Cluster(positions[:size], elements[:size], energy, forces[:size])
        for size, positions, elements, energy, forces in zip(sizes, *columns, strict=True)
    )


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
