"""Other people's models as ordinary Lightning modules: thirteen of transformers, timm and torchvision, and a U-Net.

Each comes tiny, for a CPU, and in the size of a real run, with random weights and batches drawn on the device at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, CLASSES = 97, 10

Batch = dict[str, Tensor]


class Stranger(L.LightningModule):
    """Somebody's model, trained as its own examples show.

    Args:
        model: Returns an object with a ``loss`` for a batch of keyword arguments; logits where ``loss`` is given.
        loss: Of the logits and the batch's labels.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model = model.train()
        self._loss = loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step, its loss logged."""
        if self._loss is None:
            loss: Tensor = self.model(**batch).loss
        else:
            loss = self._loss(self.model(batch["pixel_values"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Fused AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3 if self.tiny else 1e-4, fused=True)

    tiny = True
    """Whether it is the size for a CPU."""


class Denoiser(Stranger):
    """A diffusion model: random timesteps, noise added, noise predicted."""

    kept: Tensor

    def __init__(self, model: nn.Module, steps: int = 1000) -> None:
        super().__init__(model)
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)
        self.register_buffer("kept", kept, persistent=False)
        self._steps = steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step, its loss logged."""
        clean_BCHW = batch["pixel_values"]
        noise_BCHW = torch.randn_like(clean_BCHW)
        time_B = torch.randint(0, self._steps, (len(clean_BCHW),), device=clean_BCHW.device)
        kept_B111 = self.kept[time_B].view(-1, 1, 1, 1)
        noisy_BCHW = kept_B111.sqrt() * clean_BCHW + (1 - kept_B111).sqrt() * noise_BCHW
        loss = nn.functional.mse_loss(self.model(noisy_BCHW, time_B), noise_BCHW)
        self.log("loss", loss)
        return loss


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
        return self.skip(x_BCHW) + self.conv2(nn.functional.silu(self.norm2(h_BCHW)))


class UNet(nn.Module):
    """A small U-Net with sinusoidal timestep embeddings."""

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
        return self.out(x_BCHW)


class Drawn(Dataset[Batch]):
    """A few batches, drawn once and given out again and again."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]


def loader(name: str, *, tiny: bool, steps: int, device: str = "cpu", mask: bool = True) -> DataLoader[Batch]:
    """``steps`` batches for the model called ``name``, on ``device`` already; with padding where ``mask`` and text."""
    generator = torch.Generator().manual_seed(1)
    drawn = [{key: value.to(device) for key, value in _batch(name, tiny, mask, generator).items()} for _ in range(3)]
    return DataLoader(Drawn(drawn, steps), batch_size=None)


def make(name: str, *, tiny: bool, **config: Any) -> Stranger:
    """The model called ``name``. Raises ImportError where its library is missing."""
    module = MODELS[name](tiny, **config)
    module.tiny = tiny
    return module


def _batch(name: str, tiny: bool, mask: bool, generator: torch.Generator) -> Batch:
    def tokens(*shape: int) -> Tensor:
        return torch.randint(5, VOCABULARY, shape, generator=generator)

    if name in IMAGES:
        rows, pixels = (4, IMAGES[name][0]) if tiny else IMAGES[name][1:]
        images = torch.randn(rows, 3, pixels, pixels, generator=generator)
        labelled = (rows, pixels, pixels) if name == "segformer" else (rows,)
        return {"pixel_values": images, "labels": torch.randint(0, CLASSES, labelled, generator=generator)}
    rows, length = (2, 12) if tiny else {"t5": (32, 128), "whisper": (8, 64)}.get(name, (8, 512))
    if name == "whisper":
        features = torch.randn(rows, 16 if tiny else 80, 40 if tiny else 3000, generator=generator)
        return {"input_features": features, "labels": tokens(rows, length)}
    batch = {"input_ids": tokens(rows, length), "labels": tokens(rows, length)}
    if mask:
        lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
        batch["attention_mask"] = (torch.arange(length) < lengths).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def _decoder(kind: str, config_kind: str | None = None) -> Callable[..., Stranger]:
    def build(tiny: bool, **config: Any) -> Stranger:
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
        return Stranger(getattr(transformers, f"{kind}ForCausalLM")(made))

    return build


def _t5(tiny: bool, **config: Any) -> Stranger:
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers = (32, 2) if tiny else (512, 6)
    options = {
        "vocab_size": VOCABULARY if tiny else 32128, "d_model": width, "d_ff": 4 * width, "d_kv": 16 if tiny else 64,
        "num_layers": layers, "num_heads": 2 if tiny else 8, "decoder_start_token_id": 0,
    }  # fmt: skip
    return Stranger(T5ForConditionalGeneration(T5Config(**{**options, **config})))


def _modernbert(tiny: bool, **config: Any) -> Stranger:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    width, layers = (32, 4) if tiny else (768, 22)
    options = {
        "vocab_size": VOCABULARY if tiny else 50368, "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": 48 if tiny else 1152, "num_attention_heads": 2 if tiny else 12,
        "local_attention": 8 if tiny else 128, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    }  # fmt: skip
    return Stranger(ModernBertForMaskedLM(ModernBertConfig(**{**options, **config})))


def _vit(tiny: bool, **config: Any) -> Stranger:
    from transformers import ViTConfig, ViTForImageClassification

    options = {"num_labels": CLASSES}
    if tiny:
        options |= {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "image_size": 32, "patch_size": 8,
        }  # fmt: skip
    return Stranger(ViTForImageClassification(ViTConfig(**{**options, **config})))


def _segformer(tiny: bool, **config: Any) -> Stranger:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    options = {"num_labels": CLASSES}
    if tiny:
        options |= {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}
    return Stranger(SegformerForSemanticSegmentation(SegformerConfig(**{**options, **config})))


def _whisper(tiny: bool, **config: Any) -> Stranger:
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
    return Stranger(WhisperForConditionalGeneration(WhisperConfig(**{**options, **config})))


def _timm(small: str, real: str, **tiny_options: Any) -> Callable[..., Stranger]:
    def build(tiny: bool, **config: Any) -> Stranger:
        import timm

        options = {"num_classes": CLASSES, "drop_path_rate": 0.1, **(tiny_options if tiny else {}), **config}
        return Stranger(timm.create_model(small if tiny else real, **options), nn.functional.cross_entropy)

    return build


def _swin(tiny: bool, **config: Any) -> Stranger:
    from torchvision.models import swin_t
    from torchvision.models.swin_transformer import SwinTransformer

    if not tiny:
        return Stranger(swin_t(num_classes=CLASSES, **config), nn.functional.cross_entropy)
    options = {
        "patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4],
        "stochastic_depth_prob": 0.1, "num_classes": CLASSES,
    }  # fmt: skip
    return Stranger(SwinTransformer(**{**options, **config}), nn.functional.cross_entropy)


def _unet(tiny: bool, **config: Any) -> Stranger:
    return Denoiser(UNet((8, 16) if tiny else (64, 128, 256, 256)))


IMAGES = {
    "vit": (32, 64, 224), "convnext": (32, 64, 224), "swin": (32, 64, 224), "efficientnet": (64, 64, 224),
    "maxvit": (64, 32, 224), "segformer": (32, 16, 224), "unet": (16, 32, 64),
}  # fmt: skip
"""Pixels of the tiny model's images, then rows and pixels of the real one's."""

MODELS: dict[str, Callable[..., Stranger]] = {
    "llama": _decoder("Llama"),
    "qwen3": _decoder("Qwen3"),
    "gemma3": _decoder("Gemma3", "Gemma3Text"),
    "t5": _t5,
    "modernbert": _modernbert,
    "vit": _vit,
    "segformer": _segformer,
    "whisper": _whisper,
    "convnext": _timm("convnext_atto", "convnext_tiny", depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)),
    "swin": _swin,
    "efficientnet": _timm("test_efficientnet", "efficientnet_b0"),
    "maxvit": _timm(
        "maxvit_rmlp_pico_rw_256",
        "maxvit_tiny_tf_224",
        img_size=64,
        depths=(1, 1),
        embed_dim=(16, 32),
        stem_width=8,
        transformer_dim_head=8,
    ),
    "unet": _unet,
}
TEXT = tuple(name for name in MODELS if name not in IMAGES and name != "whisper")
"""Those that take an ``attention_mask`` or none."""


def cases() -> Iterator[tuple[str, bool]]:
    """Every model's name, text models with an ``attention_mask`` and without."""
    for name in MODELS:
        yield name, True
        if name in TEXT:
            yield name, False
