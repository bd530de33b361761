"""Search: the whole, its submodules and its options, trial by trial, and what is found. Needs no torch.

Top-down to the smallest submodule that shows the symptom alone, bottom-up to the rest that does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from strategies.base import Stage, Strategy
from strategies.compose import label
from trainer.auto.rule import refuse_choice

SYMPTOMS = ("fails", "breaks", "differs", "slower")
"""What a compile can do wrong, in the order in which a program is searched for it."""
OPTIMIZER = "optimizer step"
"""Stands among the module paths of a trial for the compiled optimizer step."""
NOTHING_WRONG, FOUND, ONLY_TOGETHER = 0, 1, 3
"""Exit codes."""
MAX_CULPRITS = 8
"""Different ones that are looked for before the search gives the rest up as more of the same."""
CLEARLY = 0.5
"""Share of the time that the whole loses, from which on a part is held to lose it."""
INDUCTOR_DEFAULTS: dict[str, Any] = {"mode": "default", "options": {}}
LEFT_OUT = {
    Stage.CACHE: "left out, so that no store is read or written",
    Stage.STEP: "left out, a captured step runs no single submodule",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One try: these submodules compiled each by itself, all others eager, on every batch one after the other."""

    symptom: str
    paths: tuple[str, ...]
    """Submodules, and ``OPTIMIZER`` for the optimizer step."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy that have another value for this try."""
    min_lost_seconds: float | None = None
    """A step that takes so much longer than eager's is slower; None = from the usual margin on."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    shows: bool
    """Whether the symptom was seen."""
    reason: str | None = None
    """What was seen, in one line; None where nothing was."""
    phase: str | None = None
    """``forward``, ``backward`` or ``optimizer step`` of a failure."""
    where: str | None = None
    """``file:line in function`` that the compiler or the error names."""
    code: str | None = None
    """Text of that line."""
    batch: str | None = None
    """Dtypes and shapes of the batch that showed it."""
    lost_seconds: float | None = None
    """Median seconds that a step takes longer than eager's; negative where it is faster. Timed trials only."""
    crashed: bool = False
    """Whether the process was lost: a signal, or the time limit."""


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
    """The smallest submodule, or the optimizer step, that shows the symptom when nothing else is compiled."""

    path: str
    outcome: Outcome
    kind: str | None = None
    source: str | None = None
    copies: list[str] = field(default_factory=list)
    """Others like it that show it too, compiled together."""
    own_code: bool = False
    """Whether none of its children shows it: it is its own code, or how they are one graph."""


@dataclass(slots=True, kw_only=True)
class OptionTried:
    """One option of the strategy with another value, everything compiled."""

    text: str
    """As it is typed."""
    changes: dict[str, Any] = field(default_factory=dict)
    shows: bool = False
    reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """What a search found."""

    task: str
    strategies: str
    symptom: str | None = None
    """One of ``SYMPTOMS``; None where nothing is wrong."""
    searched_for: list[str] = field(default_factory=list)
    """Symptoms that the whole was tried for."""
    whole: Outcome | None = None
    """What was seen with everything compiled."""
    culprits: list[Culprit] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    """What shows it when all of it is compiled, and nothing of it alone does."""
    options: list[OptionTried] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    """Largest submodules that hold no culprit."""
    rest_is_clean: bool | None = None
    """Whether compiling the rest shows nothing; None where there is no rest."""
    rest_reason: str | None = None
    trials: int = 0
    seconds: float = 0.0
    device: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        if self.symptom is None:
            return NOTHING_WRONG
        return FOUND if self.culprits else ONLY_TOGETHER


class Bench(Protocol):
    """What does the trials, in this process or another."""

    site: Site

    def trial(self, trial: Trial) -> Outcome: ...


class Search:
    """One search from the whole to the options. A set of submodules is tried once.

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
        self._min_lost_seconds: float | None = None
        report.device = site.device
        report.notes += site.notes

    def run(self, symptoms: Sequence[str] = SYMPTOMS) -> None:
        """Look for the first of ``symptoms`` that the whole shows, and for what is at fault."""
        report, began, queue = self._report, time.perf_counter(), list(symptoms)
        for symptom in queue:
            report.searched_for.append(symptom)
            self._symptom = symptom
            report.whole = outcome = self._try("everything", self._site.everything)
            if outcome.shows:
                report.symptom = symptom
                self._known = {frozenset(self._site.everything): outcome}
                if symptom == "slower" and outcome.lost_seconds is not None:
                    self._min_lost_seconds = CLEARLY * outcome.lost_seconds
                self._submodules(outcome)
                if [culprit.path for culprit in report.culprits] != [OPTIMIZER]:
                    self._options()
                break
            if outcome.reason is not None:
                report.notes.append(f"looked for '{symptom}', and it failed: {outcome.reason}")
                if "fails" not in queue:
                    queue.append("fails")
        report.seconds = round(time.perf_counter() - began, 1)

    def _submodules(self, rest: Outcome) -> None:
        report, everything = self._report, self._site.everything
        report.rest = list(everything)
        while report.rest and rest.shows and len(report.culprits) < MAX_CULPRITS:
            culprit = self._descend(report.rest)
            if culprit is None:
                report.together, report.rest = report.rest, []
                return
            report.culprits.append(culprit)
            likeness = self._likeness(culprit.path)
            alike = [one for one in self._below(self._without_found(everything)) if self._likeness(one) == likeness]
            culprit.copies = alike if alike and self._outcome(alike).shows else []
            report.rest = self._without_found(everything)
            if report.rest:
                rest = self._outcome(report.rest)
        if report.rest:
            report.rest_is_clean = not rest.shows and rest.reason is None
            report.rest_reason = rest.reason

    def _descend(self, paths: Sequence[str]) -> Culprit | None:
        """The smallest one below ``paths`` that shows it alone, and of which no child does; None where none does."""
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
        """The first path that shows it alone. Of those alike, one is tried first, then the others together."""
        alike: dict[str, list[str]] = {}
        for path in paths:
            alike.setdefault(self._likeness(path), []).append(path)
        for group in alike.values():
            if self._outcome(group[:1]).shows:
                return group[0]
        for _, *others in alike.values():
            while others and self._outcome(others).shows:
                if len(others) == 1:
                    return others[0]
                half = len(others) // 2
                others = next((one for one in (others[:half], others[half:]) if self._outcome(one).shows), [])
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

    def _options(self) -> None:
        """Which option, changed alone, makes it go away with everything compiled."""
        for option in options(self._site, self._symptom):
            outcome = self._try(f"everything, {option.text}", self._site.everything, option.changes)
            option.shows, option.reason = outcome.shows, outcome.reason
            self._report.options.append(option)

    def _outcome(self, paths: Sequence[str]) -> Outcome:
        key = frozenset(paths)
        if key not in self._known:
            self._known[key] = self._try(named(paths), tuple(paths))
        return self._known[key]

    def _try(self, what: str, paths: tuple[str, ...], changes: dict[str, Any] | None = None) -> Outcome:
        self._report.trials += 1
        number, what = self._report.trials, f"{self._symptom}? {what}"
        self._begins(number, what)
        given = Trial(
            symptom=self._symptom, paths=paths, changes=changes or {}, min_lost_seconds=self._min_lost_seconds
        )
        outcome = self._bench.trial(given)
        self._ended(number, what, outcome)
        return outcome


def options(site: Site, symptom: str) -> Iterator[OptionTried]:
    """Single changes of the strategy's options that are worth a try, towards torch.compile's defaults."""
    requests = list(site.requests.values())
    prefix = "every part with " if site.strategy == "modular" else f"compile.{site.strategy}."

    def typed(name: str, value: Any, **more: Any) -> OptionTried:
        text = "null" if value is None else str(value).lower()
        return OptionTried(text=f"{prefix}{name}={text}", changes={name: value, **more})

    set_anywhere = {name for request in requests for name in request}
    yield from (
        typed(name, value) for name, value in (*INDUCTOR_DEFAULTS.items(), ("dynamic", None)) if name in set_anywhere
    )
    if symptom == "fails" and any(request.get("fullgraph", True) for request in requests):
        yield typed("fullgraph", False)
    used = {request.get("backend", "inductor") for request in requests}
    for backend in ("aot_eager", "eager") if requests and symptom in ("fails", "differs") else ():
        if backend in used:
            break
        yield typed("backend", backend, **INDUCTOR_DEFAULTS)


def named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def holds(outer: str, path: str) -> bool:
    """Whether ``path`` is ``outer`` or lies in it."""
    return path == outer or path.startswith(f"{outer}.")


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
