"""A diffusion U-Net of diffusers: python docs/gallery/diffusion_unet.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, CudaGraph, Whole
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional as F
from torch.utils.data import DataLoader

GPU = torch.cuda.is_available()
PIXELS, WIDTHS, BATCH = (64, (128, 256, 256, 512), 32) if GPU else (16, (32, 32), 2)


class Diffusion(L.LightningModule):
    def __init__(self):
        super().__init__()
        down, up = ("DownBlock2D",) * (len(WIDTHS) - 1), ("UpBlock2D",) * (len(WIDTHS) - 1)
        self.model = UNet2DModel(
            sample_size=PIXELS, block_out_channels=WIDTHS, layers_per_block=1,
            down_block_types=(*down, "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", *up),
        )  # fmt: skip
        scheduler = DDPMScheduler(num_train_timesteps=1000)
        self.register_buffer("kept", scheduler.alphas_cumprod, persistent=False)

    def training_step(self, images, batch_idx):
        noise = torch.randn_like(images)
        step = torch.randint(0, len(self.kept), (len(images),), device=images.device)
        kept = self.kept[step].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        loss = F.mse_loss(self.model(noisy, step).sample, noise)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def batches(count):
    """Random images: put a DataLoader in their place."""
    images = torch.randn(4, BATCH, 3, PIXELS, PIXELS, device="cuda" if GPU else "cpu")
    return DataLoader([images[index % 4] for index in range(count)], batch_size=None)


L.seed_everything(0)
strategies = [] if "eager" in sys.argv else [Whole(), CudaGraph()] if GPU else [Whole()]
compiling = Compile(strategies, whole=["model"], count=lambda batch: (BATCH, None, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, precision="bf16-mixed", callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Diffusion(), batches(steps))
