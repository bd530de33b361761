"""Code version: which code would run a cell now, told without importing any of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("crucible-train", "torch", "lightning")
"""Packages whose version decides what a cell measures."""


def git_commit() -> str | None:
    """Commit of the checkout this code runs from, with ``+dirty`` when files differed; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD").strip()
        return commit + ("+dirty" if _git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


def code_version() -> dict[str, str]:
    """Versions of the packages, the commit, and a hash of what differs from it in tracked files."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = git_commit()
    if commit is not None:
        found["commit"] = commit
        if commit.endswith("+dirty"):
            found["changes"] = hashlib.sha256(_git("diff", "HEAD").encode()).hexdigest()[:12]
    return found


def difference(before: dict[str, str], now: dict[str, str]) -> str:
    """What changed from one version to the other, in words; empty when nothing did."""
    words = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "changes":
            words.append("files that are not committed")
        else:
            words.append(f"{name} {_short(old)}, now {_short(new)}")
    return "; ".join(words)


def _short(version: str | None) -> str:
    return "none" if version is None else version[:10] + ("+dirty" if version.endswith("+dirty") else "")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, errors="replace", check=True, timeout=30
    ).stdout
