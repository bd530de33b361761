"""``./check``: what it runs, in which order, and that one failure hides nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROGRAMS = ("ruff", "mypy", "lint-imports", "python", "pip")
QUICK = "not gpu and not libraries and not slow and not sweep"
USUAL = "not gpu and not libraries and not sweep"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the command alone, and programs that print how they were called."""
    shutil.copy2(ROOT / "check", tmp_path / "check")
    made = {name: f'echo "{name} $*"; [ {name} != "$FAILS" ]' for name in PROGRAMS}
    made["python3"] = 'mkdir -p "$3/bin"; echo "python3 $*"; echo "echo activated $3" > "$3/bin/activate"'
    for name, script in made.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def check(copy: Path, *arguments: str, fails: str = "") -> tuple[int, list[str], str]:
    """Exit code, what ran, and errors."""
    environment = {**os.environ, "PATH": f"{copy}:{os.environ['PATH']}", "FAILS": fails}
    done = subprocess.run([copy / "check", *arguments], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, [line for line in done.stdout.splitlines() if not line.startswith("==")], done.stderr


LINT = ["ruff format --check .", "ruff check ."]
BESIDE = ["lint-imports ", "mypy "]
"""They run beside the tests; what they say comes after them."""
INSTALL = "pip install --quiet --disable-pip-version-check"
RUNS: dict[str, list[str]] = {
    "": [*LINT, f"python -m pytest -m {USUAL}", *BESIDE],
    "--fast": [*LINT, f"python -m pytest -m {QUICK}", *BESIDE],
    "--fix": ["ruff format .", "ruff check --fix --quiet .", *LINT, f"python -m pytest -m {USUAL}", *BESIDE],
    "--libraries": [
        *("python3 -m venv .venv-libraries", "activated .venv-libraries", f"{INSTALL} -e .[test,libraries]"),
        "python -m pytest -m libraries tests/libraries",
    ],
    "--torch 2.11 --fast": [
        *("python3 -m venv .venv-2.11", "activated .venv-2.11", f"{INSTALL} torch==2.11.* -e .[test]"),
        f"python -m pytest -m {QUICK}",
    ],
}


@pytest.mark.parametrize("options", RUNS)
def test_it_says_what_it_takes_and_runs_all_steps_whatever_fails(copy: Path, options: str) -> None:
    code, lines, _ = check(copy, *options.split())
    assert (code, lines[1:]) == (0, [*RUNS[options], "all good"])
    minutes = {"": 13, "--libraries": 15}.get(options, 4 if "--fast" in options else 13)
    assert f"about {minutes} minutes" in lines[0]
    code, again, errors = check(copy, *options.split(), fails="mypy")
    kept = [line for line in RUNS[options] if not line.startswith("python3 -m venv")]  # is made once
    lints = BESIDE[1] in kept
    assert (code, errors) == (int(lints), "failed: mypy\n" * lints)
    assert again[1:] == [*kept, *["all good"] * (not lints)]


@pytest.mark.parametrize("arguments", [("--quick",), ("--torch",), ("--torch", "newest")])
def test_what_it_does_not_know_is_answered_by_its_options(copy: Path, arguments: tuple[str, ...]) -> None:
    code, lines, errors = check(copy, *arguments)
    assert (code, lines) == (2, [])
    assert all(option in errors for option in ("--fast", "--fix", "--torch 2.11", "--libraries"))
