"""Our loop against a hand-written one: ``python -m scripts.benchmark_loop task/size=base task.data.batch_size=32``.

For each strategy a fresh process with its own empty compile caches builds the module once and lets the arms take turns
on it: raw loop, bare Lightning Trainer, our trainer. The ratio is taken within each round; its median and range are
printed. Whoever goes first in the process pays the cold compile, so that a second process starts with the raw loop.
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

STRATEGIES = "eager,whole,regional"


def main() -> None:
    """Parse, measure each strategy in processes of their own, print a table and write JSON lines."""
    options = parse()
    if options.child:
        print("RESULT " + json.dumps(measure(options)))
        return
    results = []
    for strategy in options.strategies.split(","):
        for first in ("ours", "raw") if options.both_cold else ("ours",):
            result = in_fresh_process(options, strategy, first)
            results.append(result)
            print(json.dumps(result), flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                with (options.out / "benchmark_loop.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
    Console(width=160).print(table(results))
    sys.exit(any("error" in result for result in results))


def parse() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration, e.g. task/size=base")
    parser.add_argument("--strategies", default=STRATEGIES, help=f"compile options to measure (default {STRATEGIES})")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which each arm takes a turn (default 5)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a turn (default 40)")
    parser.add_argument("--toy", action="store_true", help="a step of next to no work: shows microseconds of the loop")
    parser.add_argument("--both-cold", action="store_true", help="also a process in which the raw loop starts cold")
    parser.add_argument("--out", type=Path, help="folder for benchmark_loop.jsonl")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one process (default 900)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first", default="ours", help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args()
    if flags := [argument for argument in unknown if argument.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    options.overrides += unknown
    return options


def in_fresh_process(options: argparse.Namespace, strategy: str, first: str) -> dict[str, Any]:
    """Run the measurement of one strategy in a process with empty caches; an error becomes part of the result."""
    about = {"strategy": strategy, "first": first, "overrides": options.overrides}
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        command = [sys.executable, "-m", "scripts.benchmark_loop", "--child", strategy, "--first", first]
        command += ["--rounds", str(options.rounds), "--steps", str(options.steps), *options.overrides]
        command += ["--toy"] if options.toy else []
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, timeout=options.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return {**about, "error": f"not done after {options.timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {**about, "error": f"exit code {done.returncode}"}
    return {**about, **json.loads(lines[-1].removeprefix("RESULT "))}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one strategy in this process: arms take turns, forwards in even rounds and backwards in odd ones."""
    from scripts import loop_arms
    from trainer.compose import compose
    from trainer.torch_settings import process_settings

    warnings.filterwarnings("ignore")
    config = compose([*options.overrides, f"compile={options.child}", "trainer.val_every_n_steps=0"])
    result: dict[str, Any] = {}
    # Of a toy's steps the mean, because what is done once in fifty steps is a good part of what the loop costs.
    steady = loop_arms.mean if options.toy else loop_arms.median
    if options.toy:
        from scripts.toy_task import Toy

        config.task = Toy()
        config.trainer.gradient_clip_val = None
    with process_settings(config.trainer):
        workload = loop_arms.Workload.build(config)
        arms: dict[str, Callable[[loop_arms.Workload, int], list[float]]] = {
            "raw": loop_arms.raw,
            "bare": loop_arms.bare,
            "ours": lambda load, steps: loop_arms.ours(load, steps)[0],
        }
        if options.first == "raw":
            loop_arms.apply_strategies(workload)
            seconds = loop_arms.raw(workload, options.steps)
            result["cold"] = {"first_step_seconds": seconds[0], "warmup_seconds": sum(seconds[:5])}
        else:
            _, record = loop_arms.ours(workload, options.steps)
            result["cold"] = {
                name: getattr(record, name)
                for name in (
                    *("first_step_seconds", "warmup_seconds", "compile_seconds", "compile_phases_seconds"),
                    *("graphs", "graph_breaks", "recompiles", "regions_compiled", "peak_device_memory_gib", "device"),
                )
            }
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds):
            times: dict[str, float] = {}
            for name in list(arms) if number % 2 == 0 else reversed(list(arms)):
                times[name] = steady(arms[name](workload, options.steps))
            rounds.append(times)
    result["rounds_milliseconds"] = [{name: value * 1e3 for name, value in times.items()} for times in rounds]
    for name in ("raw", "bare"):
        ratios = sorted(times["ours"] / times[name] for times in rounds)
        result[f"ours_over_{name}"] = [statistics.median(ratios), ratios[0], ratios[-1]]
    for name in arms:
        result[f"{name}_milliseconds"] = statistics.median(times[name] for times in rounds) * 1e3
    return result


def table(results: list[dict[str, Any]]) -> Table:
    """The results side by side."""
    columns = ("strategy", "cold start", "first step s", "warm-up s", "raw ms", "bare ms", "ours ms", "steps/s")
    shown = Table(*columns, "ours/raw (range)", "ours - bare µs", title="loop benchmark")
    for result in results:
        if "error" in result:
            shown.add_row(result["strategy"], result["first"], result["error"])
            continue
        ratio, low, high = result["ours_over_raw"]
        shown.add_row(
            result["strategy"],
            result["first"],
            f"{result['cold']['first_step_seconds']:.2f}",
            f"{result['cold']['warmup_seconds']:.2f}",
            *(f"{result[f'{name}_milliseconds']:.3f}" for name in ("raw", "bare", "ours")),
            f"{1e3 / result['ours_milliseconds']:.2f}",
            f"{ratio:.3f} ({low:.3f} to {high:.3f})",
            f"{(result['ours_milliseconds'] - result['bare_milliseconds']) * 1e3:.0f}",
        )
    return shown


if __name__ == "__main__":
    main()
