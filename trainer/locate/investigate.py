"""Investigate: the whole, its shapes of batch, its submodules, its options: trial by trial. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.locate.options import changes
from trainer.locate.report import Blamed, OptionTried, Report
from trainer.locate.search import Culprit, Found, Search
from trainer.locate.tree import Tree
from trainer.locate.trial import OPTIMIZER, SYMPTOMS, Outcome, Site, Trial

CLEARLY = 0.5
"""Share of the time that the whole loses, from which on a part is held to lose it."""

Progress = Callable[[int, str, Outcome], None]
"""Told after each trial: its number, what was compiled, what came of it."""


class TriesOut(Protocol):
    """A bench, in this process or another."""

    site: Site

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial."""
        ...


class Investigation:
    """One search.

    Args:
        bench: Does the trials.
        report: Filled in as the search goes.
        begins: Told before each trial what is compiled, as it may take long.
        ended: Told after it.
    """

    def __init__(
        self,
        bench: TriesOut,
        report: Report,
        *,
        begins: Callable[[str], None] = lambda what: None,
        ended: Progress = lambda number, what, outcome: None,
    ) -> None:
        self._bench, self._report, self._begins, self._ended = bench, report, begins, ended
        self._site, self._tree = bench.site, Tree(bench.site.regions)
        self._everything = self._site.everything
        self._batches: tuple[int, ...] = tuple(range(len(self._site.batches)))
        self._least: float | None = None
        self._began = time.perf_counter()
        report.compiled, report.shapes = list(self._everything), list(self._site.batches)
        report.device, report.versions = self._site.device, dict(self._site.versions)
        report.notes.extend(self._site.notes)

    def run(self, symptoms: Sequence[str] = SYMPTOMS) -> None:
        """Look for the first of ``symptoms`` that the whole shows, and for what is at fault."""
        report = self._report
        whole = self._whole(symptoms)
        if whole is not None and report.symptom is not None:
            report.reason, report.phase, report.where, report.code = whole.reason, whole.phase, whole.where, whole.code
            whole = self._shapes(whole)
            if report.symptom == "slower" and whole.lost_seconds is not None:
                self._least = CLEARLY * whole.lost_seconds
            found = Search(self._tree, self._try).run(self._everything, whole)
            self._note(found)
            self._options()
        report.seconds = round(time.perf_counter() - self._began, 1)

    @property
    def showing_batch(self) -> int:
        """Number of the batch with which a reproducer shows it."""
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
                outcome = self._do("everything", self._everything, order)
                if symptom == "slower":
                    self._report.lost_seconds = outcome.lost_seconds
                    self._report.eager_seconds = outcome.eager_seconds
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
        """Which batches show it alone, or which ones after each other; the search goes on with these."""
        numbers, site, report = self._batches, self._site, self._report
        if len(numbers) == 1:
            return whole
        last = whole.batch if whole.batch is not None else numbers[-1]
        alone = {last: self._do(f"everything, batch {site.batches[last]}", self._everything, (last,))}
        if alone[last].shows:
            self._batches = (last,)
            for number in numbers:
                if number != last:
                    what = f"everything, batch {site.batches[number]}"
                    alone[number] = self._do(what, self._everything, (number,))
            report.shapes_that_show = [site.batches[number] for number in numbers if alone[number].shows]
            return alone[last]
        self._batches = numbers[: numbers.index(last) + 1]
        found = whole
        for number in self._batches[:-1] if len(self._batches) > 2 else ():
            what = f"everything, batch {site.batches[number]} and then {site.batches[last]}"
            pair = self._do(what, self._everything, (number, last))
            if pair.shows:
                self._batches, found = (number, last), pair
                break
        report.shapes_that_show = []
        report.shape_sequence = [site.batches[number] for number in self._batches]
        return found

    def _options(self) -> None:
        """Which option, changed alone, makes it go with everything compiled."""
        report = self._report
        assert report.symptom is not None
        if [culprit.path for culprit in report.culprits] == [OPTIMIZER]:
            return
        for change in changes(self._site, report.symptom, several_shapes=len(self._batches) > 1):
            outcome = self._do(f"everything, {change.said}", self._everything, self._batches, change.changes)
            report.options.append(
                OptionTried(
                    said=change.said,
                    shows=outcome.shows,
                    reason=outcome.reason,
                    changes=change.changes,
                    backend=change.backend,
                )
            )

    def _note(self, found: Found) -> None:
        report = self._report
        report.culprits = [self._blamed(culprit) for culprit in found.culprits]
        report.together = found.together
        report.together_reason = found.together_outcome.reason if found.together_outcome else None
        report.rest = found.rest
        if found.rest and found.rest_outcome is not None:
            report.rest_is_clean = not found.rest_outcome.shows and found.rest_outcome.reason is None
            report.rest_reason = found.rest_outcome.reason

    def _blamed(self, culprit: Culprit) -> Blamed:
        blamed = Blamed(
            path=culprit.path,
            reason=culprit.outcome.reason,
            phase=culprit.outcome.phase,
            where=culprit.outcome.where,
            code=culprit.outcome.code,
            copies=culprit.copies,
            own_code=culprit.own_code,
        )
        if culprit.path in self._tree:
            node = self._tree.node(culprit.path)
            blamed.kind, blamed.file, blamed.line = node.kind, node.file, node.line
        return blamed

    def _try(self, paths: Sequence[str]) -> Outcome:
        outcome = self._do(named(paths), tuple(paths), self._batches)
        if len(paths) == 1 and outcome.lost_seconds is not None:
            self._report.lost_seconds_by_part[paths[0]] = outcome.lost_seconds
        return outcome

    def _do(
        self, what: str, paths: tuple[str, ...], batches: tuple[int, ...], changed: dict[str, Any] | None = None
    ) -> Outcome:
        self._report.trials += 1
        self._begins(f"{self._symptom}? {what}")
        trial = Trial(
            symptom=self._symptom,
            paths=paths,
            batches=batches,
            changes=changed or {},
            least_lost_seconds=self._least,
        )
        outcome = self._bench.trial(trial)
        self._ended(self._report.trials, f"{self._symptom}? {what}", outcome)
        return outcome


def named(paths: Sequence[str], most: int = 3) -> str:
    """A few paths in one line."""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more


def folder_name(report: Report) -> Path:
    """Where a reproducer goes by default: named after what is at fault."""
    place = report.culprits[0].path.replace(".", "-") if report.culprits else "together"
    return Path("outputs") / "bisect" / f"{report.task}-{place}"
