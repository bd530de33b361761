"""Rules that no tool checks: who knows compiler internals, how plug-ins are declared, how long files get."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from strategies import STRATEGIES
from strategies.base import Strategy
from tasks import SCHEMAS, TASKS
from tasks.base import Task
from tests.conftest import ROOT
from trainer.config import is_configuration
from trainer.settings import Config, TrainerConfig

PACKAGES = ("trainer", "strategies", "tasks", "scripts")
MODULES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
KNOW_THE_COMPILER = ("trainer.telemetry.compiler", "scripts.explain.compiler")
"""The second reads what no run should pay for: the value behind each failed guard, and Inductor's own counts."""
LONGEST = 400
"""Lines of a file."""


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> set[str]:
    """Everything that the file imports or reads as an attribute chain, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_every_module_imports(file: Path) -> None:
    importlib.import_module(name_of(file))


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_compiler_internals_are_known_to_strategies_and_compiler_telemetry_only(file: Path) -> None:
    if file.is_relative_to(ROOT / "strategies") or name_of(file) in KNOW_THE_COMPILER:
        return
    inside = {name for name in imports_of(file) if name.startswith(("torch._dynamo", "torch._inductor"))}
    assert not inside


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_a_file_says_what_it_is_and_stays_short(file: Path) -> None:
    text = file.read_text()
    assert ast.get_docstring(ast.parse(text)), "a module docstring says what the file is"
    assert len(text.splitlines()) <= LONGEST


@pytest.mark.parametrize(
    "kind",
    [*STRATEGIES.values(), *TASKS.values(), *SCHEMAS.values(), Strategy, Task, Config, TrainerConfig],
    ids=lambda kind: kind.__name__,
)
def test_configuration_is_keyword_only_and_slotted(kind: type) -> None:
    assert is_configuration(kind)


@pytest.mark.parametrize(
    "module",
    [
        "trainer",
        "trainer.telemetry.record",
        "trainer.report.sweep",
        "trainer.sweep.environment",
        "trainer.sweep.slurm",
        "trainer.sweep.ledger",
        "trainer.report.comparison",
        "trainer.settings",
        "strategies",
        "tasks",
    ],
)
def test_what_reports_and_the_command_line_read_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(sum(name in sys.modules for name in ('torch', 'lightning', 'hydra')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_strategy_is_found_under_its_own_name(name: str) -> None:
    assert STRATEGIES[name].name == name


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_found_under_its_own_name(name: str) -> None:
    assert TASKS[name].name == name
    assert SCHEMAS[f"task/{name}"] is TASKS[name]
