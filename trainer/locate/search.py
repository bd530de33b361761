"""Search: top-down to the smallest submodule that shows it alone, bottom-up to the rest that does not. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer.locate.tree import Tree
from trainer.locate.trial import Outcome

MOST_CULPRITS = 8
"""Different ones that are looked for before the search gives the rest up as more of the same."""

Try = Callable[[Sequence[str]], Outcome]
"""Compiles these submodules, each by itself, and tells what came of it."""


@dataclass(slots=True, kw_only=True)
class Culprit:
    """The smallest submodule that shows it when nothing else is compiled."""

    path: str
    outcome: Outcome
    copies: list[str] = field(default_factory=list)
    """Others like it, which show it too when they are compiled together."""
    own_code: bool = False
    """Whether it has children that show nothing, together neither: it is its own code, or how they are one graph."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search has found."""

    culprits: list[Culprit] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    """Submodules that show it only when all of them are compiled, none of them alone."""
    together_outcome: Outcome | None = None
    rest: list[str] = field(default_factory=list)
    """Everything else that was compiled, the largest submodules without any of the above."""
    rest_outcome: Outcome | None = None
    """What compiling the rest alone shows; None where there is no rest."""

    def without(self, tree: Tree, paths: Sequence[str]) -> list[str]:
        """What of ``paths`` can be compiled in spite of what was found."""
        whole: list[str] = self.together[:1]
        own_code: list[str] = []
        for culprit in self.culprits:
            kept = own_code if culprit.own_code else whole
            kept += [culprit.path, *culprit.copies]
        return tree.without(paths, whole, own_code)


class Search:
    """Searches what is compiled for what shows a symptom; a set of submodules is tried once.

    Args:
        try_paths: Tries a set of submodules.
    """

    def __init__(self, tree: Tree, try_paths: Try) -> None:
        self._tree, self._try = tree, try_paths
        self._known: dict[frozenset[str], Outcome] = {}

    def run(self, everything: Sequence[str], outcome: Outcome) -> Found:
        """Search ``everything``, which together came to ``outcome``."""
        found = Found(rest=list(everything), rest_outcome=outcome)
        self._known[frozenset(everything)] = outcome
        while found.rest and found.rest_outcome is not None and found.rest_outcome.shows:
            if len(found.culprits) == MOST_CULPRITS:
                break
            culprit = self._descend(found.rest)
            if isinstance(culprit, Culprit):
                found.culprits.append(culprit)
                culprit.copies = self._copies(culprit, found.without(self._tree, everything))
            else:
                found.together = culprit
                found.together_outcome = self._outcome(culprit)
            found.rest = found.without(self._tree, everything)
            found.rest_outcome = self._outcome(found.rest) if found.rest else None
            if found.together:
                break
        return found

    def _descend(self, paths: Sequence[str]) -> Culprit | list[str]:
        """The smallest one below ``paths``, of which something shows it; a list where only several together do."""
        alone = self._first(paths)
        if alone is None:
            return self._smallest(list(paths))
        children = self._tree.children(alone)
        below = self._first(children)
        if below is not None:
            return self._descend([below])
        if len(children) > 1 and self._outcome(children).shows:
            return self._smallest(children)
        return Culprit(path=alone, outcome=self._outcome([alone]), own_code=bool(children))

    def _first(self, paths: Sequence[str]) -> str | None:
        """The first path that shows it alone. Of those alike, one is tried first, then the others together."""
        alike: dict[str, list[str]] = {}
        for path in paths:
            alike.setdefault(self._tree.likeness(path), []).append(path)
        for group in alike.values():
            if self._outcome(group[:1]).shows:
                return group[0]
        for group in alike.values():
            others = group[1:]
            while others and self._outcome(others).shows:
                if len(others) == 1:
                    return others[0]
                half = len(others) // 2
                if self._outcome(others[:half]).shows:
                    others = others[:half]
                elif self._outcome(others[half:]).shows:
                    others = others[half:]
                else:
                    break
        return None

    def _copies(self, culprit: Culprit, rest: Sequence[str]) -> list[str]:
        """Others in ``rest`` like the culprit, if compiling them together shows it too."""
        likeness = self._tree.likeness(culprit.path)
        copies = [path for path in self._below(rest) if self._tree.likeness(path) == likeness]
        return copies if copies and self._outcome(copies).shows else []

    def _below(self, paths: Sequence[str]) -> list[str]:
        return [one for path in paths for one in (path, *self._below(self._tree.children(path)))]

    def _smallest(self, paths: list[str]) -> list[str]:
        """Fewer of ``paths`` that together still show it, until none can be spared."""
        size = max(len(paths) // 2, 1)
        while True:
            spared = False
            for begin in range(0, len(paths), size):
                fewer = paths[:begin] + paths[begin + size :]
                if fewer and self._outcome(fewer).shows:
                    paths, spared = fewer, True
                    break
            if not spared:
                if size == 1:
                    return paths
                size //= 2
            size = min(size, max(len(paths) // 2, 1))

    def _outcome(self, paths: Sequence[str]) -> Outcome:
        key = frozenset(paths)
        if key not in self._known:
            self._known[key] = self._try(list(paths))
        return self._known[key]
