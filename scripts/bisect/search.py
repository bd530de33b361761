"""Search: the whole and its submodules, trial by trial, and what is found. Needs no torch.

Top-down to the smallest submodule that alone differs from eager, bottom-up to the rest that does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from strategies.base import Stage, Strategy, holds
from strategies.compose import label
from trainer.auto import refuse_choice

OPTIMIZER = "optimizer step"
"""Stands among the module paths of a trial for the compiled optimizer step."""
NOTHING_WRONG, FOUND, ONLY_TOGETHER = 0, 1, 3
"""Exit codes."""
MAX_CULPRITS = 8
"""Different ones that are looked for before the search gives the rest up as more of the same."""
LEFT_OUT = {
    Stage.CACHE: "left out, so that no store is read or written",
    Stage.STEP: "left out, a captured step runs no single submodule",
}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one trial: some submodules compiled each by itself, all others eager, on every batch one after the other."""

    differs: bool
    reason: str | None = None
    """In one line: the difference, or why nothing could be compared, the step failed for instance."""
    batch: str | None = None
    """Dtypes and shapes of the batch that showed it."""


@dataclass(slots=True, kw_only=True)
class Node:
    """A submodule, and those below it."""

    path: str
    kind: str
    """Name of its class."""
    source: str | None = None
    """``file:line`` at which its class begins; None where there is none to read."""
    likeness: str = ""
    """Equal for submodules that the compiler can be expected to treat alike: class, children, sizes of weights."""
    called: bool = True
    """Whether a step calls it: a list of modules is not called, nor is a layer whose weight alone is used."""
    children: list[Node] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Site:
    """What there is to search: the regions of a program."""

    regions: list[Node]
    """What the strategies hand to the compiler, each with what it holds."""
    strategy: str | None
    """Name of the strategy that does so; None where only the optimizer step is compiled."""
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options of each region that a ``Part`` of ``modular`` would have to set, by path."""
    optimizer: bool = False
    """Whether a strategy compiles the optimizer step."""
    device: str = "cpu"
    notes: list[str] = field(default_factory=list)

    @property
    def everything(self) -> tuple[str, ...]:
        return (*(node.path for node in self.regions), *([OPTIMIZER] if self.optimizer else []))


@dataclass(slots=True, kw_only=True)
class Culprit:
    """The smallest submodule, or the optimizer step, that differs when nothing else is compiled."""

    path: str
    outcome: Outcome
    kind: str | None = None
    source: str | None = None
    copies: list[str] = field(default_factory=list)
    """Others like it that differ too, compiled together."""
    own_code: bool = False
    """Whether none of its children differs: it is its own code, or how they are one graph."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a search found."""

    task: str
    strategies: str
    whole: Outcome | None = None
    """What was seen with everything compiled."""
    culprits: list[Culprit] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    """What differs when all of it is compiled, and nothing of it alone does."""
    rest: list[str] = field(default_factory=list)
    """Largest submodules that hold no culprit."""
    rest_is_clean: bool | None = None
    """Whether compiling the rest equals eager; None where there is no rest."""
    rest_reason: str | None = None
    trials: int = 0
    seconds: float = 0.0
    device: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        if self.whole is None or not self.whole.differs:
            return NOTHING_WRONG
        return FOUND if self.culprits else ONLY_TOGETHER


class Bench(Protocol):
    """What does the trials."""

    site: Site

    def trial(self, paths: Sequence[str]) -> Outcome:
        """Compile the submodules at ``paths``, and the optimizer step where ``OPTIMIZER`` is among them."""
        ...


class Search:
    """One search, from the whole to its parts. A set of submodules is tried once.

    Args:
        report: Filled in as the search goes.
        begins: Called before each trial with its number and what is compiled, as it may take long.
        ended: Called after each trial with the same, and what came of it.
    """

    def __init__(
        self,
        bench: Bench,
        report: Report,
        *,
        begins: Callable[[int, str], object] = lambda number, what: None,
        ended: Callable[[int, str, Outcome], object] = lambda number, what, outcome: None,
    ) -> None:
        self._bench, self._report, self._begins, self._ended = bench, report, begins, ended
        self._site = site = bench.site
        self._nodes = {node.path: node for node in _all(site.regions)}
        self._known: dict[frozenset[str], Outcome] = {}
        report.device = site.device
        report.notes += site.notes

    def run(self) -> None:
        """Look for what differs. Raises ValueError where everything compiled cannot be compared with eager."""
        report, began = self._report, time.perf_counter()
        report.whole = outcome = self._outcome(self._site.everything, "everything")
        if outcome.differs:
            self._submodules(outcome)
        elif outcome.reason is not None:
            raise ValueError(
                f"compile={report.strategies}: the compiled step cannot be compared with eager's: {outcome.reason}; "
                "crucible explain says what does not compile"
            )
        report.seconds = round(time.perf_counter() - began, 1)

    def _submodules(self, rest: Outcome) -> None:
        report, everything = self._report, self._site.everything
        report.rest = list(everything)
        while report.rest and rest.differs and len(report.culprits) < MAX_CULPRITS:
            culprit = self._descend(report.rest)
            if culprit is None:
                report.together, report.rest = report.rest, []
                return
            report.culprits.append(culprit)
            likeness = self._likeness(culprit.path)
            alike = [one for one in self._below(self._without_found(everything)) if self._likeness(one) == likeness]
            culprit.copies = alike if alike and self._outcome(alike).differs else []
            report.rest = self._without_found(everything)
            if report.rest:
                rest = self._outcome(report.rest)
        if report.rest:
            report.rest_is_clean = not rest.differs and rest.reason is None
            report.rest_reason = rest.reason

    def _descend(self, paths: Sequence[str]) -> Culprit | None:
        """The smallest one below ``paths`` that differs alone, and of which no child does; None where none does."""
        found: str | None = None
        while (below := self._first(paths)) is not None:
            found, paths = below, self._children(below)
        if found is None:
            return None
        node = self._nodes.get(found)
        culprit = Culprit(path=found, outcome=self._outcome([found]), own_code=bool(paths))
        if node is not None:
            culprit.kind, culprit.source = node.kind, node.source
        return culprit

    def _first(self, paths: Sequence[str]) -> str | None:
        """The first path that differs alone. Of those alike, one is tried first, then the others together."""
        alike: dict[str, list[str]] = {}
        for path in paths:
            alike.setdefault(self._likeness(path), []).append(path)
        for group in alike.values():
            if self._outcome(group[:1]).differs:
                return group[0]
        for _, *others in alike.values():
            while others and self._outcome(others).differs:
                if len(others) == 1:
                    return others[0]
                half = len(others) // 2
                others = next((one for one in (others[:half], others[half:]) if self._outcome(one).differs), [])
        return None

    def _without_found(self, paths: Sequence[str]) -> list[str]:
        """What of ``paths`` can be compiled in spite of what was found."""
        whole: list[str] = []
        own_code: list[str] = []
        for culprit in self._report.culprits:
            kept = own_code if culprit.own_code else whole
            kept += [culprit.path, *culprit.copies]
        return self._without(paths, whole, own_code)

    def _without(self, paths: Sequence[str], left_out: Collection[str], own_code: Collection[str]) -> list[str]:
        """All of ``paths`` but ``left_out``: as they are where they hold none of it, else the largest submodules in
        them that do not. The code of those in between stays eager, and of ``own_code`` nothing but its own code."""
        kept: list[str] = []
        for path in paths:
            if any(holds(out, path) for out in left_out):
                continue
            if any(holds(path, out) for out in (*left_out, *own_code)):
                kept += self._without(self._children(path), left_out, own_code)
            else:
                kept.append(path)
        return kept

    def _likeness(self, path: str) -> str:
        return self._nodes[path].likeness if path in self._nodes else path

    def _children(self, path: str) -> list[str]:
        """The nearest submodules below ``path`` that a step calls."""
        return [] if path == OPTIMIZER else list(_called(self._nodes[path].children))

    def _below(self, paths: Sequence[str]) -> list[str]:
        return [one for path in paths for one in (path, *self._below(self._children(path)))]

    def _outcome(self, paths: Sequence[str], what: str | None = None) -> Outcome:
        key, report = frozenset(paths), self._report
        if key not in self._known:
            report.trials += 1
            number, what = report.trials, what or named(paths)
            self._begins(number, what)
            self._known[key] = outcome = self._bench.trial(paths)
            self._ended(number, what, outcome)
        return self._known[key]


def named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def searched(strategies: Iterable[Strategy]) -> tuple[list[Strategy], list[str]]:
    """The strategies that can be searched, and notes about the others. Raises ValueError when none compiles."""
    given = list(strategies)
    refuse_choice(given)
    kept = [each for each in given if each.stage not in LEFT_OUT]
    notes = [f"{each.name}: {LEFT_OUT[each.stage]}" for each in given if each.stage in LEFT_OUT]
    if not any(each.stage in (Stage.MODULE, Stage.OPTIMIZER) for each in kept):
        raise ValueError(f"compile={label(given)}: compiles nothing, there is nothing to search; try compile=whole")
    return kept, notes


def _all(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(node.children)


def _called(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        if node.called:
            yield node.path
        else:
            yield from _called(node.children)
