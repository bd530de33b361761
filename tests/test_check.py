"""``./check``: what it runs, in which order, and that one failure hides nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(("options", "minutes", "tests"), [((), 13, USUAL), (("--fast",), 4, QUICK)])
def test_it_says_what_it_takes_and_runs_all_steps(copy: Path, options: Any, minutes: int, tests: str) -> None:
    code, lines, _ = check(copy, *options)
    assert code == 0
    assert f"about {minutes} minutes" in lines[0]
    assert lines[1:] == [*LINT, f"python -m pytest -m {tests}", *BESIDE, "all good"]


def test_fix_puts_right_first(copy: Path) -> None:
    assert check(copy, "--fix")[1][1:3] == ["ruff format .", "ruff check --fix --quiet ."]


def test_another_torch_gets_an_environment_of_its_own_once(copy: Path) -> None:
    _, first, _ = check(copy, "--torch", "2.11", "--fast")
    _, again, _ = check(copy, "--torch", "2.11")
    install = "pip install --quiet --disable-pip-version-check torch==2.11.* -e .[test]"
    assert first[1:] == [
        "python3 -m venv .venv-2.11",
        "activated .venv-2.11",
        install,
        f"python -m pytest -m {QUICK}",
        "all good",
    ]
    assert again[1:] == [
        "activated .venv-2.11",
        install,
        f"python -m pytest -m {USUAL}",
        "all good",
    ]


def test_libraries_get_an_environment_of_their_own(copy: Path) -> None:
    assert check(copy, "--libraries")[1][1:] == [
        "python3 -m venv .venv-libraries",
        "activated .venv-libraries",
        "pip install --quiet --disable-pip-version-check -e .[test,libraries]",
        "python -m pytest -m libraries tests/libraries",
        "all good",
    ]


def test_one_failure_hides_nothing(copy: Path) -> None:
    code, lines, errors = check(copy, fails="mypy")
    assert code == 1
    assert errors == "failed: mypy\n"
    assert lines[1:] == [*LINT, f"python -m pytest -m {USUAL}", *BESIDE]


@pytest.mark.parametrize("arguments", [("--quick",), ("--torch",), ("--torch", "newest")])
def test_what_it_does_not_know_is_answered_by_its_options(copy: Path, arguments: tuple[str, ...]) -> None:
    code, lines, errors = check(copy, *arguments)
    assert (code, lines) == (2, [])
    assert all(option in errors for option in ("--fast", "--fix", "--torch 2.11", "--libraries"))
