"""Search: the whole and its submodules, trial by trial, and what is found. Needs no torch.

Top-down, half by half, to the smallest submodule that alone differs from eager; then all the rest, once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from strategies.base import Stage, Strategy, holds, label
from trainer.auto import refuse_choice

OPTIMIZER = "optimizer step"
"""Stands among the module paths of a trial for the compiled optimizer step."""
MAX_SHAPES = 4
"""Shapes of batch that are tried, the first ones."""
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
    """A submodule, or the optimizer step."""

    path: str
    about: str = ""
    """Its class, and ``file:line`` at which that begins where there is a source to read."""
    children: list[Node] = field(default_factory=list)
    """The submodules below, those of a list of modules in its place: it is not called."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a search found."""

    whole: Outcome
    """What was seen with everything compiled."""
    culprit: Node | None = None
    """The smallest submodule, or the optimizer step, that differs when nothing else is compiled; None where nothing
    differs, and where it takes several together."""
    outcome: Outcome | None = None
    """Of compiling the culprit alone."""
    copies: list[str] = field(default_factory=list)
    """Other submodules of its class, where the rest differs with them."""
    rest: list[str] = field(default_factory=list)
    """Largest submodules that hold neither."""
    rest_outcome: Outcome | None = None
    """Of compiling the rest; None where there is no rest, or nothing that differs."""

    @property
    def rest_is_clean(self) -> bool:
        outcome = self.rest_outcome
        return outcome is not None and not outcome.differs and outcome.reason is None


class Search:
    """One search, from the whole to its parts.

    Args:
        everything: What the strategies hand to the compiler, each with what it holds.
        trial: Compiles the submodules at these paths, and the optimizer step where ``OPTIMIZER`` is among them, and
            says what came of it. A set of submodules is tried once.
    """

    def __init__(self, everything: list[Node], trial: Callable[[Sequence[str]], Outcome]) -> None:
        self._everything, self._trial = everything, trial
        self._known: dict[frozenset[str], Outcome] = {}

    def run(self) -> Report:
        """Look for what differs. Raises ValueError where everything compiled cannot be compared with eager."""
        report = Report(whole=self._outcome(self._everything))
        if report.whole.differs:
            report.culprit = culprit = self._smallest(self._everything)
            if culprit is not None:
                report.outcome = self._outcome([culprit])
                # All without it, or without all of its class. What holds one of them is taken apart.
                like = [one.path for one in _all(self._everything) if culprit.about and one.about == culprit.about]
                for out in ([culprit.path], like):
                    rest = list(_without(self._everything, out))
                    report.rest = [one.path for one in rest]
                    report.copies = [path for path in out if path != culprit.path]
                    report.rest_outcome = self._outcome(rest) if rest else None
                    if report.rest_outcome is None or not report.rest_outcome.differs or len(like) < 2:
                        break
        elif report.whole.reason is not None:
            raise ValueError(
                f"the compiled step cannot be compared with eager's: {report.whole.reason}; crucible explain says "
                "what does not compile"
            )
        return report

    def _smallest(self, nodes: Sequence[Node]) -> Node | None:
        """Of ``nodes``, which differ together, and what they hold: one that differs, but no child of it; or None."""
        if len(nodes) == 1:
            (node,) = nodes
            inner = self._smallest(node.children) if node.children and self._outcome(node.children).differs else None
            return inner or node
        half = len(nodes) // 2
        part = next((part for part in (nodes[:half], nodes[half:]) if self._outcome(part).differs), None)
        return None if part is None else self._smallest(part)

    def _outcome(self, nodes: Sequence[Node]) -> Outcome:
        paths = [node.path for node in nodes]
        if frozenset(paths) not in self._known:
            self._known[frozenset(paths)] = self._trial(paths)
        return self._known[frozenset(paths)]


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


def _without(nodes: Iterable[Node], out: Sequence[str]) -> Iterator[Node]:
    """The largest ones of ``nodes`` and below them that hold none of the paths ``out``."""
    for node in nodes:
        if any(holds(node.path, path) for path in out):
            yield from _without(node.children, out)
        else:
            yield node
