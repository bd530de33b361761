"""An image classifier of timm: python docs/gallery/timm_convnext.py [eager]"""

import sys

import lightning as L
import timm
import torch
from crucible import Compile, CudaGraph, Regional
from torch.nn import functional as F
from torch.utils.data import DataLoader

GPU = torch.cuda.is_available()
NAME, BATCH, PIXELS = ("convnext_tiny", 64, 224) if GPU else ("convnext_atto", 2, 32)
CLASSES = 10


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = timm.create_model(NAME, num_classes=CLASSES, drop_path_rate=0.1)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def batches(count):
    """Random images: put a DataLoader in their place."""
    device = "cuda" if GPU else "cpu"
    images = torch.randn(4, BATCH, 3, PIXELS, PIXELS, device=device)
    labels = torch.randint(0, CLASSES, (4, BATCH), device=device)
    return DataLoader([(images[index % 4], labels[index % 4]) for index in range(count)], batch_size=None)


L.seed_everything(0)
module = Classifier()
# The outermost lists are the stages. Their blocks repeat: one graph for each width.
blocks = [f"model.stages.{stage}.blocks" for stage in range(len(module.model.stages))]
strategies = [] if "eager" in sys.argv else [Regional(), CudaGraph()] if GPU else [Regional()]
compiling = Compile(strategies, blocks=blocks, count=lambda batch: (BATCH, None, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, precision="bf16-mixed", callbacks=[compiling], enable_checkpointing=False)
trainer.fit(module, batches(steps))
