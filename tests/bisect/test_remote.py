"""The worker: what comes of one that answers, is killed, hangs, says no or cannot start. A stand-in, without torch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from scripts.bisect.remote import RemoteBench, WorkerFailed
from scripts.bisect.trial import Trial

STAND_IN = """
import faulthandler, json, os, signal, sys, threading, time
threading.Thread(target=time.sleep, args=[60], daemon=True).start()
faulthandler.enable()
def answer(facts): print(json.dumps(facts), flush=True)
first = json.loads(sys.stdin.readline())
if "refuse" in first["overrides"]: answer({"refused": "task=refuse is no task"}); sys.exit()
if "break" in first["overrides"]: sys.exit("ImportError: no such thing")
answer({"site": {"regions": [], "strategy": "whole"}})
open("starts", "a").write("x")
for line in sys.stdin:
    path = json.loads(line)["trial"]["paths"][0]
    if path == "crash": signal.raise_signal(signal.SIGSEGV)
    if path == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if path == "hang": time.sleep(60)
    if path == "exit": sys.exit("the last words")
    answer({"outcome": {"shows": path == "bad", "reason": path}})
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return [sys.executable, str(tmp_path / "stand_in.py")]


def bench(worker: list[str], *overrides: str, seconds: float = 20.0, isolate: bool = False) -> RemoteBench:
    return RemoteBench(overrides, batches=1, shapes=1, trial_seconds=seconds, isolate=isolate, worker=worker)


def trial(path: str, symptom: str = "fails") -> Trial:
    return Trial(symptom=symptom, paths=(path,))


def test_a_crash_is_an_outcome_and_the_search_goes_on(worker: list[str]) -> None:
    with bench(worker) as remote:
        crashed = remote.trial(trial("crash"))
        assert (crashed.shows, crashed.crashed) == (True, True)
        assert crashed.reason == "kills the process: SIGSEGV"
        assert crashed.where is not None
        assert crashed.where.endswith(":13 in <module>"), "Python's line, from faulthandler"
        assert "out of memory perhaps" in str(remote.trial(trial("killed")).reason)
        assert remote.trial(trial("exit")).reason == "ends the process with exit code 1: the last words"
        assert remote.trial(trial("bad")).shows
        assert not remote.trial(trial("good")).shows
    assert Path("starts").read_text() == "xxxx", "one at the start, one after each loss"


def test_a_crash_is_not_slow(worker: list[str]) -> None:
    with bench(worker) as remote:
        outcome = remote.trial(trial("crash", "slower"))
    assert not outcome.shows
    assert outcome.reason is not None


def test_what_hangs_is_ended(worker: list[str]) -> None:
    began = time.monotonic()
    with bench(worker, seconds=0.5) as remote:
        assert remote.trial(trial("hang")).reason == "hangs: not through after 0.5 seconds"
    assert time.monotonic() - began < 100


def test_each_trial_can_have_its_own_process(worker: list[str]) -> None:
    with bench(worker, isolate=True) as remote:
        remote.trial(trial("good"))
        remote.trial(trial("good"))
    assert Path("starts").read_text() == "xx"


def test_refusals_and_broken_starts_are_told(worker: list[str]) -> None:
    with pytest.raises(ValueError, match="task=refuse is no task"):
        bench(worker, "refuse")
    with pytest.raises(WorkerFailed, match="no such thing"):
        bench(worker, "break")


def test_nothing_is_left_behind(worker: list[str]) -> None:
    with bench(worker) as remote:
        process, folder = remote._process, Path(remote._folder.name)
        assert process is not None
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
