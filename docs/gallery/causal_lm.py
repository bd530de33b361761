"""A causal language model of transformers: python docs/gallery/causal_lm.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, CudaGraph, Regional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

GPU = torch.cuda.is_available()
WIDTH, LAYERS, HEADS, VOCABULARY, BATCH, LENGTH = (768, 12, 12, 32_000, 8, 512) if GPU else (32, 2, 2, 97, 2, 16)


class Llama(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS,
            use_cache=False,  # with a cache each layer reads another entry of it, and is compiled apart
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count):
    """Random tokens: put a DataLoader in their place."""
    tokens = torch.randint(0, VOCABULARY, (4, BATCH, LENGTH), device="cuda" if GPU else "cpu")
    return DataLoader(
        [{"input_ids": tokens[index % 4], "labels": tokens[index % 4]} for index in range(count)], batch_size=None
    )


L.seed_everything(0)
strategies = [] if "eager" in sys.argv else [Regional(), CudaGraph()] if GPU else [Regional()]
compiling = Compile(strategies, count=lambda batch: (BATCH, BATCH * LENGTH, None, None))
steps = 200 if GPU else 8
trainer = L.Trainer(max_steps=steps, precision="bf16-mixed", callbacks=[compiling], enable_checkpointing=False)
trainer.fit(Llama(), batches(steps))
