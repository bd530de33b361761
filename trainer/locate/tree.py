"""Tree: walks what a program compiles, and covers all of it but a few submodules. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from trainer.locate.trial import OPTIMIZER, Node


class Tree:
    """The regions of a program and what they hold.

    Args:
        regions: What is compiled, outermost; the optimizer step is known by the path ``OPTIMIZER`` without being here.
    """

    def __init__(self, regions: Iterable[Node]) -> None:
        self._nodes = {node.path: node for region in regions for node in _all(region)}

    def __contains__(self, path: str) -> bool:
        return path in self._nodes

    def node(self, path: str) -> Node:
        """The submodule at ``path``."""
        return self._nodes[path]

    def likeness(self, path: str) -> str:
        """Equal for paths that the compiler can be expected to treat alike."""
        return self._nodes[path].likeness if path in self._nodes else path

    def children(self, path: str) -> list[str]:
        """The nearest submodules below ``path`` that a step calls."""
        return [] if path == OPTIMIZER else list(_called(self._nodes[path].children))

    def without(self, paths: Sequence[str], left_out: Collection[str], own_code: Collection[str] = ()) -> list[str]:
        """All of ``paths`` but ``left_out``: as they are where they hold none of it, else the largest submodules in
        them that do not. The code of those in between stays eager, and of ``own_code`` nothing but its own code."""
        kept: list[str] = []
        for path in paths:
            if any(holds(out, path) for out in left_out):
                continue
            if any(holds(path, out) for out in (*left_out, *own_code)):
                kept += self.without(self.children(path), left_out, own_code)
            else:
                kept.append(path)
        return kept


def holds(outer: str, path: str) -> bool:
    """Whether ``path`` is ``outer`` or lies in it."""
    return path == outer or path.startswith(f"{outer}.")


def _all(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _all(child)


def _called(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        if node.called:
            yield node.path
        else:
            yield from _called(node.children)
