"""Models as transformers, timm, torchvision and Torch Geometric define them, and two in plain PyTorch.

For what compiling gains on code that was not written for it.
"""

MODELS: dict[str, tuple[str, str | None]] = {
    "llama": ("Llama", "transformers"),
    "qwen3": ("Qwen3", "transformers"),
    "gemma3": ("Gemma 3", "transformers"),
    "t5": ("T5", "transformers"),
    "bert": ("BERT", "transformers"),
    "modernbert": ("ModernBERT", "transformers"),
    "mamba2": ("Mamba2", "transformers"),
    "lstm": ("an LSTM language model", None),
    "whisper": ("Whisper", "transformers"),
    "vit": ("ViT", "transformers"),
    "naflexvit": ("NaFlexViT", "timm"),
    "swin": ("Swin", "torchvision"),
    "maxvit": ("MaxViT", "timm"),
    "convnext": ("ConvNeXt", "timm"),
    "efficientnet": ("EfficientNet", "timm"),
    "segformer": ("SegFormer", "transformers"),
    "unet": ("a diffusion U-Net", None),
    "gatv2": ("GATv2", "torch_geometric"),
}
"""By name, what people call a model, and the library that defines it; None = it is written here, in plain PyTorch."""
MASKED = ("llama", "qwen3", "gemma3", "t5", "bert", "modernbert", "mamba2")
"""Those that take batches of padded texts."""
