"""The pages say what is so: the tree, the metric table and all links are checked against the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trainer.telemetry.tensorboard import FINAL

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_folder_of_the_tree_exists_and_every_package_is_in_it() -> None:
    tree = re.search(r"## What is where\n\n```\n(.*?)```", CONTRIBUTING, re.DOTALL)
    named = {line.split()[0].rstrip("/") for line in tree[1].splitlines() if line.strip()}
    assert {name for name in named if not (ROOT / name).is_dir()} == set()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"conf", "docs"} <= named


def test_the_metrics_of_hparams_are_those_of_the_code() -> None:
    assert all(f"`{key}`" in REFERENCE for key in FINAL)


def test_links_lead_to_files() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))]
    assert len(links) > len(PAGES)
    assert [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("code", [0, 3])
def test_ci_runs_the_two_lines_of_the_readme_as_they_are_printed(tmp_path: Path, code: int) -> None:
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    (checkout / ".ci").mkdir(parents=True)
    programs.mkdir()
    for name in ("README.md", ".ci/run"):
        shutil.copy2(ROOT / name, checkout / name)
    environment = (
        r"mkdir -p .venv/bin; echo 'pip() { echo pip $*; }; crucible() { echo crucible $*; }' > .venv/bin/activate"
    )
    made = {programs / "python3": environment, checkout / "check": f"pwd; tail -n 1 README.md; ls -A; cat; exit {code}"}
    made |= {programs / name: "" for name in ("g++", "chromium")}  # nothing is missing
    for path, script in made.items():
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    (checkout / "untracked").touch()
    (checkout / "README.md").write_text(README + "\nedited\n")
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run([checkout / ".ci/run"], env=os.environ | path, capture_output=True, text=True, timeout=200)
    first, second = re.findall(r"```bash\n(python3 .*)\n```", README)
    said = [line for line in done.stdout.splitlines() if not line.startswith("== took")]
    assert said[:3] == [f"== {first}", "pip install -e .", "crucible train task=captioning compile=regional"]
    assert said[3:5] == [f"== {second}", "pip install -e .[test]"]
    assert said[6:] == ["edited", ".ci", ".git", ".venv", "README.md", "check"]
    assert done.returncode == (code and 1), done.stderr
    assert not Path(said[5]).exists()
    assert bool(re.search(rf"failed after \d+ s: {re.escape(second)}", done.stderr)) == bool(code)
