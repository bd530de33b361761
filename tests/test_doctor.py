"""``python -m scripts.doctor``: every failing condition is found with its fix, and nothing has to work for it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from scripts import doctor
from scripts.doctor import ERROR, OK, WARNING, caches, compiler, machine, reason, shared_names, tiny, with_torch
from tests.processes import python


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch of our own making, found before the real one by processes that are started now."""
    module = tmp_path / "stub" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    return module


def test_a_torch_that_does_not_import_is_an_error_and_the_rest_is_still_looked_at(stub: Path) -> None:
    stub.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = python("-m", "scripts.doctor", path=(stub.parents[1],))
    assert done.returncode == 1
    assert "error    torch imports   no: ImportError: libcudart.so.13: cannot open" in done.stdout
    for name in ("packages", "inductor cache", "environment"):
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
    done = python("-S", "-m", "scripts.doctor", path=(stub.parents[1],))  # without site-packages
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


STUB = """
import os, sys, types
__version__, version = "2.15.0", types.SimpleNamespace(cuda="13.2", hip=None)
facts = types.SimpleNamespace(os="Linux", gcc_version="13", nvidia_driver_version=None, nvidia_gpu_models=None)
sys.modules["torch.utils.collect_env"] = types.SimpleNamespace(get_env_info=lambda: facts)
"""


def test_a_driver_that_crashes_is_an_error_behind_what_was_found(stub: Path) -> None:
    kill = f"lambda: os.kill(os.getpid(), {int(signal.SIGABRT)})"
    stub.write_text(f"{STUB}cuda = types.SimpleNamespace(init={kill}, is_available=lambda: True)\n")
    imported, system, cuda = with_torch()
    assert (imported.status, imported.message) == (OK, "2.15.0 (CUDA 13.2)")
    assert (system.name, system.message) == ("machine", "Linux, GCC 13")
    assert (cuda.status, cuda.message) == (ERROR, "using the device failed: it was killed by SIGABRT")


def test_a_compiler_that_raises_is_an_error(stub: Path) -> None:
    raises = "def compile(function):\n    raise RuntimeError('Failed to find a C compiler')\n"
    cuda = "cuda = types.SimpleNamespace(init=lambda: 1 / 0, is_available=lambda: False)\n"
    stub.write_text(STUB + cuda + raises)
    *_, finding = with_torch()
    assert finding.message == "a tiny function does not compile: RuntimeError: Failed to find a C compiler"


def test_a_tiny_function_is_compiled_for_real_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    *_, found, finding = with_torch()
    assert (found.name, found.status, finding.name) == ("c++ compiler", OK, "compile")
    assert finding.message.startswith("a tiny function, forward and backward, on cpu in ")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_is_switched_off_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._dynamo.config.patch(disable=True):  # what TORCH_COMPILE_DISABLE=1 sets
        (finding,) = tiny()
    assert (finding.status, finding.message) == (ERROR, "nothing was compiled: the compiler is switched off")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    switched, given = doctor.variables()
    assert (switched.status, switched.fix) == (ERROR, "unset it, or use compile=eager")
    assert "TORCHDYNAMO_DISABLE=1" in given.message


def test_of_a_traceback_the_error_is_told_not_the_advice() -> None:
    text = 'Traceback (most recent call last):\n  File "x.py"\ntorch.InductorError: no ptxas\n\nSet X=1\n'
    assert reason(text) == "torch.InductorError: no ptxas"
    assert reason("") == "no reason given"


@pytest.mark.parametrize(
    ("boards", "cuda", "visible", "status", "said"),
    [
        (None, "13.2", "0", OK, "no NVIDIA device is to be seen"),
        ("GPU 0: H\nGPU 1: H", "13.2", "0", ERROR, "torch cannot use GPU 0: H, GPU 1: H: the driver is too old"),
        ("GPU 0: H", None, "0", WARNING, "torch cannot use GPU 0: H: the driver"),
        ("GPU 0: H", "13.2", "", OK, "no NVIDIA device is to be seen"),
    ],
)
def test_what_torch_says_of_cuda_is_judged_by_the_boards_that_are_there(
    boards: str | None, cuda: str | None, visible: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("the driver is too old. Update it.")

    facts = SimpleNamespace(os="Linux", gcc_version="13", nvidia_driver_version="580.1", nvidia_gpu_models=boards)
    monkeypatch.setattr("torch.utils.collect_env.get_env_info", lambda: facts)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _, system, finding = machine()
    assert system.message == "Linux, GCC 13, NVIDIA driver 580.1"
    assert finding.status == status
    assert finding.message.startswith(said)


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [
        ("2.15.0", (9, 0), [(OK, "a GPU, compute capability 9.0, 70.0 of 79.0 GiB free")]),
        ("2.15.0", (6, 1), [(ERROR, "a GPU, compute capability 6.1, 70.0 of 79.0 GiB free")]),
        ("2.11.0+cu130", (9, 0), [(OK, "a GPU"), (WARNING, "where cuDNN runs it, its backward can give NaN")]),
    ],
)
def test_each_device_is_judged(
    version: str, capability: tuple[int, int], expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(os="Linux", gcc_version="13", nvidia_driver_version="580.1", nvidia_gpu_models="GPU 0: H")
    monkeypatch.setattr("torch.utils.collect_env.get_env_info", lambda: facts)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))
    devices = {
        "init": lambda: None,
        "device_count": lambda: 1,
        "get_device_name": lambda number: "a GPU",
        "get_device_capability": lambda number: capability,
        "mem_get_info": lambda number: (70 << 30, 79 << 30),
    }
    for name, says in devices.items():
        monkeypatch.setattr(torch.cuda, name, says)
    _, _, *found = machine()
    assert [one.status for one in found] == [status for status, _ in expected]
    assert all(one.message.startswith(said) for one, (_, said) in zip(found, expected, strict=True))


def test_no_compiler_is_an_error_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = compiler(needed=True)
    assert (finding.status, finding.fix) == (ERROR, "install g++ or use compile=eager")
    (finding,) = compiler(needed=False)
    assert finding.status == WARNING, "on a GPU Triton writes the kernels"
    (tmp_path / "clang++").write_text("#!/bin/sh\n")
    (tmp_path / "clang++").chmod(0o755)
    (finding,) = compiler(needed=True)
    assert finding.fix == "set CXX=clang++, install g++ or use compile=eager", "Inductor looks for g++ alone"


def test_a_cache_that_cannot_be_written_to_names_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    inductor, triton = caches()
    assert (inductor.status, inductor.fix) == (ERROR, "set TORCHINDUCTOR_CACHE_DIR to a folder on another disk")
    assert "file/cache cannot be written to: " in inductor.message
    assert triton.status == OK
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    _, triton = caches()
    assert (triton.status, triton.message) == (WARNING, f"{tmp_path / 'triton'}, 1.0 GiB free")


def test_a_cache_that_others_can_fill_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, link = tmp_path / "cache", tmp_path / "link"
    cache.mkdir(mode=0o755)
    link.symlink_to(cache)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(link))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (finding,) = caches()
    assert finding.status == OK, "a link of one's own is no danger"
    cache.chmod(0o777)
    (finding,) = caches()
    assert finding.status == WARNING
    assert finding.fix == "set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write"
    assert "other users may write" in finding.message
    cache.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
    (finding,) = caches()
    assert "belongs to another user" in finding.message
