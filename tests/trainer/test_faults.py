"""Faults planted in one of two processes: each ends both soon, in a line that names it, or both go on alike."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from strategies import Regional
from tasks.micro.task import Micro
from tasks.module import ScoredModule
from tests.conftest import ROOT
from tests.processes import Pair, RanksFailed, command_on_a_rank
from tests.strategies import backends
from tests.trainer.lightning_modules import Blocks, quiet_trainer
from tests.trainer.runs import train
from trainer.callback import Compile
from trainer.loops import sentinel, watch
from trainer.telemetry.record import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two_processes")]

STEPS = 6
GRACE_SECONDS = 2.0
"""Where it is waited for."""
RANK_1 = r"rank 1 \(.+, pid \d+\): "
AND_SO = r"; this process ends with it$"


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


class Faulty(Blocks):
    """Does something else in a hook, from a step on."""

    def plant(self, hook: str, act: Callable[[], Any], *, step: int = 2) -> None:
        original = getattr(self, hook)

        def planted(*arguments: Any, **named: Any) -> Any:
            if self.trainer.global_step >= step:
                act()
            return original(*arguments, **named)

        setattr(self, hook, planted)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", Blocks.training_step(self, batch, batch_idx), sync_dist=True)


@dataclasses.dataclass
class fail:
    """Raises ``error`` when it is called."""

    error: BaseException

    def __call__(self) -> None:
        raise self.error


def once(act: Callable[[], Any]) -> Callable[[], Any]:
    """Does ``act`` the first time."""
    return functools.cache(act)


def kill(signum: int) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), signum)


class Data(TensorDataset):
    """Whose example 7 can be something else."""

    act: Callable[[], Any] | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.act is not None and index == 7:
            self.act()
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


class Endless(IterableDataset[Any]):
    """Of a length that nobody is told."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches * 4):
            yield torch.randn(8), torch.randn(1)


def trained(fault: str, folder: Path) -> dict[str, Any]:
    """Train under a Compile callback with ``fault`` on rank 1; what is there to say of it on this rank."""
    backends.register()
    rank = int(os.environ["RANK"])
    torch._dynamo.reset()
    if "stays" in fault or fault == "slow":
        sentinel.GRACE_SECONDS = GRACE_SECONDS
    L.seed_everything(0, verbose=False)
    module, options = Faulty(), dict[str, Any]()
    data = Data(torch.randn(64, 8), torch.randn(64, 1))
    loader: Any = DataLoader(data, batch_size=4)
    compile_: dict[str, Any] = {"strategies": [Regional(backend="eager")]}
    if rank == 1:
        plant(fault, module, data, compile_)
    if (rank, fault) == (1, "slow"):
        module.plant("training_step", once(lambda: time.sleep(2 * GRACE_SECONDS)))
    if fault == "worker":
        loader = DataLoader(data, batch_size=4, num_workers=1)
    if fault == "fewer batches":
        # not by Lightning's sampler, which makes them equal
        count, options = (20, 12)[rank], {"use_distributed_sampler": False, "max_epochs": 2}
        loader = DataLoader(TensorDataset(*data[:count]), batch_size=4)
    if fault == "no batches":
        options = {"use_distributed_sampler": False}
        loader = DataLoader(TensorDataset(*data[: (20, 0)[rank]]), batch_size=4)
    if fault == "another length":
        options = {"max_epochs": 2}
        loader = DataLoader(Endless((5, 3)[rank]), batch_size=4)
    if fault == "no batches of an unknown number":
        loader = DataLoader(Endless((5, 0)[rank]), batch_size=4)
    if fault == "on_train_epoch_end":
        options = {"max_steps": 12}  # which is in the second epoch, so that the other process is still there
    compiled = Compile(**compile_, verbose=False)
    if (rank, fault) == (1, "no sentinel"):
        module.plant("training_step", once(lambda: compiled.watch and compiled.watch._sentinel._process.kill()))
    trainer = quiet_trainer(
        enable_checkpointing=True,
        **{"max_steps": STEPS, **options},
        devices=2,
        strategy="ddp",
        callbacks=[compiled],
        default_root_dir=folder,
        val_check_interval=1.0 if "max_epochs" in options else 2,
        num_sanity_val_steps=0,
        limit_val_batches=1,
    )
    error = None
    try:
        trainer.fit(module, loader, DataLoader(data, batch_size=4))
        trainer.save_checkpoint(folder / "last.ckpt")
    except (Exception, SystemExit) as caught:
        error = f"{type(caught).__name__}: {caught}"
    record = compiled.record
    facts = {"error": error, "status": record.status, "reason": record.reason, "steps": trainer.global_step}
    weights = [float(one.detach().double().sum()) for one in module.parameters()]
    if error is not None and "stays" not in fault:
        (folder / f"{rank}.json").write_text(json.dumps(facts))
        os._exit(1)  # as a script does that does not catch it
    time.sleep(1000 if "stays" in fault else 0)
    return {**facts, "weights": weights}


def trained_in_turn(faults: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    return {fault: trained(fault, folder / fault) for fault in faults}


def plant(fault: str, module: Faulty, data: Data, compile_: dict[str, Any]) -> None:
    planted = RuntimeError("planted")
    plans: dict[str, Callable[[], None]] = {
        "setup": lambda: module.plant("setup", fail(planted), step=0),
        "training_step": lambda: module.plant("training_step", fail(planted)),
        "training_step, stays": lambda: module.plant("training_step", fail(planted)),
        "validation_step": lambda: module.plant("validation_step", fail(torch.OutOfMemoryError("planted"))),
        "on_save_checkpoint": lambda: module.plant("on_save_checkpoint", fail(planted)),
        "on_train_epoch_end": lambda: module.plant("on_train_epoch_end", fail(planted)),
        "teardown": lambda: module.plant("teardown", fail(planted)),
        "sys.exit": lambda: module.plant("training_step", fail(SystemExit(3))),
        "killed within a step": lambda: module.plant("on_after_backward", kill(signal.SIGKILL)),
        "killed at once": lambda: module.plant("setup", kill(signal.SIGKILL), step=0),
        "os._exit": lambda: module.plant("training_step", lambda: os._exit(0)),
        "other torch": lambda: setattr(torch, "__version__", "2.0.1"),
        "other module": lambda: setattr(module, "more", torch.nn.Linear(2, 2)),
        "other code": lambda: setattr(watch, "checksum", lambda *files: "00000000"),
        "worker": lambda: setattr(data, "act", fail(planted)),
    }
    plans.get(fault, lambda: None)()


ENDS = {
    "setup": "RuntimeError: planted",
    "training_step": "RuntimeError: planted",
    "validation_step": "OutOfMemoryError: planted",
    "on_save_checkpoint": "RuntimeError: planted",
    "on_train_epoch_end": "RuntimeError: planted",
    "worker": "RuntimeError: planted",
    "sys.exit": "SystemExit: 3",
    "killed within a step": "ended without a word",
    "killed at once": "ended without a word",
    "os._exit": "ended without a word",
    "no batches of an unknown number": "ValueError: rank 1 has no batch in epoch 0",
    "no batches": "RuntimeError: `DataLoader` within local rank has zero length.*",
}
"""What the other process says of rank 1, by fault."""


@pytest.mark.parametrize("fault", ENDS)
def test_both_end_with_the_reason_of_the_one(fault: str, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        pair(trained, fault, tmp_path)
    written = tmp_path / "0.json"
    # Where it stood still, it was ended there, and has printed why.
    said = json.loads(written.read_text())["reason"] if written.exists() else str(failed.value)
    assert re.search(RANK_1 + ENDS[fault] + AND_SO, said, re.MULTILINE), f"{said}\n{failed.value}"


def test_both_go_on_alike(pair: Pair, tmp_path: Path, subtests: pytest.Subtests) -> None:
    faults = ["fewer batches", "another length", "no sentinel", "slow"]  # which alone shortens the time of grace
    first, second = pair(trained_in_turn, faults, tmp_path)
    for fault in faults:
        one, other = first[fault], second[fault]
        with subtests.test(fault=fault):
            assert one["error"] is None
            assert (one["steps"], one["weights"]) == (other["steps"], other["weights"]) == (STEPS, one["weights"])


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("other torch", "torch 2.0.1"),
        ("other module", r"parameters \d+"),
        ("other code", "this project's code 00000000"),
    ],
)
def test_both_refuse_a_process_that_is_unlike(fault: str, what: str, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        pair(trained, fault, tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one["error"] == other["error"]
    unlike = rf"ValueError: rank 1 \(.+\) has {what}, rank 0 \(.+\) has .+: all processes of a training need the same"
    assert re.fullmatch(unlike, one["error"]), one


def test_who_stands_still_in_a_collective_is_ended_there(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=rf"(?m)^failed: {RANK_1}RuntimeError: planted{AND_SO}"):
        pair(trained, "training_step, stays", tmp_path)
    record = RunRecord.load(next(tmp_path.rglob("record.json")))
    assert record.status == "failed"
    assert re.search(RANK_1 + "RuntimeError: planted" + AND_SO, record.reason or "")


def holding_the_lock(folder: Path) -> None:
    """The other process dies while this one waits in a call that keeps Python's lock."""
    module = Faulty()
    if os.environ["RANK"] == "1":
        module.plant("on_train_batch_start", kill(signal.SIGKILL))
    else:
        sentinel.GRACE_SECONDS = GRACE_SECONDS
        module.plant("on_train_batch_start", lambda: ctypes.PyDLL(None).sleep(1000))
    data = DataLoader(Data(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4, num_workers=1)
    compiled = Compile([Regional(backend="eager")], verbose=False, save=False)
    options: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "default_root_dir": folder}
    L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, callbacks=[compiled], **options).fit(
        module, data
    )


def test_who_stands_still_with_pythons_lock_is_ended_from_outside(pair: Pair, tmp_path: Path) -> None:
    died = rf"(?m)^failed: {RANK_1}ended without a word{AND_SO}"
    with pytest.raises(RanksFailed, match=died):
        pair(holding_the_lock, tmp_path)


def of_the_command(fault: str, folder: Path) -> dict[str, Any]:
    """Train by the command line with ``fault`` in one process; the record's own words."""
    one = "0" if fault == "first is killed" else "1"
    if fault != "teardown":  # where the first process has to come to its own end in that time
        sentinel.GRACE_SECONDS = GRACE_SECONDS
    hooks: dict[str, tuple[str, Callable[[], Any]]] = {
        "first is killed": ("on_after_backward", kill(signal.SIGKILL)),
        "teardown": ("teardown", fail(RuntimeError("planted"))),
        "signal": ("on_train_batch_start", kill(signal.SIGTERM)),
    }
    hook, act = hooks[fault]
    if os.environ["RANK"] == one:
        setattr(ScoredModule, hook, lambda *_, **__: act())
    record = train(folder / "run", "trainer.devices=2", "trainer.max_steps=5")
    return {"status": record.status, "reason": record.reason, "signal": record.signal}


def test_a_process_that_fails_at_the_end_is_not_overlooked(pair: Pair, tmp_path: Path) -> None:
    one, other = pair(of_the_command, "teardown", tmp_path)
    assert (one["status"], other["status"], other["reason"]) == ("failed", "failed", "RuntimeError: planted")
    assert re.search(RANK_1 + "RuntimeError: planted" + AND_SO, one["reason"])


def test_a_signal_to_one_before_its_first_step_is_an_interruption_of_all(pair: Pair, tmp_path: Path) -> None:
    interrupted = rf"{RANK_1}Interrupted: SIGTERM{AND_SO}"
    with contextlib.suppress(RanksFailed):  # where the first one was ended while it waited for the second one
        pair(of_the_command, "signal", tmp_path)
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.signal) == ("interrupted", signal.SIGTERM)
    assert re.search(interrupted, record.reason or "")


def test_where_the_first_process_is_dead_its_sentinel_writes_the_record(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        pair(of_the_command, "first is killed", tmp_path)
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "failed"
    assert re.fullmatch(r"rank 0 \(.+\): ended without a word", record.reason or "")


@pytest.mark.timeout(240)
def test_the_record_of_a_run_whose_started_process_is_killed_before_it_trains_says_so(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    options = ["task=micro", "compile=eager", "trainer.accelerator=cpu", "trainer.strategy=ddp", "trainer.devices=2"]
    command = [sys.executable, str(tmp_path / "killed.py"), *options, f"hydra.run.dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220)
    assert done.returncode
    record = RunRecord.load(tmp_path / "run")  # the sentinel, too, has ended: it holds the same stderr
    assert record.status == "failed", done.stderr
    assert re.search(rf"^{RANK_1}killed by SIGKILL{AND_SO}", record.reason or "")


KILLED = """
import os, signal
from trainer import process
from trainer.cli import main
settings = process.process_settings
def planted(config):  # torch is imported, nothing is built
    from lightning.pytorch.strategies import DDPStrategy
    DDPStrategy.setup_distributed = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return settings(config)
if os.environ.get("LOCAL_RANK") == "1":
    process.process_settings = planted
main()
"""
"""The command line, which kills the process that it has started before there is a process group."""


def killed_before_its_data(victim: str, folder: Path) -> None:
    """As ``torchrun`` starts them: the other process waits for the record's last word, then ends."""

    def die(*_: Any, **__: Any) -> None:
        wait_for(folder / "waits")
        os.kill(os.getpid(), signal.SIGKILL)

    def last_word(*_: Any, **__: Any) -> None:
        (folder / "waits").touch()
        while RunRecord.load(folder / "run").status == "running":
            time.sleep(0.05)
        os._exit(0)

    if os.environ["RANK"] == victim:
        Micro.build_data = die  # type: ignore[assignment,method-assign]
    DDPStrategy.setup_distributed = last_word  # type: ignore[method-assign]
    options = ["task=micro", "compile=eager", "trainer.accelerator=cpu", "trainer.strategy=ddp"]
    command_on_a_rank([*options, "trainer.devices=2", f"hydra.run.dir={folder / 'run'}"], folder, folder / "said")


@pytest.mark.parametrize("victim", ["0", "1"])
def test_the_record_of_a_run_that_is_killed_before_its_data_says_so(victim: str, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        pair(killed_before_its_data, victim, tmp_path)
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "failed"
    assert re.search(rf"^rank {victim} \(.+, pid \d+\): ended without a word", record.reason or "")
