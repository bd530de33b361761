"""The head start for Inductor: whatever goes wrong in it, the run goes on."""

from __future__ import annotations

import threading
import time

import pytest
import torch._inductor.cpu_vec_isa

from strategies import prepare
from strategies.prepare import Preparation


def test_waiting_means_that_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "pick_vec_isa", probed.set)
    preparation = Preparation()
    preparation.wait()
    assert probed.is_set()
    assert preparation.waited_seconds >= 0


def test_what_was_waited_for_is_counted_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_import_inductor", lambda: time.sleep(0.2))
    monkeypatch.setattr(prepare, "_warm_up", lambda: time.sleep(0.2))
    preparation = Preparation()
    preparation.wait_for_imports()
    after_imports = preparation.waited_seconds
    preparation.wait()
    assert 0.1 < after_imports < preparation.waited_seconds
    known = preparation.waited_seconds
    preparation.wait()
    assert preparation.waited_seconds - known < 0.1, "it is over"


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), ImportError("no module"), OSError("disk full")])
def test_an_error_in_the_background_is_left_to_the_first_compile(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "pick_vec_isa", fail)
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    Preparation().wait()
    assert raised == []
    assert capfd.readouterr().err == ""
