"""Classifier network: any image classification model with normalisation before it and the loss behind it.

Shape letters: B batch, C colour channels, H height, W width, N image tokens, E token width, K classes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet, VisionTransformer

from tasks.image_classification.library import is_convolutional
from tasks.layers import Scores, class_scores
from tasks.module import ScoredModule

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels by channel, in [0, 1]: what published weights and recipes assume."""


class ClassifierNet(nn.Module):
    """Score uint8 images with ``model``, loss included, as one graph without breaks.

    ``stem`` and ``tail`` are regions of their own around the model's blocks: the tail holds the loss, and for
    torchvision's ResNets and Vision Transformers both hold the layers of the model outside its blocks, which would
    otherwise run eager under ``regional``. They borrow those layers: every weight has the model's own name.
    """

    def __init__(self, model: nn.Module, *, channels_last: bool | None = None, label_smoothing: float = 0.0) -> None:
        """``channels_last``: memory format of convolutions; None: where the model is convolutional.

        ``label_smoothing``: share of each target that is spread over all classes, in training.
        """
        super().__init__()
        if channels_last is None:
            channels_last = is_convolutional(model)
        # On the module and its input alike: a strong eager, as cuDNN's and oneDNN's fast convolutions have this layout.
        self.model = model.to(memory_format=torch.channels_last) if channels_last else model
        self.stem = Stem(model, channels_last=channels_last)
        self.tail = Tail(model, label_smoothing=label_smoothing)

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
        scores: Tensor | Scores = self.tail(x, targets_B)
        return scores


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
            pooled_BCHW: Tensor = model.maxpool(model.relu(model.bn1(model.conv1(x_BCHW))))
            return pooled_BCHW
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

    def __init__(self, model: nn.Module, *, label_smoothing: float) -> None:
        super().__init__()
        self._borrowed = (model,)
        self.label_smoothing = label_smoothing

    def logits(self, x: Tensor) -> Tensor:
        """Class scores [B, K] of what the model's blocks returned."""
        (model,) = self._borrowed
        if isinstance(model, ResNet):
            x = model.fc(torch.flatten(model.avgpool(x), 1))
        elif isinstance(model, VisionTransformer):
            x = model.heads(model.encoder.ln(x)[:, 0])
        return x

    def forward(self, x: Tensor, targets_B: Tensor | None) -> Tensor | Scores:
        """Logits [B, K] without targets, else (mean loss, right predictions, examples); see ``ClassifierNet``."""
        logits_BK = self.logits(x)
        if targets_B is None:
            return logits_BK
        if self.training and self.label_smoothing:
            return F.cross_entropy(logits_BK, targets_B, label_smoothing=self.label_smoothing), None, None
        return class_scores(logits_BK, targets_B, training=self.training)


class ImageClassifier(ScoredModule):
    """Trains a ClassifierNet; validation logs ``val/loss`` (nats an image) and ``val/accuracy``."""

    inputs: ClassVar[tuple[str, ...]] = ("images",)
