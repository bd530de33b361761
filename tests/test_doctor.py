"""``python -m scripts.doctor``: every failing condition is found with its fix, and nothing has to work for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.doctor import ERROR, OK, WARNING, Finding, installed, requirements
from scripts.doctor import __main__ as devices_module
from scripts.doctor.__main__ import TorchFacts, ask_torch, compiling, devices, main, reason
from tests.conftest import ROOT

IMPORTED = {"stage": "torch", "version": "2.15.0", "cuda": "13.2", "hip": None, "path": "here"}
GPU = {
    "number": 0,
    "name": "a GPU",
    "capability": [9, 0],
    "works": True,
    "free_gib": 70.0,
    "total_gib": 79.0,
    "bf16": True,
}


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


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_a_torch_that_does_not_import_is_an_error_and_the_rest_is_still_looked_at(stub: Path) -> None:
    stub.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = run_doctor("--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in told["findings"]}
    assert found["torch imports"]["status"] == ERROR
    assert "libcudart.so.13: cannot open" in found["torch imports"]["message"]
    assert {"python", "lightning", "c++ compiler", "inductor cache", "memory", "environment"} <= set(found)
    assert (found["compile"]["status"], found["compile"]["message"]) == (WARNING, "not tried")
    assert told["errors"] == sum(finding["status"] == ERROR for finding in told["findings"])
    assert all(finding["fix"] for finding in told["findings"] if finding["status"] != OK)


def test_where_nothing_is_installed_each_package_is_missed_by_name(stub: Path) -> None:
    stub.write_text("raise ImportError('no torch')\n")
    done = run_doctor(python=("-S",))  # without site-packages
    assert done.returncode == 1
    assert done.stderr == ""
    for package in ("torch", "lightning", "hydra-core", "rich"):
        assert f"error    {package:<15} is not installed" in done.stdout
    assert "-> pip install 'hydra-core>=1.3.8,<1.4'" in done.stdout


def test_a_torch_that_crashes_or_hangs_ends_its_own_process_only(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})\n")
    assert ask_torch().failed == "it was killed by SIGSEGV"
    stub.write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(devices_module, "PROBE_SECONDS", 0.5)
    facts = ask_torch()
    assert "torch" not in facts.stages
    assert facts.failed == "it took longer than 0.5 s and was stopped"


def test_a_tiny_function_is_compiled_for_real_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    finding = compiling(seconds=200)
    assert finding.name == "compile"
    assert finding.message.startswith("a tiny function, forward and backward, on cpu in "), "slow is a warning"
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_does_nothing_raises_or_takes_too_long_is_an_error(
    stub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    stub.write_text("import time; time.sleep(60)\n")
    assert "it took longer than 0.5 s" in compiling(seconds=0.5).message
    stub.write_text("raise RuntimeError('Failed to find a C compiler')\n")
    assert (
        compiling(seconds=100).message == "a tiny function does not compile: RuntimeError: Failed to find a C compiler"
    )
    told = {"device": "cpu", "import_seconds": 1.0, "compile_seconds": 1.0, "difference": 0.0}
    stub.write_text(f"import sys; print({json.dumps(json.dumps(told))}); sys.exit(0)\n")
    assert compiling(seconds=100).message == "nothing was compiled: the compiler is switched off"


def test_of_a_traceback_the_error_is_told_not_the_advice() -> None:
    text = 'Traceback (most recent call last):\n  File "x.py"\ntorch.InductorError: no ptxas\n\nSet X=1\n'
    assert reason(text) == "torch.InductorError: no ptxas"
    assert reason("") == "no reason given"


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        (TorchFacts(stages={"torch": IMPORTED, "cuda": {"available": False, "reasons": []}}), OK, "no NVIDIA device"),
        (
            TorchFacts(stages={"torch": IMPORTED, "cuda": {"available": False, "reasons": ["driver is too old"]}}),
            ERROR,
            "2 boards, but torch cannot use them: driver is too old",
        ),
        (
            TorchFacts(stages={"torch": {**IMPORTED, "cuda": None}, "cuda": {"available": False, "reasons": []}}),
            WARNING,
            "2 boards, but this torch is built without CUDA",
        ),
        (
            TorchFacts(
                stages={"torch": IMPORTED, "cuda": {"available": True, "reasons": []}},
                failed="it was killed by SIGABRT",
            ),
            ERROR,
            "using the device failed: it was killed by SIGABRT",
        ),
    ],
)
def test_what_torch_says_of_cuda_is_judged_by_the_boards_that_are_there(
    facts: TorchFacts, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "nvidia_boards", lambda: 0 if status == OK else 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = named(list(devices(facts)), "cuda")
    assert finding.status == status
    assert said in finding.message


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({}, OK, "a GPU, compute capability 9.0, 70.0 of 79.0 GiB free"),
        ({"capability": [6, 1]}, ERROR, "compute capability 6.1"),
        ({"works": False}, ERROR, "a product of matrices of ones is wrong"),
        ({"free_gib": 0.2}, WARNING, "0.2 of 79.0 GiB free"),
    ],
)
def test_each_device_is_judged(
    change: dict[str, object], status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "version_of", lambda package: "3.7")
    stages = {"torch": IMPORTED, "cuda": {"available": True, "reasons": []}}
    finding = named(list(devices(TorchFacts(stages=stages, devices=[{**GPU, **change}]))), "device 0")
    assert finding.status == status
    assert said in finding.message


def test_versions_are_compared_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: {"torch": "2.9.1+cu128", "hydra-core": "1.4.0"}[name]
    )
    assert installed("torch", ">=2.11").status == ERROR
    assert installed("torch", ">=2.9").status == OK
    found = installed("hydra-core", ">=1.3.8,<1.4")
    assert (found.message, found.fix) == ("1.4.0, <1.4 is needed", "pip install 'hydra-core>=1.3.8,<1.4'")
    assert dict(requirements())["hydra-core"] == ">=1.3.8,<1.4"


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--compile-seconds", "-1"])
    assert stopped.value.code == 2
    assert "argument --compile-seconds: -1 must be above 0" in capsys.readouterr().err


def test_a_cudnn_whose_backward_is_wrong_is_told() -> None:
    def findings_under(version: str) -> list[Finding]:
        stages = {"torch": {**IMPORTED, "version": version}, "cuda": {"available": True}}
        return [one for one in devices(TorchFacts(stages=stages, devices=[GPU])) if one.name == "attention"]

    (wrong,) = findings_under("2.11.0+cu130")
    assert (wrong.status, "NaN at lengths of 64 modulo 128" in wrong.message) == (WARNING, True)
    assert findings_under("2.15.0") == []
