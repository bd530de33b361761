"""Signals while torch is imported wait for its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from trainer.process import Interrupted, StopRequest, present_handlers, undisturbed, uninterrupted_import


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored, and Python leaves it at that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def imported(*signals: int, said: list[str]) -> None:
    """An import in whose middle the signals come."""
    with uninterrupted_import():
        for signum in signals:
            signal.raise_signal(signum)
        said.append("imported")


def test_a_signal_waits_for_the_end_and_is_then_what_it_was_before() -> None:
    said: list[str] = []
    with StopRequest(said.append):
        with pytest.raises(Interrupted, match="SIGTERM"):
            imported(signal.SIGTERM, said=said)
        assert said == ["imported"]


def test_a_failed_import_is_told_before_a_signal_that_waits_and_handlers_come_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ImportError), uninterrupted_import():
        raise ImportError("no torch")
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # As ``timeout`` sends it: to its command, and to the group that this is in.
    said: list[str] = []
    with StopRequest(said.append) as stop:
        stop.in_training = True
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert said == ["SIGTERM: stopping after this step with a checkpoint; once more stops at once"]
        monkeypatch.setattr("trainer.process.ONE_REQUEST_SECONDS", 0.0)
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_a_finalizer_swallows_is_found_by_a_check() -> None:
    class Interrupts:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with StopRequest(print) as stop:
        stop.check()
        del (one := [Interrupts()])[0]
        assert one == []
        with pytest.raises(Interrupted, match="SIGINT"):
            stop.check()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_hang_up_stops_a_run_unless_nohup_ignores_it(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopRequest(print):
            assert (signal.SIGHUP in present_handlers()) is not ignored
            if ignored:
                signal.raise_signal(signal.SIGHUP)
            else:
                with pytest.raises(Interrupted, match="SIGHUP"):
                    signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_worker_that_dies_while_the_last_things_are_written_is_no_error() -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal")

    before = signal.signal(signal.SIGCHLD, raises)
    try:
        with undisturbed():
            signal.raise_signal(signal.SIGCHLD)
        with pytest.raises(RuntimeError, match="is killed"):
            signal.raise_signal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)
