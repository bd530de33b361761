"""Runs on disk, and the cells of a comparison: all runs of one workload under one arm.

A **workload** is a task, what is done with it, and every setting that a step depends on. How long is trained, how
often it is logged or validated, and where the data lies may differ between its runs. An **arm** is a list of
strategies with their parameters: ``whole (mode=reduce-overhead)``. Whatever compares runs begins here.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from strategies import STRATEGIES
from trainer.advice import program
from trainer.report.statistics import Estimate, estimate
from trainer.telemetry.record import FILE_NAME, PEER, RunRecord, default_parameters, flat, parameters
from trainer.telemetry.serialization import printable

DECISIVE_VERSIONS = ("torch", "triton", "cuda")
"""Software that decides how fast compiled code is."""
NOTHING_COMPILED = "nothing compiled"
"""Reason for which a comparison with eager is left out that nobody misses."""
NOT_COMPARED = "not compared"
"""Verdict of a comparison that would have shown nothing; graver than one that was not possible."""
SECTIONS = ("task", "run", "trainer")
"""Parts of the configuration that make up the workload; beside them there are strategies, guards and the seed."""
LOOSE = frozenset(
    {
        *("trainer.max_steps", "trainer.val_every_n_steps", "trainer.val_batches", "trainer.checkpoint_every_n_steps"),
        *("trainer.log_every_n_steps", "trainer.warmup_steps", "trainer.measure_peak", "trainer.progress"),
        "trainer.summary",
    }
)
"""Settings that a steady step does not depend on."""
PLACES = frozenset({"root", "path", "val_path", "image_root"})
"""Last words of settings for where data lies."""
FORMER_SETTINGS = {
    "task.channels_last": "null",
    "task.data.tokens_per_batch": "null",
    "task.data.unit": "definition",
    "task.final_learning_rate": "0.05",
    "task.label_smoothing": "0.0",
    "task.masked_share": "0.15",
    "task.network.norm_epsilon": "1e-05",
}
"""The same of settings: runs with and without them are of one workload."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run that left a record."""

    directory: Path
    """Where the record lies."""
    record: RunRecord


@dataclass(kw_only=True, slots=True)
class Cell:
    """All runs of one workload under one arm: cold and warm starts, repeats and seeds."""

    workload: str
    """Short name that tells the workload from the others given: the task, and the settings that differ."""
    arm: str
    """The strategies, with those of their parameters that are not defaults: ``whole (mode=reduce-overhead)``."""
    cold: list[Run] = field(default_factory=list)
    """Finished runs that started with empty compile caches, or of which nobody knows what they started with."""
    warm: list[Run] = field(default_factory=list)
    """Finished runs that found all they compiled in the caches."""
    failed: list[Run] = field(default_factory=list)
    """Runs that did not finish: failed, interrupted, still running or killed."""
    profiled: list[Run] = field(default_factory=list)
    """Finished runs under the profiler, which slows them: left out where the workload has others."""

    @property
    def finished(self) -> list[Run]:
        """All runs with figures to compare."""
        return [*self.cold, *self.warm]

    @property
    def runs(self) -> list[Run]:
        return [*self.finished, *self.profiled, *self.failed]

    def started(self, start: str) -> list[Run]:
        """Runs whose warm-up stands for a ``cold`` or ``warm`` start; what compiles nothing takes any of its runs."""
        own, other = (self.cold, self.warm) if start == "cold" else (self.warm, self.cold)
        return own or ([] if self.compiles else other)

    def over(self, field: str, start: str | None = None) -> Estimate | None:
        """A figure of the record over the finished runs, or over those of a ``cold`` or ``warm`` start."""
        runs = self.finished if start is None else self.started(start)
        return estimate([getattr(run.record, field) for run in runs])

    @property
    def label(self) -> str:
        """The strategies' names, without parameters."""
        return self.runs[0].record.label

    @property
    def compiles(self) -> bool:
        """Whether anything was compiled in a run that finished, so that the state of compile caches matters."""
        return any(run.record.compile_seconds is not None for run in self.finished)

    @property
    def command(self) -> str:
        record = self.runs[0].record
        if record.script is not None:
            return shlex.join(["python", record.script, *record.command])
        peer = any(strategy["name"] == PEER for strategy in record.strategies)
        # What only a sweep gives: caches of its own, or the processes of a peer.
        by_sweep = any(word.startswith("repeat=") for word in record.command) or (peer and record.world_size > 1)
        return shlex.join([*program(), *(["-m"] if by_sweep else []), *record.command])


def find(paths: str | Path | Iterable[str | Path], *, unreadable: Callable[[str], None] | None = None) -> list[Run]:
    """All runs below ``paths``, each once, in the order given and by name within one path.

    Args:
        paths: Record files, run folders, folders that hold such folders at any depth, or globs of these; or files of
            published records, ``.jsonl``; or one of them.
        unreadable: Called with the reason for a record that a search came upon and that cannot be read.

    Raises:
        ValueError: A path that does not exist or holds no record, or a record that cannot be read: one that was given
            by its own name, or any when ``unreadable`` is None.
    """
    found: dict[Path, list[Run]] = {}
    for path in [paths] if isinstance(paths, str | Path) else paths:
        # What exists by that name is not a pattern: Hydra writes brackets and equals signs into names of folders.
        matches = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path), recursive=True))
        given = [Path(match) for match in matches]
        # A run's folder may be a link; ``**`` alone follows none.
        inside = {one: sorted([*one.glob(FILE_NAME), *one.rglob(f"*/{FILE_NAME}")]) for one in given}
        files = [file for one in given for file in (inside[one] if one.is_dir() else [one])]
        if not files:
            raise ValueError(f"{path}: " + (f"no {FILE_NAME} in it or below" if given else "no such file or folder"))
        for file in files:
            if (key := file.resolve()) in found:
                continue
            try:
                found[key] = _runs_in(file)
            except ValueError as error:
                if unreadable is None or len(files) == 1:
                    raise
                unreadable(printable(str(error)))
    return [run for runs in found.values() for run in runs]


def _runs_in(file: Path) -> list[Run]:
    """The run of a record's file; all runs of a file that holds a record a line (``trainer.report.published``)."""
    if file.suffix != ".jsonl":
        return [Run(file.parent, RunRecord.load(file))]
    lines = file.read_text(encoding="utf-8").splitlines()
    places = [Path(f"{file.name}:{number}") for number in range(1, len(lines) + 1)]
    return [Run(place, RunRecord.from_json(line, place)) for place, line in zip(places, lines, strict=True)]


def group(runs: Sequence[Run]) -> list[Cell]:
    """The cells of ``runs``: workloads in the order in which their first runs come, arms of each likewise."""
    workloads: dict[tuple[str, ...], dict[tuple[str, ...], list[Run]]] = {}
    for run in runs:
        workloads.setdefault(workload_of(run.record), {}).setdefault(arm_of(run.record), []).append(run)
    firsts = [next(iter(arms.values()))[0].record for arms in workloads.values()]
    cells: list[Cell] = []
    for workload, arms in zip(_workload_names(firsts), workloads.values(), strict=True):
        names = _arm_names([members[0].record for members in arms.values()])
        finished = [run for run in chain(*arms.values()) if run.record.status == "finished"]
        apart = not all(map(is_profiled, finished))
        for arm, members in zip(names, arms.values(), strict=True):
            cell = Cell(workload=workload, arm=arm)
            for run in members:
                place = cell.warm if start_of(run.record) == "warm" else cell.cold
                place = cell.profiled if apart and is_profiled(run) else place
                (place if run.record.status == "finished" else cell.failed).append(run)
            cells.append(cell)
    return cells


def is_profiled(run: Run) -> bool:
    """Whether it ran under the profiler, so that its steps took longer."""
    return run.record.config.get("profile", "off") != "off"


def start_of(record: RunRecord) -> str | None:
    """``cold`` or ``warm``; where nobody saw to the caches, by what the compiler found in them. None for a mixture."""
    start = record.start or record.cache
    return start if start in ("cold", "warm") else None


def workload_of(record: RunRecord) -> tuple[str, ...]:
    """What the records of one workload share."""
    return (record.task, *sorted(f"{name}={value}" for name, value in fixed_settings(record).items()))


def arm_of(record: RunRecord) -> tuple[str, ...]:
    """What the records of one arm share."""
    return (record.label, *sorted(f"{name}={value}" for name, value in parameters(record).items()))


def fixed_settings(record: RunRecord) -> dict[str, str]:
    """Settings that make up the workload."""
    settings = flat({section: value for section, value in record.config.items() if section in SECTIONS})
    fixed = ((name, value) for name, value in settings if name not in LOOSE and name.rpartition(".")[2] not in PLACES)
    return {name: value for name, value in fixed if FORMER_SETTINGS.get(name) != value}


def _workload_names(records: Sequence[RunRecord]) -> list[str]:
    """A short name for each of ``records``, one of each workload: the task, and few settings that tell them apart."""
    names: list[str] = []
    for record in records:
        fellows = [fixed_settings(one) for one in records if one.task == record.task]
        chosen: list[str] = []
        apart = 1
        for name in sorted({name for one in fellows for name in one}, key=lambda name: (name.count("."), name)):
            found = len({tuple(one.get(each) for each in (*chosen, name)) for one in fellows})
            if found > apart:
                chosen, apart = [*chosen, name], found
        settings = fixed_settings(record)
        words = [f"{name.rpartition('.')[2]}={settings[name]}" for name in chosen if name in settings]
        _add_name(names, record.task, words)
    return names


def _arm_names(records: Sequence[RunRecord]) -> list[str]:
    """A short name for each of ``records``, one of each arm: the label, parameters that are set or tell it apart."""
    names: list[str] = []
    for record in records:
        fellows = [parameters(other) for other in records if other.label == record.label]
        defaults, words = default_parameters(record), []
        for name, value in parameters(record).items():
            strategy, _, option = name.partition(".")
            # Keys of a mapping count, what they hold (``modular.parts.encoder.mode``) is too long.
            known = name in defaults or (strategy in STRATEGIES and name.count(".") == 2)
            if (known and defaults.get(name) != value) or len({fellow.get(name) for fellow in fellows}) > 1:
                words.append(f"{option if len(record.strategies) == 1 else name}={value}")
        _add_name(names, record.label, words)
    return names


def _add_name(names: list[str], kind: str, words: Sequence[str]) -> None:
    name = f"{kind} ({', '.join(words)})" if words else kind
    while name in names:  # something that the others have and this one lacks
        name += "'"
    names.append(name)


def deciding(record: RunRecord) -> dict[str, str]:
    """What runs of one workload must share to be compared. What a record does not hold is left out."""
    peer = next((one for one in record.strategies if one["name"] == PEER), {})
    values: dict[str, str | None] = {
        "device": record.device,
        **{name: record.versions.get(name) for name in DECISIVE_VERSIONS},
        **{name: peer[name] for name in peer.keys() & record.versions},
        "precision": record.precision,
        "matrix products": record.matrix_precision,
        "world size": str(record.world_size),
    }
    return {name: value for name, value in values.items() if value is not None}


def parity_of(cell: Cell) -> str | None:
    """The worst verdict over the cell's runs, of the regions' first checks and of replayed CUDA graphs."""
    found: list[str] = []
    for run in cell.finished:
        report = run.record.report
        for facts in (report.get("parity"), report.get("cuda_graph", {}).get("parity")):
            if isinstance(facts, dict) and "verdict" in facts and facts.get("reason") != NOTHING_COMPILED:
                verdict, reason = str(facts["verdict"]), facts.get("reason")
                found.append(f"{verdict}: {reason}" if reason and verdict in ("skipped", NOT_COMPARED) else verdict)
    worst = [each for kind in ("failed", NOT_COMPARED, "passed") for each in found if each.startswith(kind)]
    return next(iter([*worst, *found]), None)
