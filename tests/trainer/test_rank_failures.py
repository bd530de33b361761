"""Faults planted in one of two processes: the other says which one failed and by what, or both go on alike."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import distributed as fabric
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from strategies import Regional, loop_protocol
from tasks.lightning_module import ScoredModule
from tests.processes import Pair, RanksFailed, command_on_a_rank, forked
from tests.strategies import backends
from tests.trainer.lightning_modules import Blocks, quiet_trainer
from tests.trainer.runs import train
from trainer import process
from trainer.callback import Compile
from trainer.loops import ddp, rank_failures, ranks
from trainer.loops.ddp import DDP
from trainer.loops.fsdp2 import FSDP2
from trainer.telemetry.record import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two_processes")]

STEPS = 6
DIES = ("killed within a step", "os._exit")
"""Faults of which the other process can know nothing but a broken connection."""
RANK_1 = r"rank 1 \(.+, pid \d+\): "
AND_SO = r"; this process ends with it$"


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
    if fault in DIES:
        rank_failures.LEARN_SECONDS = 0.5  # the other one leaves no word, which is looked for in vain
    torch._dynamo.reset()
    L.seed_everything(0, verbose=False)
    module, options = Faulty(), dict[str, Any]()
    data = Data(torch.randn(64, 8), torch.randn(64, 1))
    loader: Any = DataLoader(data, batch_size=4)
    compile_: dict[str, Any] = {"strategies": [Regional(backend="eager")]}
    if rank == 1:
        plant(fault, module, data, compile_)
    if fault == "handled":
        module.plant("training_step", fail(RuntimeError("planted")))
    if fault == "worker":
        torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5  # a worker looks then whether it is alone
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
    # As Lightning does with a group of NCCL, where it waits for the other process.
    fabric._destroy_dist_connection = (folder / "waited").touch
    atexit.register(fabric._destroy_dist_connection)
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
    if fault == "handled":
        time.sleep(2 * rank)  # what a script does then takes as long as it takes
    elif error is not None:
        (folder / f"{rank}.json").write_text(json.dumps(facts))
        atexit._run_exitfuncs()  # as a script does that does not catch it
        os._exit(1)
    return {**facts, "weights": weights}


def trained_in_turn(faults: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    return {fault: trained(fault, folder / fault) for fault in faults}


def plant(fault: str, module: Faulty, data: Data, compile_: dict[str, Any]) -> None:
    planted = RuntimeError("planted")
    plans: dict[str, Callable[[], None]] = {
        "setup": lambda: module.plant("setup", fail(planted), step=0),
        "training_step": lambda: module.plant("training_step", fail(planted)),
        "validation_step": lambda: module.plant("validation_step", fail(torch.OutOfMemoryError("planted"))),
        "on_save_checkpoint": lambda: module.plant("on_save_checkpoint", fail(planted)),
        "on_train_epoch_end": lambda: module.plant("on_train_epoch_end", fail(planted)),
        "sys.exit": lambda: module.plant("training_step", fail(SystemExit(3))),
        "killed within a step": lambda: module.plant("on_after_backward", kill(signal.SIGKILL)),
        "os._exit": lambda: module.plant("training_step", lambda: os._exit(0)),
        "other torch": lambda: setattr(torch, "__version__", "2.0.1"),
        "other module": lambda: setattr(module, "more", torch.nn.Linear(2, 2)),
        "other strategies": lambda: compile_.update(strategies=[]),
        "other code": lambda: setattr(ranks, "checksum", lambda *files: "00000000"),
        "worker": lambda: setattr(data, "act", fail(planted)),
        "slow": lambda: module.plant("training_step", once(lambda: time.sleep(4))),
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
    "no batches of an unknown number": "ValueError: rank 1 has no batch in epoch 0",
    "no batches": "RuntimeError: `DataLoader` within local rank has zero length.*",
}
"""What the other process says of rank 1, by fault."""


def reason(fault: str, pair: Pair, folder: Path) -> str:
    """Why rank 0 ended."""
    with pytest.raises(RanksFailed):
        pair(trained, fault, folder)
    assert not (folder / "waited").exists()
    said: str = json.loads((folder / "0.json").read_text())["reason"]
    return said


@pytest.mark.parametrize("fault", ENDS)
def test_the_other_one_says_who_failed_and_by_what(fault: str, pair: Pair, tmp_path: Path) -> None:
    assert re.fullmatch("RankFailed: " + RANK_1 + ENDS[fault] + AND_SO, reason(fault, pair, tmp_path))


@pytest.mark.parametrize("fault", DIES)
def test_who_died_without_an_error_is_a_broken_connection(fault: str, pair: Pair, tmp_path: Path) -> None:
    assert rank_failures.CONSEQUENCE.search(reason(fault, pair, tmp_path))


def test_both_go_on_alike(pair: Pair, tmp_path: Path, subtests: pytest.Subtests) -> None:
    # An error that the script handles first: what follows trains in the same group.
    faults = ["handled", "fewer batches", "another length", "slow"]
    first, second = pair(trained_in_turn, faults, tmp_path)
    for fault in faults:
        one, other = first[fault], second[fault]
        with subtests.test(fault=fault):
            if fault == "handled":
                assert one["error"] == other["error"] == "RuntimeError: planted"
                assert one["reason"] == other["reason"] == "RuntimeError: planted"
                continue
            assert one["error"] is None
            assert (one["steps"], one["weights"]) == (other["steps"], other["weights"]) == (STEPS, one["weights"])


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("other torch", "torch 2.0.1"),
        ("other module", r"parameters \d+"),
        ("other code", "this project's code 00000000"),
        ("other strategies", "strategies eager"),
    ],
)
def test_both_refuse_a_process_that_is_unlike(fault: str, what: str, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        pair(trained, fault, tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one["error"] == other["error"]
    unlike = rf"ValueError: rank 1 \(.+\) has {what}, rank 0 \(.+\) has .+: all processes of a training need the same"
    assert re.fullmatch(unlike, one["error"]), one


def of_the_command(folder: Path) -> None:
    """Train by the command line; the second process is asked to stop before its first step."""
    if os.environ["RANK"] == "1":
        ScoredModule.on_train_batch_start = lambda *_, **__: kill(signal.SIGTERM)()  # type: ignore[method-assign,assignment]
    train(folder / "run", "trainer.devices=2", "trainer.max_steps=5")
    os._exit(1)  # as the command does


def test_a_signal_to_one_before_its_first_step_is_an_interruption_of_all(pair: Pair, tmp_path: Path) -> None:
    with contextlib.suppress(RanksFailed):
        pair(of_the_command, tmp_path)
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.signal) == ("interrupted", signal.SIGTERM)
    assert re.fullmatch(rf"RankFailed: {RANK_1}Interrupted: SIGTERM{AND_SO}", record.reason or "")


# ---- processes that the command has started --------------------------------------------------------------------------


def whose_started_process_is_killed(folder: Path) -> None:
    """Be the command, which waits in the process group's rendezvous for a process that dies meanwhile."""

    def dies(*_: Any, env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", "sleep 2; kill -9 $$"], env=env)

    process.subprocess = SimpleNamespace(Popen=dies)  # type: ignore[attr-defined]
    options = ["task=micro", "compile=eager", "trainer.accelerator=cpu", "trainer.strategy=ddp", "trainer.devices=2"]
    with (folder / "errors").open("w") as file:
        os.dup2(file.fileno(), 2)
    os._exit(command_on_a_rank([*options, f"hydra.run.dir={folder / 'run'}"], folder, folder / "output"))


def test_the_record_of_a_run_whose_started_process_is_killed_before_it_trains_says_so(tmp_path: Path) -> None:
    one = forked(whose_started_process_is_killed, tmp_path)
    one.join(240)
    assert one.exitcode == 1
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "failed"
    assert re.fullmatch(rf"{RANK_1}killed by SIGKILL{AND_SO}", record.reason or "")
    assert f"failed: {record.reason}" in (tmp_path / "errors").read_text()


def with_one_started(code: str, folder: Path, stands_still: bool) -> None:
    """As the first process of a run, which has started another one that runs ``code`` of a shell."""
    process.others[:] = [subprocess.Popen(["sh", "-c", code])]
    rank_failures.GRACE_SECONDS = 0.5
    started = rank_failures.StartedProcesses(folder, lambda: None)
    if stands_still:
        time.sleep(120)  # as in a collective
    with pytest.raises(rank_failures.RankFailed, match=RANK_1 + "ended with exit code 3"):
        started.wait()
    started.end()


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_started_process_that_fails_is_not_overlooked(stands_still: bool, tmp_path: Path) -> None:
    RunRecord(task="micro", status="running").save(tmp_path)
    one = forked(with_one_started, "exit 3", tmp_path, stands_still)
    one.join(240)
    assert one.exitcode == (1 if stands_still else 0)
    record = RunRecord.load(tmp_path)
    assert record.status == ("failed" if stands_still else "running")
    assert not stands_still or re.fullmatch(rf"{RANK_1}ended with exit code 3{AND_SO}", record.reason or "")


@pytest.mark.parametrize("given", [None, "60000"])
@pytest.mark.parametrize(
    ("strategy", "of_lightning"),
    [(DDP, (DDPStrategy, "setup_distributed")), (FSDP2, (ModelParallelStrategy, "_setup_distributed"))],
)
def test_a_group_is_made_to_end_soon_after_a_timeout_unless_the_user_says_when(
    strategy: Any, of_lightning: tuple[Any, str], given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv(ddp.DUMP_WAIT, raising=False)
    else:
        monkeypatch.setenv(ddp.DUMP_WAIT, given)
    seen = []

    def made(_: Any) -> None:
        seen.append(os.environ[ddp.DUMP_WAIT])
        raise StopIteration

    monkeypatch.setattr(ParallelStrategy, "setup_environment", lambda _: None)
    monkeypatch.setattr(*of_lightning, made)
    with pytest.raises(StopIteration):
        strategy().setup_environment()
    assert seen == [given or ddp.DUMP_WAIT_MS]
    assert os.environ.get(ddp.DUMP_WAIT) == given


def agreed() -> tuple[list[int], timedelta, bool]:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=33))
    gather = torch.distributed.all_gather_object
    with mock.patch.object(torch.distributed, "all_gather_object", side_effect=gather) as calls:
        ranks = loop_protocol.gathered(torch.distributed.get_rank())
    group: Any = calls.call_args.kwargs["group"]
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return ranks, timeout, group is loop_protocol.host_group() is not torch.distributed.group.WORLD


def test_what_processes_agree_on_goes_from_host_to_host_and_waits_as_long_as_the_group_that_trains(pair: Pair) -> None:
    assert pair(agreed) == [([0, 1], timedelta(seconds=33), True)] * 2


# ---- standing still --------------------------------------------------------------------------------------------------


def test_a_run_that_stands_still_says_where_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(rank_failures, "STILL_SECONDS", 1.0)
    monkeypatch.setattr(rank_failures, "print_error", said.append)
    deadline = rank_failures.Deadline(3)
    deadline.batch_begins(17)
    time.sleep(4.5)
    deadline.end()
    (line,) = said
    assert re.match(r"no batch for \d s, rank 3 \(.+\), step 17\nthread .+:\n", line)
    assert "time.sleep(4.5)" in line


class NeverDone:
    """An event of a device that waits in a collective."""

    def record(self) -> None:
        """It counts from now."""

    def query(self) -> bool:
        return False


def with_a_device_that_waits(output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.cuda.Event = NeverDone  # type: ignore[assignment,misc]
    deadline = rank_failures.Deadline(1, 1.0, captures=True)
    deadline.batch_begins(5)
    deadline.batch_ends()
    time.sleep(120)


def test_a_device_that_waits_in_a_collective_ends_its_process(tmp_path: Path) -> None:
    one = forked(with_a_device_that_waits, tmp_path / "output")
    one.join(240)
    assert one.exitcode == 1
    said = (tmp_path / "output").read_text()
    assert re.search(r"failed: the device has worked on one batch for 1 s, .+ rank 1 \(.+\), step 5", said)
    assert "time.sleep(120)" in said
