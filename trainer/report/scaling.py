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
from trainer.report.statistics import Estimate, estimate
from trainer.report.tables import ABSENT, estimated, kept, number, piped, plain_lines
from trainer.telemetry.record import RunRecord

DEVICES = frozenset({"trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.sharded_checkpoints"})
SAME = 0.01
"""Batches that differ by less, relatively, are the same: the last one of an epoch is smaller."""


@dataclass(kw_only=True, slots=True)
class Row:
    """The runs on one number of devices, which train together in one way."""

    devices: int
    how: str
    """``trainer.strategy``; empty on one device."""
    runs: list[Run]
    samples_per_second: Estimate
    """Of all devices."""
    batch: float
    """Samples of a step, of all devices."""
    efficiency: Estimate | None
    """Samples a second over ``devices`` times those of one device, of each run: of the same seed and round where there
    is one; None without a run on one device."""


@dataclass(kw_only=True, slots=True)
class Scaling:
    """One training on several numbers of devices."""

    name: str
    rows: list[Row]
    """By number of devices."""
    unlike: list[str]
    """What differs beside them and decides speed."""

    @property
    def kind(self) -> str:
        """What stays the same as devices are added: weak and strong scaling are not to be mixed up."""
        shares = {row.devices: row.batch / row.devices for row in self.rows}
        first = self.rows[0]
        if _alike(list(shares.values())):
            return (
                f"weak scaling: each device keeps its batch of {number(first.batch)} samples, a step has more of them"
            )
        if _alike([row.batch for row in self.rows]):
            return f"strong scaling: a step keeps its {number(first.batch)} samples, each device has fewer"
        each = ", ".join(f"{number(share)} on {devices}" for devices, share in shares.items())
        return f"neither weak nor strong scaling: samples of a device in a step differ ({each})"


def scalings(runs: Sequence[Run]) -> list[Scaling]:
    """Those trainings in ``runs`` that finished on several numbers of devices."""
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        record = run.record
        if record.status != "finished" or record.run != "train" or not record.samples_per_second:
            continue
        settings = {name: value for name, value in fixed_settings(record).items() if name not in DEVICES}
        said = [f"{name}={value}" for name, value in settings.items() if not name.endswith("batch_size")]
        options = [f"{name}={value}" for name, value in sorted(set_parameters(record).items())]
        alike.setdefault((record.task, record.label, *options, *sorted(said)), []).append(run)
    found = [members for members in alike.values() if len({run.record.world_size for run in members}) > 1]
    return [_scaling(members) for members in found]


def _scaling(members: Sequence[Run]) -> Scaling:
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in members:
        batch = [value for name, value in fixed_settings(run.record).items() if name.endswith("batch_size")]
        groups.setdefault((run.record.world_size, _how(run.record), *batch), []).append(run)
    base = next((runs for key, runs in sorted(groups.items(), key=lambda item: item[0][0]) if key[0] == 1), [])
    first = members[0].record
    options = [f"{name}={value}" for name, value in set_parameters(first).items()]
    return Scaling(
        name=" · ".join([first.task, " ".join([first.label, *options])]),
        rows=[_row(runs, base) for _, runs in sorted(groups.items(), key=lambda item: item[0][:2])],
        unlike=[line for line in unlike_conditions(members) if not line.startswith("world size")],
    )


def _row(runs: Sequence[Run], base: Sequence[Run]) -> Row:
    devices = runs[0].record.world_size
    return Row(
        devices=devices,
        how=_how(runs[0].record),
        runs=list(runs),
        samples_per_second=_known(estimate([run.record.samples_per_second for run in runs])),
        batch=statistics.median(
            (run.record.samples_per_second or 0.0) * (step_seconds(run.record) or 0.0) for run in runs
        ),
        efficiency=estimate([_efficiency(run.record, base) for run in runs]),
    )


def _efficiency(record: RunRecord, base: Sequence[Run]) -> float | None:
    same = [run for run in base if (run.record.seed, run.record.round) == (record.seed, record.round)] or base
    rates = [rate for run in same if (rate := run.record.samples_per_second)]
    if not rates or not record.samples_per_second:
        return None
    return record.samples_per_second / record.world_size / statistics.median(rates)


def _how(record: RunRecord) -> str:
    settings = record.config.get("trainer", {}) if isinstance(record.config.get("trainer"), dict) else {}
    return "" if record.world_size == 1 else str(settings.get("strategy", ""))


def _known(value: Estimate | None) -> Estimate:
    assert value is not None
    return value


def _alike(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= SAME * max(values)


def lines(found: Scaling, width: int) -> Iterator[str]:
    """The table with its heading as lines of text."""
    yield f"scaling: {found.name}"
    yield f"  {found.kind}"
    yield from (f"  unlike: {line}" for line in found.unlike)
    yield from (f"  {line}" for line in plain_lines(table_of(found), width - 2))
    yield ""


def markdown(every: Sequence[Scaling]) -> str:
    """The same as Markdown, after a blank line; empty without any."""
    texts = []
    for found in every:
        unlike = "".join(f"Unlike: {line}.\n\n" for line in found.unlike)
        texts.append(
            "\n".join([f"\n## Scaling: {found.name}\n\n{found.kind}.\n\n{unlike}", *piped(table_of(found)), ""])
        )
    return "".join(texts)


def table_of(found: Scaling) -> dict[str, list[str]]:
    """A row for each number of devices, as columns by heading."""
    rows = found.rows
    base = next((row.samples_per_second.median for row in rows if row.devices == 1), None)
    return kept(
        {
            "arm": [f"{row.devices} device{'s' if row.devices > 1 else ''} {row.how}".strip() for row in rows],
            "runs": [str(len(row.runs)) for row in rows],
            "samples of a step": [number(row.batch) for row in rows],
            "samples/s": [estimated(row.samples_per_second) for row in rows],
            "times one device": [
                ABSENT if base is None else f"{row.samples_per_second.median / base:.2f}x" for row in rows
            ],
            "efficiency": [estimated(row.efficiency) for row in rows],
        }
    )
