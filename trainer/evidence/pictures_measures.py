"""What was measured of the arms of one workload, as bars: throughput, warm-up, padding, memory and energy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.evidence import pictures_style as style
from trainer.evidence.columns import NOT_SURE, marked
from trainer.evidence.comparison import Row, WorkloadComparison
from trainer.evidence.pictures_bars import Bar, Section, draw
from trainer.evidence.statistics import Estimate, Ratio
from trainer.telemetry.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def throughput(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Useful tokens a second of each arm, or samples, or steps, with their range over runs and the ratio's interval."""
    unit, rates = _rates(comparison)
    section = Section(f"{unit.capitalize()} a second")
    for row in comparison.rows:
        rate = rates[row.cell.arm]
        if rate is None:
            continue
        text = f"{style.rounded(rate.median)}{_ratio(row)}"
        section.groups.append((row.cell.arm, palette[row.cell.arm], [Bar(rate.median, text, rate.low, rate.high)]))
    if any(bars[0].low is not None for _, _, bars in section.groups):
        section.legend.append("line: slowest to fastest run")
    if any(row.ratio is not None and row.ratio.low is not None for row in comparison.rows):
        section.legend.append(f"x: times {style.plain(comparison.baseline, longest=24)} (95% interval)")
    if any(row.ratio is not None and not row.ratio.shown for row in comparison.rows):
        section.legend.append(f"{NOT_SURE}: no difference shown")
    return draw([section])


def warmup(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Warm-up seconds of each arm, cold and warm, with what the rehearsal and the compiler took of them."""
    section = Section("Seconds of warm-up")
    split = compiled = False
    for row in comparison.rows:
        bars = []
        for start, estimate, runs in (
            ("cold", row.cold_warmup_seconds, row.cell.cold or row.cell.others),
            ("warm", row.warm_warmup_seconds, row.cell.warm),
        ):
            if estimate is None or (start == "warm" and estimate == row.cold_warmup_seconds):
                continue  # what compiles nothing starts the same either way
            records = [run.record for run in runs]
            rehearsal, compiling = _median(records, "preflight_seconds"), _median(records, "compile_seconds")
            split, compiled = split or rehearsal is not None, compiled or compiling is not None
            # The record's compile seconds include validation's, which come after the warm-up.
            inner = None if compiling is None else min(compiling, estimate.median)
            known = start if start == "warm" or row.cell.cold else "caches unknown" if row.cell.compiles else ""
            bar = Bar(
                estimate.median,
                f"{style.duration(estimate.median)} {known}".rstrip(),
                estimate.low,
                estimate.high,
                pale=start == "warm",
                dark=rehearsal,
                inner=inner,
            )
            bars.append(bar)
        if bars:
            section.groups.append((row.cell.arm, palette[row.cell.arm], bars))
    if split:
        section.legend.append("full colour: rehearsal before the first step")
        section.legend.append("paler: first steps, and steps that compiled something")
    if compiled:
        section.legend.append("line inside: of it in the compiler")
    return draw([section])


def padding(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Share of padding in what each arm computed, and by bucket where a run says so."""
    section = Section("Padding, share of all positions", whole=1.0)
    for row in comparison.rows:
        if row.padded_share is not None:
            bar = Bar(row.padded_share, f"{row.padded_share:.1%}")
            section.groups.append((row.cell.arm, palette[row.cell.arm], [bar]))
    if not any(bars[0].value for _, _, bars in section.groups):
        return None
    sections, seen = [section], set()
    for row in comparison.rows:
        for edges, shares, examples in _buckets(row):
            if (edges, shares) in seen:
                continue
            seen.add((edges, shares))
            colour, counts = palette[row.cell.arm], max(sum(examples), 1)
            groups = [
                (f"up to {edge}", colour, [Bar(share, f"{share:.1%} · {count / counts:.0%} of examples")])
                for edge, share, count in zip(edges, shares, examples, strict=True)
                if share is not None
            ]
            sections.append(Section(f"Padding by bucket: {style.plain(row.cell.arm, longest=34)}", groups, whole=1.0))
    return draw(sections)


def resources(comparison: WorkloadComparison, *, palette: Mapping[str, str]) -> Figure | None:
    """Peak memory and energy of each arm, as far as they were measured."""
    on_device = any(row.peak_device_memory_gib is not None for row in comparison.rows)
    memory = Section("Peak memory, GiB" + (" on the device" if on_device else " of the process"))
    energy = Section("Energy, joules a sample")
    for row in comparison.rows:
        arm, colour = row.cell.arm, palette[row.cell.arm]
        gib = row.peak_device_memory_gib if on_device else row.peak_process_memory_gib
        if gib is not None:
            memory.groups.append((arm, colour, [Bar(gib, f"{gib:.3g}")]))
        if (joules := row.joules_per_sample) is not None:
            bar = Bar(joules.median, style.rounded(joules.median), joules.low, joules.high)
            energy.groups.append((arm, colour, [bar]))
    return draw([memory, energy])


def _ratio(row: Row) -> str:
    """What is said of the ratio beside the bar."""
    if row.ratio is None:
        return ""
    return f" · {marked(row.ratio)}{_interval(row.ratio)}"


def _interval(ratio: Ratio) -> str:
    """A ratio's interval in brackets; ends that say nothing are cut short. Nothing without one."""
    if ratio.low is None or ratio.high is None:
        return ""
    low = f"{ratio.low:.2f}" if ratio.low >= 0.01 else "<0.01"
    high = f"{ratio.high:.2f}" if ratio.high < 100 else ">100"
    return f" ({low}-{high})"


def _rates(comparison: WorkloadComparison) -> tuple[str, dict[str, Estimate | None]]:
    """What is counted, and how much of it each arm does in a second: the most telling that any arm has."""
    for unit, name in (("useful tokens", "useful_tokens_per_second"), ("samples", "samples_per_second")):
        rates = {row.cell.arm: getattr(row, name) for row in comparison.rows}
        if any(rate is not None for rate in rates.values()):
            return unit, rates
    unit = "batches" if comparison.run == "inference" else "steps"
    return unit, {row.cell.arm: _rate(row.step_seconds) for row in comparison.rows}


def _rate(seconds: Estimate | None) -> Estimate | None:
    """Steps a second from seconds a step."""
    if seconds is None or not seconds.median:
        return None
    low, high = (None if end is None else 1 / end for end in (seconds.high, seconds.low))
    return Estimate(1 / seconds.median, low, high, seconds.count, tuple(1 / value for value in seconds.values))


def _median(records: Sequence[RunRecord], name: str) -> float | None:
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return statistics.median(values) if values else None


Buckets = tuple[tuple[int, ...], tuple[float | None, ...], tuple[int, ...]]


def _buckets(row: Row) -> list[Buckets]:
    """Edges, padded shares and numbers of examples, of each run that has them."""
    found = []
    for run in row.cell.finished:
        facts = run.record.report.get("buckets", {})
        if "padded_share_by_edge" in facts:
            found.append((tuple(facts["edges"]), tuple(facts["padded_share_by_edge"]), tuple(facts["examples"])))
    return found
