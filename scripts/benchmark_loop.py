"""Our loop against a hand-written one: ``python -m scripts.benchmark_loop task/size=base task.data.batch_size=32``.

Steady state: one process builds the module once, and every strategy under every arm (raw loop, bare Lightning Trainer,
our trainer) takes turns on it, round after round. Ratios are taken within a round; median and range are printed.
Cold start (``--cold``): a fresh process with empty compile caches for each strategy and each of raw and ours.
Arguments that are no flag are overrides of the configuration, as for the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts import loop_arms
from trainer.config import compose
from trainer.process import process_settings
from trainer.settings import Config

ARMS: dict[str, Callable[[loop_arms.Workload, int], list[float]]] = {
    "raw": loop_arms.raw,
    "bare": loop_arms.bare,
    "ours": lambda workload, steps: loop_arms.ours(workload, steps)[0],
}
COLD_STEPS = 8
COLD_FIELDS = ("compile_seconds", "compile_phases_seconds", "graphs", "graph_breaks", "recompiles", "regions_compiled")


def main() -> None:
    """Parse, measure, print tables and write one JSON file."""
    options = parse()
    warnings.filterwarnings("ignore")
    if options.cold_cell:
        print("RESULT " + json.dumps(cold_cell(options, *options.cold_cell.split(":"))))
        return
    console = Console(width=160)
    result: dict[str, Any] = {"overrides": options.overrides, "toy": options.toy}
    if options.cold:
        arms = [(strategy, arm) for strategy in options.strategies.split(",") for arm in ("raw", "ours")]
        result["cold"] = [in_fresh_process(options, strategy, arm) for strategy, arm in arms]
        console.print(cold_table(result["cold"]))
    if options.rounds:
        result["rounds"] = rounds(options)
        console.print(steady_table(result["rounds"]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.exit(any("error" in cell for cell in result.get("cold", [])))


def parse() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration, e.g. task/size=base")
    parser.add_argument("--strategies", default="eager,whole,regional", help="compile options to measure, by commas")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which each arm takes a turn (default 5)")
    parser.add_argument("--steps", type=int, default=25, help="steps of a turn (default 25)")
    parser.add_argument("--cold", action="store_true", help="also cold starts in fresh processes")
    parser.add_argument("--toy", action="store_true", help="a step of next to no work: shows microseconds of the loop")
    parser.add_argument("--out", type=Path, help="JSON file for every figure")
    parser.add_argument("--cold-cell", help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args()
    if flags := [argument for argument in unknown if argument.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    options.overrides += unknown
    if options.steps <= loop_arms.WARMUP:
        parser.error(f"--steps {options.steps} leaves nothing after the {loop_arms.WARMUP} warm-up steps of a turn")
    return options


def config_of(options: argparse.Namespace, strategy: str) -> Config:
    """The configuration of one strategy, without validation."""
    config = compose([*options.overrides, f"compile={strategy}", "trainer.val_every_n_steps=0"])
    if options.toy:
        from scripts.toy_task import Toy

        config.task = Toy()
        config.trainer.gradient_clip_val = None
    return config


def rounds(options: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds a step of every ``strategy/arm`` in each round; odd rounds go backwards."""
    configs = {strategy: config_of(options, strategy) for strategy in options.strategies.split(",")}
    # Of a toy's steps the mean, because what is done once in fifty steps is a good part of what its loop costs.
    steady = loop_arms.mean if options.toy else loop_arms.median
    turns = [(strategy, arm) for strategy in configs for arm in ARMS]
    measured: list[dict[str, float]] = []
    first = next(iter(configs.values()))
    with process_settings(first.trainer):
        workload = loop_arms.Workload.build(first)
        for strategy in configs:  # compile everything before anything is measured
            workload.config = configs[strategy]
            loop_arms.raw(workload, loop_arms.WARMUP)
        for number in range(options.rounds):
            times: dict[str, float] = {}
            for strategy, arm in turns if number % 2 == 0 else reversed(turns):
                workload.config = configs[strategy]
                times[f"{strategy}/{arm}"] = steady(ARMS[arm](workload, options.steps)) * 1e3
            measured.append(times)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return measured


def in_fresh_process(options: argparse.Namespace, strategy: str, arm: str) -> dict[str, Any]:
    """Cold start of one strategy in a process with empty caches; an error becomes part of the result."""
    about = {"strategy": strategy, "arm": arm}
    print(f"cold start: {strategy}, {arm}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        command = [sys.executable, "-m", "scripts.benchmark_loop", "--cold-cell", f"{strategy}:{arm}"]
        command += [*options.overrides, *(["--toy"] if options.toy else [])]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {**about, "error": f"exit code {done.returncode}"}
    return {**about, **json.loads(lines[-1].removeprefix("RESULT "))}


def cold_cell(options: argparse.Namespace, strategy: str, arm: str) -> dict[str, Any]:
    """First steps of one strategy in this process."""
    config = config_of(options, strategy)
    with process_settings(config.trainer):
        workload = loop_arms.Workload.build(config)
        if arm == "raw":
            seconds = loop_arms.raw(workload, COLD_STEPS)
            return {"first_step_seconds": seconds[0], "warmup_seconds": sum(seconds[: loop_arms.WARMUP])}
        _, record = loop_arms.ours(workload, COLD_STEPS)
        figures = {name: getattr(record, name) for name in COLD_FIELDS}
        return {
            "first_step_seconds": record.first_step_seconds,
            "warmup_seconds": record.warmup_seconds,
            **figures,
        }


def cold_table(cells: list[dict[str, Any]]) -> Table:
    """Cold starts side by side."""
    shown = Table("strategy", "arm", "first step s", "warm-up s", "compile s", "graphs", title="cold start")
    for cell in cells:
        if "error" in cell:
            shown.add_row(cell["strategy"], cell["arm"], cell["error"])
            continue
        compile_seconds = cell.get("compile_seconds")
        shown.add_row(
            cell["strategy"],
            cell["arm"],
            f"{cell['first_step_seconds']:.2f}",
            f"{cell['warmup_seconds']:.2f}",
            "-" if compile_seconds is None else f"{compile_seconds:.2f}",
            str(cell.get("graphs") or "-"),
        )
    return shown


def steady_table(measured: list[dict[str, float]]) -> Table:
    """Steady steps side by side, ratios within rounds as median (least to most)."""
    shown = Table("strategy", "raw ms", "bare ms", "ours ms", "steps/s", title="steady steps")
    for column in ("ours / raw", "ours - bare µs", "speed-up over eager (ours)"):
        shown.add_column(column)
    for strategy in dict.fromkeys(name.split("/")[0] for name in measured[0]):
        medians = {arm: statistics.median(times[f"{strategy}/{arm}"] for times in measured) for arm in ARMS}
        extra = [(times[f"{strategy}/ours"] - times[f"{strategy}/bare"]) * 1e3 for times in measured]
        eager = [times.get("eager/ours", float("nan")) / times[f"{strategy}/ours"] for times in measured]
        shown.add_row(
            strategy,
            *(f"{medians[arm]:.3f}" for arm in ARMS),
            f"{1e3 / medians['ours']:.2f}",
            spread([times[f"{strategy}/ours"] / times[f"{strategy}/raw"] for times in measured]),
            f"{statistics.median(extra):.0f} ({min(extra):.0f} to {max(extra):.0f})",
            spread(eager),
        )
    return shown


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
