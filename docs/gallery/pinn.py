"""A PINN for the heat equation against its exact solution: python docs/gallery/pinn.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, SecondOrder
from torch import nn
from torch.utils.data import DataLoader

GPU = torch.cuda.is_available()
POINTS, WIDTH = (16384, 256) if GPU else (64, 16)
DIFFUSION = 0.1


def exact(points):
    """At time and place: u = exp(-pi^2 D t) sin(pi x)."""
    time, place = points[:, :1], points[:, 1:]
    return torch.exp(-(torch.pi**2) * DIFFUSION * time) * torch.sin(torch.pi * place)


class Heat(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
        self.net = nn.Sequential(*layers)

    def residual(self, points):
        """Mean square of u_t - D u_xx: two gradients within, and another one behind."""
        points.requires_grad_(True)
        (slope,) = torch.autograd.grad(self.net(points).sum(), points, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
        return (slope[:, 0] - DIFFUSION * bend[:, 1]).square().mean()

    def training_step(self, points, batch_idx):
        start = points * torch.tensor([0.0, 1.0], device=points.device)
        edge = torch.cat([points[::2, :1], torch.zeros_like(points[::2, :1])], 1)
        known = (self.net(start) - exact(start)).square().mean() + self.net(edge).square().mean()
        loss = self.residual(points) + 10 * known
        with torch.no_grad():
            self.log("loss/off", (self.net(points) - exact(points)).abs().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def batches(count):
    points = torch.rand(4, POINTS, 2, device="cuda" if GPU else "cpu")
    return DataLoader([points[index % 4].clone() for index in range(count)], batch_size=None)


L.seed_everything(0)
strategies = [] if "eager" in sys.argv else [SecondOrder(functions=["residual"])]
compiling = Compile(strategies, count=lambda batch: (POINTS, None, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Heat(), batches(steps))
