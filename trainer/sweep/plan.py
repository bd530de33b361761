"""Plan: the cells of a sweep in the order in which they run, and the options ``hydra.launcher.<option>=...``."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from trainer.telemetry.record import RunRecord

MAX_NAME = 120
"""Characters of a cell's directory name; file systems take 255 bytes."""
STARTS = (None, "cold", "warm")
"""In the order in which they run."""
COMPILE = re.compile(r"^[+~]*compile\b")
REPEAT = re.compile(r"^[+~]*repeat\b")
OUTPUTS = ("file", "terminal")
CACHES = ("own", "shared")
OBJECTIVES: dict[str, Literal["minimize", "maximize"]] = {
    "final_loss": "minimize",
    "seconds_to_steps": "minimize",
    "useful_tokens_per_second": "maximize",
}
"""Figures that a sweeper can get of a cell, and which way is better."""

Key = tuple[tuple[str, ...], int | None, int]
"""What makes a cell the same one when a sweep continues: overrides, round, and how many of its kind came before it."""


@dataclass(kw_only=True, slots=True)
class PlannedCell:
    """One process of a sweep."""

    overrides: tuple[str, ...]
    """All that its command line says."""
    arm: tuple[str, ...]
    """Those of them that choose strategies and their options."""
    job: int
    """Index of the sweeper's job that it belongs to; arms and rounds make several cells of one job."""
    start: str | None
    """``cold`` or ``warm``, see ``Config.repeat``; None where a store or the machine's caches decide."""
    described: RunRecord
    """The record as far as the configuration tells it, for a process that leaves none."""
    round: int | None = None
    copy: int = 0
    """Cells with the same overrides and round before this one."""
    chosen: list[str] = field(default_factory=list)
    """What sets it apart from the other cells."""
    number: int = -1
    directory: Path = field(default_factory=Path)
    caches: Path | None = None
    """Compile caches of its own, or shared with the other cell of its pair; None for the machine's."""
    command: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """The same for the same cell of a sweep that continues."""
        return (self.overrides, self.round, self.copy)

    @property
    def title(self) -> str:
        return " ".join(self.chosen) or "one cell"

    @property
    def shared(self) -> tuple[str, ...]:
        """The overrides that a cell has in common with the other arms of its workload and seed."""
        return tuple(each for each in self.overrides if each not in self.arm and not REPEAT.match(each))

    @property
    def pair(self) -> tuple[object, ...]:
        """What a cold cell and the warm one after it have in common, and no other cell."""
        return (self.shared, self.arm, self.round, self.copy)


def quoted(value: object) -> str:
    """A value in quotes, as Hydra's grammar reads it back: backslashes count only before a quote, and are doubled."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value)) + "'"


def with_arms(overrides: Sequence[str], arms: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Overrides of each cell that ``arms`` (``whole compile.whole.mode=reduce-overhead``) make of one job, and those of
    them that are the arm's. Raises ValueError when the job names strategies too."""
    if not arms:
        return [(tuple(overrides), tuple(override for override in overrides if COMPILE.match(override)))]
    if named := [override for override in overrides if override.startswith("compile=")]:
        raise ValueError(f"hydra.launcher.arms and {named[0]} both name strategies; leave one of them out")
    chosen = [(f"compile={words[0]}", *words[1:]) for words in map(str.split, arms)]
    return [((*overrides, *arm), arm) for arm in chosen]


def in_order(cells: Sequence[PlannedCell], *, rounds: int, interleaved: bool) -> list[PlannedCell]:
    """The cells as they run: a cold one right before the warm one of its pair, arms interleaved, everything once a
    round. Raises ValueError for a warm cell without a cold one."""
    seen: Counter[tuple[str, ...]] = Counter()
    for cell in cells:
        cell.copy = seen[cell.overrides]
        seen[cell.overrides] += 1
    cold = {cell.pair for cell in cells if cell.start == "cold"}
    for cell in cells:
        if cell.start == "warm" and cell.pair not in cold:
            what = " ".join((*cell.shared, *cell.arm)) or "this cell"
            raise ValueError(f"repeat='warm' of {what} has no cold cell in this sweep; use repeat=cold,warm")
    workloads = list(dict.fromkeys(cell.shared for cell in cells))
    pairs = list(dict.fromkeys(cell.pair for cell in cells))

    def place(cell: PlannedCell) -> tuple[int, int, int]:
        return (
            workloads.index(cell.shared) if interleaved else 0,
            pairs.index(cell.pair),
            STARTS.index(cell.start),
        )

    ordered = sorted(cells, key=place)
    if rounds == 1:
        return ordered
    return [_in_round(cell, number) for number in range(1, rounds + 1) for cell in ordered]


def _in_round(cell: PlannedCell, number: int) -> PlannedCell:
    return dataclasses.replace(cell, round=number, described=dataclasses.replace(cell.described, round=number))


def queues(cells: Sequence[PlannedCell], *, interleaved: bool) -> list[list[PlannedCell]]:
    """Groups of cells that must run one after the other, on one device: pairs, and arms that are interleaved."""
    found: dict[tuple[object, ...], list[PlannedCell]] = {}
    for cell in cells:
        found.setdefault((cell.shared, cell.round) if interleaved else cell.pair, []).append(cell)
    return list(found.values())


def name_by_difference(cells: Sequence[PlannedCell]) -> None:
    """Set ``chosen`` of each cell: the overrides that not all share (all where there is one kind of cell only) and the
    round."""
    kinds = {cell.overrides for cell in cells}
    shared = set() if len(kinds) == 1 else set(cells[0].overrides).intersection(*kinds)
    for cell in cells:
        cell.chosen = [override for override in cell.overrides if override not in shared]
        if cell.round is not None:
            cell.chosen.append(f"round={cell.round}")


def directory_name(chosen: Sequence[str]) -> str:
    """A readable, short file name from overrides: ``compile=[regional,mine]`` becomes ``compile=regional+mine``."""
    text = ",".join(re.sub(r"[\[\]{}'\"]", "", override).replace(",", "+") for override in chosen)
    return re.sub(r"[^\w.=+,-]+", "_", text)[:MAX_NAME] or "run"


def value_of(record: RunRecord, objective: str, *, steps: int | None = None) -> float | None:
    """The figure named by ``objective``; None when the run has not measured it.

    ``seconds_to_steps`` is the time from the start of the process to the end of ``steps`` optimizer steps, or batches
    in inference (None = as many as the run took): start, warm-up with compiling, and steady steps for the rest.
    Validation and checkpoints are left out: they are alike for all.
    """
    if objective != "seconds_to_steps":
        figure: float | None = getattr(record, objective)
        return figure
    inference = record.run == "inference"
    speed = record.batches_per_second if inference else record.steady_steps_per_second
    count = steps if steps is not None else (record.batches if inference else record.steps)
    if not speed or count is None or record.warmup_seconds is None or record.warmup_steps is None:
        return None
    starting = (record.import_seconds or 0.0) + (record.setup_seconds or 0.0)
    return starting + record.warmup_seconds + max(0, count - record.warmup_steps) / speed


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """What every launcher understands."""

    rounds: int = 1
    """Times that every cell runs; with more than one, arms are interleaved (A B A B) and the record has its round."""
    interleave: bool | None = None
    """Whether arms are interleaved within each workload and seed (``seed=0,1,2``), so that what changes on a machine
    with time hits all of them alike; null = with more than one round, and where cells run one at a time."""
    arms: list[str] = field(default_factory=list)
    """Values of ``compile=`` with further overrides after blanks, for what a list of values cannot say:
    ``["eager","whole compile.whole.mode=reduce-overhead"]``."""
    timeout_seconds: float | None = None
    """Longest time of one cell; then it is stopped, and given up as failed. Null = no limit."""
    grace_seconds: float = 30.0
    """Time that a cell has to stop by itself when its time is up, before it is killed."""
    caches: str = "own"
    """Compile caches of cells without ``repeat``: ``own`` = empty ones for each, so that none finds what the one before
    it compiled, though a store of ``compile=cached`` stays; ``shared`` = the machine's, as they are: compile times then
    say little, and cells that repeat start sooner."""
    keep_caches: bool = False
    """Whether a cell's own compile caches are kept when its pair has finished; they can take gigabytes."""
    objective: str = "final_loss"
    """What a sweeper of the user's gets from a cell: ``final_loss``, ``seconds_to_steps`` (see the next) or
    ``useful_tokens_per_second``."""
    objective_steps: int | None = None
    """Optimizer steps of ``seconds_to_steps``; null = as many as the cell trains."""

    def __post_init__(self) -> None:
        """Check every field. Raises one ValueError that holds all complaints, a line each."""
        if complaints := self.complaints():
            raise ValueError("\n".join(f"hydra.launcher.{complaint}" for complaint in complaints))

    def complaints(self) -> list[str]:
        """What is wrong with the options, from the option's name on."""
        found = self._below_one("rounds")
        for name in ("timeout_seconds", "grace_seconds", "objective_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name}={value} must be above 0" + (", or null for none" * (name[0] == "t")))
        found += self._not_one_of("objective", tuple(OBJECTIVES)) + self._not_one_of("caches", CACHES)
        if any(not arm.strip() for arm in self.arms):
            found.append(f"arms={self.arms} holds an arm without a value for compile=")
        return found

    @property
    def interleaved(self) -> bool:
        return self.rounds > 1 if self.interleave is None else self.interleave

    def _below_one(self, *names: str) -> list[str]:
        return [f"{name}={getattr(self, name)} must be at least 1" for name in names if getattr(self, name) < 1]

    def _not_one_of(self, name: str, choices: tuple[str, ...]) -> list[str]:
        value = getattr(self, name)
        return [] if value in choices else [f"{name}={value!r} is not one of {choices}"]


@dataclass(kw_only=True, slots=True)
class LocalOptions(SweepOptions):
    """Options of ``hydra/launcher=isolated`` and ``joblib``: cells on this machine."""

    parallel: int = 1
    """Cells at once, on a GPU each where there are GPUs; -1 = as many as there are GPUs. One is what timings are fair
    with."""
    gpus_per_cell: int = 1
    """GPUs of each cell, for ``parallel`` above 1."""
    output: str = "file"
    """Where a cell's output goes: ``file`` (``output.txt`` in its directory) or ``terminal``."""

    def complaints(self) -> list[str]:
        # slots=True makes a new class, which a bare super() does not know.
        found = super(LocalOptions, self).complaints()
        if self.parallel < 1 and self.parallel != -1:
            found.append(f"parallel={self.parallel} must be at least 1, or -1 for the number of GPUs")
        found += self._below_one("gpus_per_cell") + self._not_one_of("output", OUTPUTS)
        if self.output == "terminal" and self.parallel != 1:
            found.append(f"parallel={self.parallel} needs hydra.launcher.output=file: outputs would mix")
        return found

    @property
    def interleaved(self) -> bool:
        """Whether arms are interleaved: side by side on several devices only where rounds are asked for."""
        if self.interleave is None and self.rounds == 1:
            return self.parallel == 1
        return super(LocalOptions, self).interleaved


@dataclass(kw_only=True, slots=True)
class SubmititOptions(SweepOptions):
    """Options of ``hydra/launcher=submitit_slurm`` and ``submitit_local``; null = what the cluster does by itself."""

    executor: str = "slurm"
    """``slurm``, or ``local`` for processes on this machine, to try things out."""
    timeout_min: int = 60
    """Minutes of one job: one cell, or the cells that must come one after the other (``repeat``, rounds)."""
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int = 1
    """One: a cell starts the processes of ``trainer.devices`` by itself."""
    nodes: int = 1
    mem_gb: float | None = None
    stderr_to_stdout: bool = True
    slurm_partition: str | None = None
    slurm_qos: str | None = None
    slurm_account: str | None = None
    slurm_constraint: str | None = None
    slurm_gres: str | None = None
    slurm_time: str | None = None
    """As sbatch takes it; null = ``timeout_min``."""
    jobs_at_once: int = 256
    """Jobs that wait in the queue or run; the next ones are submitted as these end."""
    slurm_setup: list[str] = field(default_factory=list)
    """Shell commands before each job, ``module load cuda`` for instance."""
    slurm_additional_parameters: dict[str, str] = field(default_factory=dict)
    """Further options of sbatch."""
    slurm_signal_delay_s: int = 120
    """Seconds between the warning that a job's time is up or that it is preempted, and its end."""
    max_num_timeout: int = 3
    """Times that a job whose time is up is put into the queue again, to continue from its checkpoint."""

    def complaints(self) -> list[str]:
        found = super(SubmititOptions, self).complaints()
        found += self._not_one_of("executor", ("slurm", "local")) + self._below_one("timeout_min", "jobs_at_once")
        if self.tasks_per_node != 1 or self.nodes != 1:
            found.append("nodes and tasks_per_node must be 1: a cell is one process that starts its own")
        return found

    def parameters(self) -> dict[str, object]:
        """What submitit gets: everything that is set and is its own."""
        ours = {option.name for option in fields(SweepOptions)} | {"executor", "jobs_at_once", "max_num_timeout"}
        named = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in ours}
        return {name: value for name, value in named.items() if value not in (None, [], {})}


LAUNCHERS: dict[str, type[SweepOptions]] = {"isolated": LocalOptions, "submitit_slurm": SubmititOptions}
"""Values of ``hydra/launcher=`` that have options of their own."""
