"""Baselines: what arms of named workloads came to on a machine, in a small file to compare later runs with.

A file holds several machines, by fingerprint, each with a row for each arm of each workload:

    {"schema": 1, "machines": {"NVIDIA H200, AMD EPYC, torch 2, triton 3, cuda 13": {"rows": [
        {"workload": ["experiment=gpt2"], "arm": "regional", "ratio": {"median": 1.37, "low": 1.35, "high": 1.39}, ...}
    ]}}}
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.evidence.statistics import Estimate, Ratio
from trainer.evidence.workloads import LOOSE, SILENT
from trainer.printable import printable
from trainer.telemetry.files import written_whole

SCHEMA = 1
DIGITS = 4
"""Significant digits that are kept: more is noise, and makes differences of the file long to read."""

APART = ("compile.", "hydra.", "hydra/", "-")
"""First letters of what is no part of a workload: strategies, the sweep, flags."""


@dataclass(frozen=True, slots=True)
class Span:
    """A figure with its noise."""

    median: float
    low: float | None = None
    """Ends of its interval or range; None when one run does not tell."""
    high: float | None = None

    @classmethod
    def of(cls, figure: Ratio | Estimate | None) -> Span | None:
        """A ratio with its 95% interval, or an estimate with the range of its runs; None stays None."""
        if figure is None:
            return None
        median = figure.value if isinstance(figure, Ratio) else figure.median
        return cls(_short(median), *(None if end is None else _short(end) for end in (figure.low, figure.high)))


@dataclass(kw_only=True, slots=True)
class BaselineRow:
    """One arm of one workload, as it was measured."""

    workload: list[str]
    """Overrides of all its arms, as the sweep that measures them takes them."""
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
    """What a command says of its workload: neither strategies nor where it runs and how often."""
    return [
        word
        for word in command
        if "=" in word and _name(word) not in ("compile", "repeat", "resume") and not _name(word).startswith(APART)
    ]


def load(file: Path) -> dict[str, list[BaselineRow]]:
    """Rows by machine; none when there is no such file. Raises ValueError for a file that is none of ours."""
    try:
        values = printable(json.loads(file.read_text(encoding="utf-8")))
        if values["schema"] != SCHEMA:
            raise ValueError(f"{file}: baseline schema {values['schema']}, this version reads {SCHEMA}")
        return {machine: [_row(given) for given in content["rows"]] for machine, content in values["machines"].items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a baseline ({error})") from error


def save(machines: dict[str, list[BaselineRow]], file: Path) -> None:
    """Write all machines. Raises OSError where that cannot be done."""
    told = [
        f'  {json.dumps(machine)}: {{\n   "rows": [\n' + ",\n".join(map(_text, rows)) + "\n   ]\n  }"
        for machine, rows in machines.items()
    ]
    with written_whole(file, "w") as stream:
        stream.write(f'{{\n "schema": {SCHEMA},\n "machines": {{\n' + ",\n".join(told) + "\n }\n}\n")


def merged(before: Sequence[BaselineRow], measured: Sequence[BaselineRow]) -> list[BaselineRow]:
    """Rows with new figures in the place of those before; those that are new come last."""
    new = {row.key: row for row in measured}
    kept = [new.pop(row.key, row) for row in before]
    return [*kept, *new.values()]


def _name(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _row(given: dict[str, Any]) -> BaselineRow:
    spans = ("ratio", "eager_step_seconds", "warmup_seconds", "peak_device_memory_gib")
    read: dict[str, Any] = {
        name: Span(**value) if name in spans and value is not None else value for name, value in given.items()
    }
    return BaselineRow(**read)


def _text(row: BaselineRow) -> str:
    """A row with a line for each figure; what was not measured is left out."""
    told = {name: value for name, value in dataclasses.asdict(row).items() if value not in (None, {})}
    for name, value in told.items():
        if isinstance(value, dict):
            told[name] = {part: figure for part, figure in value.items() if figure is not None}
    lines = [f"     {json.dumps(name)}: {json.dumps(value)}" for name, value in told.items()]
    return "    {\n" + ",\n".join(lines) + "\n    }"


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
