"""Records to compare, without training: figures as published in docs/results, repeats made of a stated noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.telemetry.record import Event, RunRecord

VERSIONS = {
    "python": "3.12.3",
    "cuda": "13.0",
    "crucible-train": "0.1.0",
    "torch": "2.11.0",
    "lightning": "2.6.6",
    "triton": "3.6.0",
}
STATIC: tuple[tuple[str, float, float, float, float | None, float], ...] = (
    # strategies, steps/s, p95 ms, cold warm-up, warm warm-up, peak GiB: captioning at batch 32, static, of one H200
    ("eager", 27.07, 36.6, 2.1, None, 8.7),
    ("regional", 26.26, 44.1, 10.4, 3.1, 8.0),
    ("cuda_graph", 29.03, 34.5, 1.0, None, 8.7),
    ("whole", 36.70, 28.0, 32.9, 4.3, 8.0),
    ("regional+cuda_graph", 42.47, 23.6, 11.1, 4.0, 8.1),
    ("whole mode=reduce-overhead", 43.30, 23.1, 34.0, 5.2, 3.2),
    ("regional+optimizer+cuda_graph", 44.42, 22.6, 17.7, 6.1, 8.1),
    ("full_stack", 50.29, 21.5, 23.9, 6.7, 8.1),
)
RAGGED: tuple[tuple[str, float, float, float, float | None, float, float], ...] = (
    # strategies, useful tokens/s, p95 ms, cold warm-up, warm warm-up, peak GiB, padded share: ragged captions
    ("eager", 19918, 180, 1.2, None, 13.6, 0.646),
    ("buckets", 53440, 52.6, 1.3, None, 13.5, 0.139),
    ("regional+buckets", 61028, 39.2, 33.7, None, 10.9, 0.139),
    ("regional+buckets+cuda_graph", 88798, 30.8, 35.8, None, 13.8, 0.140),
    ("full_stack", 92739, 29.8, 41.2, 10.0, 13.8, 0.140),
)
FULL_STACK = "cached+buckets+regional+optimizer+cuda_graph"


def figures(
    step_seconds: float, *, p95_seconds: float | None = None, batch_size: int = 32, steps: int = 200
) -> dict[str, Any]:
    """The steady fields of a record whose steps take ``step_seconds`` on average, evenly spread up to their p95."""
    p95_seconds = max(p95_seconds or 1.05 * step_seconds, 1.02 * step_seconds)
    low = max(2 * step_seconds - p95_seconds, 0.8 * step_seconds)
    return {
        "steps": steps + 5,
        "steady_steps": steps,
        "warmup_steps": 5,
        "steady_step_seconds_mean": step_seconds,
        "steady_step_seconds_median": low + (p95_seconds - low) * (10 / 19) ** 2,
        "steady_step_seconds_p95": p95_seconds,
        "steady_steps_per_second": 1 / step_seconds,
        "samples_per_second": batch_size / step_seconds,
    }


def record(
    arm: str,
    *,
    step_seconds: float = 0.1,
    p95_seconds: float | None = None,
    task: str = "captioning",
    batch_size: int = 32,
    **changes: Any,
) -> RunRecord:
    """A finished run of ``arm``: strategies joined by ``+``, then parameters of the last one."""
    label, *parameters = arm.split()
    label = FULL_STACK if label == "full_stack" else label
    names = [] if label == "eager" else label.split("+")
    strategies: list[dict[str, Any]] = [{"name": name} for name in names]
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        strategies[-1][key] = value
    said = f"compile=[{','.join(names)}]" if names else "compile=eager"
    values: dict[str, Any] = {
        "task": task,
        "label": label,
        "strategies": strategies,
        "status": "finished",
        "config": {
            "task": {"data": {"batch_size": batch_size}},
            "compile": {one["name"]: {key: one[key] for key in one if key != "name"} for one in strategies},
            "trainer": {"max_steps": 205},
            "seed": 0,
        },
        "command": [f"task={task}", f"task.data.batch_size={batch_size}", said]
        + [f"compile.{names[-1]}.{one}" for one in parameters],
        "versions": dict(VERSIONS),
        "device": "NVIDIA H200",
        "device_type": "cuda",
        "precision": "bf16-mixed",
        "git_commit": "7db0f83b6a0c5f7d8e9a",
        "started": "2026-11-21T12:00:00+00:00",
        "import_seconds": 7.5,
        "setup_seconds": 4.7 if names else 3.2,
        "final_loss": 0.4652,
        **figures(step_seconds, p95_seconds=p95_seconds, batch_size=batch_size),
    }
    if names and names != ["cuda_graph"] and names != ["buckets"]:
        values |= {"graphs": 8, "graph_breaks": 0, "recompiles": 0, "regions": 27, "regions_compiled": 27}
        values["report"] = {"parity": {"mode": "on", "verdict": "passed"}}
    began = values["import_seconds"] + values["setup_seconds"]
    warm = began + (changes.get("warmup_seconds") or 0.0)
    values["progress"] = [[0, began], [5, warm], [205, warm + 200 * step_seconds]]
    return RunRecord(**{**values, **changes})


def static(*, rounds: int = 3, noise: float = 0.01) -> list[RunRecord]:
    """Cold and warm runs of all arms on static captions, ``rounds`` times, each round with a common pace."""
    drawn, records = random.Random(0), []
    for turn in range(1, rounds + 1):
        pace = 1 + drawn.gauss(0, 4 * noise)  # the machine's, which all arms of a round share
        for arm, rate, p95, cold, warm, gib in STATIC:
            for start, warmup in (("cold", cold), ("warm", warm)):
                if warmup is None:
                    continue
                step = pace / rate * (1 + drawn.gauss(0, noise))
                compile_seconds = 0.7 * warmup if warmup > 3 else None
                one = record(
                    arm,
                    step_seconds=step,
                    p95_seconds=p95 / 1e3 * pace,
                    warmup_seconds=warmup,
                    compile_seconds=compile_seconds,
                )
                one.start, one.round, one.seed = start, turn, 0
                one.first_step_seconds = 0.3 * warmup
                one.peak_device_memory_gib = gib
                one.joules_per_sample = 700 * step / 32
                one.cache = start if one.graphs else None
                records.append(one)
    return records


def ragged() -> list[RunRecord]:
    """One cold run of each arm on ragged captions, and full_stack's warm one, with their buckets."""
    edges = [32, 48, 64, 80, 96, 128, 176, 256]
    shares = [0.19, 0.17, 0.12, 0.10, 0.08, 0.12, 0.13, 0.17]
    records = []
    for arm, useful, p95, cold, warm, gib, padded in RAGGED:
        for start, warmup in (("cold", cold), ("warm", warm)):
            if warmup is None:
                continue
            one = record(arm, step_seconds=2080 / useful, p95_seconds=p95 / 1e3, warmup_seconds=warmup)
            one.config["task"]["data"]["name"] = "lognormal"
            one.command.append("task/data=lognormal")
            one.start, one.padded_share, one.useful_tokens_per_second = start, padded, float(useful)
            one.tokens_per_second = useful / (1 - padded)
            one.peak_device_memory_gib = gib
            one.compile_seconds = 0.8 * warmup if one.graphs else None
            if "buckets" in arm or arm == "full_stack":
                one.report["buckets"] = {
                    "edges": edges,
                    "examples": [120, 180, 230, 200, 130, 110, 40, 14],
                    "padded_share_by_edge": shares,
                    "expected_padded_share": 0.139,
                }
            if arm == "full_stack":
                one.recompiles, one.graph_breaks = 1, 1
                one.events = [
                    Event(
                        kind="graph_break",
                        reason="call to a builtin that cannot be traced: print",
                        location="tasks/captioning/model.py:63 forward",
                    ),
                    Event(
                        kind="recompile",
                        reason="2/0: tensor 'x_BSD' size mismatch at index 1. expected 32, actual 128",
                        location="tasks/captioning/model.py:150 forward",
                        step=12,
                    ),
                    Event(
                        kind="recompile",
                        reason="2/1: GLOBAL_STATE changed: grad_mode",
                        location="tasks/captioning/model.py:150 forward",
                        step=200,
                        phase="validating",
                    ),
                ]
            records.append(one)
    broken = record("whole mode=max-autotune", status="failed", reason="CUDA out of memory: tried to allocate 2.00 GiB")
    broken.config["task"]["data"]["name"] = "lognormal"
    broken.steady_steps = broken.steady_step_seconds_median = broken.steady_steps_per_second = None
    broken.samples_per_second = broken.steady_step_seconds_mean = broken.steady_step_seconds_p95 = None
    return [*records, broken]


def save(records: Sequence[RunRecord], directory: Path) -> Path:
    """Each record in a run folder of its own under ``directory``."""
    for number, one in enumerate(records):
        folder = directory / f"{number:03}-{one.label}-{one.start or 'unknown'}"
        folder.mkdir(parents=True)
        one.save(folder)
    return directory
