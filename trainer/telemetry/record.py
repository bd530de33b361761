"""RunRecord: what one run measured, with units in the field names; the only thing that reports read.

Absent figures are ``None``, never 0 and never a guess. This module imports neither torch nor Lightning.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.telemetry.machine_monitor import MachineFacts
from trainer.telemetry.serialization import dataclass_from_json, nan_to_none, printable, type_name, written_whole

FILE_NAME = "record.json"
SCHEMA = 2
"""Raised when the meaning of a field changes. Until 2 (2026-11-28; the program of 2026-11-27 wrote 1 still) a run took
steps before its first one, whose seconds are in ``warmup_seconds`` and whose compiling is in ``compile_seconds``."""
READ = (1, SCHEMA)
NOT_STARTED = "not started"
"""Status of a record whose training is still to come."""
EXPECTED = re.compile(
    r"grad_mode|autocast|\.training\b|requires_grad|dispatch key|(size|stride|rank) mismatch|\.(size|stride)\(\)| % "
)
"""Guards by which graphs of validation differ, those of shapes that a strategy lets come first, and, in the first step,
of copies of one class that share their code: the first one's input."""


@dataclass(kw_only=True, slots=True)
class Event:
    """A graph break, a recompile, a fallback or a skip that the compiler reported."""

    kind: str
    """``graph_break``, ``recompile``, ``fallback`` or ``cudagraph_skip``. Records of before 2026-11-27 also have
    ``switch``: compiled code took over."""
    reason: str
    """The compiler's own words."""
    location: str | None = None
    """``file:line function`` of the user's code."""
    step: int | None = None
    """Optimizer step during which, or after which, it happened; None before the first step."""
    phase: str = "training"
    """``training`` or ``validating``, which has graphs of its own: torch counts them as recompiles. Records of before
    2026-11-27 also have ``preflight``."""

    def is_expected(self, *, first_steps: int = 1) -> bool:
        """Whether it is a recompile that every run has: in validation, or in the ``first_steps`` of a training, one
        for each shape that is planned. No change of the code would save it."""
        early = self.phase != "training" or (self.step or 0) <= first_steps
        guard = self.reason.lstrip().partition("\n")[0]
        return self.kind == "recompile" and early and EXPECTED.search(guard) is not None


@dataclass(kw_only=True, slots=True)
class AuditDifference:
    """How far what was audited was from eager's in one respect, relative to eager's."""

    what: str
    """Name of a tensor: an output, a parameter, its gradient or state, a buffer; ``loss``."""
    difference: float
    tolerance: float
    step: int | None = None
    """Optimizer step that was audited."""

    @property
    def share(self) -> float:
        """The difference over its tolerance; beyond 1 it is not eager's, and no number is beyond."""
        if not self.difference:
            return 0.0
        return self.difference / self.tolerance if self.difference == self.difference and self.tolerance else math.inf


@dataclass(kw_only=True, slots=True)
class AuditFacts:
    """What the audits of a training found."""

    verdict: str
    """``clean``, ``failed``, ``went eager`` (something differed twice, and what did ran eager) or ``not audited``."""
    reason: str | None = None
    """Why nothing was audited, or what differed."""
    steps: list[int] = field(default_factory=list)
    """Optimizer steps that were audited."""
    last_clean_step: int | None = None
    """The last of them that agreed with eager in all that was compared."""
    seconds: float = 0.0
    """Spent on checks, within the audited steps."""
    worst: dict[str, AuditDifference] = field(default_factory=dict)
    """By kind (``output``, ``gradient``, ``buffer``, ...; formerly ``loss``, ``update``, ``buffers``): the difference
    that came nearest to its tolerance, or beyond it."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """By kind of region: why it was left out of the last audit."""


@dataclass(kw_only=True, slots=True)
class RunVerdict:
    """Whether a run's strategies paid, by real steps of eager and of the run, taken by turns."""

    outcome: str
    """``faster``, ``slower`` than eager, ``no difference shown``, ``eager`` (nothing compiled) or ``not compared``."""
    reason: str | None = None
    """Why it was not compared."""
    ratio: float | None = None
    """Eager's seconds over the run's, with its 95% interval; None where they were not compared."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    pairs: int = 0
    """Steps of each that were timed."""
    batches: int = 0
    """Windows of steps that they were taken in; in records of before 2026-11-27, batches."""
    eager_step_seconds: float | None = None
    """Mean step of eager over the pairs, without waiting for data."""
    step_seconds: float | None = None
    """The same of the run: eager's over the ratio."""
    wait_seconds: float | None = None
    """What compiling and warm-up took beyond as many steady steps."""
    break_even_steps: float | None = None
    """Steps after which that is made up for; None where no gain is shown."""
    steps: int | None = None
    """Steps that this run has done, resumed ones left out."""
    paid: bool | None = None
    """Whether they were enough; None where no gain is shown."""
    next_command: str | None = None
    """What to try next."""
    next_reason: str | None = None

    @property
    def shown_ratio(self) -> float | None:
        """``ratio`` where it may stand without its interval: a difference is shown."""
        return self.ratio if self.outcome in ("faster", "slower") else None


@dataclass(kw_only=True, slots=True)
class RankFigures:
    """What one process of several measured."""

    rank: int
    host: str
    device: str
    """Its name, and its number where it is an accelerator."""
    steady_step_seconds_median: float | None = None
    """About the same on all, because they wait for each other."""
    exposed_communication_seconds: float | None = None
    """Of a step, in collectives while nothing computes, waits for others included; None without ``profile=on``."""
    compile_seconds: float | None = None
    peak_device_memory_gib: float | None = None
    peak_process_memory_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Communication:
    """What steps of several processes lose to each other."""

    slowest: RankFigures
    """Waits the least: the others wait for it."""
    skew_seconds: float
    """Of a step: how much longer the rank that waits most is in collectives than the slowest one."""
    exposed_share: float
    """Of a step, the slowest rank's: what communication itself costs beyond what compute hides."""
    step_seconds: float


def communication_of(ranks: Sequence[RankFigures]) -> Communication | None:
    """None where the ranks did not measure it, or not all."""
    waits = [seconds for one in ranks if (seconds := one.exposed_communication_seconds) is not None]
    if len(waits) < max(len(ranks), 2):
        return None
    slowest = ranks[waits.index(min(waits))]
    if not (step := slowest.steady_step_seconds_median):
        return None
    return Communication(slowest, max(waits) - min(waits), min(1.0, min(waits) / step), step)


@dataclass(kw_only=True)
class CompilerFigures:
    """What the compiler did, in training and validation; None for eager."""

    compile_seconds: float | None = None
    """Wall time inside the compiler, training and validation; None when nothing was compiled."""
    cache: str | None = None
    """``cold`` (all graphs compiled anew), ``warm`` (all from cache), ``mixed``; None when the cache was not asked."""
    cache_hits: int | None = None
    cache_misses: int | None = None
    graphs: int | None = None
    graph_breaks: int | None = None
    recompiles: int | None = None
    cudagraph_skips: int | None = None


@dataclass(kw_only=True)
class Rates:
    """Over the time of steady steps, of all processes together; None where there is nothing to divide."""

    steady_steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    useful_tokens_per_second: float | None = None
    """Padding excluded."""
    padded_share: float | None = None
    """Padding positions over all token positions."""
    teraflops_per_second: float | None = None
    """Analytic forward and backward operations of the task over steady time, for each device."""
    data_wait_share: float | None = None
    """Share of steady time lost to waiting for the data loader, this process: on CUDA the device's idle time while the
    loop waits for a batch, elsewhere the loop's own waiting."""


@dataclass(kw_only=True)
class Peak:
    """The rates of one device; None where unknown or not measured."""

    matrix_precision: str | None = None
    """What matrix products compute in: ``bf16``, ``fp16``, ``tf32``, ``fp32`` or ``fp64``."""
    peak_teraflops_datasheet: float | None = None
    """Dense matrix rate of the device in ``matrix_precision`` by its datasheet; None when it is not known."""
    peak_teraflops_measured: float | None = None
    """The same, of a product of two large matrices in this run; None when it was not measured."""
    peak_gigabytes_per_second_measured: float | None = None
    """Of a large copy in this run, its bytes read and written; None when it was not measured."""

    def utilization(self, teraflops: float | None) -> tuple[float | None, float | None]:
        """Share of each peak, the datasheet's and the measured one, that a run reaches; None where not known."""
        peaks = (self.peak_teraflops_datasheet, self.peak_teraflops_measured)
        datasheet, measured = (teraflops / peak if teraflops and peak else None for peak in peaks)
        return datasheet, measured

    def least_seconds(self, teraflop: float | None, optimizer_gigabytes: float | None) -> float | None:
        """Of a step of so many operations (1e12) and bytes (1e9), one after the other; None where a part is unknown."""
        flops, bandwidth = self.peak_teraflops_measured, self.peak_gigabytes_per_second_measured
        if teraflop is None or optimizer_gigabytes is None or not flops or not bandwidth:
            return None
        return teraflop / flops + optimizer_gigabytes / bandwidth


@dataclass(kw_only=True)
class RunRecord(CompilerFigures, Rates, Peak):
    """One task under one list of strategies, trained and timed on one machine."""

    # What ran
    task: str
    """The task's title: its name, and which model where it has several (``micro ragged``)."""
    strategies: list[dict[str, Any]] = field(default_factory=list)
    """As applied, in order: ``{"name": ..., <parameter>: ...}``; empty for eager."""
    chosen_strategies: list[dict[str, Any]] = field(default_factory=list)
    """What ``auto`` chose, in the same form; empty for eager, and without ``auto``."""
    label: str = "eager"
    """The strategies' names joined by ``+``."""
    config: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    """Command-line overrides of this run; arguments of ``script``."""
    script: str | None = None
    """The script of one's own that trained; None for our command line."""
    entry: str = "Compile"
    """What a script gives its strategies to: ``Compile``, ``compile_trainer`` or ``crucible.compile``."""
    seed: int | None = 0
    resumed_from: str | None = None
    """Checkpoint that the run continued from."""
    status: str = "running"
    """``running`` (or killed then), ``finished``, ``interrupted`` or ``failed``; in a script also ``not started``."""
    reason: str | None = None
    failed_at: str | None = None
    """Of a failed run, ``file:line function`` of the user's own innermost line, as in ``Event``; None where there is
    none."""
    started: str | None = None
    """Start, ISO 8601 with offset."""
    signal: int | None = None

    # Where it ran
    versions: dict[str, str | None] = field(default_factory=dict)
    device: str | None = None
    """Name of the accelerator or processor."""
    processor: str | None = None
    """Name of the host's processor, of a run on an accelerator too."""
    device_type: str | None = None
    """``cuda``, ``cpu``, ..."""
    world_size: int = 1
    """Processes that trained together."""
    ranks: list[RankFigures] = field(default_factory=list)
    """What each of them measured; empty for one process."""
    num_nodes: int = 1
    """Hosts that they were on."""
    launched_by: str | None = None
    """What started them: ``torchrun``, or SLURM with the numbers of job and step; None for our own command."""
    restarts: int = 0
    """Times that it started the run again, which then continued from its last checkpoint."""
    precision: str | None = None
    git_commit: str | None = None
    """Commit of the code that ran, with ``+dirty`` when files differed; None outside a checkout."""
    start: str | None = None
    """Compile caches that the process began with: ``cold`` (empty ones) or ``warm`` (those of the cold run before it);
    None where they were left as they were, see ``repeat``."""
    round: int | None = None
    """Of a sweep that runs its cells several times, from 1; None in other runs."""

    # Start-up and compilation
    import_seconds: float | None = None
    """From process start until the libraries were imported."""
    setup_seconds: float | None = None
    """Building data, module and trainer, up to the first training batch."""
    preparation_seconds: float | None = None
    """Of the setup, what importing Inductor and starting its workers in the background cost: waited for, or taken from
    the main thread; at most, see ``strategies.compiler_warmup``. None without, and under ``auto``."""
    first_step_seconds: float | None = None
    """First optimizer step, compilation included, measured on the device."""
    warmup_seconds: float | None = None
    """All optimizer steps that are neither steady nor left out, first checks and compiling included: see
    ``trainer.telemetry.meter``."""
    warmup_steps: int | None = None
    left_out_steps: int | None = None
    """Steps in no figure: audited, or timed beside eager's for the verdict."""
    new_shape_steps: int | None = None
    """Of those since the last switch of strategies, how many nothing but a new shape keeps from being steady."""
    new_shape_seconds: float | None = None
    """What they took beyond as many steady steps; None without either."""
    regions: int | None = None
    """Submodules handed to the compiler; None for eager."""
    regions_compiled: int | None = None
    """Of those, how many the compiler really compiled code for."""
    ended_in_eager: bool | None = None
    """Whether nothing that was to be compiled or captured was so in the end; None where nothing was to be compiled."""
    eager_parts: dict[str, str] = field(default_factory=dict)
    """What was to be compiled and ran eager in the end (path of a region, or ``optimizer``), with the reason."""
    eager_evaluations: dict[str, str] = field(default_factory=dict)
    """Regions that trained compiled and ran eager in evaluations, by path, with the reason."""
    report: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each strategy found and did, by its name: bucket edges, graphs captured, artifacts loaded."""
    audits: AuditFacts | None = None
    """What checks of later steps showed; None with ``parity=off``."""
    events: list[Event] = field(default_factory=list)
    """Each break, recompile, fallback and skip with reason and source line."""
    notes: list[str] = field(default_factory=list)
    """What the strategies or the run report to the user."""

    # The ruler: steady state
    steps: int | None = None
    """Optimizer steps done, the resumed ones included."""
    progress: list[list[float]] = field(default_factory=list)
    """Pairs: optimizer steps done by this process, and seconds from its start until then, pauses included; begins with
    the first step's begin. At most 256; empty where several runs share the process."""
    losses: list[list[float]] = field(default_factory=list)
    """Pairs: an optimizer step, and the mean training loss of the steps from the pair before up to it. At most 256."""
    steady_steps: int | None = None
    """Optimizer steps that the steady figures are made of."""
    steady_step_seconds_mean: float | None = None
    steady_step_seconds_median: float | None = None
    steady_step_seconds_p95: float | None = None
    model_flops_utilization: float | None = None
    """``teraflops_per_second`` over ``peak_teraflops_datasheet``."""
    model_flops_utilization_measured_peak: float | None = None
    """``teraflops_per_second`` over ``peak_teraflops_measured``."""
    optimizer_gigabytes: float | None = None
    """What the optimizer has to move in a step on each device, see ``hardware.optimizer_gigabytes``."""
    least_step_seconds: float | None = None
    """Computed from the two measured rates: a mean step's operations, then the optimizer's bytes; padding counts."""
    roofline_share: float | None = None
    """``least_step_seconds`` over ``steady_step_seconds_mean``."""
    machine: MachineFacts | None = None
    """What else ran on the machine from the first steady step on; None where that took under a second."""
    pause_seconds: float | None = None
    """Validation and checkpoints during training."""
    peak_device_memory_gib: float | None = None
    """Highest allocation on the accelerator, of the fullest rank; None on a CPU."""
    peak_process_memory_gib: float | None = None
    """Highest resident memory of a process, of the largest one."""
    joules_per_sample: float | None = None
    """Board energy (NVML) over steady windows; None without NVML or for windows under two seconds."""

    # What was learned
    final_loss: float | None = None
    """Mean training loss of the last steps (up to ``trainer.log_every_n_steps``); None where it is not finite."""
    final_metrics: dict[str, float | None] = field(default_factory=dict)
    """What the module logged last, validation loss and accuracy for instance; None for what is not finite."""
    skipped_items: dict[str, int] = field(default_factory=dict)
    """Items of the data left out, by reason."""
    total_seconds: float | None = None
    """Whole run, from process start; in one's own script from the Trainer's setup."""
    verdict: RunVerdict | None = None
    """Set when the run has ended."""
    schema: int = SCHEMA

    @property
    def exit_code(self) -> int:
        """What the process should exit with: 0 finished, 1 failed, 128 + signal when a signal ended it."""
        if self.status == "interrupted":
            return 128 + (self.signal or 2)
        return 0 if self.status == "finished" else 1

    @property
    def step_seconds(self) -> float | None:
        """Mean of a steady step: what ratios and total times are made of."""
        return 1 / self.steady_steps_per_second if self.steady_steps_per_second else None

    @property
    def samples_per_step(self) -> float | None:
        seconds = self.step_seconds
        return None if seconds is None or not self.samples_per_second else self.samples_per_second * seconds

    @property
    def own_setup_seconds(self) -> float | None:
        """Of the setup, without getting the compiler ready, which is an arm's own cost."""
        return None if self.setup_seconds is None else self.setup_seconds - (self.preparation_seconds or 0.0)

    @property
    def expected_recompiles(self) -> int:
        """Of ``recompiles``, those that every run has, see ``Event.is_expected``."""
        planned = len(self.report.get("buckets", {}).get("batch_sizes", ()))
        return sum(event.is_expected(first_steps=max(planned, 1)) for event in self.events)

    def copy_fields(self, *facts: Any) -> None:
        """Copy every field of dataclasses whose fields are fields of the record as well."""
        for each in facts:
            for one in dataclasses.fields(each):
                setattr(self, one.name, getattr(each, one.name))

    def save(self, directory: str | Path) -> Path:
        """Write ``record.json`` so that a reader sees the old one or the new one whole, never a half."""
        # Not above: the command line plans a sweep first, and then makes sure that this package is ours.
        from strategies.compile_errors import without_credentials

        values = without_credentials({"task": self.task, **dataclasses.asdict(self)})  # what ran comes first
        file = Path(directory) / FILE_NAME
        with written_whole(file, "w") as out:
            json.dump(nan_to_none(values), out, indent=1, allow_nan=False, default=str)
        return file

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read a record from its file or its run's directory. Raises ValueError when it is not one of ours."""
        file = path / FILE_NAME if path.is_dir() else path
        try:
            return cls.from_json(file.read_bytes(), file)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error

    @classmethod
    def from_json(cls, text: str | bytes, file: Path) -> RunRecord:
        """A record from the JSON that ``file`` holds of it, without control characters.

        Raises ValueError, naming the file and the first value that does not fit, when it is not one of ours.
        """
        try:
            values = printable(json.loads(text if isinstance(text, str) else text.decode("utf-8")))
        except RecursionError as error:
            raise ValueError(f"{file}: not a run record (it is nested too deeply)") from error
        except ValueError as error:  # also bytes that are not UTF-8, and a number of ten thousand digits
            raise ValueError(f"{file}: not a run record ({error})") from error
        try:
            if not isinstance(values, dict):
                raise TypeError(f"the whole is {type_name(values)}, not an object")
            if values["schema"] not in READ:
                raise ValueError(f"{file}: record schema {values['schema']}, this version reads {READ[0]} to {SCHEMA}")
            if (run := values.get("run", "train")) != "train":
                raise ValueError(f"{file}: a record of run={run}, which is no longer measured")
            record = dataclass_from_json(cls, values)
            if not all(isinstance(strategy.get("name"), str) for strategy in record.strategies):
                raise TypeError("a strategy has no name")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a run record ({error})") from error
        return record


# ---- parameters of strategies, by which arms are told apart ----------------------------------------------------------

PEER = "peer"
"""Name, in the place of a strategy's, of another project's way to train that was measured beside ours."""
PLACE_PARAMETERS = frozenset({"url", "key_file", "storage_options"})
"""Parameters of strategies for where something lies, not how the task executes."""
FORMER_DEFAULTS = {
    "auto.background": "null",
    "auto.margin": "0.02",
    "auto.memory": "null",
    "background.at_step": "null",
    "background.force": "false",
    "background.max_device_gib": "8.0",
    "background.max_host_gib": "16.0",
    "background.niceness": "10",
    "background.regions_per_step": "1",
    "background.timeout_seconds": "1800.0",
    "background.workers": "null",
    "buckets.limit": "null",
    "cached.read_only": "false",
    "cuda_graph.eager_steps": "1",
    "cuda_graph.max_graphs": "64",
    "dynamic.limit": "null",
    "optimizer.clip": "true",
    "regional.on_recompile_limit": "eager",
    "whole.on_recompile_limit": "eager",
    **{
        f"{strategy}.{option}": "null"
        for strategy in ("regional", "whole")
        for option in ("activation_memory_budget", "combo_kernels", "coordinate_descent")
    },
}
"""Parameters that only older records have, where they say no more than what a strategy does today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInfo:
    """What the framework that runs a training says of it for its record."""

    folder: Path | None
    """Where the training's logs go; None for no file."""
    shared: bool = False
    """Whether other trainings log into the same folder."""
    batch_size: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Options of the framework's trainer that a step depends on."""
    entry: str = "Compile"
    """See ``RunRecord.entry``."""
    resumed_from: str | None = None
    seed: int | None = None


def set_parameters(record: RunRecord) -> dict[str, str]:
    """Parameters of a record's strategies that are not their defaults, by dotted name; all of a plug-in's."""
    defaults = default_parameters(record)
    return {name: value for name, value in parameters(record).items() if defaults.get(name) != value}


def parameters(record: RunRecord) -> dict[str, str]:
    """All of a record's strategies. Those of a known strategy that an older record lacks are its defaults."""
    found = default_parameters(record)
    for strategy in record.strategies:
        # A peer's library is among the versions: of another one it is the same arm.
        left_out = {"name", *PLACE_PARAMETERS, *(record.versions if strategy["name"] == PEER else ())}
        values = {name: value for name, value in strategy.items() if name not in left_out}
        found.update(flat(values, f"{strategy['name']}."))
    return {name: value for name, value in found.items() if FORMER_DEFAULTS.get(name) != value}


def default_parameters(record: RunRecord) -> dict[str, str]:
    """Defaults of those strategies that are known here: a plug-in's are not."""
    from strategies import STRATEGIES  # not above, as in RunRecord.save

    defaults: dict[str, str] = {}
    for strategy in record.strategies:
        kind = STRATEGIES.get(str(strategy["name"]))
        for one in () if kind is None else dataclasses.fields(kind):
            value = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
            if value is not dataclasses.MISSING and one.name not in PLACE_PARAMETERS:
                defaults.update(flat({one.name: json.loads(json.dumps(value, default=str))}, f"{strategy['name']}."))
    return defaults


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values as text of nested mappings, empty mappings left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)
