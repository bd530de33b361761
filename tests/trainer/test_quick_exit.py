"""The end of a command: at once, and nothing is lost by it that the interpreter would have written."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from tests.processes import Ended, python

ENDS = """
import atexit, gzip, os, socket, sys, threading, time, zipfile
from trainer.process import quick_exit

text = open("text", "w")
text.write("held back")
binary = open("binary", "wb")
binary.write(b"held back")
packed = gzip.open("packed.gz", "wt")
packed.write("held back")
archive = zipfile.ZipFile("archive.zip", "w")
archive.writestr("inside", "held back")
atexit.register(lambda: open("exit function", "w").close())

def work():
    time.sleep(0.3)
    open("thread", "w").close()

near, far = socket.socketpair()
waits = near.makefile()
threading.Thread(target=waits.readline, daemon=True).start()  # with its lock, until the other end closes

class Slow:
    def __del__(self, make=os.mkdir):
        make("taken apart")

kept = Slow()
kept.itself = kept
sys.stdout.write("said")
with quick_exit():
    threading.Thread(target=work).start()
    {end}
"""


def ended(end: str, folder: Path) -> Ended:
    return python("-c", ENDS.replace("{end}", end), cwd=folder)


def test_a_command_leaves_at_once_and_loses_nothing(tmp_path: Path) -> None:
    done = ended("sys.exit(130)", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "said", "")
    assert (tmp_path / "text").read_text() == "held back"
    assert (tmp_path / "binary").read_bytes() == b"held back"
    with gzip.open(tmp_path / "packed.gz", "rt") as packed:
        assert packed.read() == "held back"
    assert zipfile.ZipFile(tmp_path / "archive.zip").read("inside") == b"held back"
    assert (tmp_path / "exit function").exists()
    assert (tmp_path / "thread").exists(), "a thread that is no daemon is waited for"
    assert not (tmp_path / "taken apart").exists(), "which is what takes the seconds"


LATE = (
    "import signal, trainer.process as ours; sys.stdout.flush(); "
    "ours._flush_files = lambda: signal.raise_signal(2); sys.exit(130)"
)


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", LATE])
def test_a_ctrl_c_early_or_late_is_an_exit_code_without_a_traceback(end: str, tmp_path: Path) -> None:
    done = ended(end, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "said", "")


@pytest.mark.parametrize(
    ("end", "code", "said"), [("pass", 0, ""), ("sys.exit('why')", 1, "why"), ("1 / 0", 1, "ZeroDivisionError")]
)
def test_any_other_end_is_pythons_own(end: str, code: int, said: str, tmp_path: Path) -> None:
    done = ended(end, tmp_path)
    assert done.returncode == code
    assert said in done.stderr
    assert (tmp_path / "taken apart").exists()
