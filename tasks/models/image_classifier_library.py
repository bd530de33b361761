"""Classification networks by name: every one of torchvision, two small Vision Transformers, and timm's."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import VisionTransformer

from tasks.checks import near
from tasks.models.stochastic_depth import share_stochastic_depth

TIMM = "timm/"
"""Begins the names of timm's networks."""
SMALL_TRANSFORMERS = {"vit_ti_16": (192, 3), "vit_s_16": (384, 6)}
"""Width and heads of the Vision Transformers of 12 layers that torchvision lacks (Touvron et al. 2020,
https://arxiv.org/abs/2012.12877, table 1)."""


def build_model(name: str, *, classes: int, image_size: int) -> nn.Module:
    """Build a network with random weights, drawn from torch's global generator, for square images.

    Auxiliary heads (GoogLeNet, Inception) are off: they are no part of the network that predicts.

    Raises ValueError for an unknown name, with near ones, and for a size that the network cannot be built for.
    """
    _require_known(name)
    try:
        if name.startswith(TIMM):
            return _timm_model(name.removeprefix(TIMM), classes=classes, image_size=image_size)
        if name in SMALL_TRANSFORMERS:
            width, heads = SMALL_TRANSFORMERS[name]
            return VisionTransformer(image_size, 16, 12, heads, width, 4 * width, num_classes=classes)
        model: nn.Module = torchvision.models.get_model(
            name, weights=None, num_classes=classes, **_torchvision_arguments(name, image_size)
        )
    except (AssertionError, ValueError) as error:  # torch._assert in constructors raises AssertionError
        raise ValueError(f"task.image_size={image_size}: {name} cannot be built for it ({error})") from None
    return share_stochastic_depth(model)


@functools.lru_cache(maxsize=4)
def skeleton(name: str, *, classes: int, image_size: int) -> nn.Module:
    """The network of ``build_model`` without memory for its weights; draws no random numbers. Not to be changed."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build_model(name, classes=classes, image_size=image_size)
        except NotImplementedError:
            # Constructors that compute with tensors (RegNet's widths) need real ones.
            return build_model(name, classes=classes, image_size=image_size).to("meta")


def _torchvision_arguments(name: str, image_size: int) -> dict[str, Any]:
    if name.startswith("vit_"):
        return {"image_size": image_size}
    if name.startswith("maxvit_"):
        return {"input_size": (image_size, image_size)}
    if name in ("googlenet", "inception_v3"):
        # Both would warn that their way to draw weights will change; this is the one they were published with.
        return {"aux_logits": False, "init_weights": True}
    return {}


def _timm_model(name: str, *, classes: int, image_size: int) -> nn.Module:
    import timm

    # Networks for any size take no such argument.
    published = timm.get_pretrained_cfg(name)
    size: dict[str, Any] = {"img_size": image_size} if published is not None and published.fixed_input_size else {}
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, **size)
    return model


def _require_known(name: str) -> None:
    if not name.startswith(TIMM):
        _require_among(name, [*torchvision.models.list_models(module=torchvision.models), *SMALL_TRANSFORMERS])
        return
    if importlib.util.find_spec("timm") is None:
        raise ValueError(f"task.model={name} needs timm: pip install 'crucible-train[models]'")
    import timm

    _require_among(name, [TIMM + known for known in timm.list_models()])


def _require_among(name: str, names: Iterable[str]) -> None:
    known = sorted(names)
    if name in known:
        return
    library = "timm has" if name.startswith(TIMM) else "torchvision has (timm's are written timm/<name>)"
    raise ValueError(f"task.model={name!r} is no classification network that {library}{near(name, known)}")
