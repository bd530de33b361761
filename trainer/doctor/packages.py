"""Python and the installed packages against what the project asks for."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.doctor.finding import Finding, error, ok, warning

DISTRIBUTION = "crucible-train"
OLDEST_PYTHON = (3, 11)
NEWEST_TORCH_TRIED = (2, 15)
"""The project's tests run on this one and on the oldest that it takes."""
REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)\s*(?P<bounds>[^;\[]*)$")
BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")


def packages() -> Iterator[Finding]:
    """A line for Python and for each package that a run cannot do without."""
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield error("python", f"{version}, at least {wanted} is needed", f"python{wanted} -m venv .venv")
    else:
        yield ok("python", f"{version} ({sys.executable})")
    for name, bounds in requirements():
        yield installed(name, bounds)


def requirements() -> Iterator[tuple[str, str]]:
    """Name and bounds of each required package: of the checkout, or of what is installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file() and sys.version_info >= OLDEST_PYTHON:
        import tomllib

        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        try:
            lines = importlib.metadata.requires(DISTRIBUTION) or []
        except importlib.metadata.PackageNotFoundError:
            lines = []
    for line in lines:
        if found := REQUIREMENT.match(line):  # those of extras have a marker, and are not required
            yield found["name"], found["bounds"].strip()


def installed(name: str, bounds: str) -> Finding:
    """Whether ``name`` is installed in a version within ``bounds``, as pip writes them."""
    mend = f"pip install '{name}{bounds}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return error(name, "is not installed", mend)
    release = _numbers(version)
    for relation, wanted in BOUND.findall(bounds):
        if (release >= _numbers(wanted)) != (relation == ">="):
            return error(name, f"{version}, {relation}{wanted} is needed", mend)
    if name == "torch" and release[:2] > NEWEST_TORCH_TRIED:
        tried = ".".join(map(str, NEWEST_TORCH_TRIED))
        return warning(
            name, f"{version}, newer than {tried}, the newest that was tried", f"pip install 'torch=={tried}.*'"
        )
    return ok(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in leading[0].split(".") if part) if leading else ()
