"""Other people's models on a GPU: steps a second of each under eager, fixed strategies and ``auto``, one line an arm.

    python -m tests.gpu.strangers --models llama,t5 --arms eager,regional+cuda_graph,whole+cuda_graph,auto \
        --steps 200 --out strangers.jsonl

``llama:mask`` is Llama with padded batches and an ``attention_mask``. Each arm is a process of its own with empty
compile caches; one that fails or takes too long is a line that says so. ``--seeds 4`` trains four times in that
process, with other weights: the column ``eager_parts`` counts what was called different, or does not compile.
``--smoke`` runs tiny models on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COLUMNS = ("model", "arm", "seed", "steps_per_second", "compile_seconds", "warmup_seconds", "graphs", "replayed",
           "parity", "audits", "eager_parts", "loss", "outcome")  # fmt: skip
MARKS = (10, 50, 100, 200, 500, 1000, 2000)
"""Steps at which the seconds since the beginning of ``fit`` are kept."""
ARMS = "eager,regional+cuda_graph,whole+cuda_graph,auto"


def main() -> None:
    """Run every arm of every model, or one of them where ``--one`` says so."""
    options = _options()
    if options.one:
        for seed in range(options.seeds):
            print(json.dumps(_train(options.one[0], options.one[1], seed, options)), flush=True)
        return
    from tests.strangers import MODELS

    models = list(MODELS) if options.models == "all" else options.models.split(",")
    ends = time.monotonic() + options.total_seconds
    rows = []
    for model in models:
        for arm in options.arms.split(","):
            for row in _in_a_process(model, arm, options, min(options.arm_seconds, ends - time.monotonic())):
                rows.append(row)
                print(_line(row), flush=True)
                eager = [f"{name}: {reason}" for name, reason in row.get("eager_parts", {}).items()]
                for reason in row.get("refused", []) + eager + row.get("notes", []):
                    print(f"    {reason}", flush=True)
                if options.out:
                    with Path(options.out).open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print("\n" + _line({column: column for column in COLUMNS}))
    for row in rows:
        print(_line(row))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all", help="names, with commas; NAME:mask = with an attention_mask")
    parser.add_argument("--arms", default=ARMS, help="strategies joined with +, arms with commas")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1, help="trainings an arm, in one process")
    parser.add_argument("--arm-seconds", type=float, default=240.0, help="time limit of one arm")
    parser.add_argument("--total-seconds", type=float, default=3600.0, help="time limit of all arms together")
    parser.add_argument("--out", help="file that takes one JSON object an arm")
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU, nothing captured")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ARM"), help="train one arm in this process")
    return parser.parse_args()


def _in_a_process(model: str, arm: str, options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """A row a training, and one more where the last did not end."""
    row: dict[str, Any] = {"model": model, "arm": arm}
    if seconds <= 1:
        return [{**row, "outcome": "left out, the total time was used up"}]
    command = [sys.executable, "-m", "tests.gpu.strangers", "--one", model, arm, "--steps", str(options.steps)]
    command += ["--seeds", str(options.seeds)]
    with tempfile.TemporaryDirectory() as caches:
        places = {name: f"{caches}/{name.lower()}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        try:
            ended = subprocess.run(
                command + ["--smoke"] * options.smoke,
                env={**os.environ, **places, "XDG_CACHE_HOME": f"{caches}/home"},
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as stopped:
            output, problem = (stopped.stdout or b"").decode(), f"stopped after {seconds:.0f} s"
        else:
            output, problem = ended.stdout, (ended.stderr.strip().splitlines() or ["no message"])[-1][:300]
    lines = [line for line in output.splitlines() if line.startswith('{"seed"')]
    done = [{**row, **json.loads(line), "outcome": "ended"} for line in lines]
    return done if len(done) == options.seeds else [*done, {**row, "outcome": problem}]


def _train(model: str, arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    import lightning as L
    import torch

    from strategies import Strategy
    from strategies.cuda_graph import CudaGraph
    from strategies.modules import Auto, Regional, Whole
    from tests.strangers import loader, make
    from trainer.callback import Compile

    cuda = not options.smoke
    compiled: dict[str, Any] = {} if cuda else {"backend": "aot_eager"}
    kinds: dict[str, Any] = {
        "regional": lambda: Regional(**compiled),
        "whole": lambda: Whole(**compiled),
        "cuda_graph": lambda: CudaGraph(required=cuda),
        "auto": lambda: Auto(planned_steps=20_000 if cuda else None),
    }
    strategies: list[Strategy] = [kinds[name]() for name in arm.split("+") if name != "eager"]
    torch.set_float32_matmul_precision("high")
    name, _, mask = model.partition(":")
    L.seed_everything(seed, verbose=False)
    device = "cuda" if cuda else "cpu"
    with torch.device(device):
        module = make(name, tiny=options.smoke)
    losses: list[torch.Tensor] = []
    ends: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses[:] = [*losses[:1], outputs["loss"]]
            ends.append(time.perf_counter())

    callback = Compile(strategies, measure_peak=False, save=False)
    trainer = L.Trainer(
        max_steps=options.steps, max_epochs=-1, accelerator=device, devices=1, precision="bf16-mixed", logger=False,
        callbacks=[Losses(), callback], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(module, loader(name, tiny=options.smoke, steps=options.steps, device=device, mask=mask == "mask"))
    record = callback.record
    stalls = sorted(((after - before, step) for step, (before, after) in enumerate(itertools.pairwise(ends), 1)))
    captured, median = record.report.get("cuda_graph", {}), record.steady_step_seconds_median
    parity, audits = record.report.get("parity", {}), record.audits
    return {
        "seed": seed,
        "steps_per_second": None if median is None else round(1 / median, 2),
        "compile_seconds": record.compile_seconds,
        "warmup_seconds": record.warmup_seconds,
        "compiled_graphs": record.graphs,
        "graph_breaks": record.graph_breaks,
        "recompiles": record.recompiles,
        "graphs": captured.get("graphs"),
        "replayed": captured.get("replayed_steps"),
        "refused": captured.get("refused", []),
        "parity": parity.get("verdict"),
        "checks": parity.get("checks"),
        "audits": None if audits is None else audits.verdict,
        "audit_facts": None if audits is None else dataclasses.asdict(audits),
        "eager_parts": record.eager_parts,
        "captured_parity": captured.get("parity", {}).get("verdict"),
        "chosen": [facts["name"] for facts in record.chosen_strategies or []],
        "first_loss": float(losses[0]),
        "loss": float(losses[-1]),
        "seconds_at": {step: round(ends[step - 1] - began, 2) for step in MARKS if step <= len(ends)},
        "longest_steps": [(round(seconds, 2), step) for seconds, step in reversed(stalls[-4:])],
        "setup_seconds": record.setup_seconds,
        "peak_gib": record.peak_device_memory_gib,
        "notes": record.notes,
        "versions": {"torch": torch.__version__},
    }


def _line(row: dict[str, Any]) -> str:
    """``row`` in columns; an auto's arm names what it chose."""
    chosen = f" = {'+'.join(row['chosen']) or 'eager'}" if row["arm"] == "auto" and "chosen" in row else ""
    shown = {**row, "arm": row["arm"] + chosen}
    if isinstance(row.get("eager_parts"), dict):
        shown["eager_parts"] = len(row["eager_parts"])
    widths = (15, 32, 5, 17, 16, 15, 7, 9, 12, 12, 12, 8, 0)
    return " ".join(f"{_shown(shown.get(name)):<{width}}" for name, width in zip(COLUMNS, widths, strict=True))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


if __name__ == "__main__":
    main()
