"""The documentation: a site that builds, versions that were tested."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from strategies import STRATEGIES
from tests.conftest import ROOT


@pytest.mark.slow
def test_the_site_builds_strictly_lists_every_public_name_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("properdocs")
    pytest.importorskip("material.plugins.search", reason="needs mkdocs-materialx")
    pytest.importorskip("mkdocstrings_handlers.python")
    # The command of CONTRIBUTING, less its folder. Its warnings count under --strict only where they are shown: no -q.
    (command,) = re.findall(
        r"`properdocs (build --strict -f \S+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    )
    arguments = [sys.executable, "-m", "properdocs", *command.split(), "-d", str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stub = ast.parse((ROOT / "trainer" / "crucible" / "__init__.pyi").read_text(encoding="utf-8"))
    public = {
        f"{node.module}.{name.name}" for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert public - set(re.findall(r'id="([\w.]+)"', (tmp_path / "api.html").read_text(encoding="utf-8"))) == set()
    loads = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""")
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert {name: found for name, text in pages.items() if (found := loads.findall(text))} == {}
    assert {name for name, text in pages.items() if "```" in text} == set(), "a block of code is shown as text"
    assert list(tmp_path.glob("search/*")), "the search has an index"


def test_every_strategy_has_its_row_and_its_section() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    sections = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^## .*", text, re.MULTILINE))))
    names = {name for name, strategy in STRATEGIES.items() if not strategy.removed}
    assert (names - rows, names - sections) == (set(), set())


def test_every_direct_dependency_has_a_version_that_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        re.split(r"[\[<>=]", each)[0] for each in project["dependencies"] + project["optional-dependencies"]["test"]
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert asked - {"setuptools"} <= pinned


def test_no_script_of_the_pages_lies_beside_a_folder_that_hides_a_package_of_ours() -> None:
    """Python looks there first, so that ``python docs/SCRIPT`` would end at its import of ``crucible``."""
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"crucible"}
    beside = {path: {one.stem for one in path.parent.iterdir()} for path in (ROOT / "docs").rglob("*.py")}
    assert {str(path): ours & names for path, names in beside.items() if ours & names} == {}


@pytest.mark.parametrize("fails", [False, True])
def test_ci_tests_the_oldest_and_the_newest_torch(tmp_path: Path, fails: bool) -> None:
    (tmp_path / ".ci").mkdir()
    for name in (".ci/torch", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "check").write_text(f"#!/bin/sh\necho $*\nexit {int(fails)}\n")
    for name in (".ci/torch", "check"):
        os.chmod(tmp_path / name, 0o755)
    done = subprocess.run([tmp_path / ".ci/torch", "--fast"], capture_output=True, text=True, check=False)
    assert re.fullmatch(r"--torch 2\.\d+ --fast\n--torch 2\.\d+ --fast\n", done.stdout)
    assert done.returncode == int(fails), "a failure under one does not hide the other"
