"""An image classifier of torchvision, compiled whole: python docs/gallery/torchvision_efficientnet.py [eager]"""

import sys

import lightning as L
import torch
import torchvision
from crucible import Compile, CudaGraph, Whole
from torch.nn import functional as F
from torch.utils.data import DataLoader

GPU = torch.cuda.is_available()
NAME, BATCH, PIXELS = ("efficientnet_b0", 64, 224) if GPU else ("mobilenet_v3_small", 2, 32)
CLASSES = 10


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torchvision.models.get_model(NAME, num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-5, fused=True)


def batches(count):
    """Random images: put a DataLoader in their place."""
    device = "cuda" if GPU else "cpu"
    images = torch.randn(4, BATCH, 3, PIXELS, PIXELS, device=device)
    labels = torch.randint(0, CLASSES, (4, BATCH), device=device)
    return DataLoader([(images[index % 4], labels[index % 4]) for index in range(count)], batch_size=None)


L.seed_everything(0)
strategies = [] if "eager" in sys.argv else [Whole(), CudaGraph()] if GPU else [Whole()]
compiling = Compile(strategies, whole=["model"], count=lambda batch: (BATCH, None, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, precision="bf16-mixed", callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Classifier(), batches(steps))
