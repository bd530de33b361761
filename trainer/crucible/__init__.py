"""The one public name: ``from crucible import Compile, Regional``. Each name is imported when it is first asked for.

``__init__.pyi`` is the list of them. An installation maps this folder to the top level, see ``pyproject.toml``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
"""Module that each public name lives in."""
OURS = {"trainer": "callback.py", "strategies": "base.py", "tasks": "base.py", "scripts": "compare.py"}
"""A file of each of our packages, which a user's module of the same name lacks."""
IN_INIT = {"trainer": "CONF", "strategies": "STRATEGIES", "tasks": "TASKS", "scripts": "working_directory_last"}
"""A word in the ``__init__.py`` of each, which that of another distribution lacks."""

DISTRIBUTION = "crucible-train"
NEEDS = {"trainer.loops.huggingface": "transformers"}
"""Modules of public names that import a package which crucible does not require."""


def _is_there(package: str) -> bool:
    """Whether ``package`` can be imported, as far as Python knows without running it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


# A star import asks for every name: those of packages that are not installed are imported by name alone.
__all__ = [name for name, home in HOMES.items() if home not in NEEDS or _is_there(NEEDS[home])]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("trainer", "strategies", "tasks", HOMES[name].partition(".")[0]):
        spec = importlib.util.find_spec(package)  # as Python would find it, without running it
        if spec is None:
            raise ImportError(
                f"crucible: its package {package!r} is not installed: pip install -e . in crucible's checkout"
            )
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        if not any((folder / OURS[package]).is_file() for folder in folders):
            where = spec.origin or folders[0]
            raise ImportError(f"crucible: {where} hides crucible's own package {package!r}: rename that file or folder")
        if spec.origin and IN_INIT[package] not in Path(spec.origin).read_text(encoding="utf-8", errors="replace"):
            not_ours = f"{spec.origin} is not crucible's"
            raise ImportError(overwritten(not_ours) or f"crucible: {not_ours}: install {DISTRIBUTION} anew")
    try:
        found = globals()[name] = getattr(importlib.import_module(HOMES[name]), name)
    except ImportError as error:
        if not (line := overwritten(error)):
            raise
        raise ImportError(line, name=error.name, path=error.path) from None
    return found


def other_owners() -> Iterator[tuple[str, str]]:
    """Each other distribution that installs a package of the name of one of ours, with that name: whichever was
    installed last has overwritten files of the other."""
    owners = importlib.metadata.packages_distributions()
    for package in (__name__, *OURS):
        for other in sorted({owner for owner in owners.get(package, ()) if owner != DISTRIBUTION}):
            yield other, package


def overwritten(reason: object) -> str:
    """A line of ``reason`` and the first of ``other_owners``, which is probably behind it; empty without one."""
    for other, package in other_owners():
        return (
            f"crucible: {reason}; {other} installs a package {package!r} too, and one has overwritten the other: keep "
            f"them in two environments; pip uninstall {other}, then pip install --force-reinstall --no-deps "
            f"{DISTRIBUTION}"
        )
    return ""


def __dir__() -> list[str]:
    return __all__
