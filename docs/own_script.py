"""The script of the README: a small network of one's own in Lightning. Lines marked ``# +`` were added."""

import lightning as L
import torch
from crucible import Compile, Regional  # +
from torch import nn


class Block(nn.Module):
    """A norm and two activations written by hand: much arithmetic beside one matrix product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        y = y * torch.tanh(torch.log1p(torch.exp(y)))  # mish
        return x + 0.5 * y * (1 + torch.erf(y * 0.5**0.5))  # gelu


class Network(L.LightningModule):
    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, target = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


L.seed_everything(0, verbose=False)
x = torch.randn(32 * 4096, 64)
data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))
trainer = L.Trainer(
    max_steps=200,
    callbacks=[Compile([Regional()])],  # +
)
trainer.fit(Network(), torch.utils.data.DataLoader(data, batch_size=4096, shuffle=True))
