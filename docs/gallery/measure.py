"""Train scripts of this folder eager and compiled, in turns: python docs/gallery/measure.py [--rounds 3] [SCRIPT ...]

A fresh process for every run. The first one of a script compiles from empty caches and gives the cold warm-up; the
rounds after it start from what it cached, and give the steady steps. Each GPU runs a script of its own.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHILD = """
import json, runpy, sys
sys.argv = sys.argv[1:]
record = runpy.run_path(sys.argv[0], run_name="__main__")["compiling"].record
captured = record.report.get("cuda_graph") or {}
print(json.dumps({
    "arm": record.label, "ms": 1000 * record.steady_step_seconds_median, "warmup_seconds": record.warmup_seconds,
    "gib": record.peak_device_memory_gib, "graphs": record.graphs, "breaks": record.graph_breaks,
    "replayed": captured.get("replayed_steps"), "refused": captured.get("refused"), "notes": record.notes,
    "parity": (record.report.get("parity") or {}).get("verdict"), "loss": record.final_loss,
}))
"""


def run(script: str, *arguments: str, device: int, folder: str) -> dict:
    """One run in a process of its own: its figures, or the last line of what it printed before it failed."""
    caches = {name: f"{folder}/{script}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, "-c", CHILD, str(HERE / f"{script}.py"), *arguments]
    env = {**os.environ, **caches, "CUDA_VISIBLE_DEVICES": str(device)}
    ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        return {"failed": (ended.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(ended.stdout.splitlines()[-1])


def spread(work: Callable[[str, int], dict], scripts: list[str], devices: int) -> dict[str, dict]:
    """What ``work`` returns for each script, a script a device at a time."""
    free: queue.Queue[int] = queue.Queue()
    for device in range(devices):
        free.put(device)

    def one(script: str) -> dict:
        device = free.get()
        try:
            return work(script, device)
        finally:
            free.put(device)

    with ThreadPoolExecutor(devices) as pool:
        return dict(zip(scripts, pool.map(one, scripts), strict=True))


def line(row: dict) -> str:
    """A row in Markdown."""
    runs = [row["cold"], *(run for pair in row["pairs"] for run in pair)]
    failed = next((run["failed"] for run in runs if "failed" in run), None)
    if failed:
        return f"| {row['script']} | failed: {failed} |"
    ratios = [eager["ms"] / compiled["ms"] for eager, compiled in row["pairs"]]
    eager_ms, compiled_ms = (statistics.median(run["ms"] for run in arm) for arm in zip(*row["pairs"], strict=True))
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    cold = row["cold"]
    return (
        f"| {row['script']} | {cold['arm']} | {eager_ms:.1f} | {compiled_ms:.1f} | {ratio} "
        f"| {cold['warmup_seconds']:.0f} s | {cold['graphs']}, {cold['breaks']} | {cold['parity']} |"
    )


def main() -> None:
    """Print a table, and the rows as JSON lines into ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "measure")
    parser.add_argument("scripts", nargs="*", default=names, metavar="SCRIPT", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=3, help="pairs of an eager and a compiled run (default: 3)")
    parser.add_argument("--devices", type=int, default=1, help="GPUs to spread the scripts over (default: 1)")
    parser.add_argument("--out", type=Path, help="file that takes one JSON object a script")
    options = parser.parse_args()
    print("| script | strategies | eager, ms | compiled, ms | ratio | cold warm-up | graphs, breaks | parity |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        # All cold runs first: the processes that compile for one script would slow the eager steps of another.
        cold = spread(
            lambda script, device: run(script, device=device, folder=folder), options.scripts, options.devices
        )

        def rounds(script: str, device: int) -> dict:
            pairs = [
                [run(script, *arm, device=device, folder=folder) for arm in (["eager"], [])]
                for _ in range(options.rounds)
            ]
            row = {"script": script, "cold": cold[script], "pairs": pairs}
            print(line(row), flush=True)
            rows.append(row)
            if options.out:
                options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return row

        spread(rounds, options.scripts, options.devices)


if __name__ == "__main__":
    main()
