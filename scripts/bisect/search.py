"""Search: the whole, its shapes of batch, its submodules and its options, trial by trial. Needs no torch.

Top-down to the smallest submodule that shows the symptom alone, bottom-up to the rest that does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from scripts.bisect.report import OPTIMIZER, SYMPTOMS, Culprit, Node, OptionTried, Outcome, Report, Site, Trial, named
from strategies.base import Stage, Strategy
from strategies.compose import label
from trainer.auto.rule import refuse_choice

MAX_CULPRITS = 8
"""Different ones that are looked for before the search gives the rest up as more of the same."""
CLEARLY = 0.5
"""Share of the time that the whole loses, from which on a part is held to lose it."""
INDUCTOR_DEFAULTS: dict[str, Any] = {"mode": "default", "combo_kernels": None, "coordinate_descent": None}
DEFAULTS: dict[str, Any] = {**INDUCTOR_DEFAULTS, "dynamic": None, "activation_memory_budget": None}
"""Options that are tried at their default."""
LEFT_OUT = {
    Stage.CACHE: "left out, so that no store is read or written",
    Stage.STEP: "left out, a captured step runs no single submodule",
}

Try = Callable[[Sequence[str]], Outcome]
"""Compiles these submodules, each by itself, and returns what came of it."""


class Bench(Protocol):
    """What does the trials, in this process or another."""

    site: Site

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial."""
        ...


class Tree:
    """The regions of a program and what they hold; the optimizer step is known as ``OPTIMIZER`` without being here."""

    def __init__(self, regions: Iterable[Node]) -> None:
        self.nodes = {node.path: node for region in regions for node in _all(region)}

    def likeness(self, path: str) -> str:
        """Equal for paths that the compiler can be expected to treat alike."""
        return self.nodes[path].likeness if path in self.nodes else path

    def children(self, path: str) -> list[str]:
        """The nearest submodules below ``path`` that a step calls."""
        return [] if path == OPTIMIZER else list(_called(self.nodes[path].children))

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


class Search:
    """Searches submodules for what shows a symptom; a set of them is tried once. What it finds is in the report."""

    def __init__(self, tree: Tree, try_paths: Try, report: Report) -> None:
        self._tree, self._try, self._report = tree, try_paths, report
        self._known: dict[frozenset[str], Outcome] = {}

    def run(self, everything: Sequence[str], outcome: Outcome) -> None:
        """Search ``everything``, which together came to ``outcome``."""
        report = self._report
        report.rest, rest = list(everything), outcome
        self._known[frozenset(everything)] = outcome
        while report.rest and rest.shows and len(report.culprits) < MAX_CULPRITS and not report.together:
            culprit = self._descend(report.rest)
            if isinstance(culprit, Culprit):
                report.culprits.append(culprit)
                culprit.copies = self._copies(culprit, self._without_found(everything))
            else:
                report.together, report.together_reason = culprit, self._outcome(culprit).reason
            report.rest = self._without_found(everything)
            if report.rest:
                rest = self._outcome(report.rest)
        if report.rest:
            report.rest_is_clean = not rest.shows and rest.reason is None
            report.rest_reason = rest.reason

    def _without_found(self, paths: Sequence[str]) -> list[str]:
        """What of ``paths`` can be compiled in spite of what was found."""
        whole: list[str] = self._report.together[:1]
        own_code: list[str] = []
        for culprit in self._report.culprits:
            kept = own_code if culprit.own_code else whole
            kept += [culprit.path, *culprit.copies]
        return self._tree.without(paths, whole, own_code)

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
        node = self._tree.nodes.get(alone)
        about: dict[str, Any] = {} if node is None else {"kind": node.kind, "file": node.file, "line": node.line}
        return Culprit(path=alone, outcome=self._outcome([alone]), own_code=bool(children), **about)

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


class Investigation:
    """One search from the whole to the options.

    Args:
        report: Filled in as the search goes.
        begins: Called before each trial with what is compiled, as it may take long.
        ended: Called after each trial with its number, what was compiled, and what came of it.
    """

    def __init__(
        self,
        bench: Bench,
        report: Report,
        *,
        begins: Callable[[str], None] = lambda what: None,
        ended: Callable[[int, str, Outcome], None] = lambda number, what, outcome: None,
    ) -> None:
        self._bench, self._report, self._begins, self._ended = bench, report, begins, ended
        self._site = site = bench.site
        self._batches: tuple[int, ...] = tuple(range(len(site.batches)))
        self._min_lost_seconds: float | None = None
        self._began = time.perf_counter()
        report.compiled, report.shapes = list(site.everything), list(site.batches)
        report.device, report.versions = site.device, dict(site.versions)
        report.notes.extend(site.notes)

    def run(self, symptoms: Sequence[str] = SYMPTOMS) -> None:
        """Look for the first of ``symptoms`` that the whole shows, and for what is at fault."""
        report = self._report
        whole = self._whole(symptoms)
        if whole is not None:
            whole = self._shapes(whole)
            if report.symptom == "slower" and whole.lost_seconds is not None:
                self._min_lost_seconds = CLEARLY * whole.lost_seconds
            Search(Tree(self._site.regions), self._try, report).run(self._site.everything, whole)
            self._options()
        report.seconds = round(time.perf_counter() - self._began, 1)

    @property
    def showing_batch(self) -> int:
        return self._batches[-1]

    def _whole(self, symptoms: Sequence[str]) -> Outcome | None:
        """Everything compiled, for one symptom after the other; the outcome of the first that shows."""
        queue = list(symptoms)
        for symptom in queue:
            self._report.searched_for.append(symptom)
            self._symptom = symptom
            # Only the last batch of a trial is timed.
            orders = [(number,) for number in self._batches] if symptom == "slower" else [self._batches]
            for order in orders:
                outcome = self._do("everything", self._site.everything, order)
                self._report.whole = outcome
                if outcome.shows:
                    self._report.symptom = symptom
                    return outcome
                if outcome.reason is not None:
                    self._report.notes.append(f"looked for '{symptom}', and it failed: {outcome.reason}")
                    if "fails" not in self._report.searched_for:
                        queue.append("fails")
                    break
        return None

    def _shapes(self, whole: Outcome) -> Outcome:
        """Which batches show it alone, or which ones after each other; the search continues with these."""
        numbers, shapes, everything = self._batches, self._site.batches, self._site.everything
        if len(numbers) == 1:
            return whole

        def alone(number: int) -> Outcome:
            return self._do(f"everything, batch {shapes[number]}", everything, (number,))

        last = whole.batch if whole.batch is not None else numbers[-1]
        found = alone(last)
        if found.shows:
            self._batches = (last,)
            shows = {number: number == last or alone(number).shows for number in numbers}
            self._report.shapes_that_show = [shapes[number] for number in numbers if shows[number]]
            return found
        self._batches, found = numbers[: numbers.index(last) + 1], whole
        for number in self._batches[:-1] if len(self._batches) > 2 else ():
            pair = self._do(f"everything, batch {shapes[number]} and then {shapes[last]}", everything, (number, last))
            if pair.shows:
                self._batches, found = (number, last), pair
                break
        self._report.shapes_that_show = []
        self._report.shape_sequence = [shapes[number] for number in self._batches]
        return found

    def _options(self) -> None:
        """Which option, changed alone, makes it go away with everything compiled."""
        report = self._report
        assert report.symptom is not None
        if [culprit.path for culprit in report.culprits] == [OPTIMIZER]:
            return
        for option in options(self._site, report.symptom, several_shapes=len(self._batches) > 1):
            outcome = self._do(f"everything, {option.text}", self._site.everything, self._batches, option.changes)
            option.shows, option.reason = outcome.shows, outcome.reason
            report.options.append(option)

    def _try(self, paths: Sequence[str]) -> Outcome:
        outcome = self._do(named(paths), tuple(paths), self._batches)
        if len(paths) == 1 and outcome.lost_seconds is not None:
            self._report.lost_seconds_by_part[paths[0]] = outcome.lost_seconds
        return outcome

    def _do(
        self, what: str, paths: tuple[str, ...], batches: tuple[int, ...], changes: dict[str, Any] | None = None
    ) -> Outcome:
        self._report.trials += 1
        self._begins(f"{self._symptom}? {what}")
        trial = Trial(
            symptom=self._symptom,
            paths=paths,
            batches=batches,
            changes=changes or {},
            min_lost_seconds=self._min_lost_seconds,
        )
        outcome = self._bench.trial(trial)
        self._ended(self._report.trials, f"{self._symptom}? {what}", outcome)
        return outcome


def options(site: Site, symptom: str, *, several_shapes: bool) -> Iterator[OptionTried]:
    """Single changes of the strategy's options that are worth a try, towards torch.compile's defaults.

    ``several_shapes``: it takes batches of several shapes, so that ``dynamic`` may matter.
    """
    requests = list(site.requests.values())
    if not requests:
        return
    prefix = "every part with " if site.strategy == "modular" else f"compile.{site.strategy}."

    def typed(name: str, value: Any) -> OptionTried:
        text = "null" if value is None else str(value).lower()
        return OptionTried(text=f"{prefix}{name}={text}", changes={name: value})

    set_anywhere = {name for request in requests for name in request}
    for name, default in DEFAULTS.items():
        if name in set_anywhere:
            yield typed(name, default)
    given = [request["options"] for request in requests if request.get("options")]
    if given and all(each == given[0] for each in given):  # of several, none could be put in place of the others
        for option in given[0]:
            fewer = {name: value for name, value in given[0].items() if name != option}
            yield OptionTried(text=f"without the option {option}", changes={"options": fewer})
    if several_shapes and "dynamic" not in set_anywhere:
        yield from (typed("dynamic", value) for value in (False, True))
    if symptom == "fails" and any(request.get("fullgraph", True) for request in requests):
        yield typed("fullgraph", False)
    if symptom not in ("breaks", "recompiles", "slower"):
        used = {request.get("backend", "inductor") for request in requests}
        for backend in ("aot_eager", "eager"):
            if backend in used:
                break
            option = typed("backend", backend)
            option.changes |= {**INDUCTOR_DEFAULTS, "options": {}}
            if backend == "eager":
                option.changes["activation_memory_budget"] = None
            option.backend = True
            yield option


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
