"""Runs that are told to stop or are killed, on the real command line: exit codes, what is left, how to go on."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo import register_backend

from tasks.lightning_module import ScoredModule
from tests.conftest import ROOT
from tests.processes import RanksFailed, command_alone, on_ranks, torchrun
from tests.trainer.runs import SMALLEST, last_checkpoint, train
from tests.trainer.test_early_start import alive
from tests.trainer.test_resume_exactness import send_in_step
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.xdist_group("two_processes")

Start = Callable[..., "subprocess.Popen[str]"]
ENDLESS = (
    *("trainer=debug", *SMALLEST["captioning"], "compile=eager", "trainer.max_steps=100000", "task.data.num_workers=1"),
    *("trainer.log_every_n_steps=5", "trainer.val_every_n_steps=0", "trainer.checkpoint_every_n_steps=5"),
)


def arguments_to_go_on(said: str, *, max_steps: int) -> list[str]:
    """Those of the command that was printed, but for the number of steps."""
    (line,) = [line for line in said.splitlines() if line.startswith("continue with: ")]
    python, module, name, *arguments = shlex.split(line.removeprefix("continue with: "))
    assert (python, module, name) == ("python", "-m", "trainer")
    arguments[arguments.index("trainer.max_steps=100000")] = f"trainer.max_steps={max_steps}"
    return arguments


def test_ctrl_c_stops_with_a_checkpoint_and_the_command_to_go_on(
    start_trainer: Start, command_line: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start_trainer([*ENDLESS, f"hydra.run.dir={run_dir}"], cwd=tmp_path, stand_in=False)
    while not (run_dir / "checkpoints" / "last.ckpt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert os.getpgid(process.pid) == process.pid, "the run must not share the tests' own group"
    os.killpg(process.pid, signal.SIGINT)  # reaches the data workers too, as in a terminal
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    record = RunRecord.load(run_dir)
    assert (record.status, record.signal) == ("interrupted", signal.SIGINT)
    assert record.steps == last_checkpoint(run_dir)["global_step"]
    assert record.steady_steps_per_second
    monkeypatch.chdir(tmp_path)
    assert command_line(*arguments_to_go_on(said, max_steps=record.steps + 3)) == 0
    (directory,) = Path("outputs/captioning/eager").iterdir()
    resumed = RunRecord.load(directory)
    assert (resumed.status, resumed.steps) == ("finished", record.steps + 3)
    assert tmp_path / resumed.resumed_from == run_dir / "checkpoints" / "last.ckpt"


def killed(run_dir: Path) -> None:
    """Train alone, and be killed in the eighth step: a checkpoint is there of the fifth."""
    for name in ("RANK", "LOCAL_RANK", *torchrun(1)):
        del os.environ[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        send_in_step(monkeypatch, 8, signal.SIGKILL)
        train(run_dir, "trainer.max_steps=100", "trainer.checkpoint_every_n_steps=5")


def test_a_killed_run_says_running_and_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(RanksFailed, match="rank 0 died"):
        on_ranks(killed, run_dir, ranks=1)
    assert RunRecord.load(run_dir).status == "running"
    assert last_checkpoint(run_dir)["global_step"] == 5
    record = train(tmp_path / "resumed", f"resume={run_dir}", "trainer.max_steps=7")
    assert (record.status, record.steps) == ("finished", 7)


@pytest.mark.parametrize(("step", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM), (1, signal.SIGHUP)])
def test_before_the_first_step_is_trained_one_signal_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    send_in_step(monkeypatch, step, number)
    try:
        record = train(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    saved = 0 if step == 1 else 2
    assert (record.status, record.signal, record.exit_code) == ("interrupted", number, 128 + number)
    assert (record.steps, (tmp_path / "checkpoints" / "last.ckpt").exists()) == (saved, saved > 0)


def test_a_compile_is_not_waited_for(tmp_path: Path) -> None:
    compiled: list[str] = []

    @register_backend(name="tests_slow_to_compile")  # type: ignore[untyped-decorator]
    def slow(graph: Any, _: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # the signal's handler comes before this returns
        compiled.append("went on")
        return graph

    record = train(tmp_path, strategy="regional", backend="tests_slow_to_compile")
    assert (record.status, record.signal, record.steps, compiled) == ("interrupted", signal.SIGTERM, 0, [])
    assert RunRecord.load(tmp_path) == record


@pytest.mark.parametrize(("code", "said"), [(7, "sys.exit(7)"), ("no data", "sys.exit('no data')")])
def test_an_exit_of_the_task_s_own_code_keeps_its_code_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: Any, said: str
) -> None:
    def on_train_batch_start(module: ScoredModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            sys.exit(code)

    monkeypatch.setattr(ScoredModule, "on_train_batch_start", on_train_batch_start)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path)
    assert ended.value.code == code
    record = RunRecord.load(tmp_path)
    assert (record.status, record.steps) == ("failed", 2)
    line = f"{said} was called in {Path(__file__)}:"
    assert str(record.reason).startswith(line.replace(f"{Path.cwd()}/", ""))
    assert f"failed: {record.reason}" in capsys.readouterr().out


def test_a_second_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("trainer.process.ONE_REQUEST_SECONDS", 0.0)  # these two come at the same moment
    send_in_step(monkeypatch, 2, signal.SIGINT, times=2)
    record = train(tmp_path)
    assert (record.status, record.exit_code, record.steps) == ("interrupted", 130, 1)
    assert RunRecord.load(tmp_path) == record
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


# ---- as schedulers send them: to the whole group ---------------------------------------------------------------------


def terminated(folder: Path) -> int:
    """Be ``python -m trainer`` with a data worker, and get SIGTERM with it after a checkpoint."""
    sent: list[bool] = []

    def on_train_batch_start(module: ScoredModule, batch: Any, batch_idx: int) -> None:
        if not sent and (folder / "run" / "checkpoints" / "last.ckpt").exists():
            sent.append(True)
            os.killpg(0, signal.SIGTERM)

    ScoredModule.on_train_batch_start = on_train_batch_start  # type: ignore[method-assign]
    with (folder / "errors").open("w") as file:
        os.dup2(file.fileno(), 2)
    return command_alone([*ENDLESS, f"hydra.run.dir={folder / 'run'}"], folder, folder / "said")


def test_a_sigterm_to_the_group_is_an_interruption_that_can_be_gone_on_from(tmp_path: Path) -> None:
    (code,) = on_ranks(terminated, tmp_path, ranks=1)
    run_dir, said, errors = tmp_path / "run", *((tmp_path / name).read_text() for name in ("said", "errors"))
    assert code == 143, errors
    # Torch raises wherever Python is when a worker has ended, within a call of the garbage collector's, too.
    assert "Traceback" not in re.sub(r"Exception ignored in: .*\nTraceback", "", errors)
    record = RunRecord.load(run_dir)
    assert (record.status, record.signal) == ("interrupted", signal.SIGTERM)
    # By SIGTERM torch's data workers end at once, and the run with them: then the last regular checkpoint counts.
    assert record.steps >= last_checkpoint(run_dir)["global_step"]
    assert "continue with: " in said


ALONE = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from tasks.lightning_module import ScoredModule
from tests.trainer.runs import train

folder, rank = Path(sys.argv[1]), int(os.environ.get("LOCAL_RANK", 0))
torch.set_num_threads(1)

def on_train_batch_start(module, batch, batch_idx):
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    while rank == 0 and not ((folder / "1.pid").exists() and (folder / "1.pid").read_text()):
        time.sleep(0.05)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)

ScoredModule.on_train_batch_start = on_train_batch_start
record = train(folder / "run", "trainer.devices=2", "trainer.max_steps=4")
(folder / f"{rank}.json").write_text(json.dumps([record.status, record.signal, record.steps]))
sys.exit(record.exit_code)
"""


def alone(folder: Path) -> Any:
    """Be the script, and wait for the end of the process that it has started."""
    for name in ("RANK", "LOCAL_RANK", *torchrun(1)):
        del os.environ[name]
    sys.argv = [str(folder / "script.py"), str(folder)]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    while alive(int((folder / "1.pid").read_text())):
        time.sleep(0.05)
    return ended.value.code


def test_a_process_that_stops_in_its_first_step_takes_those_with_it_that_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ALONE)
    assert on_ranks(alone, tmp_path, ranks=1, environment={"PYTHONPATH": str(ROOT)}) == [143]
    assert json.loads((tmp_path / "0.json").read_text()) == ["interrupted", signal.SIGTERM, 0]
    assert RunRecord.load(tmp_path / "run").status == "interrupted"
