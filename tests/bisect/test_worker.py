"""The worker: what comes of one that answers, is killed, hangs, says no or cannot start. A stand-in, without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.bisect.search import Outcome, Site, Trial
from scripts.bisect.worker import RemoteBench, WorkerFailed


def stand_in(pipe: Any, overrides: list[str], *_: Any) -> None:
    """What a worker does, by the name of the module that is tried."""
    if "refuse" in overrides:
        raise ValueError("task=refuse is no task")
    if "break" in overrides:
        raise ImportError("no such thing")
    pipe.send(Site(regions=[], strategy="whole"))
    with open("starts", "a") as file:
        file.write("x")
    while True:
        [path] = pipe.recv().paths
        if path == "crash":
            signal.raise_signal(signal.SIGSEGV)
        if path == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if path == "hang":
            time.sleep(60)
        if path == "exit":
            sys.exit("the last words")
        pipe.send(Outcome(shows=path == "bad", reason=path))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.chdir(tmp_path)


def bench(*overrides: str, seconds: float = 60.0) -> RemoteBench:
    return RemoteBench(overrides, trial_seconds=seconds, serve=stand_in)


def trial(path: str, symptom: str = "fails") -> Trial:
    return Trial(symptom=symptom, paths=(path,))


def test_a_crash_is_an_outcome_and_the_search_continues() -> None:
    with bench() as remote:
        process, folder = remote._process, Path(remote._folder.name)
        crashed = remote.trial(trial("crash"))
        assert (crashed.shows, crashed.crashed) == (True, True)
        assert crashed.reason == "kills the process: SIGSEGV"
        assert crashed.where is not None
        assert crashed.where.endswith(" in stand_in"), "Python's line, from faulthandler"
        assert remote.trial(trial("bad")).shows
        killed = remote.trial(trial("killed", "slower"))
        assert "out of memory perhaps" in str(killed.reason)
        assert not killed.shows, "a crash is not slow"
        assert remote.trial(trial("exit")).reason == "ends the process with exit code 1: the last words"
        assert not remote.trial(trial("good")).shows
    assert Path("starts").read_text() == "xxxx", "one at the start, one after each loss"
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_what_hangs_is_ended() -> None:
    with bench(seconds=1.0) as remote:
        remote.trial(trial("good"))
        assert remote.trial(trial("hang")).reason == "hangs: not through after 1 seconds"
    assert Path("starts").read_text() == "x"


def test_refusals_and_broken_starts_are_told() -> None:
    with pytest.raises(ValueError, match="task=refuse is no task"):
        bench("refuse")
    with pytest.raises(WorkerFailed, match="no such thing"):
        bench("break")
