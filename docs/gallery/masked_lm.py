"""A masked language model of transformers with padding: python docs/gallery/masked_lm.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, CudaGraph, Regional
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

GPU = torch.cuda.is_available()
WIDTH, LAYERS, HEADS, VOCABULARY, BATCH, LENGTH = (768, 12, 12, 30_522, 32, 128) if GPU else (32, 2, 2, 97, 2, 16)
MASK_TOKEN = 3


class Bert(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
        )  # fmt: skip
        self.model = BertForMaskedLM(config)

    def training_step(self, batch, batch_idx):
        tokens, attended = batch["input_ids"], batch["attention_mask"]
        masked = (torch.rand(tokens.shape, device=tokens.device) < 0.15) & attended.bool()
        labels = tokens.masked_fill(~masked, -100)
        loss = self.model(input_ids=tokens.masked_fill(masked, MASK_TOKEN), attention_mask=attended, labels=labels).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def batches(count):
    """Random tokens, padded behind random lengths: put a DataLoader in their place."""
    device = "cuda" if GPU else "cpu"
    tokens = torch.randint(5, VOCABULARY, (4, BATCH, LENGTH), device=device)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (4, BATCH, 1), device=device)
    attended = (torch.arange(LENGTH, device=device) < lengths).long()
    return DataLoader(
        [{"input_ids": tokens[i % 4], "attention_mask": attended[i % 4]} for i in range(count)], batch_size=None
    )


L.seed_everything(0)
strategies = [] if "eager" in sys.argv else [Regional(), CudaGraph()] if GPU else [Regional()]
compiling = Compile(strategies, count=lambda batch: (BATCH, BATCH * LENGTH, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, precision="bf16-mixed", callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Bert(), batches(steps))
