"""Library models with random weights, tiny or of a real run's size, and the Lightning module that trains them.

Shape letters: B batch, C channels, H height, W width, T features of a timestep, S positions, D features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tasks.library_model.data import CLASSES, GRAPHS, VOCABULARY, Batch

TIMESTEPS = 1000
"""Of the diffusion."""


class LibraryModule(L.LightningModule):
    """Somebody's model, trained as its own examples show.

    Its weights are drawn in ``configure_model``, on the device that trains.
    """

    model: nn.Module

    def __init__(self, known: Known, *, tiny: bool, **config: Any) -> None:
        super().__init__()
        self._known, self._tiny, self._config = known, tiny, config
        self._seed = torch.initial_seed()

    def configure_model(self) -> None:
        """Build the model, once."""
        if hasattr(self, "model"):
            return
        device = self.trainer.strategy.root_device
        # The run's random numbers are left alone.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(self._seed)
            self.model = self._known.build(self._tiny, **self._config).train()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step, its loss logged."""
        loss = self._known.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Fused AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3 if self._tiny else 1e-4, fused=True)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The one that a model of transformers computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def node_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"], batch["edge_index"]), batch["labels"])


def noise_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of a diffusion model: random timesteps, noise added, noise predicted."""
    clean_BCHW = batch["pixel_values"]
    noise_BCHW = torch.randn_like(clean_BCHW)
    time_B = torch.randint(0, TIMESTEPS, (len(clean_BCHW),), device=clean_BCHW.device)
    kept_B111 = model.kept[time_B].view(-1, 1, 1, 1)  # type: ignore[index]
    noisy_BCHW = kept_B111.sqrt() * clean_BCHW + (1 - kept_B111).sqrt() * noise_BCHW
    return nn.functional.mse_loss(model(noisy_BCHW, time_B), noise_BCHW)


class LanguageLSTM(nn.Module):
    """A language model of cuDNN's LSTM, as those before transformers."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, tokens)

    def forward(self, token_BS: Tensor) -> Tensor:
        """Logits of the next token."""
        hidden_BSD, _ = self.lstm(self.embed(token_BS))
        logits: Tensor = self.head(hidden_BSD)
        return logits


class TimedBlock(nn.Module):
    """A residual block of two convolutions, shifted by the embedded timestep."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x_BCHW: Tensor, time_BT: Tensor) -> Tensor:
        """Same height and width."""
        h_BCHW = self.conv1(nn.functional.silu(self.norm1(x_BCHW)))
        h_BCHW = h_BCHW + self.time(nn.functional.silu(time_BT))[:, :, None, None]
        result: Tensor = self.skip(x_BCHW) + self.conv2(nn.functional.silu(self.norm2(h_BCHW)))
        return result


class UNet(nn.Module):
    """A small U-Net with sinusoidal timestep embeddings, and the noise schedule of its training."""

    kept: Tensor

    def __init__(self, widths: tuple[int, ...], channels: int = 3) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.width = widths[0]
        self.embed = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.into = nn.Conv2d(channels, widths[0], 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(TimedBlock(inner, outer, time) for inner, outer in pairs)
        self.middle = nn.ModuleList(TimedBlock(widths[-1], widths[-1], time) for _ in range(2))
        self.up = nn.ModuleList(TimedBlock(2 * outer, inner, time) for inner, outer in reversed(pairs))
        self.out = nn.Conv2d(widths[0], channels, 3, padding=1)
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMESTEPS), 0)
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, x_BCHW: Tensor, time_B: Tensor) -> Tensor:
        """The noise in ``x_BCHW``."""
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=x_BCHW.device) / half)
        angles = time_B[:, None].float() * rates[None]
        time_BT = self.embed(torch.cat([angles.cos(), angles.sin()], dim=-1))
        x_BCHW = self.into(x_BCHW)
        skips = []
        for block in self.down:
            x_BCHW = block(x_BCHW, time_BT)
            skips.append(x_BCHW)
            x_BCHW = nn.functional.avg_pool2d(x_BCHW, 2)
        for block in self.middle:
            x_BCHW = block(x_BCHW, time_BT)
        for block in self.up:
            x_BCHW = nn.functional.interpolate(x_BCHW, scale_factor=2.0)
            x_BCHW = block(torch.cat([x_BCHW, skips.pop()], dim=1), time_BT)
        noise: Tensor = self.out(x_BCHW)
        return noise


# ---- how each is built: tiny or not, with further options of its configuration ---------------------------------------


def _decoder(kind: str, config_kind: str | None = None) -> Callable[..., nn.Module]:
    def build(tiny: bool, **config: Any) -> nn.Module:
        import transformers

        width, layers = (32, 2) if tiny else (768, 12)
        options = {
            "vocab_size": VOCABULARY if tiny else 32000, "hidden_size": width, "intermediate_size": 8 * width // 3,
            "num_hidden_layers": layers, "num_attention_heads": width // 16 if tiny else 12,
            "num_key_value_heads": width // 16 if tiny else 12, "head_dim": 16 if tiny else 64,
            "max_position_embeddings": 512, "use_cache": False,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        made = getattr(transformers, f"{config_kind or kind}Config")(**{**options, **config})
        return _built(getattr(transformers, f"{kind}ForCausalLM")(made))

    return build


def _built(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _t5(tiny: bool, **config: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers = (32, 2) if tiny else (512, 6)
    options = {
        "vocab_size": VOCABULARY if tiny else 32128, "d_model": width, "d_ff": 4 * width, "d_kv": 16 if tiny else 64,
        "num_layers": layers, "num_heads": 2 if tiny else 8, "decoder_start_token_id": 0,
    }  # fmt: skip
    return _built(T5ForConditionalGeneration(T5Config(**{**options, **config})))


def _bert(tiny: bool, **config: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    options = {}
    if tiny:
        options = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 64,
        }  # fmt: skip
    return _built(BertForMaskedLM(BertConfig(**{**options, **config})))


def _modernbert(tiny: bool, **config: Any) -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    width, layers = (32, 4) if tiny else (768, 22)
    options = {
        "vocab_size": VOCABULARY if tiny else 50368, "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": 48 if tiny else 1152, "num_attention_heads": 2 if tiny else 12,
        "local_attention": 8 if tiny else 128, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    }  # fmt: skip
    return _built(ModernBertForMaskedLM(ModernBertConfig(**{**options, **config})))


def _mamba2(tiny: bool, **config: Any) -> nn.Module:
    """In the library's own PyTorch code, without the kernels of mamba_ssm."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    width, layers = (32, 2) if tiny else (768, 12)
    options = {
        "vocab_size": VOCABULARY if tiny else 32000, "hidden_size": width, "num_hidden_layers": layers,
        "state_size": 8 if tiny else 64, "head_dim": 16 if tiny else 64, "num_heads": 4 if tiny else 24,
        "n_groups": 1, "chunk_size": 4 if tiny else 64, "use_cache": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return _built(Mamba2ForCausalLM(Mamba2Config(**{**options, **config})))


def _lstm(tiny: bool) -> nn.Module:
    return LanguageLSTM(VOCABULARY, 16, 2) if tiny else LanguageLSTM(32000, 1024, 3)


def _vit(tiny: bool, **config: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    options = {"num_labels": CLASSES}
    if tiny:
        options |= {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "image_size": 32, "patch_size": 8,
        }  # fmt: skip
    return _built(ViTForImageClassification(ViTConfig(**{**options, **config})))


def _segformer(tiny: bool, **config: Any) -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    options: dict[str, Any] = {"num_labels": CLASSES}
    if tiny:
        options |= {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}
    return _built(SegformerForSemanticSegmentation(SegformerConfig(**{**options, **config})))


def _whisper(tiny: bool, **config: Any) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, layers = (32, 2) if tiny else (768, 12)
    options = {
        "vocab_size": VOCABULARY if tiny else 51865, "d_model": width, "encoder_layers": layers,
        "decoder_layers": layers, "encoder_attention_heads": 2 if tiny else 12,
        "decoder_attention_heads": 2 if tiny else 12, "encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width,
        "num_mel_bins": 16 if tiny else 80, "max_source_positions": 20 if tiny else 1500,
        "max_target_positions": 64, "use_cache": False, "dropout": 0.1, "decoder_start_token_id": 1,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }  # fmt: skip
    return _built(WhisperForConditionalGeneration(WhisperConfig(**{**options, **config})))


def _timm(small: str, real: str, **tiny_options: Any) -> Callable[..., nn.Module]:
    def build(tiny: bool, **config: Any) -> nn.Module:
        import timm

        options = {"num_classes": CLASSES, "drop_path_rate": 0.1, **(tiny_options if tiny else {}), **config}
        return _built(timm.create_model(small if tiny else real, **options))

    return build


def _swin(tiny: bool, **config: Any) -> nn.Module:
    from torchvision.models import swin_t
    from torchvision.models.swin_transformer import SwinTransformer

    if not tiny:
        return _built(swin_t(num_classes=CLASSES, **config))
    options = {
        "patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4],
        "stochastic_depth_prob": 0.1, "num_classes": CLASSES,
    }  # fmt: skip
    return _built(SwinTransformer(**{**options, **config}))


def _unet(tiny: bool) -> nn.Module:
    return UNet((8, 16) if tiny else (64, 128, 256, 256))


def _gatv2(tiny: bool) -> nn.Module:
    from torch_geometric.nn.models import GAT  # type: ignore[import-untyped]

    width, heads = (16, 2) if tiny else (256, 4)
    # Without loops at nodes, which would have to be looked for in each batch.
    return _built(GAT(GRAPHS[tiny][2], width, 3, CLASSES, v2=True, heads=heads, dropout=0.1, add_self_loops=False))


@dataclass(frozen=True, slots=True)
class Known:
    """How a model is built, and what of it is trained."""

    build: Callable[..., nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss


NETWORKS: dict[str, Known] = {
    "llama": Known(_decoder("Llama")),
    "qwen3": Known(_decoder("Qwen3")),
    "gemma3": Known(_decoder("Gemma3", "Gemma3Text")),
    "t5": Known(_t5),
    "bert": Known(_bert),
    "modernbert": Known(_modernbert),
    "mamba2": Known(_mamba2),
    "lstm": Known(_lstm, token_loss),
    "whisper": Known(_whisper),
    "vit": Known(_vit),
    "naflexvit": Known(
        _timm(
            "naflexvit_base_patch16_gap", "naflexvit_base_patch16_gap", embed_dim=32, depth=2, num_heads=2, patch_size=8
        ),
        image_loss,
    ),
    "swin": Known(_swin, image_loss),
    "maxvit": Known(
        _timm(
            "maxvit_rmlp_pico_rw_256",
            "maxvit_tiny_tf_224",
            img_size=64,
            depths=(1, 1),
            embed_dim=(16, 32),
            stem_width=8,
            transformer_dim_head=8,
        ),
        image_loss,
    ),
    "convnext": Known(_timm("convnext_atto", "convnext_tiny", depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)), image_loss),
    "efficientnet": Known(_timm("test_efficientnet", "efficientnet_b0"), image_loss),
    "segformer": Known(_segformer),
    "unet": Known(_unet, noise_loss),
    "gatv2": Known(_gatv2, node_loss),
}
"""By the names of ``MODELS``."""


def make(name: str, *, tiny: bool, **config: Any) -> LibraryModule:
    """The module that trains the model called ``name``; ``config`` are further options of its library."""
    return LibraryModule(NETWORKS[name], tiny=tiny, **config)
