"""What the doctor looks at without torch: the C++ compiler, folders, limits of the container, environment variables."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.doctor import ERROR, OK, WARNING, place, places, processors, quota, shared_memory, variables
from scripts.doctor.devices import cpp
from tasks.resources import memory_limit_gib


def script(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_the_compiler_of_this_machine_compiles_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    finding = cpp(needed=True)
    assert finding.status == OK
    assert "g++ compiles and runs, OpenMP with" in finding.message


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


def test_a_compiler_that_fails_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "fails", "echo 'three_lines.cpp:1:10: fatal error: omp.h: No such file' >&2; exit 1")
    monkeypatch.setenv("CXX", str(tmp_path / "fails"))
    finding = cpp(needed=True)
    assert finding.status == ERROR
    assert "fatal error: omp.h: No such file" in finding.message
    # It writes a program that does not run, as on a file system that is mounted noexec.
    script(tmp_path / "half", 'while [ "$1" != -o ]; do shift; done; touch "$2"')
    monkeypatch.setenv("CXX", str(tmp_path / "half"))
    finding = cpp(needed=True)
    assert "does not run: " in finding.message
    assert "Permission denied" in finding.message
    assert "noexec" in str(finding.fix)


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
    ("change", "status", "said"),
    [
        ({}, OK, "20.0 GiB free"),
        ({"f_flag": os.ST_NOEXEC}, ERROR, "mounted noexec"),
        ({"f_bavail": 262144}, WARNING, "1.0 GiB free"),
        ({"f_bavail": 2560}, ERROR, "is full: 10 MiB free"),
        ({"f_favail": 12}, WARNING, "only 12 more files fit"),
        ({"f_favail": 0, "f_files": 0}, OK, "20.0 GiB free"),
    ],
)
def test_a_folder_is_judged_by_its_file_system(
    change: dict[str, int], status: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = {"f_flag": 0, "f_bavail": 20 * 262144, "f_frsize": 4096, "f_favail": 10**6, "f_files": 10**7}
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(**{**system, **change}))
    finding = place("cache", tmp_path, "elsewhere", runs_files=True)
    assert finding.status == status
    assert said in finding.message


def test_the_shared_memory_of_a_container_is_little() -> None:
    assert shared_memory(0.0625).status == WARNING
    assert shared_memory(8.0).status == OK


def test_processors_are_those_that_the_container_gets(tmp_path: Path) -> None:
    assert quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert quota(tmp_path) == 1.5
    finding = processors(64, 1.5, None)
    assert finding.status == WARNING
    assert "OMP_NUM_THREADS=1" in str(finding.fix)
    assert processors(64, 1.5, "1").status == OK
    assert processors(2, 4.0, None).status == OK


def test_quotas_of_the_first_version_count_too(tmp_path: Path) -> None:
    for name, text in (("cpu/cpu.cfs_quota_us", "400000"), ("cpu/cpu.cfs_period_us", "100000")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota(tmp_path) == 4.0
    assert memory_limit_gib(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    assert memory_limit_gib(tmp_path) == 2.0


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
        ("OMP_NUM_THREADS", "4", OK),
        ("TORCHINDUCTOR_FREEZING", "1", OK),
    ],
)
def test_a_variable_is_judged_by_its_value(name: str, value: str, status: str) -> None:
    finding = next(variables({name: value, "PATH": "/bin"}))
    assert finding.status == status
    assert finding.message.startswith(f"{name}={value}") or (status == OK and name.startswith("CUDA_"))
    assert "PATH" not in finding.message


def test_a_switched_off_compiler_is_an_error_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    finding = next(variables({"TORCHDYNAMO_DISABLE": "1"}))
    assert (finding.status, finding.fix) == (ERROR, "unset it, or use compile=eager")
    assert [each.status for each in variables({"TORCHDYNAMO_DISABLE": "1"})].count(ERROR) == 1
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    (finding,) = variables({})
    assert finding.status == OK
