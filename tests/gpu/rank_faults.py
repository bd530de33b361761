"""Faults planted in one of two processes that train together: ``python -m tests.gpu.rank_faults FOLDER``

A Lightning script with our callback is started by torchrun or by Lightning's own launcher, under DDP and FSDP2,
captured and not, over NCCL on two GPUs, or over gloo with ``--cpu``. One of its processes then fails, is slow or does
something else. Each row says how long after that all processes had ended, the exit code, and the first line that names
the one at fault. A row is fine where no process outlives its deadline, the line is there, and no healthy run was ended.
Jobs are not timed for speed and run beside each other, all on the same two GPUs.

    --seconds 250      for all of it: jobs that do not fit any more are left out, and named
    --only killed,slow
    --beside 10        jobs at a time
    --cpu              gloo, without the captured arms
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.gpu.several import marked, members, signal_all
from tests.processes import free_port

DEADLINE = 20.0
"""Seconds that a collective may wait for a process: the timeout of the group."""
PATIENT = 90.0
"""The same, of runs in which a process is only slow."""
AFTER = 45.0
"""Seconds until all have ended once a process has failed: torchrun's agent kills what does not end by SIGTERM after 30,
and a process with a broken connection looks 5 for what is behind it."""
LIMIT = 130.0
"""Seconds that a job may take; the others wait for its place."""
STEPS, AT = 30, 16
"""Of a run; the one at which the fault comes, which is captured by then."""
NAMED = (
    r"(failed|error|interrupted): .*rank 1 \(.*",
    r".*Error: rank 1 \(.+, pid \d+\).*",
    r"rank 1 \(.+, pid \d+\).*",
    r"no batch for .*rank 1 \(.*",
    r".*rank 1\b.*has no batch.*",
    r"rank +: 1 \(local_rank: 1\).*",
    r".*local_rank: 1.*",
    r"failed: the device has worked on one batch for .*",
    r".*Child process with PID \d+ terminated with code -?\d+.*",
    r"\[rank1\]:.*Error.*",
)
"""Lines that name the process at fault, the best ones first. Lightning's launcher knows its process id alone."""


@dataclass(frozen=True)
class Fault:
    """What one process does, and what is to come of it."""

    name: str
    healthy: bool = False
    """All processes train to the end, or end as the script has it."""
    stop: bool = False
    """A wish to stop, for all at one step: no line is owed."""
    patient: bool = False
    said: str = ""
    """What both processes have to print, of a run that is ``healthy``."""


TRAINED = f"trained {STEPS} steps"
CAPTURES = "graphs were replayed: "
WITHIN_A_STEP = (
    *("killed", "callback raises", "out of memory", "sys.exit", "os._exit"),
    *("stands still", "interrupted", "terminated", "slow 30 s"),
)
"""Faults that come at step ``AT``."""
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("killed"),
        Fault("training_step raises"),
        Fault("validation raises"),
        Fault("callback raises"),
        Fault("checkpoint raises"),
        Fault("setup raises"),
        Fault("data worker raises"),
        Fault("out of memory"),
        Fault("other model size"),
        Fault("other strategies"),
        Fault("sys.exit"),
        Fault("os._exit"),
        Fault("stands still"),
        Fault("no batch"),
        Fault("interrupted", stop=True),
        Fault("terminated", stop=True),
        Fault("slow 30 s", healthy=True, patient=True, said=TRAINED),
        Fault("late 20 s", healthy=True, patient=True, said=TRAINED),
        Fault("stranger on the port", healthy=True, said=TRAINED),
        Fault("fewer batches", healthy=True, said=r"trained \d+ steps"),
        Fault("error handled by the script", healthy=True, said="cleaned up"),
    )
}


@dataclass
class Job:
    """One fault under one arm, and what came of it."""

    fault: str
    arm: str
    """``ddp`` or ``fsdp2``."""
    captured: bool = False
    launcher: str = "torchrun"
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.arm}{' captured' if self.captured else ''}, {self.launcher}"

    def folder(self, within: Path) -> Path:
        return within / self.name.replace(" ", "_")


def plan(*, cpu: bool) -> list[Job]:
    """The longest first."""
    first = ("slow 30 s", "late 20 s", "stands still", "killed", "error handled by the script")
    faults = [*first, *(one for one in FAULTS if one not in first)]
    jobs = []
    for fault in faults:
        if not cpu and fault in (*first, "training_step raises", "callback raises", "out of memory", "terminated"):
            jobs += [Job(fault, arm, captured=True) for arm in ("ddp", "fsdp2")]
        both = fault in (*first, "training_step raises", "terminated", "data worker raises", "sys.exit")
        jobs += [Job(fault, arm) for arm in (("ddp", "fsdp2") if both else ("ddp",))]
        if fault in ("killed", "training_step raises", "error handled by the script", "sys.exit"):
            jobs.append(Job(fault, "ddp", launcher="Lightning"))
    return jobs


# ---- in each of the two processes -----------------------------------------------------------------------------------


def train(fault: str, arm: str, launcher: str, captured: bool, cpu: bool, folder: Path) -> None:
    """Train a small network in a script of one's own, and do ``fault`` on rank 1."""
    import lightning as L
    import torch
    from crucible import DDP, FSDP2, Compile, CudaGraph, Regional
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    mine = rank == 1

    def planted() -> None:
        (folder / "planted").write_text(str(time.time()))

    def act() -> None:
        """The fault, on rank 1, within its training."""
        if captured:
            print(f"{CAPTURES}{compiled.program is not None and compiled.program.replays > 0}", flush=True)
        planted()
        match fault:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "terminated":
                os.kill(os.getpid(), signal.SIGTERM)
            case "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(3)
            case "slow 30 s":
                time.sleep(30)
            case "stands still":
                time.sleep(10**6)
            case "out of memory":
                torch.empty(2**48, device="cpu" if cpu else "cuda")
            case _:
                raise RuntimeError(f"planted: {fault}")

    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return {"fewer batches": (64, 40), "no batch": (64, 0)}.get(fault, (64, 64))[rank]

        def __getitem__(self, index: int) -> Any:
            if mine and fault == "data worker raises" and index == 41:
                act()
            generator = torch.Generator().manual_seed(index)
            return torch.randn(64, generator=generator), torch.randn(1, generator=generator)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x_BD: Any) -> Any:
            return x_BD + torch.tanh(self.inner(x_BD))

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            count = 5 if mine and fault == "other model size" else 3
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(count)), nn.Linear(64, 1)

        def setup(self, stage: str) -> None:
            if mine and fault == "setup raises":
                act()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fault in ("training_step raises", "error handled by the script") and self.global_step == 5:
                if fault == "error handled by the script":
                    planted()
                    raise RuntimeError("planted: this batch does not fit, say")
                if mine:
                    act()
            x_BD, target_B1 = batch
            for block in self.blocks:
                x_BD = block(x_BD)
            return nn.functional.mse_loss(self.head(x_BD), target_B1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_step and mine and fault == "validation raises":
                act()
            self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if mine and fault == "checkpoint raises":
                act()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Plants(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if mine and fault in WITHIN_A_STEP and trainer.global_step == AT and not (folder / "planted").exists():
                act()

    if mine:
        if fault == "late 20 s":
            planted()
            time.sleep(20)
        if fault in ("other model size", "other strategies", "no batch", "fewer batches"):
            planted()
    torch.manual_seed(0)
    strategies: list[Any] = [Regional(), CudaGraph()] if captured else [Regional(backend="eager")]
    if mine and fault == "other strategies":
        strategies = []
    patient = FAULTS[fault].patient or launcher == "Lightning"  # which starts rank 1 when rank 0 has imported all
    timeout = timedelta(seconds=PATIENT if patient else DEADLINE)
    strategy: Any = DDP(captures=captured, timeout=timeout) if arm == "ddp" else FSDP2(timeout=timeout)
    own_batches = fault in ("fewer batches", "no batch")
    workers = 1 if fault == "data worker raises" else 0
    compiled = Compile(strategies, verbose=True, parity="off")
    trainer = L.Trainer(
        accelerator="cpu" if cpu else "gpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        use_distributed_sampler=not own_batches,
        callbacks=[Plants(), compiled],
        logger=False,
        enable_checkpointing=fault == "checkpoint raises",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1 if fault == "validation raises" else 0,
        default_root_dir=folder,
    )
    # 8 batches an epoch for each rank where Lightning divides the data
    loader = DataLoader(Data(), batch_size=4, num_workers=workers)
    try:
        trainer.fit(Module(), loader, DataLoader(Data(), batch_size=4) if fault == "validation raises" else None)
    except RuntimeError as error:
        if fault != "error handled by the script":
            raise
        print(f"rank {rank} handles {error}", flush=True)
        time.sleep(12)
        print(f"rank {rank} cleaned up", flush=True)
    else:
        print(f"rank {rank} trained {trainer.global_step} steps", flush=True)


# ---- running them ---------------------------------------------------------------------------------------------------


def start(job: Job, folder: Path, *, cpu: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--train", job.fault, job.arm, job.launcher, str(int(job.captured)), str(int(cpu)), str(folder)]
    port = free_port()
    agent = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    started = agent if job.launcher == "torchrun" else []
    command = [sys.executable, *started, "-m", "tests.gpu.rank_faults", *words]
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    environment = {**marked(folder), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    job.began = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        job.process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    if job.fault == "stranger on the port":
        threading.Thread(target=be_a_stranger, args=(port, folder), daemon=True).start()


def be_a_stranger(port: int, folder: Path) -> None:
    """Connect to the store's port, as a scan of ports does, before and while the processes do: say something that the
    store does not know, say nothing, leave."""
    end, met, silent = time.monotonic() + LIMIT, 0, []
    while time.monotonic() < end and met < 60:
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), timeout=1)
            if not met:
                (folder / "planted").write_text(str(time.time()))
            met += 1
            if met % 3 == 0:
                silent.append(one)  # stays there and says nothing
            else:
                if met % 3 == 1:
                    one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                one.close()
        time.sleep(0.3)
    for one in silent:
        one.close()


def end(job: Job, folder: Path) -> None:
    """Note what came of a job whose processes have all ended, or whose time is over."""
    left = members(folder)
    over = time.time()
    signal_all(folder, signal.SIGKILL)
    code = job.process.wait()
    text = (folder / "log.txt").read_text(errors="replace")
    planted = float((folder / "planted").read_text()) if (folder / "planted").exists() else None
    seconds = None if planted is None else round(over - planted, 1)
    fault = FAULTS[job.fault]
    line = next(lines_that_name(text), "")
    job.row = {"seconds": seconds, "code": None if left else code, "line": line}
    job.row["verdict"] = verdict(fault, text, seconds, code, bool(left), line)
    if job.captured and job.fault in WITHIN_A_STEP and f"{CAPTURES}True" not in text:
        job.row["verdict"] = "no graph was replayed"


def lines_that_name(text: str) -> Iterator[str]:
    """Those that name the process at fault, the best first."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", one).strip() for one in text.splitlines()]
    # Of torchrun's summary what it takes for the cause, in two lines.
    cause = next((place for place, one in enumerate(lines) if one.startswith("Root Cause")), len(lines))
    lines = [one for place, one in enumerate(lines) if place > cause or not one.startswith("rank  ")]
    lines = [f"{one}, {after}" if after.startswith("exitcode") else one for one, after in pairwise([*lines, ""])]
    for pattern in NAMED:
        yield from (one for one in lines if re.match(pattern, one))


def verdict(fault: Fault, text: str, seconds: float | None, code: int, left: bool, line: str) -> str:
    """``ok``, or what is wrong."""
    if seconds is None:
        return "the fault did not come"
    if left:
        return f"still there after {seconds:.0f} s"
    if fault.healthy:
        done = len(re.findall(f"rank [01] {fault.said}", text))
        return "ok" if code == 0 and done == 2 else f"a healthy run ended: exit code {code}, {done} of 2 done"
    if seconds > DEADLINE + AFTER:
        return f"{seconds:.0f} s, more than the deadline"
    if fault.stop:
        return "ok"
    if code == 0:
        return "exit code 0"
    return "ok" if line else "no line names it"


def run(jobs: Sequence[Job], folder: Path, *, seconds: float, beside: int, cpu: bool) -> None:
    until, waiting, running = time.monotonic() + seconds, list(jobs), list[Job]()
    try:
        while waiting or running:
            for job in running[:]:
                gone = job.process.poll() is not None and not members(job.folder(folder))
                if gone or time.monotonic() > min(until, job.began + LIMIT):
                    end(job, job.folder(folder))
                    running.remove(job)
                    print(f"{job.name}: {json.dumps(job.row)}", flush=True)
            if waiting and len(running) < beside and time.monotonic() < until - DEADLINE:
                job = waiting.pop(0)
                start(job, job.folder(folder), cpu=cpu)
                running.append(job)
            elif not running:
                break
            else:
                time.sleep(0.1)
    finally:
        for job in running:
            end(job, job.folder(folder))


def table(jobs: Sequence[Job]) -> str:
    lines = [
        "| fault | arm | started by | s until all had ended | exit code | line | |",
        "|---|---|---|---:|---:|---|---|",
    ]
    for job in jobs:
        row = job.row
        line = str(row.get("line", "")).replace("|", "\\|")[:160]
        cells = [job.fault, f"{job.arm}{' captured' if job.captured else ''}", job.launcher]
        cells += ["-" if row.get(name) is None else str(row[name]) for name in ("seconds", "code")]
        lines.append(f"| {' | '.join([*cells, line, row.get('verdict', 'left out, no time')])} |")
    good = sum(job.row.get("verdict") == "ok" for job in jobs)
    return "\n".join([*lines, "", f"{good} of {len(jobs)} as they should be"])


def main(given: Sequence[str]) -> None:
    if given[:1] == ["--train"]:
        fault, arm, launcher, captured, cpu, folder = given[1:]
        train(fault, arm, launcher, captured == "1", cpu == "1", Path(folder))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs ends with this process
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=250.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--beside", type=int, default=10)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(given)
    only = options.only.split(",") if options.only else list(FAULTS)
    jobs = [job for job in plan(cpu=options.cpu) if job.fault in only]
    run(jobs, options.folder.resolve(), seconds=options.seconds, beside=options.beside, cpu=options.cpu)
    print(table(jobs), flush=True)
    (options.folder / "table.md").write_text(table(jobs) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
