"""Find the repeated blocks of a module tree: containers whose children share a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from strategies.base import Program
from strategies.options import near

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of repeated blocks."""

    path: str
    """Path of the container, as in ``module.get_submodule(path)``."""
    kind: str
    """Class name of its blocks."""
    count: int
    """Number of blocks."""

    def __str__(self) -> str:
        return f"{self.path} ({self.count} x {self.kind})"


def find_containers(module: nn.Module) -> list[Container]:
    """Outermost ModuleLists and Sequentials with two or more children of one class that has children of its own.

    A list of bare layers (Linear, Conv2d) is not a list of blocks: compiling a single layer gains nothing. Lists of
    lists count by the blocks in them, one class of which has to repeat; dicts by blocks that hold no others.
    """
    found: list[Container] = []
    for path, candidate in module.named_modules():
        if not isinstance(candidate, CONTAINERS) or any(_lies_in(path, outer.path) for outer in found):
            continue
        children = list(candidate.children())
        nested = bool(children) and all(map(never_called, children))
        blocks = [block for _, block in _held(candidate)] if nested else children
        kinds = Counter(type(block) for block in blocks if any(True for _ in block.children()))
        if not nested and (len(kinds) != 1 or kinds.total() < len(children)):
            continue
        own_forward = isinstance(candidate, nn.ModuleDict) and not never_called(candidate)
        if own_forward or (isinstance(candidate, nn.ModuleDict) and not nested and any(map(find_containers, children))):
            continue
        if max(kinds.values(), default=0) >= 2:
            names = " and ".join(kind.__name__ for kind in kinds)
            found.append(Container(path=path, kind=names, count=kinds.total()))
    return found


def never_called(module: nn.Module) -> bool:
    """Whether ``module`` only holds others: a ModuleList or ModuleDict without a forward of its own."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _held(container: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Path and module of what ``container`` holds, lists and dicts inside it opened."""
    held: list[tuple[str, nn.Module]] = []
    for name, child in container.named_children():
        inner = f"{path}.{name}".lstrip(".")
        held.extend(_held(child, inner) if never_called(child) else [(inner, child)])
    return held


def _lies_in(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def expand_blocks(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Paths of the blocks: the children of each container named, and every other submodule named as it is.

    Of lists within a list those of the blocks in them, bare layers between these left out.
    """
    blocks: list[str] = []
    for path in paths:
        submodule = module.get_submodule(path)
        if isinstance(submodule, nn.Sequential) or never_called(submodule):
            held = _held(submodule, path)
            if any(map(never_called, submodule.children())):
                held = [(name, block) for name, block in held if any(True for _ in block.children())] or held
            blocks.extend(name for name, _ in held)
        else:
            blocks.append(path)
    return blocks


def kinds_of_several_sizes(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Class names of the blocks at ``paths`` of which a weight has one shape in one block and another in the next."""
    seen: dict[type[nn.Module], dict[str, tuple[int, ...]]] = {}
    kinds: dict[str, None] = {}
    for path in paths:
        block = module.get_submodule(path)
        shapes = seen.setdefault(type(block), {})
        for name, weight in block.named_parameters():
            if is_lazy(weight):  # of no shape before its first call
                continue
            if shapes.setdefault(name, tuple(weight.shape)) != tuple(weight.shape):
                kinds[type(block).__name__] = None
    return list(kinds)


def fixed_sizes(program: Program, paths: Sequence[str], dynamic: bool | None) -> list[str]:
    """Kinds of blocks at ``paths`` because of which regions are to be compiled with ``dynamic=False``.

    Torch takes the second size of a kind for one that changes from batch to batch, and makes symbolic code for all
    further ones (automatic dynamic shapes): most of the stages of a ResNet. Empty where the sizes are the user's or
    another strategy's choice, and where lengths do change.
    """
    if dynamic is not None or program.dynamic is not None or program.ragged:
        return []
    return kinds_of_several_sizes(program.module, paths)


def require_submodules(module: nn.Module, key: str, paths: Sequence[str]) -> None:
    """Raise ValueError naming near matches and candidates when a path is no submodule of ``module``."""
    names = [name for name, _ in module.named_modules()]
    for path in paths:
        if path not in names:
            candidates = [str(container) for container in find_containers(module)]
            raise ValueError(
                f"{key}: {path!r} matches no submodule{near(path, names)}"
                + (f"; repeated blocks found: {', '.join(candidates)}" if candidates else "")
            )
