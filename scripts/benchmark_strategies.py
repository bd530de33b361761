"""Strategies side by side on one workload, each in fresh processes with caches of its own:

    python -m scripts.benchmark_strategies --arms eager whole '[regional,cuda_graph]' \
        'whole compile.whole.mode=reduce-overhead' --warm --out DIR experiment=captioning_base task.data.pad_to=64

An arm is a value of ``compile=``, with further overrides after a blank. Arms take turns, round after round (A B A B);
the table shows medians over rounds and ratios to the first arm within a round; under ``run=inference``, of batches.
Cells that are finished in ``--out`` are not run again. Arguments that are no flag are overrides of every cell.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.telemetry.record import FILE_NAME, RunRecord

ALWAYS = (
    "trainer.val_every_n_steps=0",
    "trainer.checkpoint_every_n_steps=null",  # gigabytes a cell, and nobody goes on from one
    "trainer.progress=none",
    "trainer.log_every_n_steps=100",  # windows of at least two seconds, which the energy counter needs
)
INFERENCE = {"steady_steps_per_second": "batches_per_second", "steady_step_seconds_p95": "latency_seconds_p95"}
"""Figures of ``run=inference`` that stand where a training has others."""
COLUMNS = (
    "arm",
    "steps/s",
    "ratio",
    "useful tokens/s",
    "ratio",
    "p95 ms",
    "cold s",
    "warm s",
    "GiB",
    "J/sample",
    "loss",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One process of a comparison."""

    arm: str
    round: int
    start: str
    """``cold``: empty caches; ``warm``: those of the cold cell before it."""

    def directory(self, out: Path) -> Path:
        """Where its record lies."""
        name = "_".join(re.findall(r"[A-Za-z0-9.]+", self.arm.replace("compile.", "")))
        return out / f"{name}-{self.round}-{self.start}"


def main() -> None:
    """Run what is missing, then print the table."""
    options = parse()
    console = Console(width=180)
    starts = ("cold", "warm") if options.warm else ("cold",)
    cells = [Cell(arm, number, start) for number in range(options.rounds) for arm in options.arms for start in starts]
    for index, cell in enumerate(cells, start=1):
        if finished(cell.directory(options.out)) is None:
            console.print(
                f"{index}/{len(cells)} {escape(cell.arm)} · round {cell.round} · {cell.start}", highlight=False
            )
            run(cell, options)
            console.print(f"    {line(finished(cell.directory(options.out)))}", highlight=False)
    records = {cell: finished(cell.directory(options.out)) for cell in cells}
    console.print(table(options.arms, records))
    for cell, record in records.items():
        if record is None:
            console.print(escape(f"no figures: {cell.arm} · {cell.round} · {cell.start}: {reason(cell, options.out)}"))
    sys.exit(any(record is None for record in records.values()))


def parse() -> argparse.Namespace:
    """Read the command line; what is no flag is an override."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", required=True, metavar="ARM", help="values of compile=, overrides after")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each arm (default 1)")
    parser.add_argument("--warm", action="store_true", help="a second process after each cold one, on its caches")
    parser.add_argument("--out", type=Path, required=True, help="directory of the cells' records")
    parser.add_argument("--timeout", type=int, default=300, help="seconds after which a cell is given up (default 300)")
    options, overrides = parser.parse_known_args()
    overrides = [given for given in overrides if given != "--"]
    # An override among the arms has a key of its own and is no arm: "task.data.pad_to=64".
    options.overrides = [*overrides, *(arm for arm in options.arms if re.match(r"^[+~\w./]+=", arm))]
    options.arms = [arm for arm in options.arms if arm not in options.overrides]
    return options


def run(cell: Cell, options: argparse.Namespace) -> None:
    """Train one cell; its output stays beside its record."""
    directory = cell.directory(options.out).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    caches = Path(tempfile.gettempdir()) / "crucible-benchmark" / re.sub(r"\W+", "-", f"{cell.arm}-{cell.round}")
    if cell.start == "cold":
        shutil.rmtree(caches, ignore_errors=True)
    strategies, *more = cell.arm.split()
    if "cached" in strategies or "full_stack" in strategies:
        more.append(f"compile.cached.url=file://{caches / 'artifacts'}")
        for name in ("inductor", "triton"):  # warm means: from the artifacts, on a machine that has nothing else
            shutil.rmtree(caches / name, ignore_errors=True)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    command = [sys.executable, "-m", "trainer", *ALWAYS, *options.overrides, f"compile={strategies}", *more]
    # Quoted twice: for Hydra, a path may hold what its grammar knows.
    command.append(f"hydra.run.dir='{directory}'")
    with (directory / "output.txt").open("w") as output:
        try:
            subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=options.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            output.write(f"\ngiven up after {options.timeout} s\n")


def finished(directory: Path) -> RunRecord | None:
    """The record of a cell that finished."""
    if not (directory / FILE_NAME).is_file():
        return None
    record = RunRecord.load(directory)
    return record if record.status == "finished" else None


def reason(cell: Cell, out: Path) -> str:
    """Why a cell has no figures: its record's word, or the last lines that it printed."""
    directory = cell.directory(out)
    if (directory / FILE_NAME).is_file() and (said := RunRecord.load(directory).reason):
        return said
    output = directory / "output.txt"
    return " / ".join(output.read_text().strip().splitlines()[-2:]) if output.is_file() else "not run"


def line(record: RunRecord | None) -> str:
    """The figures of one cell as soon as they are there."""
    if record is None:
        return "no figures"
    named = {
        "steps/s": "steady_steps_per_second",
        "samples/s": "samples_per_second",
        "useful tokens/s": "useful_tokens_per_second",
    }
    rates = [f"{_median([_of(record, field)], '{:,.2f}')} {unit}" for unit, field in named.items()]
    return " · ".join([*rates, f"warm-up {_median([record.warmup_seconds], '{:.2f}')} s"])


def table(arms: list[str], records: dict[Cell, RunRecord | None]) -> Table:
    """One row an arm."""
    shown = Table(*COLUMNS, title="medians over rounds; ratios to the first arm, least to most in brackets")
    for column in shown.columns[1:]:
        column.justify = "right"
    for arm in arms:
        cold = {cell.round: record for cell, record in records.items() if (cell.arm, cell.start) == (arm, "cold")}
        warm = [record for cell, record in records.items() if (cell.arm, cell.start) == (arm, "warm")]
        base = {cell.round: record for cell, record in records.items() if (cell.arm, cell.start) == (arms[0], "cold")}
        shown.add_row(
            escape(arm),
            _median([_of(record, "steady_steps_per_second") for record in cold.values()], "{:.2f}"),
            _ratios(cold, base, "steady_steps_per_second"),
            _median([_of(record, "useful_tokens_per_second") for record in cold.values()], "{:,.0f}"),
            _ratios(cold, base, "useful_tokens_per_second"),
            _median([_of(record, "steady_step_seconds_p95") for record in cold.values()], "{:.1f}", scale=1e3),
            _median([_of(record, "warmup_seconds") for record in cold.values()], "{:.2f}"),
            _median([_of(record, "warmup_seconds") for record in warm], "{:.2f}"),
            _median([_of(record, "peak_device_memory_gib") for record in cold.values()], "{:.2f}"),
            _median([_of(record, "joules_per_sample") for record in cold.values()], "{:.3f}"),
            _median([_of(record, "final_loss") for record in cold.values()], "{:.4f}"),
        )
    return shown


def _of(record: RunRecord | None, name: str) -> float | None:
    if record is None:
        return None
    name = INFERENCE[name] if record.run == "inference" and name in INFERENCE else name
    return getattr(record, name)


def _median(values: list[float | None], form: str, *, scale: float = 1.0) -> str:
    known = [value * scale for value in values if value is not None]
    return form.format(statistics.median(known)) if known else "-"


def _ratios(cells: dict[int, RunRecord | None], base: dict[int, RunRecord | None], name: str) -> str:
    pairs = [(_of(record, name), _of(base.get(number), name)) for number, record in cells.items()]
    ratios = [value / reference for value, reference in pairs if value and reference]
    if not ratios:
        return "-"
    spread = f" [{min(ratios):.3f} {max(ratios):.3f}]" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.3f}{spread}"


if __name__ == "__main__":
    main()
