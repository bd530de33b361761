"""The start of a run: further processes start before Lightning is imported, and nothing is imported in vain."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch.distributed import TCPStore

from tests.conftest import ROOT
from tests.processes import python
from trainer import process
from trainer.settings import TrainerConfig
from trainer.telemetry.record import RunRecord

CHILD = """
import os, sys
from trainer import process
process.end_with_first()
given = {name: os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
os.write(1, (" ".join([*sys.argv[1:], *given.values()]) + "\\n").encode())  # one write: two processes share the pipe
"""
PARENT = """
import os, sys
from trainer import process
process.start_others(1, "run")
os.write(1, f"{process.others[0].pid}\\n".encode())
sys.stdin.read()
"""
COUNTED = """
import os, subprocess, sys
from pathlib import Path
own = Path(__file__).with_name(os.environ.get("LOCAL_RANK", "0"))
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "LOCAL_RANK" in (options.get("env") or {}):
            own.write_text(f"started {options['env']['LOCAL_RANK']} {'torch' in sys.modules}, ")
subprocess.Popen = Popen
from trainer.cli import main
try:
    main()
finally:
    with own.open("a") as file:
        print("in vain", *sorted(sys.modules.keys() & set(IN_VAIN)), file=file)
"""
IN_VAIN = [
    *("accelerate", "datasets", "diffusers", "optuna", "pandas", "peft", "scipy", "submitit", "timm"),
    *(
        "scripts",
        "torch._inductor.compile_fx",
        "trainer.auto",
        "trainer.guards.checks",
        "trainer.guards.timing",
    ),
    "trainer.loops.huggingface",
    *("trainer.report.pictures", "trainer.sweep.in_process"),
]
"""What an eager training needs none of. (torchmetrics, below Lightning, takes transformers and matplotlib.)"""


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[bytes]]:
    """Processes that this one starts, as if it had been started as a program."""
    file = tmp_path / "child.py"
    file.write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "argv", [str(file), "given"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(process.os, "environ", dict(os.environ))
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(process, "others", started)
    return started


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_each_other_process_runs_the_command_in_the_same_folder_and_knows_its_rank(
    others: list[subprocess.Popen[bytes]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process.start_early(TrainerConfig(devices=3), tmp_path / "run")
    assert [one.wait(200) for one in others] == [0, 0]
    assert process.os.environ["LOCAL_RANK"] == "0"
    port = process.os.environ["MASTER_PORT"]
    command = f'given hydra.run.dir="{tmp_path}/run"'
    expected = [f"{command} {rank} 3 127.0.0.1 {port}" for rank in (1, 2)]
    assert sorted(capfd.readouterr().out.splitlines()) == expected
    store = TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
    assert store.port == int(port), "which was kept free"


def test_the_folder_of_the_run_may_have_any_name(
    others: list[subprocess.Popen[bytes]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / 'the "best" run, lr=0.1\\'
    process.start_others(1, folder)
    assert [one.wait(200) for one in others] == [0]
    given = capfd.readouterr().out.removeprefix("given ").rsplit(" ", 4)[0]
    assert OverridesParser.create().parse_override(given).value() == str(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": None},
        {"devices": "auto"},
        {"devices": -1},
        {"devices": 1},
        {"devices": "2"},
        {"devices": 2, "strategy": "ddp_spawn"},
    ],
)
def test_what_may_need_no_others_starts_none_early(
    changes: dict[str, Any], others: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process.start_early(TrainerConfig(**changes), tmp_path)
    assert not others


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends where it looks for the others")
def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    # The child runs the same file, and waits in it.
    parent = tmp_path / "parent.py"
    waits = f"exec({CHILD!r})\n    time.sleep(1000)"
    parent.write_text(f"import os, time\nif 'CRUCIBLE_PARENT' in os.environ:\n    {waits}\nelse:\n    exec({PARENT!r})")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(parent)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        said = sorted([first.stdout.readline(), first.stdout.readline()], key=len)
        child = int(said[0])
        assert alive(child)
        first.kill()
    while alive(child):
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.xdist_group("two_processes")
def test_the_others_start_once_and_nothing_is_imported_in_vain(tmp_path: Path) -> None:
    program = tmp_path / "counted.py"
    program.write_text(f"IN_VAIN = {IN_VAIN}\n{COUNTED}")
    options = ["task=micro", "compile=eager", "trainer.max_steps=3", "trainer.accelerator=cpu"]
    options += ["trainer.devices=2", "trainer.progress=none", f"hydra.run.dir={tmp_path / 'run'}"]
    done = python(program, *options)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["started 1 False, in vain\n", "in vain\n"]
    assert RunRecord.load(tmp_path / "run").world_size == 2
