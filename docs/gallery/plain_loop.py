"""A PyTorch loop without a framework, its whole steps captured on a GPU: python docs/gallery/plain_loop.py [eager]"""

import sys

import crucible
import torch
from crucible import CudaGraph, Regional
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LAYERS, WIDTH, HEADS, WORDS, LENGTH, BATCH = (12, 768, 12, 50304, 512, 8) if GPU else (3, 32, 2, 64, 16, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attention(self.before(x)).chunk(3, -1)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_function(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches(count):
    """Random tokens: put a DataLoader in their place."""
    tokens = torch.randint(WORDS, (4, BATCH, LENGTH + 1), device=DEVICE)
    return DataLoader([tokens[index % 4] for index in range(count)], batch_size=None)


torch.manual_seed(0)
model = Model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
epochs, steps = 2, 100 if GPU else 4
strategies = [] if "eager" in sys.argv else [Regional(parts=["head"]), *([CudaGraph()] if GPU else [])]
compiling = crucible.compile(
    model,
    optimizer,
    strategies,
    loss=loss_function,
    clip=1.0,
    precision="bf16-mixed",
    planned_steps=epochs * steps,
    count=lambda tokens: (BATCH, tokens[:, 1:].numel(), None, None),
)
with compiling:
    for epoch in range(epochs):
        model.train()
        for tokens in compiling.batches(batches(steps)):
            loss = compiling.step(tokens)
        model.eval()
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            losses = [loss_function(model, tokens) for tokens in compiling.evaluation(batches(2))]
        print(f"epoch {epoch}: loss {loss:.3f}, evaluated {sum(losses) / len(losses):.3f}")
