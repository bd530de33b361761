"""What the doctor looks at without torch: the C++ compiler, folders, limits of the container, environment variables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.doctor.findings import ERROR, OK, WARNING, place, places, variables
from scripts.doctor.probe import cpp


def script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_no_compiler_is_an_error_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = cpp(needed=True)
    assert (finding.status, finding.fix) == (ERROR, "install g++ or use compile=eager")
    finding = cpp(needed=False)
    assert finding.status == WARNING, "on a GPU Triton writes the kernels"
    script(tmp_path / "clang++", "exit 0")
    finding = cpp(needed=True)
    assert finding.fix == "set CXX=clang++, install g++ or use compile=eager", "Inductor looks for g++ alone"


def test_a_cache_that_cannot_be_written_to_names_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    found = {finding.name: finding for finding in places()}
    assert found["inductor cache"].status == ERROR
    assert found["inductor cache"].fix == "set TORCHINDUCTOR_CACHE_DIR to a folder on another disk"
    assert "file/cache cannot be written to: " in found["inductor cache"].message
    assert found["triton cache"].status == OK


@pytest.mark.parametrize(
    ("free_gib", "status", "said"),
    [(20.0, OK, "20.0 GiB free"), (1.0, WARNING, "1.0 GiB free"), (10 / 1024, ERROR, "is full: 10 MiB free")],
)
def test_a_folder_is_judged_by_its_room(
    free_gib: float, status: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free_gib * 2**30))
    finding = place("cache", tmp_path, "elsewhere", runs_files=True)
    assert finding.status == status
    assert said in finding.message


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "0", WARNING),  # torch takes any text for yes
        ("CUDA_LAUNCH_BLOCKING", "1", WARNING),
        ("CUDA_LAUNCH_BLOCKING", "0", OK),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", WARNING),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", OK),
        ("TRITON_INTERPRET", "1", ERROR),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "0", WARNING),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "1", OK),
    ],
)
def test_a_variable_is_judged_by_its_value(name: str, value: str, status: str) -> None:
    finding = next(variables({name: value, "PATH": "/bin"}))
    assert finding.status == status
    assert finding.message.startswith(f"{name}={value}") or status == OK


def test_a_switched_off_compiler_is_an_error_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    finding = next(variables({"TORCHDYNAMO_DISABLE": "1"}))
    assert (finding.status, finding.fix) == (ERROR, "unset it, or use compile=eager")
    assert [each.status for each in variables({"TORCHDYNAMO_DISABLE": "1"})].count(ERROR) == 1
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    (finding,) = variables({})
    assert finding.status == OK
