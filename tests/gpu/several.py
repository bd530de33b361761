"""Measurements on as many GPUs as a machine has: ``python -m tests.gpu.several FOLDER``

Captioning on 1, 2, 4 and 8 GPUs under DDP and FSDP2, captured, beside a loop by hand; Llama 3 8B; ragged captions. What
becomes of a rank that fails is in ``tests/gpu/rank_faults.py``. Each job has GPUs, processor cores and empty compile
caches of its own; several run beside each other where there are GPUs for them. What has ended is printed at once, its
record lies in ``FOLDER``, and a table comes last, or when the time is over.

    --seconds 600     for all of it: jobs that do not fit any more are left out, and named
    --devices 1,2,4   numbers of GPUs to measure, by default all powers of two up to what is there
    --only captioning,ragged
    --smoke           tiny sizes on two processes of a CPU, without captures: does everything work?
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from trainer.report.tables import number
from trainer.run_start import ROUND_VARIABLE, SWEEP_VARIABLE, cache_variables
from trainer.telemetry.record import RunRecord

SHORTEST = 30.0
"""Seconds without which no job is worth its start."""
MARK = "CRUCIBLE_TEST_JOB"
"""Environment variable with a job's folder."""
GRACE = 10.0
"""Seconds between the signal that ends what takes too long and the one that nobody can catch."""
CAPTIONING = ("experiment=captioning_base", "task.data.pad_to=64", "trainer.max_steps=300")
LLAMA = (
    *("experiment=llama_7b", "task/network=llama_3_8b", "task.network.max_tokens=8192", "task.data.batch_size=1"),
    *("trainer.accumulate_grad_batches=4", "trainer.max_steps=14", "trainer.warmup_steps=4"),
)
RAGGED = ("experiment=captioning_base", "task/data=lognormal", "trainer.max_steps=400")
TINY = {
    CAPTIONING: ("experiment=smoke", "task.data.pad_to=64", "task.data.train_images=256"),
    LLAMA: ("experiment=llama_7b_smoke", "task.data.batch_size=1", "trainer.accumulate_grad_batches=2"),
    RAGGED: ("experiment=smoke", "task/data=lognormal", "task.data.train_images=256"),
}
"""What ``--smoke`` takes in their place."""
CAPTURED, LOOP = "[regional,cuda_graph]", "loop_captured"


@dataclass(kw_only=True)
class Job:
    """One command on some of the GPUs, and what came of it."""

    kind: str
    arm: str
    """ddp, fsdp2 or one; what trains."""
    what: str
    devices: int
    seconds: float
    """The most that it may take."""
    overrides: Sequence[str]
    gpus: list[int] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    ended: str = "left out, no time"
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.devices}-{self.arm}-{self.what}"


def plan(counts: Sequence[int], *, smoke: bool = False) -> list[Job]:
    """The jobs for these numbers of GPUs, the most valuable first."""
    most, jobs = max(counts), []

    def add(kind: str, arm: str, what: str, devices: int, seconds: float, work: Sequence[str], *more: str) -> None:
        words = [*(TINY[tuple(work)] if smoke else work), "trainer=measured", f"trainer.devices={devices}", *more]
        if arm != "one":
            words.append(f"trainer.strategy={arm}")
        if smoke:
            words += ["trainer.accelerator=cpu", "trainer.val_every_n_steps=0", "trainer.max_steps=40"]
            words += [f"compile.{one}.backend=eager" for one in ("regional", "optimizer") if one in _compiled(more)]
        jobs.append(Job(kind=kind, arm=arm, what=what, devices=devices, seconds=seconds, overrides=words))

    graph = () if not smoke else ("compile.cuda_graph.required=false",)
    loop = "loop_eager" if smoke else LOOP
    for count in sorted(counts, reverse=True):
        for arm in ("ddp", "fsdp2") if count > 1 else ("one",):
            add("captioning", arm, "ours", count, 120, CAPTIONING, f"compile={CAPTURED}", *graph)
            add("captioning", arm, "loop", count, 90, CAPTIONING, "run=peer", f"run.peer={loop}")
    if most > 1:
        add("llama", "fsdp2", "ours", most, 240, LLAMA, "compile=[checkpointing,regional]")
        for count in (most, 1):
            arm = "ddp" if count > 1 else "one"
            buckets = ("compile.buckets.count=2",) if smoke else ()
            add("ragged", arm, "ours", count, 240, RAGGED, "compile=full_stack", *graph, *buckets)
    return jobs


def _compiled(overrides: Iterable[str]) -> tuple[str, ...]:
    """Strategies of ``compile=`` among ``overrides`` that hand something to the compiler."""
    given = next((one for one in overrides if one.startswith("compile=")), "")
    return ("regional", "optimizer") if "full_stack" in given else ("regional",) if "regional" in given else ()


def command(job: Job, folder: Path) -> list[str]:
    several = job.devices > 1 and "run=peer" in job.overrides  # ours start the others themselves
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.devices}"] if several else []
    words = ["-m", "trainer", *job.overrides, "repeat=cold", f"hydra.run.dir={folder / 'run'}"]
    return [sys.executable, *started, *words]


# ---- running them ---------------------------------------------------------------------------------------------------


def start(job: Job, folder: Path, gpus: list[int], cores: Sequence[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **marked(folder),
        **cache_variables(folder / "caches"),
        **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]),
        ROUND_VARIABLE: "1",
        SWEEP_VARIABLE: str(os.getpid()),
    }
    words = command(job, folder)
    (folder / "command.txt").write_text(shlex.join(words) + "\n")
    job.gpus, job.began = gpus, time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        job.process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(job.process.pid, cores)


def end(job: Job, folder: Path) -> None:
    """Note what came of a job; whatever is left of it is ended."""
    took, code = time.monotonic() - job.began, job.process.poll()
    if code is None:
        signal_all(folder, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(GRACE)
    signal_all(folder, signal.SIGKILL)
    job.process.wait()
    job.ended = f"cut off after {took:.0f} s" if code is None else f"exit code {code} after {took:.0f} s"
    job.figures = figures(folder)


def figures(folder: Path) -> dict[str, Any]:
    """Of the run's record, as far as they are there."""
    try:
        record = RunRecord.load(folder / "run")
    except (OSError, ValueError):
        return {}
    compile_seconds = [one.compile_seconds for one in record.ranks if one.compile_seconds is not None]
    return {
        "status": record.status,
        "reason": record.reason,
        "samples_per_second": record.samples_per_second,
        "useful_tokens_per_second": record.useful_tokens_per_second,
        "step_seconds": record.steady_step_seconds_mean,
        "first_step_seconds": record.first_step_seconds,
        "warmup_seconds": record.warmup_seconds,
        "compile_seconds_of_all": sum(compile_seconds) if compile_seconds else record.compile_seconds,
        "peak_gib": record.peak_device_memory_gib,
        "steps": record.steps,
    }


def run(jobs: Sequence[Job], folder: Path, *, gpus: int, seconds: float, smoke: bool = False) -> None:
    """Run ``jobs`` in their order, as many beside each other as have GPUs; on a CPU one after the other."""
    until, waiting, running = time.monotonic() + seconds, list(jobs), list[Job]()
    free = list(range(gpus))
    everywhere = sorted(os.sched_getaffinity(0))
    share = max(1, len(everywhere) // max(gpus, 1))
    try:
        while waiting or running:
            for job in running[:]:
                over = time.monotonic() > min(until, job.began + job.seconds)
                if job.process.poll() is not None or over:
                    end(job, folder / job.name)
                    running.remove(job)
                    free = sorted({*free, *job.gpus})
                    print(f"{job.name}: {job.ended} {json.dumps(job.figures)}", flush=True)
            if time.monotonic() > until - SHORTEST:
                waiting.clear()
            if waiting and (not running if smoke else waiting[0].devices <= len(free)):
                job = waiting.pop(0)
                taken, free = ([], free) if smoke else (free[: job.devices], free[job.devices :])
                cores = [core for gpu in taken for core in everywhere[gpu * share : (gpu + 1) * share]]
                start(job, folder / job.name, taken, cores)
                running.append(job)
            else:
                time.sleep(0.2)
    finally:
        for job in running:
            end(job, folder / job.name)


def table(jobs: Sequence[Job]) -> str:
    """What has come of all jobs, in Markdown."""
    rate = {job.name: job.figures.get(_rate(job)) for job in jobs}
    names = ["samples/s, useful tokens/s", "over the loop", "over one GPU's times their number", "first step s"]
    names += ["warm-up s", "compile s, all ranks", "GiB"]
    lines = [f"| | {' | '.join(names)} | |", f"|---|{'---:|' * len(names)}---|"]
    for job in jobs:
        loop = rate.get(job.name.replace("-ours", "-loop")) if job.what == "ours" else None
        alone = rate.get(f"{job.kind}-1-one-{job.what}")
        own, found = rate[job.name], job.figures
        cells = [
            _shown(own, 1),
            _shown(own / loop if own and loop else None, 3),
            _shown(own / alone / job.devices if own and alone and job.devices > 1 else None, 3),
            *(_shown(found.get(name), 1) for name in ("first_step_seconds", "warmup_seconds")),
            *(_shown(found.get(name), 1) for name in ("compile_seconds_of_all", "peak_gib")),
            job.ended + (f"; {found['reason']}" if found.get("reason") else ""),
        ]
        lines.append(f"| {job.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(job: Job) -> str:
    return "samples_per_second" if job.kind == "captioning" else "useful_tokens_per_second"


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else number(value) if value >= 100 else f"{value:.{digits}f}"


# ---- processes of a job ---------------------------------------------------------------------------------------------


def marked(folder: Path) -> dict[str, str]:
    """An environment by which ``members`` finds a job's processes: torchrun starts each in a session of its own."""
    return {**os.environ, MARK: str(folder.resolve())}


def members(folder: Path) -> list[int]:
    """The processes that live and are marked with ``folder``."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(process.name)
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            given = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            if f"{MARK}={folder.resolve()}" in given and state != "Z":
                found.append(pid)
    return found


def signal_all(folder: Path, number: signal.Signals) -> None:
    for pid in members(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main(given: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs ends with this process
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--devices", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(given)
    gpus = (
        0
        if options.smoke
        else len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=True).stdout.splitlines())
    )
    counts = [int(one) for one in options.devices.split(",") if one] or (
        [1, 2] if options.smoke else [count for count in (1, 2, 4, 8) if count <= gpus]
    )
    jobs = [job for job in plan(counts, smoke=options.smoke) if not options.only or job.kind in options.only.split(",")]
    run(jobs, options.folder.resolve(), gpus=gpus, seconds=options.seconds, smoke=options.smoke)
    print(table(jobs), flush=True)
    (options.folder / "table.md").write_text(table(jobs) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
