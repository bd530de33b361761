"""A WGAN whose critic has a gradient penalty, by hand: python docs/gallery/wgan_gp.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, SecondOrder
from torch import nn
from torch.utils.data import DataLoader

GPU = torch.cuda.is_available()
FEATURES, WIDTH, BATCH = (256, 1024, 4096) if GPU else (4, 16, 8)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs)
    )


class Wgan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(FEATURES, FEATURES), network(FEATURES, 1)
        self.automatic_optimization = False

    def critic_loss(self, real, fake, mixed):
        """The whole loss of the critic, its penalty included: one graph."""
        mixed.requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty

    def training_step(self, real, batch_idx):
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn_like(real))
        share = torch.rand(len(real), 1, device=real.device)
        critic_loss = self.critic_loss(real, fake.detach(), (share * real + (1 - share) * fake).detach())
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()

        generator_loss = -self.critic(fake).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.log_dict({"loss/generator": generator_loss, "loss/critic": critic_loss})

    def configure_optimizers(self):
        return [
            torch.optim.Adam(part.parameters(), lr=1e-4, betas=(0.0, 0.9)) for part in (self.generator, self.critic)
        ]


def batches(count):
    """Random vectors: put a DataLoader in their place."""
    vectors = torch.randn(4, BATCH, FEATURES, device="cuda" if GPU else "cpu")
    return DataLoader([vectors[index % 4] for index in range(count)], batch_size=None)


L.seed_everything(0)
strategies = [] if "eager" in sys.argv else [SecondOrder(functions=["critic_loss"])]
compiling = Compile(strategies, count=lambda batch: (BATCH, None, None, None))
steps = 200 if GPU else 8
# Lightning counts the steps of both optimizers.
trainer = L.Trainer(max_steps=2 * steps, callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Wgan(), batches(steps))
