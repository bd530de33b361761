"""Measurement: one task under one list of strategies in several rounds, and the base record of them.

A base record is a small JSON file: for each task and list of strategies its rounds, with the lines of breaks and
recompiles, device and versions. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.explain import findings
from trainer.report.comparison import BUSY, UNCERTAIN, compare_runs
from trainer.report.runs import Cell, Run, deciding, fixed_settings, workload_of
from trainer.telemetry import source_lines
from trainer.telemetry.record import RunRecord, set_parameters
from trainer.telemetry.serialization import dataclass_from_json, nan_to_none, printable, written_whole

SCHEMA = 1
"""Raised when the meaning of a field changes."""
FILE_NAME = "crucible-check.json"
NOT_CLEAN = ("failed", "went eager")
"""Verdicts of checks that found something."""
MAX_REASON = 300
"""Characters of a reason that are kept."""


@dataclass(kw_only=True, slots=True)
class Place:
    """A line at which the compiler ends a graph, or compiles again."""

    kind: str
    """``graph_break`` or ``recompile``."""
    file: str
    """From the folder of the checkout, or of the installed packages."""
    line: int | None = None
    function: str | None = None
    code: str | None = None
    """Text of the line; None where the file cannot be read."""
    reason: str
    """The compiler's own words, the first of several."""
    count: int
    """The most of a round."""

    @property
    def key(self) -> tuple[object, ...]:
        """What one place has on two branches: lines before it may have come or gone."""
        return self.kind, self.file, self.function, self.code if self.code is not None else self.line


@dataclass(kw_only=True, slots=True)
class Round:
    """One run of an arm."""

    number: int
    step_seconds: float | None = None
    """Mean of a steady step."""
    share_of_eager: float | None = None
    """That over eager's of the same round, so that below 1 is faster; in a script of one's own over eager's of the same
    run. None without."""
    graphs: int | None = None
    graph_breaks: int = 0
    recompiles: int = 0
    """Those that a change of the code would save: first shapes and validation are left out, as ``explain`` has it."""


@dataclass(kw_only=True, slots=True)
class Measured:
    """What the rounds of one task under one list of strategies came to."""

    task: str
    arm: str
    """The strategies, with those of their parameters that are not defaults."""
    commit: str | None = None
    started: str | None = None
    """Of the first round."""
    device_type: str | None = None
    conditions: dict[str, str] = field(default_factory=dict)
    """Device, versions and precision: what has to be alike for seconds to be compared."""
    settings: dict[str, str] = field(default_factory=dict)
    """Of the task and its training."""
    busy: str | None = None
    """Why seconds of these rounds are not to be trusted."""
    rounds: list[Round] = field(default_factory=list)
    """Those that finished."""
    places: list[Place] = field(default_factory=list)
    not_clean: dict[str, str] = field(default_factory=dict)
    """What differs from eager, does not compile or runs eager, with the reason."""
    failed: list[str] = field(default_factory=list)
    """Why runs did not finish."""
    remarks: list[str] = field(default_factory=list)
    """What else to know before believing the figures."""

    @property
    def name(self) -> str:
        return f"{self.task} · {self.arm}"


def measured(runs: Sequence[Run], *, root: Path, commit: str | None = None) -> list[Measured]:
    """Every arm that compiles, in the order in which they come.

    Args:
        runs: Eager ones among them are what the others are held against.
        root: Files are named from here on.
        commit: That of the code that ran; None = what the records say.
    """
    if not runs:
        return []
    eager = {_pair(run.record): run.record.step_seconds for run in runs if not run.record.strategies}
    rows = [row for found in compare_runs(runs) for row in found.rows if row.cell.runs[0].record.strategies]
    made = [_measured(row.cell, eager, row.flags, root) for row in rows]
    return [dataclasses.replace(one, commit=commit or one.commit) for one in made]


def _pair(record: RunRecord) -> tuple[object, ...]:
    return workload_of(record), record.seed, record.round


def _measured(cell: Cell, eager: dict[tuple[object, ...], float | None], flags: Iterable[str], root: Path) -> Measured:
    records = [run.record for run in cell.finished]
    first = (records or [run.record for run in cell.failed])[0]
    alone = len(first.strategies) == 1  # as a comparison names arms
    parameters = [
        f"{name.partition('.')[2] if alone else name}={value}" for name, value in sorted(set_parameters(first).items())
    ]
    made = Measured(
        task=first.task,
        arm=first.label + (f" ({', '.join(parameters)})" if parameters else ""),
        commit=first.git_commit,
        started=first.started,
        device_type=first.device_type,
        conditions=deciding(first),
        settings=fixed_settings(first),
        busy=next((facts.busy for record in records if (facts := record.machine) is not None and facts.busy), None),
        failed=[_ended(run.record) for run in cell.failed],
        remarks=[flag for flag in flags if flag.startswith((BUSY, UNCERTAIN, "final loss"))],
    )
    places: dict[tuple[object, ...], Place] = {}
    for number, record in enumerate(records, 1):
        made.not_clean |= _not_clean(record)
        own = _places(record, root)
        for place in own:
            known = places.setdefault(place.key, place)
            known.count = max(known.count, place.count)
        counts = {kind: sum(one.count for one in own if one.kind == kind) for kind in ("graph_break", "recompile")}
        made.rounds.append(
            Round(
                number=record.round or number,
                step_seconds=record.step_seconds,
                share_of_eager=_share_of_eager(record, eager.get(_pair(record))),
                graphs=record.graphs,
                graph_breaks=counts["graph_break"],
                recompiles=counts["recompile"],
            )
        )
    made.places = list(places.values())
    return made


def _share_of_eager(record: RunRecord, eager_seconds: float | None) -> float | None:
    if eager_seconds and record.step_seconds:
        return record.step_seconds / eager_seconds
    ratio = record.verdict.ratio if record.verdict is not None and record.script is not None else None
    return 1 / ratio if ratio else None


def _ended(record: RunRecord) -> str:
    return f"{record.status}: {(record.reason or 'no reason given').splitlines()[0]}"


def _not_clean(record: RunRecord) -> dict[str, str]:
    found = {f"{path} runs eager": reason for path, reason in record.eager_parts.items()}
    found |= {f"{path} runs eager in evaluations": reason for path, reason in record.eager_evaluations.items()}
    for what, facts in record.report.items():
        parity = facts if what == "parity" else facts.get("parity")
        if isinstance(parity, dict) and parity.get("verdict") in NOT_CLEAN:
            name = "comparison with eager" if what == "parity" else f"comparison of {what} with eager"
            found[name] = str(parity.get("reason") or parity["verdict"])
    if record.audits is not None and record.audits.verdict in NOT_CLEAN:
        found["audits"] = record.audits.reason or record.audits.verdict
    if record.ended_in_eager and not found:
        found["ended in eager"] = "nothing that was to be compiled was so in the end"
    return {name: _cut(reason) for name, reason in found.items()}


def _places(record: RunRecord, root: Path) -> list[Place]:
    planned = record.report.get("buckets", {}).get("edges", ())  # a graph each, one after the other
    found = []
    for kind in ("graph_break", "recompile"):
        for one in findings(record.events, kind, first_steps=max(1, len(planned))):
            if one.expected:
                continue
            line = source_lines.line_at(one.where)
            place = Place(kind=kind, file="", reason=_explained(one.texts[0]), count=one.count)
            if line is not None:
                place.file, place.line = _from(root, line.file), line.number
                place.function, place.code = line.function, line.code
            found.append(place)
    return found


def _explained(text: str) -> str:
    """The most telling of the compiler's lines: the explanation below a title, else the first; no stack."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _cut(next((line for line in lines[1:2] if line.startswith("Explanation: ")), lines[0]))


def _from(root: Path, file: str) -> str:
    return source_lines.installed(file) or file.removeprefix(f"{root}{os.sep}")


def _cut(text: str) -> str:
    first = " ".join(text.split())
    return first if len(first) <= MAX_REASON else f"{first[: MAX_REASON - 3]}..."


# ---- the file --------------------------------------------------------------------------------------------------------


def save(found: Sequence[Measured], file: Path) -> None:
    """Write ``found`` into ``file``; what it holds of other tasks and strategies stays."""
    kept = {one.name: one for one in load(file)} if file.exists() else {}
    kept |= {one.name: one for one in found}
    facts = {"schema": SCHEMA, "measured": [dataclasses.asdict(one) for one in kept.values()]}
    with written_whole(file, "w") as out:
        out.write(json.dumps(nan_to_none(facts), indent=1, allow_nan=False) + "\n")


def load(file: Path) -> list[Measured]:
    """What a base record holds. Raises ValueError when it is none, OSError when it cannot be read."""
    return read(file.read_bytes(), str(file))


def read(text: bytes, name: str) -> list[Measured]:
    """The same of its ``text``; ``name`` is for messages."""
    try:
        values = printable(json.loads(text.decode("utf-8")))
        if values["schema"] != SCHEMA:
            raise ValueError(f"schema {values['schema']}, this version reads {SCHEMA}")
        return [dataclass_from_json(Measured, each) for each in values["measured"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{name}: not a base record of crucible check ({error})") from error
