"""Classification networks by name: every one of torchvision, two small Vision Transformers, and timm's; and the
classifier around them, with normalisation before the network and the loss behind it.

Shape letters: B batch, C colour channels, H height, W width, N image tokens, E token width, K classes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchvision.models import ResNet, VisionTransformer

from tasks.base import suggest
from tasks.lightning_module import Scores, class_scores, on_meta
from tasks.resumable_data import ResumableDataModule

TIMM = "timm/"
"""Begins the names of timm's networks."""
SMALL_TRANSFORMERS = {"vit_ti_16": (192, 3), "vit_s_16": (384, 6)}
"""Width and heads of the Vision Transformers of 12 layers that torchvision lacks (Touvron et al. 2020,
https://arxiv.org/abs/2012.12877, table 1)."""


def build_model(name: str, *, classes: int, image_size: int) -> nn.Module:
    """Build a network with random weights, drawn from torch's global generator, for square images.

    Auxiliary heads (GoogLeNet, Inception) are off: they are no part of the network that predicts.

    Raises ValueError for an unknown name, with a suggestion, and for a size that the network cannot be built for.
    """
    if name.startswith(TIMM):
        if importlib.util.find_spec("timm") is None:
            raise ValueError(f"task.model={name} needs timm: pip install -e '.[models]'")
        import timm

        known, library = [TIMM + each for each in timm.list_models()], "timm has"
    else:
        known = [*torchvision.models.list_models(module=torchvision.models), *SMALL_TRANSFORMERS]
        library = "torchvision has (timm's are written timm/<name>)"
    if name not in known:
        raise ValueError(f"task.model={name!r} is not a classification network that {library}{suggest(name, known)}")
    options: dict[str, Any] = {"num_classes": classes}
    try:
        if name.startswith(TIMM):
            name_there = name.removeprefix(TIMM)
            published = timm.get_pretrained_cfg(name_there)
            if published is not None and published.fixed_input_size:  # networks for any size take no such argument
                options["img_size"] = image_size
            return timm.create_model(name_there, pretrained=False, **options)
        if name in SMALL_TRANSFORMERS:
            width, heads = SMALL_TRANSFORMERS[name]
            return VisionTransformer(image_size, 16, 12, heads, width, 4 * width, **options)
        if name.startswith("vit_"):
            options["image_size"] = image_size
        elif name.startswith("maxvit_"):
            options["input_size"] = (image_size, image_size)
        elif name in ("googlenet", "inception_v3"):
            # Both would warn that their way to draw weights will change; this is the one they were published with.
            options |= {"aux_logits": False, "init_weights": True}
        return torchvision.models.get_model(name, weights=None, **options)
    except (AssertionError, ValueError) as error:  # torch._assert in constructors raises AssertionError
        raise ValueError(f"task.image_size={image_size}: {name} cannot be built for it ({error})") from None


@functools.lru_cache(maxsize=4)
def skeleton(name: str, *, classes: int, image_size: int) -> nn.Module:
    """The network of ``build_model`` without memory for its weights; draws no random numbers. Not to be changed."""
    build = functools.partial(build_model, name, classes=classes, image_size=image_size)
    try:
        return on_meta(build)
    except NotImplementedError:
        # Constructors that compute with tensors (RegNet's widths) need real ones.
        with torch.random.fork_rng(devices=[]):
            return build().to("meta")


def find_blocks(model: nn.Module) -> list[str]:
    """Paths of the outermost containers of blocks: modules of one class, of which two side by side somewhere have
    weights of equal shapes. Empty where no container holds such: AlexNet, VGG, GoogLeNet, DenseNet, MobileNet.
    """
    kinds: set[type[nn.Module]] = set()
    held: dict[str, type[nn.Module]] = {}
    for path, container in model.named_modules():
        blocks = list(container.children()) if isinstance(container, nn.Sequential | nn.ModuleList) else []
        if len({type(block) for block in blocks}) == 1 and len(list(blocks[0].modules())) > 2:
            held[path] = type(blocks[0])
            shapes = [tuple(weight.shape for weight in block.parameters()) for block in blocks]
            if len(set(shapes)) < len(shapes):
                kinds.add(held[path])
    paths = [path for path, kind in held.items() if kind in kinds]
    return [path for path in paths if not any(path.startswith(f"{outer}.") for outer in paths)]


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels by channel, in [0, 1]: what published weights and recipes assume."""


class ClassifierNet(nn.Module):
    """Score uint8 images with ``model``, loss included, as one graph without breaks.

    ``stem`` and ``tail`` are regions of their own around the model's blocks; the tail holds the loss. In torchvision's
    ResNets and Vision Transformers both hold the layers outside the blocks, else eager under ``regional``. They borrow
    those layers: every weight has the model's own name.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # A transformer cuts its patches with its only convolution.
        channels_last = sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1
        # On the module and its input alike: a strong eager, as cuDNN's and oneDNN's fast convolutions have this layout.
        self.model = model.to(memory_format=torch.channels_last) if channels_last else model
        self.stem = Stem(model, channels_last=channels_last)
        self.tail = Tail(model)

    def forward(self, images_BCHW: Tensor, targets_B: Tensor | None = None) -> Tensor | Scores:
        """Score uint8 images [B, 3, H, W] against int64 targets [B].

        Returns (mean loss in nats, right predictions, examples), 0-D, the last two None in training mode; or, without
        targets, the logits [B, K].
        """
        x = self.stem(images_BCHW)
        model = self.model
        if isinstance(model, ResNet):
            x = model.layer4(model.layer3(model.layer2(model.layer1(x))))
        elif isinstance(model, VisionTransformer):
            for block in model.encoder.layers:
                # torch's attention returns a transposed view: one layout keeps all blocks on one compiled graph.
                x = block(x).contiguous()
        else:
            x = model(x)
        return self.tail(x, targets_B)


class Stem(nn.Module):
    """Normalise uint8 pixels on the device, and run what comes before the model's blocks."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, *, channels_last: bool) -> None:
        super().__init__()
        # In a tuple, so that they are not registered twice.
        self._borrowed = (model,)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        mean_C11, std_C11 = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
        self.register_buffer("scale", 1.0 / (255.0 * std_C11), persistent=False)
        self.register_buffer("shift", -mean_C11 / std_C11, persistent=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Turn uint8 images [B, 3, H, W], values 0..255, into what the model's blocks take."""
        x_BCHW = images_BCHW.to(self.scale.dtype) * self.scale + self.shift
        x_BCHW = x_BCHW.contiguous(memory_format=self.memory_format)
        (model,) = self._borrowed
        if isinstance(model, ResNet):
            return model.maxpool(model.relu(model.bn1(model.conv1(x_BCHW))))
        if isinstance(model, VisionTransformer):
            patches_BNE = model._process_input(x_BCHW)
            # The convolution may have made a lower precision than the class token's.
            class_token_B1E = model.class_token.expand(patches_BNE.shape[0], -1, -1).to(patches_BNE.dtype)
            x_BNE = torch.cat((class_token_B1E, patches_BNE), dim=1) + model.encoder.pos_embedding
            tokens_BNE: Tensor = model.encoder.dropout(x_BNE)
            return tokens_BNE.contiguous()
        return x_BCHW


class Tail(nn.Module):
    """Run what comes behind the model's blocks, and the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._borrowed = (model,)

    def forward(self, x: Tensor, targets_B: Tensor | None) -> Tensor | Scores:
        """Logits [B, K] without targets, else (mean loss, right predictions, examples); see ``ClassifierNet``."""
        (model,) = self._borrowed
        if isinstance(model, ResNet):
            x = model.fc(torch.flatten(model.avgpool(x), 1))
        elif isinstance(model, VisionTransformer):
            x = model.heads(model.encoder.ln(x)[:, 0])
        return x if targets_B is None else class_scores(x, targets_B, training=self.training)


# ---- batches of labelled images --------------------------------------------------------------------------------------


class ImageBatch(NamedTuple):
    """What the loader yields and the module takes."""

    images: Tensor
    """uint8 [B, 3, H, W]: a quarter of the bytes of float32 on their way to the device, where they are normalised."""
    targets: Tensor
    """int64 [B]: the class of each image."""


def collate(items: Sequence[tuple[Tensor, int]]) -> ImageBatch:
    return ImageBatch(*default_collate(list(items)))


class LabelledDataModule(ResumableDataModule):
    """Loads batches of labelled images, in an order that a resumed run continues exactly."""

    def open(self) -> None:
        data, found, outputs = self.task.data, self.task.data.class_count(), self.task.class_count()
        if found > outputs:  # on a GPU a label beyond them would end the process without saying why
            raise ValueError(f"task.classes={outputs} must be at least {found}, the classes of the data")
        self.train_set, self.val_set = data.sets(seed=self.seed, image_size=self.task.image_size)
        self.collate = collate
