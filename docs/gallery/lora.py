"""LoRA with peft: a frozen Llama, adapters trained: python docs/gallery/lora.py [eager]"""

import sys

import lightning as L
import torch
from crucible import Compile, CudaGraph, Regional
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

GPU = torch.cuda.is_available()
WIDTH, LAYERS, HEADS, VOCABULARY, BATCH, LENGTH = (2048, 16, 32, 32_000, 4, 512) if GPU else (32, 2, 2, 97, 2, 16)


class Lora(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        self.model = get_peft_model(model, LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=2e-4, fused=True)


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
trainer.fit(Lora(), batches(steps))
