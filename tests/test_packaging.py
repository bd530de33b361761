"""The distribution: the wheel holds every package and every YAML, and its command line works from anywhere."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    mapped = {folder: name for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()}
    folders = {
        str(file.parent.relative_to(ROOT))
        for top in ("trainer", "strategies", "tasks", "scripts")
        for file in (ROOT / top).rglob("__init__.py")
    }
    found = {mapped.get(folder, folder.replace("/", ".")) for folder in {*folders, "conf"}}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


@pytest.mark.slow
def test_the_wheel_works_from_a_directory_with_folders_of_the_same_names(tmp_path: Path) -> None:
    source = tmp_path / "source"
    # From a copy: setuptools leaves build/ and an egg-info in the tree that it builds.
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    installed = tmp_path / "installed"
    pytest.importorskip("setuptools", minversion="77")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    yamls = {str(file.relative_to(ROOT)) for file in (ROOT / "conf").rglob("*.yaml")}
    assert {f"trainer/{name}" for name in yamls} <= names
    assert not {name.split("/")[0] for name in names} & {"conf", "tests", "docs"}
    typed = {f"{name}/py.typed" for name in ("crucible", "scripts", "strategies", "tasks", "trainer")}
    assert typed | {"crucible/__init__.pyi"} <= names
    subprocess.run([*pip, "install", *options, "--no-compile", "--target", str(installed), str(wheel)], check=True)

    elsewhere = tmp_path / "elsewhere"
    for name in ("conf", "tasks", "strategies"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "__init__.py").write_text("raise ImportError('the wrong one')\n")
    (elsewhere / "conf" / "config.yaml").write_text("seed: 99\n")
    for command, said in (
        (["-P", "-c", "from crucible import Compile, Regional; print(Compile([Regional()]).record)"], "RunRecord("),
        (["-m", "trainer", "--cfg", "job", "compile=whole"], "\nseed: 0"),
        ([installed / "bin" / "crucible", "seed=1", "--help"], "\n  seed=1"),
    ):
        done = python(*command, cwd=elsewhere, path=[installed])
        assert done.returncode == 0, done.stderr
        assert said in done.stdout

    # Another distribution with packages of two of our names, installed later.
    metadata = installed / "other_trainer-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-trainer\nVersion: 1\n")
    crucible, module = str(installed / "bin" / "crucible"), ["-m", "trainer", "task=micro"]
    commands = {
        "tasks": [module, [crucible, "task=micro"], ["-P", "-c", "from crucible import Task, Compile"]],
        "trainer": [module, [crucible, "doctor"]],
    }
    for package, given in commands.items():
        (installed / package / "__init__.py").write_text("")
        (metadata / "RECORD").write_text(f"{package}/__init__.py,,\n")
        said = f"other-trainer installs a package {package!r} too"
        for command in given:
            done = python(*command, cwd=elsewhere, path=[installed])
            assert done.returncode == 1
            assert said in done.stdout + done.stderr
            assert done.stderr.count("Traceback") == (command[0] == "-P"), "a line, in Python the last one"
