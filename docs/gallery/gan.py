"""A GAN with two optimizers under manual optimization: python docs/gallery/gan.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, Whole
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

GPU = torch.cuda.is_available()
PIXELS, WIDTH, LATENT, BATCH = (64, 128, 128, 128) if GPU else (16, 8, 4, 2)


class Generator(nn.Sequential):
    def __init__(self, size=PIXELS):
        layers, width = [nn.ConvTranspose2d(LATENT, 8 * WIDTH, 4)], 8 * WIDTH
        while (size := size // 2) > 4:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, width // 2, 4, 2, 1)]
            width //= 2
        super().__init__(*layers, nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())


class Critic(nn.Sequential):
    def __init__(self, size=PIXELS):
        layers, width = [nn.Conv2d(3, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2)], WIDTH
        while (size := size // 2) > 4:
            layers += [nn.Conv2d(width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)]
            width *= 2
        super().__init__(*layers, nn.Conv2d(width, 1, 4), nn.Flatten(0))


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = Generator(), Critic()
        self.automatic_optimization = False

    def training_step(self, images, batch_idx):
        for_generator, for_critic = self.optimizers()
        fakes = self.generator(torch.randn(len(images), LATENT, 1, 1, device=images.device))

        critic_loss = F.softplus(-self.critic(images)).mean() + F.softplus(self.critic(fakes.detach())).mean()
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()

        generator_loss = F.softplus(-self.critic(fakes)).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.log_dict({"loss/generator": generator_loss, "loss/critic": critic_loss})

    def configure_optimizers(self):
        options = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": True}
        return [torch.optim.Adam(part.parameters(), **options) for part in (self.generator, self.critic)]


def batches(count):
    """Random images: put a DataLoader in their place."""
    images = torch.rand(4, BATCH, 3, PIXELS, PIXELS, device="cuda" if GPU else "cpu") * 2 - 1
    return DataLoader([images[index % 4] for index in range(count)], batch_size=None)


L.seed_everything(0)
# Manual optimization is compiled and checked; its step is not captured.
strategies = [] if "eager" in sys.argv else [Whole()]
compiling = Compile(strategies, whole=["generator", "critic"], count=lambda batch: (BATCH, None, None, None))
steps = 200 if GPU else 8
# Lightning counts the steps of both optimizers.
trainer = L.Trainer(max_steps=2 * steps, precision="bf16-mixed", callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Gan(), batches(steps))
