"""Published figures: the records behind a table as compact JSON lines, the tables and pictures that the documentation
makes of them, and whether figures measured elsewhere agree with them. ``crucible verify`` is the command.

A file of records, ``docs/results/records/NAME.jsonl``, holds the runs of one workload, a line each. A page shows their
table between ``<!-- table: NAME -->`` and ``<!-- end -->``; of ``losses-*.jsonl`` it shows the picture alone. Files
``*-models.jsonl`` hold several workloads; ``<!-- models: NAME -->`` begins a table of them all. Files ``same-*.jsonl``,
of arms beside themselves, are for tests of the statistics. A ratio is the one that ``crucible compare`` gives; other
figures are medians. Ratios, or steps where a table has no ratio, have the least and the largest round beside them. Of
runs under the profiler only the device's own time of a step is taken, and the cold warm-up where no other run was.
Where a page shows ``docs/pictures/NAME-PICTURE.png``, that picture (``pictures.PICTURES``) is drawn from the records.
The README's table names its rows in ``<!-- summary``, one a line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report import pictures
from trainer.report.comparison import BUSY, Row, WorkloadComparison, compare_runs, unlike_conditions, wait_seconds
from trainer.report.runs import Run, find, is_profiled, workload_of
from trainer.report.statistics import break_even_steps, rounded
from trainer.report.tables import ABSENT, NOT_SURE, conditions_of, kept, number, piped, plain_lines
from trainer.telemetry.record import RunRecord
from trainer.telemetry.serialization import nan_to_none, written_whole
from trainer.wording import counted

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "records"
LEFT_OUT = frozenset({"events", "notes", "verdict", "audits", "skipped_items", "final_metrics"})
"""What neither a table nor a picture nor a verification reads, but for some of the verdict."""
BY_TURNS = (
    *("outcome", "reason", "ratio", "ratio_low", "ratio_high", "pairs", "batches"),
    *("eager_step_seconds", "step_seconds", "wait_seconds", "break_even_steps"),
)
"""What is kept of a run's verdict: the ratio of its own steps and eager's, by turns."""
CURVES = {"progress": 2, "losses": 5}
"""Curves of a record, with the digits after the point that are kept."""
SOURCE = "Records"
"""Key of a picture's metadata: the digest of the records that it was drawn from."""
REPORTED = frozenset({"parity", "profile", "cuda_graph"})
"""Strategies and checks whose reports are kept: verdicts and numbers."""
AUTO = "auto_step_seconds"
"""Name of the report that holds seconds a step of all that ``auto`` tried, by arm."""
SAME, CURVES_ALONE = "same-", "losses-"
"""What the names of files begin with that hold no rows: arms beside themselves, and runs of which the losses count."""
SEVERAL = "models"
"""What the names of files end with that hold several workloads."""
MAX_SPREAD = 0.05
"""Between the rounds of a row, over their median; beyond it the row is marked."""
MARK = re.compile(r"(<!-- (table|models): ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SUMMARY = re.compile(r"(<!-- summary\n(.*?)\n-->\n).*?(<!-- end -->)", re.DOTALL)
"""The README's table, with a row a line: ``FILE/ARM what is trained``."""
RATIO, STEP, LOSS = "over eager", "ms a step", "final loss"
TOKENS = "useful tokens/s"
COLD, WARM = "warm-up s, cold", "warm-up s, warm"
COUNTS = ("graphs", "graph breaks", "recompiles")
COLUMNS = (RATIO, STEP, "device ms a step", COLD, "peak GiB", "graph breaks", LOSS)
"""Figures that a table shows. Warm starts, what follows from a step's time, and counts, ``check`` compares as well."""
TOLERANCES = {RATIO: 0.03, LOSS: 0.02, **dict.fromkeys(COUNTS, 0.0)}
"""By how much a figure may lie outside of what the rounds gave, relatively; 0 = it is one of theirs exactly."""
TIME_TOLERANCE = 0.05
"""The same of times and memory, which are compared on one model of GPU alone."""
MORE_IS_BETTER = (RATIO, TOKENS, "of roofline")
LESS_IS_BETTER = (STEP, "device ms a step", COLD, WARM, "peak GiB", "graph breaks", "recompiles")
HOLDS, BETTER, FAILS, NOT_COMPARED = "holds", "better", "DOES NOT HOLD", "not compared"
Figures = dict[str, tuple[float, ...]]
"""Values by the name of a figure, of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    arm: str
    compared: Row
    figures: Figures
    spread: float | None
    """Between the rounds, over their median: of the ratios, for the baseline of its steps. None for one round."""
    busy: bool
    """Whether the machine was, under its runs or the baseline's."""

    @property
    def records(self) -> list[RunRecord]:
        return [run.record for run in self.compared.cell.finished]


def line_of(record: RunRecord) -> str:
    """A record as a line: without what is empty or left out."""
    blank, values = dataclasses.asdict(RunRecord(task="")), dataclasses.asdict(record)
    short = {name: value for name, value in values.items() if name not in LEFT_OUT and value != blank[name]}
    short["config"] = {name: value for name, value in record.config.items() if name != "compile"}  # in ``strategies``
    short["report"] = {name: _facts(facts) for name, facts in record.report.items() if name in REPORTED}
    if table := record.report.get("auto", {}).get("table"):
        short["report"][AUTO] = {arm: tried["step_seconds"] for arm, tried in table.items() if tried["step_seconds"]}
    if record.verdict is not None:
        short["verdict"] = {name: values["verdict"][name] for name in BY_TURNS if values["verdict"][name] is not None}
    for name, digits in CURVES.items():
        if name in short:
            short[name] = [[int(step), round(value, digits)] for step, value in short[name]]
    if record.machine is not None:
        short["machine"] = {name: value for name, value in values["machine"].items() if value not in (None, [])}
    return json.dumps(
        nan_to_none(short | {"schema": record.schema}), allow_nan=False, separators=(",", ":"), default=str
    )


def _facts(facts: Any) -> Any:
    """Numbers and verdicts; no lists, no paths."""
    if not isinstance(facts, dict):
        return facts
    return {
        name: _facts(value)
        for name, value in facts.items()
        if isinstance(value, int | float) or name in ("verdict", "reason", "parity")
    }


def publish(paths: Iterable[str | Path], file: Path) -> int:
    """Write the records of the runs below ``paths`` into ``file``, in the order in which they ran; returns how many.

    Runs that someone stopped are left out, failed ones are not. Raises ValueError when they are of several workloads,
    unless the file is for these, or of arms beside themselves.
    """
    ended = [run for run in find(paths) if run.record.status in ("finished", "failed")]
    runs = sorted(ended, key=lambda run: run.record.started or "")
    if not (file.name.startswith(SAME) or file.stem.endswith(SEVERAL)):
        rows_of(runs)
    with written_whole(file, "w") as out:
        out.writelines(f"{line_of(run.record)}\n" for run in runs)
    return len(runs)


def rows_of(runs: Sequence[Run]) -> list[PublishedRow]:
    """An arm a row, eager first; none of runs that were all profiled. Raises ValueError for several workloads."""
    return [] if runs and all(map(is_profiled, runs)) else rows_in(_compared(runs), runs)


def published_rows(records: Path = RECORDS) -> dict[str, PublishedRow]:
    """Every row of the files in ``records`` by its name: ``FILE/ARM``, or ``FILE/WORKLOAD/ARM``."""
    rows: dict[str, PublishedRow] = {}
    for file in sorted(records.glob("*.jsonl")):
        if file.name.startswith((SAME, CURVES_ALONE)):
            continue
        runs = find([file])
        if file.stem.endswith(SEVERAL):
            for found in workloads(runs):
                rows |= {f"{file.stem}/{found.workload}/{row.arm}": row for row in rows_in(found, runs)}
        else:
            rows |= {f"{file.stem}/{row.arm}": row for row in rows_of(runs)}
    return rows


def workloads(runs: Sequence[Run]) -> list[WorkloadComparison]:
    """The comparison of each workload in ``runs``, without runs under the profiler."""
    return compare_runs([run for run in runs if not is_profiled(run)])


def _compared(runs: Sequence[Run]) -> WorkloadComparison:
    compared = workloads(runs)
    if len(compared) != 1:
        raise ValueError(f"a table is of one workload, these are {', '.join(found.workload for found in compared)}")
    return compared[0]


def rows_in(found: WorkloadComparison, runs: Sequence[Run] = ()) -> list[PublishedRow]:
    """A row for each arm; ``runs`` may hold profiled ones beside those that are compared, and other workloads."""
    base = found.baseline_row
    rows = []
    for row in found.rows:
        one = row.cell.runs[0].record
        profiled = [
            run.record
            for run in runs
            if is_profiled(run)
            and run.record.strategies == one.strategies
            and workload_of(run.record) == workload_of(one)
        ]
        figures = _figures(row, base if row is not base else None, profiled)
        rounds = figures.get(RATIO) or figures.get(STEP, ())
        spread = (max(rounds) - min(rounds)) / statistics.median(rounds) if len(rounds) > 1 else None
        busy = any(flag.startswith(BUSY) for each in (row, base) if each is not None for flag in each.flags)
        rows.append(PublishedRow(arm=row.cell.arm, compared=row, figures=figures, spread=spread, busy=busy))
    return rows


def _figures(row: Row, base: Row | None, profiled: Sequence[RunRecord]) -> Figures:
    records = [run.record for run in row.cell.finished]
    steps = [record.step_seconds for record in records]
    busy = [record.report.get("profile", {}).get("busy_seconds_per_step") for record in (*profiled, *records)]
    theirs = [] if base is None else [run.record for run in base.cell.finished]
    of_round = {(record.seed, record.round): record.step_seconds for record in theirs}
    if len(of_round) < len(theirs):  # a key that several runs share makes no pair, as in ``statistics.ratio``
        of_round = {}
    pairs = zip(steps, (of_round.get((record.seed, record.round)) for record in records), strict=True)
    cold = row.cell.over("warmup_seconds", "cold")
    found: dict[str, Sequence[float | None]] = {
        RATIO: [eager / ours for ours, eager in pairs if ours and eager],
        STEP: [seconds and seconds * 1e3 for seconds in steps],
        "device ms a step": [seconds and seconds * 1e3 for seconds in busy],
        TOKENS: [record.useful_tokens_per_second for record in records],
        "of roofline": [record.roofline_share for record in records],
        COLD: cold.values if cold else [one.warmup_seconds for one in profiled if one.cache in (None, "cold")],
        WARM: row.warm_warmup_seconds.values if row.warm_warmup_seconds else (),
        "peak GiB": [record.peak_device_memory_gib for record in records],
        "graphs": [record.graphs for record in records],
        "graph breaks": [record.graph_breaks for record in records],
        "recompiles": [record.recompiles for record in records],
        LOSS: [record.final_loss for record in records],
    }
    there = {name: tuple(value for value in values if value is not None) for name, values in found.items()}
    return {name: values for name, values in there.items() if values}


def middle(name: str, values: Sequence[float]) -> float:
    """What stands for several rounds: the geometric mean of ratios, as in ``statistics.ratio``, and else the median."""
    return statistics.geometric_mean(values) if name == RATIO else statistics.median(values)


def figure_text(row: PublishedRow, name: str) -> str:
    """A figure of a row, ``1.55 (1.54 to 1.56)``: of a ratio what ``crucible compare`` says, also where rounds lack one
    of the two runs."""
    ratio, values = row.compared.ratio, row.figures.get(name, ())
    return range_text(name, values, ratio.value if name == RATIO and ratio is not None else None)


def range_text(name: str, values: Sequence[float], figure: float | None = None) -> str:
    """``figure``, by default the middle of ``values``, with their least and largest where they differ."""
    if not values:
        return ABSENT
    figure = middle(name, values) if figure is None else figure

    def text(value: float) -> str:
        return f"{value:.0f}" if name in COUNTS else f"{value:.4g}" if name == LOSS else number(value)

    low, shown, high = (text(each) for each in (min(values), figure, max(values)))
    return shown if low == high else f"{shown} ({low} to {high})"


def table(runs: Sequence[Run], link: str) -> list[str]:
    """The lines of a table: conditions, arms, what to know of them. docs/results/README.md says what the marks mean."""
    compared = _compared(runs)
    rows = rows_in(compared, runs)
    records = [record for row in rows for record in row.records]
    on_cpu = all(record.device_type == "cpu" for record in records)
    shown = [name for name in COLUMNS if not (on_cpu and name not in TOLERANCES)]
    columns = {"arm": [f"`{row.arm}`{' †' if (row.spread or 0) > MAX_SPREAD else ''}" for row in rows]}
    rounds = [len(row.records) for row in rows]
    columns |= _rounds_column(rounds)
    ranged = RATIO if any(RATIO in row.figures for row in rows) else STEP
    for name in shown:
        columns[name] = [figure_text(row, name) if name == ranged else cell_text(row, name) for row in rows]
    for place, row in enumerate(rows):
        if row.compared is compared.baseline_row:
            columns[RATIO][place] = "1"
        elif row.compared.ratio is not None and not row.compared.ratio.shown:
            columns[RATIO][place] = NOT_SURE + columns[RATIO][place]
    # The losses are a column.
    flags = ((row.arm, flag) for row in rows for flag in row.compared.flags if not flag.startswith(LOSS))
    notes = _flag_lines((f"`{arm}`", flag) for arm, flag in flags)
    silent = [name for name in COUNTS if {ABSENT, "0"} >= set(columns.get(name, ()))]
    columns = {name: texts for name, texts in kept(columns).items() if name not in silent}
    conditions = f"{compared.workload} · {_conditions(records, rounds)} · [records]({link})"
    return [conditions, "", *piped(columns), "", *(f"- {note}" for note in notes), *([""] if notes else [])]


def _flag_lines(flags: Iterable[tuple[str, str]]) -> list[str]:
    """What to know of rows, a line for each flag with all that have it. How busy a machine was is in the records."""
    of: dict[str, list[str]] = {}
    for row, flag in flags:
        of.setdefault(BUSY if flag.startswith(BUSY) else flag, []).append(row)
    return [f"{', '.join(named)}: {flag}." for flag, named in of.items()]


def cell_text(row: PublishedRow, name: str) -> str:
    """The middle of a figure alone."""
    values = row.figures.get(name, ())
    return range_text(name, [middle(name, values)] if values else ())


def _rounds_column(rounds: Sequence[int]) -> dict[str, list[str]]:
    """A column where rows differ; else ``_conditions`` says it once."""
    return {"rounds": [str(each) for each in rounds]} if len(set(rounds)) > 1 else {}


def _conditions(records: Sequence[RunRecord], rounds: Sequence[int]) -> str:
    """Where and when, in one line: processor, load, clock, power and all versions are in the records beside it."""
    machines = [record.machine for record in records if record.machine is not None]
    throttled = sorted({reason for each in machines for reason in each.gpu_throttled})
    facts = (
        [record.device for record in records],
        [f"torch {record.versions.get('torch')}" for record in records],
        [f"commit {commit[:10] + commit[40:]}" for commit in (record.git_commit or "unknown" for record in records)],
        sorted((record.started or "")[:10] for record in records),
        [counted(rounds[0], "round") if rounds[0] > 1 else "one run a row"] if len(set(rounds)) == 1 else [],
        [f"throttled: {', '.join(throttled)}"] * bool(throttled),
    )
    return " · ".join(" / ".join(dict.fromkeys(filter(None, each))) for each in facts if any(each))


def models(runs: Sequence[Run], link: str) -> list[str]:
    """The lines of a table of several workloads: conditions, a row for each arm of each but eager, and what to know.

    Eager's step is that of its runs, or of ``auto``, which begins in eager. Where there is neither, it is the one of
    the run's own windows by turns, which until 2026-11-28 were waited for step by step: eager is no slower (≤).
    """
    texts, flags, records, rounds = [], [], [], []
    for found in workloads(runs):
        for row in rows_in(found, runs):
            records += row.records
            flags += [(f"{found.workload}, `{row.arm}`", flag) for flag in row.compared.flags]
            if row.compared is found.baseline_row and len(found.rows) > 1:
                continue
            rounds.append(len(row.records))
            texts.append(_model_row(found, row))
    columns = {name: [text[name] for text in texts] for name in texts[0]}
    columns = {"model": columns["model"], "arm": columns["arm"]} | _rounds_column(rounds) | columns
    notes = _flag_lines(flags)
    conditions = f"{_conditions(records, rounds)} · [records]({link})"
    return [conditions, "", *piped(kept(columns)), "", *(f"- {note}" for note in notes), *([""] if notes else [])]


def _model_row(found: WorkloadComparison, row: PublishedRow) -> dict[str, str]:
    """Texts of a row of ``models`` by column."""
    compared, base = row.compared, found.baseline_row
    verdicts = [one.verdict for one in row.records if one.verdict is not None and one.verdict.ratio is not None]
    turns = sorted(verdicts, key=lambda one: one.ratio or 0.0)[len(verdicts) // 2] if verdicts else None
    eager, over, wait, pays, bound = None, ABSENT, None, None, ""
    if base is not None:
        over = figure_text(row, RATIO)
        eager = None if base.step_seconds is None else base.step_seconds.median
        over = NOT_SURE + over if compared.ratio is not None and not compared.ratio.shown else over
        if compared.cost is not None and base.cost is not None:
            wait, pays = wait_seconds(compared, base), break_even_steps(compared.cost, base.cost)
    elif turns is not None:
        wait, pays, eager, step = (
            turns.wait_seconds,
            turns.break_even_steps,
            turns.eager_step_seconds,
            compared.step_seconds,
        )
        if (own := pictures.over_own_eager(compared)) is not None:
            over, eager = number(own), None if step is None else own * step.median
        elif eager is not None and step is not None:
            bound, over = "≤ ", f"≤ {number(eager / step.median)}"
    chosen = dict.fromkeys("+".join(each["name"] for each in one.chosen_strategies) or "eager" for one in row.records)
    became = f" → {', '.join(f'`{name}`' for name in chosen)}" if row.arm.startswith("auto") and row.records else ""
    paid = ABSENT if pays is None else "never" if pays == math.inf else rounded(pays)
    return {
        "model": found.workload,
        "arm": f"`{row.arm}`{became}",
        STEP: figure_text(row, STEP),
        "eager ms": ABSENT if eager is None else f"{bound}{number(eager * 1e3)}",
        RATIO: over,
        "wait s": ABSENT if wait is None else f"{wait:.0f}",
        "pays after": f"≥ {paid}" if bound and paid != ABSENT else paid,
        "peak GiB": cell_text(row, "peak GiB"),
    }


def summary(lines: Sequence[str], records: Path = RECORDS) -> list[str]:
    """A table for newcomers: trainings eager and compiled, each of ``lines`` as in ``SUMMARY``; then where and when.

    To wait, and the step after which it has paid, count from empty caches. Raises ValueError for a row that is not one,
    or has no ratio to eager from such a start.
    """
    names = ("training", "strategy", "eager step", "compiled step", "times as fast", "seconds to wait", "pays after")
    texts, measured = [], []
    for line in lines:
        name, _, title = line.partition(" ")
        file, *which, arm = name.split("/")
        every = workloads(find([records / f"{file}.jsonl"]))
        found = next((one for one in every if [one.workload] == which), every[0])
        # Of these two alone: other arms may have started with filled caches only.
        runs = [run for row in found.rows if row.cell.arm in (found.baseline, arm) for run in row.cell.finished]
        both = compare_runs(runs)[0] if runs else found
        if len(both.rows) != 2 or both.start != "cold" or both.rows[1].break_even_steps is None:
            raise ValueError(f"{name} is not a row with a ratio to eager from a cold start: crucible verify --list")
        eager, compiled = rows_in(both)
        waited = wait_seconds(compiled.compared, eager.compared)
        steps = (number(statistics.median(row.figures[STEP])) for row in (eager, compiled))
        pays = both.rows[1].break_even_steps
        texts.append(
            (
                title,
                f"`{arm if '+' not in arm else '[' + arm.replace('+', ',') + ']'}`",
                *(f"{step} ms" for step in steps),
                figure_text(compiled, RATIO),
                ABSENT if waited is None else f"{waited:.0f}",
                "never" if pays == math.inf else f"{rounded(pays)} steps",
            )
        )
        measured += [*eager.records, *compiled.records]
    columns = {name: list(column) for name, column in zip(names, zip(*texts, strict=True), strict=True)}
    facts = (
        [record.device for record in measured],
        [record.precision for record in measured],
        [f"torch {record.versions.get('torch')}" for record in measured],
        [f"{len(measured) // (2 * len(lines))} rounds"],
        sorted((record.started or "")[:10] for record in measured),
        [f"commit {(record.git_commit or 'unknown')[:10]}" for record in measured],
    )
    return [*piped(columns), "", " · ".join(" / ".join(dict.fromkeys(filter(None, each))) for each in facts) + "."]


def refreshed(text: str, records: Path = RECORDS) -> str:
    """A page with its tables made anew from the files in ``records``. Raises ValueError for a file that is missing."""

    def made(match: re.Match[str]) -> str:
        file = records / f"{match[3]}.jsonl"
        lines = {"table": table, "models": models}[match[2]](find([file]), f"records/{file.name}")
        return "\n".join((match[1].rstrip("\n"), *lines, match[4]))

    def summed(match: re.Match[str]) -> str:
        return "\n".join((match[1], *summary(match[2].splitlines(), records), "", match[3]))

    return SUMMARY.sub(summed, MARK.sub(made, text))


def refresh(records: Path = RECORDS) -> list[Path]:
    """Make the tables of all pages beside ``records`` and the pictures anew; returns the files that have changed.

    Raises ValueError for a file of records that is missing, and where a picture is due and matplotlib is not there.
    """
    changed = []
    for page in _pages(records):
        text = page.read_text(encoding="utf-8")
        if (new := refreshed(text, records)) != text:
            with written_whole(page, "w") as out:
                out.write(new)
            changed.append(page)
    for target, file, draw in stale_pictures(records):
        found = workloads(find([file]))
        colours = pictures.arm_colours(found)
        if (figure := pictures.models(found, colours) if draw is None else draw(found[0], colours)) is None:
            raise ValueError(f"{file} has no figures for {target.name}")
        pictures.save(figure, target, metadata={SOURCE: _digest(file)})
        changed.append(target)
    return changed


def _pages(records: Path) -> list[Path]:
    """Pages that may show a table: those beside ``records``, and the README of the checkout that these belong to."""
    readme = records.resolve().parents[2] / "README.md"
    ours = records.resolve().parent.parent.name == "docs" and readme.is_file()
    return sorted(records.parent.glob("*.md")) + [readme] * ours


def stale_pictures(records: Path = RECORDS) -> Iterator[tuple[Path, Path, pictures.Draw | None]]:
    """Pictures that a page shows and that are not drawn from the records of their name, with the file of these, and
    with who draws them; None = ``pictures.models``."""
    docs = records.resolve().parent.parent
    if docs.name != "docs":
        return  # kept elsewhere: no page shows them, and somebody's folders are not searched for one
    pages = [page for page in (docs.parent / "README.md", *docs.rglob("*.md")) if page.is_file()]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    for file in sorted(records.glob("*.jsonl")):
        kinds: dict[str, pictures.Draw | None] = {kind: draw for kind, (draw, _) in pictures.PICTURES.items()}
        if file.stem.endswith(SEVERAL):
            kinds = {"ratios": None}
        for kind, draw in kinds.items():
            name = f"{file.stem}-{kind}.png"
            target = docs / "pictures" / name
            content = target.read_bytes() if target.is_file() else b""
            # PNG keeps the digest as text: key, zero byte, value.
            drawn_from_these = f"{SOURCE}\0{_digest(file)}".encode() in content
            if any(f"pictures/{name}" in text for text in texts) and not drawn_from_these:
                yield target, file, draw


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def judged(name: str, published: Sequence[float], here: Sequence[float], same_gpu: bool) -> str:
    """Whether the middle of ``here`` is within what was published and its tolerance, beyond it on the better side, or
    not; ``not compared`` where it is a time on another device, or there is none. What every machine has must be there.
    """
    if not here or not published:
        return FAILS if name in TOLERANCES else NOT_COMPARED
    if name not in TOLERANCES and not same_gpu:
        return NOT_COMPARED
    low, ours, high = min(published), middle(name, here), max(published)
    tolerance = TOLERANCES.get(name, TIME_TOLERANCE)
    room = tolerance * abs(middle(name, published))
    if low - room <= ours <= high + room if tolerance else set(here) <= set(published):
        return HOLDS
    better = (ours > high and name in MORE_IS_BETTER) or (ours < low and name in LESS_IS_BETTER)
    return BETTER if better and (tolerance or max(here) <= high) else FAILS  # a count is looked at in each round


def check(
    name: str, row: PublishedRow, here: PublishedRow, *, called: str = "published", command: str = ""
) -> tuple[list[str], bool]:
    """What to say of a row that was measured again ``here``, for a person and for a bug report, and whether all that
    can be compared holds or is better. The ratio of a busy machine cannot, nor that of a single round, whose noise
    nobody knows."""
    ours, theirs = row.records[0], here.records[0]
    same_gpu = ours.device_type == theirs.device_type == "cuda" and ours.device == theirs.device
    verdicts = {
        each: judged(each, values, here.figures.get(each, ()), same_gpu) for each, values in row.figures.items()
    }
    if RATIO in verdicts and RATIO in here.figures and (here.busy or len(here.records) < 2):
        verdicts[RATIO] = NOT_COMPARED
    columns = {
        "figure": list(verdicts),
        called: [figure_text(row, each) for each in verdicts],
        "here": [figure_text(here, each) for each in verdicts],
        "verdict": list(verdicts.values()),
    }
    failed = [each for each, verdict in verdicts.items() if verdict == FAILS]
    better = [each for each, verdict in verdicts.items() if verdict == BETTER]
    compared = sum(verdict != NOT_COMPARED for verdict in verdicts.values())
    if failed:
        conclusion = f"{', '.join(failed)} of {compared} figures {'does' if len(failed) == 1 else 'do'} not hold here"
    else:
        conclusion = f"all {compared} figures that can be compared hold here"
        conclusion += f" or are better: {', '.join(better)}" if better else ""
    runs = [*row.compared.cell.finished, *here.compared.cell.finished]
    remarks = [*unlike_conditions(runs), *here.compared.flags]
    if RATIO in row.figures and (row.spread or 0) > MAX_SPREAD:
        remarks.append(f"the {called} rounds spread by {row.spread:.0%}: that the ratio holds says little")
    width = len(called) + 1
    lines = [
        f"{name}: {conclusion}",
        f"  {called + ':':<{width}} {conditions_of(row.records)} · rounds: {len(row.records)}",
        f"  {'here:':<{width}} {conditions_of(here.records)} · rounds: {len(here.records)}",
        *([f"  {'command:':<{width}} {command}"] if command else []),
        *plain_lines(columns, 100),
        *(f"  {remark}" for remark in remarks),
    ]
    return ["", *lines], not failed
