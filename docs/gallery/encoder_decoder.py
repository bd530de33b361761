"""An encoder-decoder of transformers: python docs/gallery/encoder_decoder.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, CudaGraph, Regional
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

GPU = torch.cuda.is_available()
WIDTH, LAYERS, HEADS, VOCABULARY, BATCH, LENGTH = (512, 6, 8, 32_128, 32, 128) if GPU else (32, 2, 2, 97, 2, 16)


class T5(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_ff=4 * WIDTH, d_kv=WIDTH // HEADS, num_layers=LAYERS,
            num_heads=HEADS, decoder_start_token_id=0,
            use_cache=False,
        )  # fmt: skip
        self.model = T5ForConditionalGeneration(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def batches(count):
    """Random source and target: put a DataLoader in their place."""
    device = "cuda" if GPU else "cpu"
    source, target = torch.randint(1, VOCABULARY, (2, 4, BATCH, LENGTH), device=device)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long, device=device)
    drawn = [{"input_ids": source[i], "attention_mask": mask, "labels": target[i]} for i in range(4)]
    return DataLoader([drawn[index % 4] for index in range(count)], batch_size=None)


L.seed_everything(0)
strategies = [] if "eager" in sys.argv else [Regional(), CudaGraph()] if GPU else [Regional()]
compiling = Compile(strategies, count=lambda batch: (BATCH, 2 * BATCH * LENGTH, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, precision="bf16-mixed", callbacks=[compiling], enable_checkpointing=False)
trainer.fit(T5(), batches(steps))
