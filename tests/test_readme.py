"""The README says what is so: its tree, its metric table and its links are checked against the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.telemetry.keys import FINAL, SCALARS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_folder_of_the_tree_exists_and_every_package_is_in_it() -> None:
    tree = re.search(r"## What is where\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    named = {line.split()[0].rstrip("/") for line in tree[1].splitlines() if line.strip()}
    assert {name for name in named if not (ROOT / name).is_dir()} == set()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"conf", "docs"} <= named


def test_the_metric_table_is_the_one_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+/[a-z0-9_]+)` \| (.+) \|$", README, re.MULTILINE))
    assert rows == {key: f"{unit} | {meaning}" for key, (unit, meaning) in SCALARS.items()}
    assert all(f"`{key}`" in README for key in FINAL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_nothing_is_left_to_fill_in() -> None:
    assert [page.name for page in PAGES if "@@" in page.read_text(encoding="utf-8")] == []
