"""Standard streams that are full, closed or read by nobody: what prints goes on, and ends with its own exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import command_alone, on_ranks
from tests.trainer.runs import SMALLEST, last_checkpoint
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.xdist_group("two_processes")

PRINTS = """
import atexit, os, sys
from trainer.process import keep_streams
keep_streams()
if sys.argv[1] == "full pipe":
    os.set_blocking(1, False), os.set_blocking(2, False)
atexit.register(lambda: print("at the end", flush=True))
for _ in range(3):
    print("x" * 100_000, flush=True)
    print("y" * 100_000, file=sys.stderr)
    os.write(1, b"from a library") if sys.argv[1] == "closed" else None
with open(sys.argv[2], "w") as file:
    assert file.fileno() > 2
sys.exit(3)
"""


@pytest.mark.parametrize("streams", ["closed", "full", "nobody reads", "full pipe"])
def test_printing_raises_nothing(tmp_path: Path, streams: str) -> None:
    command = [sys.executable, "-c", PRINTS, streams, str(tmp_path / "file")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if streams == "closed":
        code = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=environment).returncode
    elif streams == "full":
        with open("/dev/full", "w") as full:
            code = subprocess.run(command, env=environment, stdout=full, stderr=full).returncode
    else:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for pipe in (process.stdout, process.stderr):
            if streams == "nobody reads":
                pipe.close()
        code = process.wait(timeout=200)
    assert code == 3
    assert (tmp_path / "file").read_text() == ""


def test_what_can_be_printed_is_printed_as_ever() -> None:
    code = 'from trainer.process import keep_streams; keep_streams(); print("ä"); raise SystemExit("ö")'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.stdout, done.stderr, done.returncode) == ("ä\n".encode("latin-1"), "ö\n".encode("latin-1"), 1)


def test_unbuffered_streams_stay_so() -> None:
    code = (
        'import os, sys; from trainer.process import keep_streams; keep_streams(); sys.stderr.write("ö"); os._exit(0)'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).stderr == "ö".encode()


def command(*words: str, cwd: Path, stdout: int) -> tuple[int, str]:
    """Exit code and error output of a command line."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'trainer'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=environment, cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    return done.returncode, done.stderr


COMMANDS = ["trainer --help", "trainer --cfg job", "crucible", "crucible --version"]


@pytest.mark.parametrize("words", [*COMMANDS, "crucible train --help", "crucible report --help"])
def test_a_reader_that_has_left_gets_no_complaint(words: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert command(*words.split(), cwd=tmp_path, stdout=writing) == (0, "")
    finally:
        os.close(writing)


@pytest.mark.parametrize("words", COMMANDS)
def test_nor_does_a_full_disk(words: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        assert command(*words.split(), cwd=tmp_path, stdout=full.fileno()) == (0, "")


def test_a_full_standard_output_does_not_end_a_training(tmp_path: Path) -> None:
    small = ("trainer=debug", "task=micro", *SMALLEST["micro"], "compile=eager", "trainer.max_steps=2")
    arguments = [*small, "hydra.run.dir=run"]
    assert on_ranks(command_alone, arguments, tmp_path, Path("/dev/full"), ranks=1) == [0]
    assert RunRecord.load(tmp_path / "run").status == "finished"
    assert last_checkpoint(tmp_path / "run")["global_step"] == 2
