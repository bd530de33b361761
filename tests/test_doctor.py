"""``python -m scripts.doctor``: every failing condition is found with its fix, and nothing has to work for it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.doctor import __main__ as doctor
from scripts.doctor.__main__ import with_torch
from scripts.doctor.findings import ERROR, OK, WARNING, reason, shared_names
from scripts.doctor.probe import device, tiny, without_cuda
from tests.conftest import ROOT


def run_doctor(*arguments: str, python: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "scripts.doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch of our own making, found before the real one by processes that are started now."""
    module = tmp_path / "stub" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    return module


def test_a_torch_that_does_not_import_is_an_error_and_the_rest_is_still_looked_at(stub: Path) -> None:
    stub.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = run_doctor()
    assert done.returncode == 1
    assert "error    torch imports   no: ImportError: libcudart.so.13: cannot open" in done.stdout
    for name in ("python", "lightning", "inductor cache", "memory", "environment"):
        assert f" {name} " in done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(f"errors: {sum(line.startswith('error ') for line in lines)}, ")
    for line, after in itertools.pairwise(lines):
        assert line.startswith((OK, " ", "errors:")) or after.lstrip().startswith("-> "), "with its fix"


def test_what_brings_packages_of_our_names_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"trainer": ["crucible-train", "other"], "tasks": ["crucible-train"], "crucible": ["crucible-train"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: owners)
    (found,) = shared_names()
    assert (found.status, found.message) == (ERROR, "other installs a package 'trainer' too, as crucible-train does")
    monkeypatch.setitem(sys.modules, "crucible", ModuleType("crucible"))
    vars(sys.modules["crucible"])["__file__"] = "crucible.py"
    (found,) = shared_names()
    assert (found.status, found.message) == (ERROR, "crucible.py hides crucible's own package 'crucible'")
    monkeypatch.setitem(sys.modules, "crucible", None)
    assert list(shared_names()) == [], "nothing is installed"


def test_where_nothing_is_installed_each_package_is_missed_by_name(stub: Path) -> None:
    stub.write_text("raise ImportError('no torch')\n")
    done = run_doctor(python=("-S",))  # without site-packages
    assert done.returncode == 1
    assert done.stderr == ""
    for package in ("torch", "lightning", "hydra-core", "rich"):
        assert f"error    {package:<15} is not installed" in done.stdout


def test_a_torch_that_crashes_or_hangs_ends_its_own_process_only(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})\n")
    assert [one.message for one in with_torch()] == ["no: it was killed by SIGSEGV"]
    stub.write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(doctor, "SECONDS", 0.5)
    assert [one.message for one in with_torch()] == ["no: it took longer than 0.5 s and was stopped"]


def test_a_driver_that_crashes_is_an_error_behind_what_was_found(stub: Path) -> None:
    stub.write_text(
        "import os, types\n"
        "__version__, version = '2.15.0', types.SimpleNamespace(cuda='13.2', hip=None)\n"
        f"cuda = types.SimpleNamespace(is_available=lambda: os.kill(os.getpid(), {int(signal.SIGABRT)}))\n"
    )
    imported, cuda = with_torch()
    assert (imported.status, imported.message) == (OK, "2.15.0 (CUDA 13.2)")
    assert (cuda.status, cuda.message) == (ERROR, "using the device failed: it was killed by SIGABRT")


def test_a_tiny_function_is_compiled_for_real_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    *_, compiler, finding = with_torch()
    assert (compiler.name, compiler.status, finding.name) == ("c++ compiler", OK, "compile")
    assert finding.message.startswith("a tiny function, forward and backward, on cpu in ")
    assert list(tmp_path.iterdir()) == []


CPU_TORCH = """
import types
__version__, version = "2.15.0", types.SimpleNamespace(cuda=None, hip=None)
cuda = types.SimpleNamespace(is_available=lambda: False)
def compile(function):
    raise RuntimeError("Failed to find a C compiler")
"""


def test_a_compiler_that_raises_is_an_error(stub: Path) -> None:
    stub.write_text(CPU_TORCH)
    *_, finding = with_torch()
    assert finding.message == "a tiny function does not compile: RuntimeError: Failed to find a C compiler"


def test_a_compiler_that_is_switched_off_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._dynamo.config.patch(disable=True):  # what TORCH_COMPILE_DISABLE=1 sets
        finding = tiny()
    assert (finding.status, finding.message) == (ERROR, "nothing was compiled: the compiler is switched off")


def test_of_a_traceback_the_error_is_told_not_the_advice() -> None:
    text = 'Traceback (most recent call last):\n  File "x.py"\ntorch.InductorError: no ptxas\n\nSet X=1\n'
    assert reason(text) == "torch.InductorError: no ptxas"
    assert reason("") == "no reason given"


@pytest.mark.parametrize(
    ("boards", "cuda", "why", "status", "said"),
    [
        (0, "13.2", "", OK, "no NVIDIA device"),
        (2, "13.2", "driver is too old", ERROR, "2 boards, but torch cannot use them: driver is too old"),
        (2, None, "", WARNING, "2 boards, but torch cannot use them: it is built without CUDA"),
    ],
)
def test_what_torch_says_of_cuda_is_judged_by_the_boards_that_are_there(
    boards: int, cuda: str | None, why: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = without_cuda(boards, cuda, why)
    assert finding.status == status
    assert said in finding.message


def test_devices_that_the_user_hides_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert without_cuda(2, "13.2", "no CUDA-capable device is detected").status == OK


@pytest.mark.parametrize(
    ("major", "free_gib", "status", "said"),
    [
        (9, 70.0, OK, "a GPU, compute capability 9.1, 70.0 of 79.0 GiB free"),
        (6, 70.0, ERROR, "compute capability 6.1"),
        (9, 0.2, WARNING, "0.2 of 79.0 GiB free"),
    ],
)
def test_each_device_is_judged(
    major: int, free_gib: float, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "3.7")
    properties: Any = SimpleNamespace(name="a GPU", major=major, minor=1)
    finding = device(0, properties, free_gib=free_gib, total_gib=79.0)
    assert finding.status == status
    assert said in finding.message


GPU_TORCH = """
import types
__version__, version = {version!r}, types.SimpleNamespace(cuda="13.2", hip=None)
_C = types.SimpleNamespace(_cuda_getDriverVersion=lambda: 13020)
ones = lambda *size, device: types.SimpleNamespace(sum=lambda: types.SimpleNamespace(item=lambda: 1.0))
cuda = types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, mem_get_info=lambda number: (70 << 30, 79 << 30),
    get_device_properties=lambda number: types.SimpleNamespace(name="a GPU", major=9, minor=0),
    get_device_capability=lambda number: (9, 0),
)
"""


def test_a_cudnn_whose_backward_is_wrong_is_told(stub: Path) -> None:
    stub.write_text(GPU_TORCH.format(version="2.11.0+cu130"))
    *found, _ = with_torch()
    assert [one.name for one in found] == ["torch imports", "cuda driver", "device 0", "attention", "c++ compiler"]
    assert found[1].message == "for CUDA 13.2, torch is built with 13.2"
    assert (found[-2].status, "NaN at lengths of 64 modulo 128" in found[-2].message) == (WARNING, True)
    stub.write_text(GPU_TORCH.format(version="2.15.0"))
    assert "attention" not in {one.name for one in with_torch()}
