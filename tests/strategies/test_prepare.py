"""The head start for Inductor: whatever goes wrong in it, the run goes on."""

from __future__ import annotations

import threading

import pytest
import torch._inductor.cpu_vec_isa

from strategies.prepare import Preparation


def test_waiting_means_that_inductor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "pick_vec_isa", probed.set)
    Preparation().wait()
    assert probed.is_set()


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
