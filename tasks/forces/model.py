"""A message-passing potential: energies, forces as the energy's negative gradient, and their loss.

Continuous-filter convolutions as in SchNet (Schütt et al. 2017, https://arxiv.org/abs/1706.08566), over all pairs of a
cluster, radial functions as in DimeNet (Gasteiger et al. 2020, https://arxiv.org/abs/2003.03123).

Shape letters: B clusters, A atoms of a cluster, D features, R radial functions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tasks.forces import KINDS
from tasks.forces.data import distances, envelope, pairs
from tasks.lightning_module import Scores


class Interaction(nn.Module):
    """Each atom takes up what the others send, weighted by a filter of the distance."""

    def __init__(self, width: int, radials: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(radials, width), nn.SiLU(), nn.Linear(width, width))
        self.send = nn.Linear(width, width, bias=False)
        self.update = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x_BAD: Tensor, radial_BAAR: Tensor, near_BAA1: Tensor) -> Tensor:
        """``near_BAA1``: the envelope, zero where there is no pair."""
        messages_BAD = (self.filter(radial_BAAR) * near_BAA1 * self.send(x_BAD)[:, None]).sum(2)
        return x_BAD + self.update(messages_BAD)


class Potential(nn.Module):
    """Energies of clusters."""

    def __init__(self, width: int, *, layers: int, radials: int, cutoff: float) -> None:
        """``cutoff``: distance beyond which atoms do not see each other, angstrom."""
        super().__init__()
        self.radials, self.cutoff = radials, cutoff
        self.embed = nn.Embedding(KINDS + 1, width, padding_idx=0)
        self.blocks = nn.ModuleList(Interaction(width, radials) for _ in range(layers))
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, positions_BA3: Tensor, elements_BA: Tensor) -> Tensor:
        """Energies [B], electronvolt."""
        pair_BAA = pairs(elements_BA)
        apart_BAA1 = distances(positions_BA3, pair_BAA)[..., None]
        near_BAA1 = envelope(apart_BAA1, self.cutoff) * pair_BAA[..., None]
        waves_R = torch.arange(1, self.radials + 1, dtype=apart_BAA1.dtype, device=apart_BAA1.device)
        radial_BAAR = torch.sin(waves_R * torch.pi * apart_BAA1 / self.cutoff) / apart_BAA1
        x_BAD = self.embed(elements_BA)
        for block in self.blocks:
            x_BAD = block(x_BAD, radial_BAAR, near_BAA1)
        return (self.energy(x_BAD)[..., 0] * (elements_BA != 0)).sum(1)


class ForcesNet(nn.Module):
    """Energies and forces with their loss: the gradient of the energy is taken within the forward."""

    def __init__(self, potential: Potential, *, force_weight: float) -> None:
        super().__init__()
        self.potential, self.force_weight = potential, force_weight

    def forward(
        self,
        positions_BA3: Tensor,
        elements_BA: Tensor,
        energies_B: Tensor | None = None,
        forces_BA3: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Scores:
        """Energies [B] and forces [B, A, 3] of clusters; with those of the data the loss, and in eval mode the sum of
        the forces' absolute errors and their number. Without autocast: forces are small differences of energies."""
        with torch.autocast(positions_BA3.device.type, enabled=False):
            positions_BA3.requires_grad_(True)
            energy_B = self.potential(positions_BA3, elements_BA)
            (slope_BA3,) = torch.autograd.grad(energy_B.sum(), positions_BA3, create_graph=True)
            if energies_B is None or forces_BA3 is None:
                return energy_B, -slope_BA3
            atoms_B = (elements_BA != 0).sum(1)
            off_BA3 = slope_BA3 + forces_BA3  # zero on padding, of which both are
            count = 3 * atoms_B.sum()
            loss = ((energy_B - energies_B) / atoms_B).square().mean()
            loss = loss + self.force_weight * off_BA3.square().sum() / count
        return (loss, None, None) if self.training else (loss, off_BA3.abs().sum(), count)
