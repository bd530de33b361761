"""The start of a run: further processes wait for Lightning before it is imported, and nothing is imported in vain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer import process as early
from trainer.settings import TrainerConfig

CHILD = """
import os, sys
from trainer import process as early
if early.EARLY_PIPE in os.environ:
    with early.waiting_early():
        pass
print(os.getpid(), *sys.argv[1:], os.environ["LOCAL_RANK"], os.environ["LATE"], early.EARLY_PIPE in os.environ)
"""
PARENT = """
import sys
from trainer.settings import TrainerConfig
from trainer import process as early
with early.started_early(TrainerConfig(devices=2), "."):
    print(early._waiting[0].process.pid, flush=True)
    sys.stdin.read()
"""
COUNTED = """
import subprocess, sys
from trainer import process as early
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "LOCAL_RANK" in (options.get("env") or {}):
            print("started", early.EARLY_PIPE in options["env"], options["env"]["LOCAL_RANK"], flush=True)
subprocess.Popen = Popen
from trainer.cli import main
try:
    main()
finally:
    print("in vain", *sorted(sys.modules.keys() & set(IN_VAIN)))
"""
IN_VAIN = [
    *("accelerate", "datasets", "diffusers", "optuna", "pandas", "peft", "scipy", "submitit", "timm"),
    *("scripts", "torch._inductor.compile_fx", "trainer.auto", "trainer.guards.audits", "trainer.guards.parity"),
    *("trainer.guards.preflight", "trainer.loops.huggingface", "trainer.report.page"),
    *("trainer.report.pictures", "trainer.sweep.in_process", "trainer.sweep.slurm"),
]
"""What an eager training needs none of. (torchmetrics, below Lightning, takes transformers and matplotlib.)"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What this process was started as, if one believes ``sys.argv``."""
    file = tmp_path / "child.py"
    file.write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", [str(file), "first"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    yield [sys.executable, str(file)]
    early.end_early()


def environment(rank: int = 1) -> dict[str, str]:
    return {**os.environ, "LOCAL_RANK": str(rank), "LATE": "late"}


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_a_process_becomes_what_is_asked_for_later(
    program: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with early.started_early(TrainerConfig(devices=3), str(tmp_path)):
        waiting = [one.process for one in early._waiting]
        found = early.process_for([*program, "second"], env=environment(2), cwd=str(tmp_path))
        assert found is waiting[1]
        assert found.wait(200) == 0
    assert waiting[0].returncode == -signal.SIGKILL  # nobody asked for it
    assert capfd.readouterr().out.split() == [str(found.pid), "second", "2", "late", "False"]


@pytest.mark.parametrize("unlike", ["folder", "program", "rank", "dead"])
def test_what_is_unlike_is_started_anew(unlike: str, program: list[str], tmp_path: Path) -> None:
    with early.started_early(TrainerConfig(devices=2), str(tmp_path)):
        waiting = early._waiting[0].process
        if unlike == "dead":
            waiting.kill()
            waiting.wait()
        command = [sys.executable, "-c", "pass"] if unlike == "program" else program
        folder = str(ROOT) if unlike == "folder" else str(tmp_path)
        found = early.process_for(command, env=environment(1 + (unlike == "rank")), cwd=folder)
        assert found is not waiting
        assert found.wait(200) == 0
    assert waiting.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": None},
        {"devices": "auto"},
        {"devices": 1},
        {"devices": 2, "strategy": "ddp_spawn"},
    ],
)
def test_what_may_be_started_otherwise_is_left_to_lightning(changes: dict[str, object], tmp_path: Path) -> None:
    with early.started_early(TrainerConfig(**changes), str(tmp_path)):  # type: ignore[arg-type]
        assert not early._waiting


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends once it has imported")
def test_a_process_ends_with_the_one_that_started_it(program: list[str], tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(PARENT)
    # The child runs the same file, and waits in it.
    parent.write_text(
        f"import os, time\nif {early.EARLY_PIPE!r} in os.environ:\n    exec({CHILD!r})\nelse:\n    exec({PARENT!r})"
    )
    with subprocess.Popen(
        [sys.executable, str(parent)], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        child = int(first.stdout.readline())
        assert alive(child)
        first.kill()
    while alive(child):
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.xdist_group("two_processes")
def test_lightning_takes_the_process_that_waits_and_nothing_is_imported_in_vain(tmp_path: Path) -> None:
    program = tmp_path / "counted.py"
    program.write_text(f"IN_VAIN = {IN_VAIN}\n{COUNTED}")
    options = ["task=micro", "compile=eager", "trainer.max_steps=3", "trainer.accelerator=cpu", "trainer.devices=2"]
    command = [sys.executable, str(program), *options, "trainer.progress=none", f"hydra.run.dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith(("started", "in vain"))]
    assert lines == ["started True 1", "in vain", "in vain"]
    assert "of all 2 processes" in done.stdout
