"""The script of the README: a small network of one's own in Lightning. Lines marked ``# +`` were added."""

import lightning as L
import torch
from crucible import Compile, Regional  # +
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Normalised, gated, with a residual: much arithmetic between few matrix products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        gate, value = self.wide(normal).chunk(2, -1)
        return x + self.narrow(F.silu(gate) * torch.tanh(value))


class Network(L.LightningModule):
    def __init__(self, width: int = 128, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, target = batch
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


L.seed_everything(0, verbose=False)
x = torch.randn(32 * 1024, 128)
data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))
trainer = L.Trainer(
    max_steps=300,
    callbacks=[Compile([Regional()])],  # +
)
trainer.fit(Network(), torch.utils.data.DataLoader(data, batch_size=512, shuffle=True))
