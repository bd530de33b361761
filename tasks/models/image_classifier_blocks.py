"""Blocks of any classification network: what repeats in it, and what is worth a region beside that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torchvision.models import ResNet, VisionTransformer

LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Signature = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...]], ...]]
"""Class, and name and shape of each weight: modules that have it in common share one compiled graph."""


def find_blocks(model: nn.Module) -> list[str]:
    """Paths of the outermost repeated blocks; of a container where all its children are blocks.

    A class is one of blocks when two of its modules, side by side in a container, have weights of equal shapes: only
    those share a compiled graph. All other modules of the class are blocks then too (the first one of a ResNet's
    stage). Empty where nothing repeats: AlexNet, VGG, SqueezeNet, GoogLeNet, Inception, DenseNet.
    """
    kinds: set[type[nn.Module]] = set()
    paths: list[str] = []
    for path, module in model.named_modules():
        if _inside(path, paths):
            continue
        if type(module) in kinds:
            paths.append(path)
            continue
        if isinstance(module, LISTS):
            kinds |= _repeated(module)
    # Once more: a class is known from its first pair on, and modules of it may have come before.
    blocks: list[str] = []
    for path, module in model.named_modules():
        if type(module) in kinds and not _inside(path, blocks):
            blocks.append(path)
    return _by_container(model, blocks)


def find_parts(model: nn.Module, blocks: list[str]) -> list[str]:
    """Paths of the outermost submodules beside ``blocks`` that are called and have two layers or more."""
    if isinstance(model, ResNet | VisionTransformer):
        return []  # in the stem and the tail of ``ClassifierNet``
    parts: list[str] = []
    for path, module in model.named_modules():
        if not path or _inside(path, [*blocks, *parts]) or any(_inside(block, [path]) for block in blocks):
            continue
        layers = [child for child in module.modules() if not any(True for _ in child.children())]
        weighed = any(True for _ in module.parameters())
        if len(layers) > 1 and weighed and type(module) not in (nn.ModuleList, nn.ModuleDict):
            parts.append(path)
    return parts


def _repeated(container: nn.Module) -> set[type[nn.Module]]:
    """Classes of which two children have weights of equal shapes; layers and plain lists are no blocks."""
    counts: Counter[Signature] = Counter()
    for child in container.children():
        if type(child) not in LISTS and len(list(child.modules())) > 2:
            weights = tuple((name, tuple(weight.shape)) for name, weight in child.named_parameters())
            counts[type(child), weights] += 1
    return {kind for (kind, weights), count in counts.items() if count > 1 and weights}


def _by_container(model: nn.Module, blocks: list[str]) -> list[str]:
    """Replace blocks by their container where it holds nothing else."""
    named: dict[str, None] = {}
    for path in blocks:
        parent = path.rpartition(".")[0]
        container = model.get_submodule(parent)
        whole = isinstance(container, nn.Sequential | nn.ModuleList) and all(
            child in blocks for child in _children(parent, container)
        )
        named[parent if whole else path] = None
    return list(named)


def _children(path: str, module: nn.Module) -> Iterator[str]:
    return (f"{path}.{name}".lstrip(".") for name, _ in module.named_children())


def _inside(path: str, others: list[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in others)
