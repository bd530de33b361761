"""Reference: what arms of named workloads came to on a machine, in a small file to compare later runs with.

A file holds several machines, each with a row for each arm of each workload:

    {"schema": 1, "machines": {"NVIDIA H200, AMD EPYC, torch 2, triton 3, cuda 13": {"rows": [
        {"workload": ["experiment=gpt2"], "arm": "regional", "ratio": {"median": 1.37, "low": 1.35, "high": 1.39}, ...}
    ]}}}

A machine is a device, a host processor and the major versions of torch, Triton and CUDA. Figures of one machine are no
measure for another, whereas a new minor version is just what a comparison over time is for.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.report.comparison import Row, WorkloadComparison, compare_runs
from trainer.report.flags import BUSY, DECISIVE_VERSIONS
from trainer.report.runs import LOOSE, SILENT, Run
from trainer.report.statistics import Estimate, Ratio
from trainer.telemetry.files import printable, written_whole
from trainer.telemetry.record import RunRecord

SCHEMA = 1
DIGITS = 4
"""Significant digits that are kept: more is noise, and makes differences of the file long to read."""
APART = ("compile.", "hydra.", "hydra/", "-")
"""First letters of what is no part of a workload: strategies, the sweep, flags."""
COUNTS = ("graphs", "graph_breaks", "recompiles", "cache_misses")
"""Fields of a record that are the same in every run of the same code."""


@dataclass(frozen=True, slots=True)
class Span:
    """A figure with its noise."""

    median: float
    low: float | None = None
    """Ends of its interval or range; None for a single run."""
    high: float | None = None

    @classmethod
    def of(cls, figure: Ratio | Estimate | None) -> Span | None:
        """A ratio with its 95% interval, or an estimate with the range of its runs; None stays None."""
        if figure is None:
            return None
        median = figure.value if isinstance(figure, Ratio) else figure.median
        low, high = (None if end is None else _short(end) for end in (figure.low, figure.high))
        return cls(_short(median), low, high)

    def text(self, form: str, unit: str = "") -> str:
        """``1.550x (1.530 to 1.570)``."""
        middle = form.format(self.median) + unit
        if self.low is None or self.high is None or self.low == self.high:
            return middle
        return f"{middle} ({form.format(self.low)} to {form.format(self.high)})"


@dataclass(kw_only=True, slots=True)
class ReferenceRow:
    """One arm of one workload, as it was measured."""

    workload: list[str]
    """Overrides of all its arms."""
    arm: str
    """Value of ``compile=``, further overrides after blanks, as in ``hydra.launcher.arms``."""
    measured: str = ""
    """Day."""
    git_commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Of torch, Triton and CUDA."""
    runs: int = 0
    ratio: Span | None = None
    """How many times faster than eager of the same session: eager's mean step over the arm's."""
    eager_step_seconds: Span | None = None
    """What that is relative to. Not compared: it is the machine's as much as the code's."""
    warmup_seconds: Span | None = None
    """Of cold starts."""
    peak_device_memory_gib: Span | None = None
    counts: dict[str, int | list[int]] = field(default_factory=dict)
    """Graphs, graph breaks, recompiles, cache misses; smallest and largest where runs differ."""
    busy: str | None = None
    """Why its times are not judged: what others took of the machine meanwhile."""
    failed: str | None = None
    """Why there are no figures; never in a file."""

    @property
    def key(self) -> tuple[tuple[str, ...], str]:
        """What a row of another day has to share to be compared."""
        strategies, *options = self.arm.split()
        return identity([*self.workload, f"compile={strategies}", *options])

    @property
    def name(self) -> str:
        """For people: ``experiment=gpt2 compile=regional``."""
        return " ".join([*self.workload, f"compile={self.arm}"])


def measured(runs: Sequence[Run]) -> list[ReferenceRow]:
    """A row for each arm but eager of each workload in ``runs``, by the overrides of their commands.

    Raises ValueError for runs of one workload that are unlike.
    """
    workloads: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        workloads.setdefault(identity(run.record.command)[0], []).append(run)
    rows = []
    for workload, members in workloads.items():
        for found in compare_runs(members):
            if found.unlike:
                name = " ".join(workload) or found.workload
                raise ValueError(f"runs of {name} are unlike: {'; '.join(found.unlike)}")
            rows += [_measured(row, found) for row in found.rows if row.cell.label != "eager"]
    return rows


def _measured(row: Row, found: WorkloadComparison) -> ReferenceRow:
    first, base = row.cell.runs[0].record, found.baseline_row
    made = ReferenceRow(
        workload=overrides(first.command),
        arm=identity(first.command)[1],
        measured=(first.started or "").partition("T")[0],
        git_commit=first.git_commit,
        versions={name: version for name in DECISIVE_VERSIONS if (version := first.versions.get(name))},
        runs=len(row.cell.finished),
        ratio=Span.of(row.ratio),
        eager_step_seconds=None if base is None else Span.of(base.step_seconds),
        warmup_seconds=Span.of(row.cold_warmup_seconds),
        counts=_counts(row.cell.finished),
        busy=next((flag for each in (row, found.rows[0]) for flag in each.flags if flag.startswith(BUSY)), None),
    )
    peaks = [peak for run in row.cell.finished if (peak := run.record.peak_device_memory_gib) is not None]
    if peaks:
        made.peak_device_memory_gib = Span(max(peaks), min(peaks), max(peaks))
    if row.cell.failed:
        reason = row.cell.failed[0].record.reason or row.cell.failed[0].record.status
        made.failed = f"{len(row.cell.failed)} of {len(row.cell.runs)} runs {reason.splitlines()[0]}"
    elif row.ratio is None:
        made.failed = "no ratio: eager did not finish" if base is None else "no ratio: steady steps were not measured"
    return made


def _counts(runs: Sequence[Run]) -> dict[str, int | list[int]]:
    """Of cold starts alone, where there are any: warm ones compile less."""
    chosen = [run for run in runs if run.record.start == "cold"] or runs
    counts: dict[str, int | list[int]] = {}
    for name in COUNTS:
        values = [value for run in chosen if (value := getattr(run.record, name)) is not None]
        if values:
            counts[name] = values[0] if len(set(values)) == 1 else [min(values), max(values)]
    return counts


def identity(command: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Workload and arm of a command: overrides that a steady step depends on, and those of the strategies."""
    choice, options = "eager", []
    for word in command:
        name, equals, value = word.lstrip("+~").partition("=")
        if name == "compile" and equals:
            choice = re.sub(r"[\s'\"]", "", value)
            choice = re.sub(r"^\[([^,[\]]*)\]$", r"\1", choice)  # a list of one
        elif name.startswith("compile."):
            options.append(word)
    workload = sorted(word for word in overrides(command) if _name(word) not in LOOSE | SILENT)
    return tuple(workload), " ".join([choice, *sorted(options)])


def overrides(command: Sequence[str]) -> list[str]:
    """Overrides of a command that describe its workload: neither strategies nor where it runs and how often."""
    return [
        word
        for word in command
        if "=" in word and _name(word) not in ("compile", "repeat", "resume") and not _name(word).startswith(APART)
    ]


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def fingerprint(record: RunRecord) -> str | None:
    """The machine of a record: ``NVIDIA H200, AMD EPYC 9654, torch 2, triton 3, cuda 13``; None where it is unknown."""
    processor = record.processor or (record.device if record.device_type == "cpu" else None)
    if record.device is None or processor is None:
        return None
    majors = [f"{name} {version.split('.')[0]}" for name in DECISIVE_VERSIONS if (version := record.versions.get(name))]
    return ", ".join(dict.fromkeys([record.device, processor, *majors]))


def machine_of(runs: Sequence[Run]) -> str:
    """The machine that all runs were made on. Raises ValueError for several, or one that is not known."""
    machines: dict[str, None] = {}
    for run in [run for run in runs if run.record.status == "finished"] or runs:
        machine = fingerprint(run.record)
        if machine is None:
            raise ValueError(f"{run.directory}: its record does not name the machine that it was made on")
        machines[machine] = None
    if len(machines) != 1:
        raise ValueError(f"runs of one machine are needed, and these are of {len(machines)}: {'; '.join(machines)}")
    return next(iter(machines))


def load(file: Path) -> dict[str, list[ReferenceRow]]:
    """Rows by machine; none when there is no such file. Raises ValueError for a file that is not a reference."""
    try:
        values = printable(json.loads(file.read_text(encoding="utf-8")))
        if values["schema"] != SCHEMA:
            raise ValueError(f"{file}: reference schema {values['schema']}, this version reads {SCHEMA}")
        return {machine: [_row(given) for given in content["rows"]] for machine, content in values["machines"].items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a reference ({error})") from error


def _row(given: dict[str, Any]) -> ReferenceRow:
    read: dict[str, Any] = {
        name: Span(**value) if isinstance(value, dict) and "median" in value else value for name, value in given.items()
    }
    return ReferenceRow(**read)


def save(machines: dict[str, list[ReferenceRow]], file: Path) -> None:
    """Write all machines. Raises OSError where that cannot be done."""
    texts = [
        f'  {json.dumps(machine)}: {{\n   "rows": [\n' + ",\n".join(map(_json, rows)) + "\n   ]\n  }"
        for machine, rows in machines.items()
    ]
    with written_whole(file, "w") as stream:
        stream.write(f'{{\n "schema": {SCHEMA},\n "machines": {{\n' + ",\n".join(texts) + "\n }\n}\n")


def _json(row: ReferenceRow) -> str:
    """A row with a line for each figure, to be read in a diff; what was not measured is left out."""
    values = dataclasses.asdict(
        row, dict_factory=lambda pairs: {name: value for name, value in pairs if value not in (None, {}, "")}
    )
    lines = [f"     {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return "    {\n" + ",\n".join(lines) + "\n    }"


def merged(before: Sequence[ReferenceRow], measured: Sequence[ReferenceRow]) -> list[ReferenceRow]:
    """Rows with new figures in the place of those before; those that are new come last."""
    new = {row.key: row for row in measured}
    kept = [new.pop(row.key, row) for row in before]
    return [*kept, *new.values()]


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
