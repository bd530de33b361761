"""NequIP's potential on clusters of many sizes: python docs/gallery/nequip_forces.py [eager]   (pip install nequip)"""

import sys

import lightning as L
import torch
from crucible import Compile, SecondOrder
from nequip.data import AtomicDataDict
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state
from torch.utils.data import DataLoader

set_global_state()  # NequIP's own: float64 as torch's default
GPU = torch.cuda.is_available()
CLUSTERS, ATOMS, CUTOFF = (8, (40, 64), 5.0) if GPU else (3, (4, 9), 4.0)
SIZES = {"num_layers": 2, "l_max": 1, "num_features": 32} if GPU else {"num_layers": 2, "l_max": 1, "num_features": 8}


class Forces(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.potential = NequIPGNNModel(
            **SIZES, seed=0, model_dtype="float32", r_max=CUTOFF, type_names=["A", "B"], parity=False,
            radial_mlp_depth=1, radial_mlp_width=64 if GPU else 16, avg_num_neighbors=16.0,
            per_type_energy_scales=1.0, per_type_energy_shifts=0.0,
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        clusters, energies, forces = batch
        found = self.potential(dict(clusters))  # takes the forces in its forward, which SecondOrder compiles whole
        energy_loss = (found[AtomicDataDict.TOTAL_ENERGY_KEY] - energies).square().mean()
        return energy_loss + 10 * (found[AtomicDataDict.FORCE_KEY] - forces).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def batch():
    """Clusters of random sizes with energies and forces that mean nothing: put your data in their place."""
    sizes = torch.randint(*ATOMS, (CLUSTERS,))
    places = [2.2 * float(size) ** (1 / 3) * torch.rand(size, 3) for size in sizes]
    starts = sizes.cumsum(0) - sizes
    edges = []
    for place, start in zip(places, starts, strict=True):
        near = (torch.cdist(place, place) < CUTOFF).fill_diagonal_(False)
        edges.append(near.nonzero().T + start)
    clusters = {
        AtomicDataDict.POSITIONS_KEY: torch.cat(places),
        AtomicDataDict.ATOM_TYPE_KEY: torch.randint(0, 2, (int(sizes.sum()),)),
        AtomicDataDict.EDGE_INDEX_KEY: torch.cat(edges, 1),
        AtomicDataDict.BATCH_KEY: torch.arange(CLUSTERS).repeat_interleave(sizes),
        AtomicDataDict.NUM_NODES_KEY: sizes,
    }
    return clusters, torch.randn(CLUSTERS, 1), torch.randn(int(sizes.sum()), 3)


L.seed_everything(0)
strategies = (
    [] if "eager" in sys.argv else [SecondOrder(dynamic=True)]
)  # sizes vary: one graph for all, from the first batch on
compiling = Compile(strategies, count=lambda batch: (CLUSTERS, None, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Forces(), DataLoader([batch() for _ in range(steps)], batch_size=None))
