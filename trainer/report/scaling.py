"""Scaling: one training on several numbers of devices, its samples a second over as many times those of one device.

Runs belong together that share task, strategies with their options, and all settings but the devices, how these train
together, and the batch. What a step really held is measured: samples a second times seconds a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.report.flags import step_seconds, unlike_conditions
from trainer.report.runs import Run, fixed_settings, set_parameters
from trainer.report.statistics import estimate
from trainer.report.tables import ABSENT, estimated, kept, number, piped, plain_lines
from trainer.telemetry.record import RunRecord

DEVICES = frozenset({"trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.sharded_checkpoints"})
SAME = 0.01
"""Batches that differ by less, relatively, are the same: the last one of an epoch is smaller."""


@dataclass(kw_only=True, slots=True)
class Scaling:
    """One training on several numbers of devices."""

    name: str
    kind: str
    """What stays the same as devices are added: weak and strong scaling are not to be mixed up."""
    table: dict[str, list[str]]
    """A row for each number of devices and way to train together, as columns by heading."""
    unlike: list[str]
    """What differs beside them and decides speed."""

    def lines(self, width: int) -> Iterator[str]:
        """The table with its heading as lines of text."""
        yield f"scaling: {self.name}"
        yield f"  {self.kind}"
        yield from (f"  unlike: {line}" for line in self.unlike)
        yield from (f"  {line}" for line in plain_lines(self.table, width - 2))
        yield ""

    def markdown(self) -> str:
        """The same as Markdown, after a blank line."""
        unlike = "".join(f"Unlike: {line}.\n\n" for line in self.unlike)
        return "\n".join([f"\n## Scaling: {self.name}\n\n{self.kind}.\n\n{unlike}", *piped(self.table), ""])


def scalings(runs: Sequence[Run]) -> list[Scaling]:
    """Those trainings in ``runs`` that finished on several numbers of devices."""
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        record = run.record
        if record.status != "finished" or not record.samples_per_second:
            continue
        settings = {name: value for name, value in fixed_settings(record).items() if name not in DEVICES}
        said = [f"{name}={value}" for name, value in settings.items() if not name.endswith("batch_size")]
        alike.setdefault((record.task, record.label, *_options(record), *sorted(said)), []).append(run)
    return [_scaling(members) for members in alike.values() if len({run.record.world_size for run in members}) > 1]


def _scaling(members: Sequence[Run]) -> Scaling:
    rows: dict[tuple[Any, ...], list[RunRecord]] = {}
    first = members[0].record
    for record in sorted((run.record for run in members), key=lambda record: (record.world_size, _how(record))):
        batch = [value for name, value in fixed_settings(record).items() if name.endswith("batch_size")]
        rows.setdefault((record.world_size, _how(record), *batch), []).append(record)
    base = next((records for key, records in rows.items() if key[0] == 1), [])
    steps = [
        statistics.median((one.samples_per_second or 0.0) * (step_seconds(one) or 0.0) for one in records)
        for records in rows.values()
    ]
    rates = [estimate([one.samples_per_second for one in records]) for records in rows.values()]
    medians = [0.0 if rate is None else rate.median for rate in rates]
    efficiencies = [estimate([_efficiency(one, base) for one in records]) for records in rows.values()]
    columns = {
        "arm": [f"{key[0]} device{'s' if key[0] > 1 else ''} {key[1]}".strip() for key in rows],
        "runs": [str(len(records)) for records in rows.values()],
        "samples of a step": [number(samples) for samples in steps],
        "samples/s": [estimated(rate) for rate in rates],
        "times one device": [f"{rate / medians[0]:.2f}x" if base else ABSENT for rate in medians],
        "efficiency": [estimated(efficiency) for efficiency in efficiencies],
    }
    return Scaling(
        name=f"{first.task} · {' '.join([first.label, *_options(first)])}",
        kind=_kind([int(key[0]) for key in rows], steps),
        table=kept(columns),
        unlike=[line for line in unlike_conditions(members) if not line.startswith("world size")],
    )


def _kind(devices: Sequence[int], steps: Sequence[float]) -> str:
    shares = {count: samples / count for count, samples in zip(devices, steps, strict=True)}
    if _alike(list(shares.values())):
        return f"weak scaling: each device keeps its batch of {number(steps[0])} samples, a step has more of them"
    if _alike(steps):
        return f"strong scaling: a step keeps its {number(steps[0])} samples, each device has fewer"
    each = ", ".join(f"{number(share)} on {count}" for count, share in shares.items())
    return f"neither weak nor strong scaling: samples of a device in a step differ ({each})"


def _alike(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= SAME * max(values)


def _efficiency(record: RunRecord, base: Sequence[RunRecord]) -> float | None:
    """Samples a second over as many times those of one device, of the same seed and round where there is one."""
    same = [one for one in base if (one.seed, one.round) == (record.seed, record.round)] or base
    rates = [rate for one in same if (rate := one.samples_per_second)]
    if not rates or not record.samples_per_second:
        return None
    return record.samples_per_second / record.world_size / statistics.median(rates)


def _how(record: RunRecord) -> str:
    return "" if record.world_size == 1 else fixed_settings(record).get("trainer.strategy", "")


def _options(record: RunRecord) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(set_parameters(record).items())]
