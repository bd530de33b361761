"""Rules that no tool checks: who knows compiler internals, how plug-ins are declared."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

import grimp
import pytest

from strategies import STRATEGIES
from strategies.base import Strategy
from tasks import SCHEMAS, TASKS
from tasks.base import Task
from tests.conftest import ROOT, SECONDS, SLOW_FILES
from tests.processes import python
from trainer import crucible
from trainer.settings import Config, TrainerConfig

PACKAGES = ("trainer", "strategies", "tasks", "scripts")
TEXTS = {file: file.read_text() for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))}
KNOW_THE_COMPILER = ("trainer.telemetry.compiler", "scripts.explain.run")
"""The last reads what no run should pay for: the region, the stack and the guard of every compilation."""


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(text: str) -> set[str]:
    """Everything that the file imports or reads as an attribute chain, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def test_the_files_of_every_package_were_found() -> None:
    found = {name_of(file) for file in TEXTS}
    assert {"trainer.callback", "strategies.base", "tasks.base", "scripts.compare"} <= found
    assert {name.split(".")[0] for name in found} == set(PACKAGES)


IMPORTS = """
import importlib.metadata, sys
from importlib.machinery import PathFinder

found, version = PathFinder.find_spec, importlib.metadata.version

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] == "transformers" else found(name, path, target)

def version_of(name):
    if name == "transformers":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

PathFinder.find_spec, importlib.metadata.version = find_spec, version_of
from trainer.callback import Compile
print(*sys.modules)
from trainer.crucible import *
print(Compile.__name__, Regional.__name__, "compile_trainer" in dir())
try:
    from trainer.crucible import compile_trainer
except ImportError as error:
    print(error)
from tests.trainer.lightning_modules import Blocks, fit
callback = Compile([Auto(planned_steps=30, remember=False)])
fit(Blocks(), sys.argv[1], [callback], max_steps=30)
print(callback.record.report["auto"]["chosen"], "torch._inductor.compile_fx" in sys.modules)
"""
"""In one process, because torch takes seconds to import: the one name of a script, all names where a package that is
not required is missing, and a run that compiles nothing."""


@pytest.mark.slow
def test_imports_of_a_library_user_need_little(tmp_path: Path) -> None:
    pulled_in, named, missing, *_, last = python("-c", IMPORTS, tmp_path).stdout.splitlines()
    assert "trainer.callback" in pulled_in.split()
    others = ("trainer.auto", "trainer.cli", "trainer.run", "trainer.sweep", "tasks", "scripts")
    heavy = (*others, "hydra", "torch._inductor.compile_fx")
    assert sorted(name for name in pulled_in.split() if name.startswith(heavy)) == []
    assert named == "Compile Regional False"
    assert missing == "No module named 'transformers'", "asked for by name"
    assert "compile_trainer" in crucible.__all__, "where transformers is installed"
    assert last == "eager False"


def test_every_module_imports() -> None:
    failed: dict[str, BaseException] = {}
    for name in map(name_of, TEXTS):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            failed[name] = error
    assert failed == {}


def test_compiler_internals_are_known_to_strategies_and_compiler_telemetry_only() -> None:
    found = {}
    for file, text in TEXTS.items():
        if not (file.is_relative_to(ROOT / "strategies") or name_of(file) in KNOW_THE_COMPILER):
            inside = sorted(name for name in imports_of(text) if name.startswith(("torch._dynamo", "torch._inductor")))
            found.update({name_of(file): inside} if inside else {})
    assert found == {}


def test_configuration_is_keyword_only_and_slotted() -> None:
    kinds: Iterable[type] = (*STRATEGIES.values(), *TASKS.values(), *SCHEMAS.values())
    for kind in (*kinds, Strategy, Task, Config, TrainerConfig):
        assert {"__dataclass_params__", "__slots__"} <= vars(kind).keys(), kind
        assert all(option.kw_only for option in dataclasses.fields(kind)), kind


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each import is tried in a fork of one bare process")
def test_what_reports_and_the_command_line_read_imports_no_torch() -> None:
    code = """
import os, sys
sys.path.insert(0, os.getcwd())
for module in sys.argv[1:]:
    if not os.fork():
        __import__(module)
        print(module, *(name for name in ("torch", "lightning", "hydra") if name in sys.modules), flush=True)
        os._exit(0)
    os.wait()
"""
    light = [
        "trainer",
        "trainer.crucible",
        "trainer.telemetry.record",
        "trainer.run_start",
        "trainer.sweep.plan",
        "trainer.report.comparison",
        "scripts.compare",
        "scripts.report",
        "trainer.settings",
        "strategies",
        "tasks",
    ]
    assert python("-c", code, *light).stdout.splitlines() == light, (
        "those that are missing failed, those with a name behind them imported it"
    )


def test_a_strategy_is_found_under_its_own_name() -> None:
    assert {name: strategy.name for name, strategy in STRATEGIES.items()} == {name: name for name in STRATEGIES}


def test_every_strategy_and_every_task_is_in_its_siblings_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = {
        one["name"]: set(one["modules"]) for one in project["tool"]["importlinter"]["contracts"] if "modules" in one
    }
    for kind, classes in (("strategies", STRATEGIES), ("tasks", TASKS)):
        homes = {".".join(one.__module__.split(".")[:2]) for one in classes.values()}
        assert listed[f"Sibling {kind} do not know each other"] == homes


def test_a_task_is_found_under_its_own_name() -> None:
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in TASKS}
    assert {f"task/{name}": SCHEMAS.get(f"task/{name}") for name in TASKS} == {f"task/{n}": t for n, t in TASKS.items()}


def test_files_that_are_marked_slow_or_long_exist() -> None:
    assert [name for name in [*SLOW_FILES, *SECONDS] if not (ROOT / "tests" / f"{name}.py").is_file()] == []


LANGUAGE = {f"tasks.language.{name}" for name in ("data", "model", "packing", "task")}
REPORT = {"trainer.report.comparison", "trainer.report.tables"}
"""Circles that are there for types alone: a task is built of what is made for it, a comparison shows its own table."""


def test_no_modules_import_each_other() -> None:
    """Imports within functions count; those for types alone lead to two circles, each within one package."""
    for without_types, known in ((True, []), (False, [LANGUAGE, REPORT])):
        graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=without_types, cache_dir=None)
        circles = {
            frozenset({module, *others})
            for module in graph.modules
            if (others := graph.find_upstream_modules(module) & graph.find_downstream_modules(module))
        }
        assert sorted(map(sorted, circles)) == sorted(map(sorted, known)), "each of these imports one that leads back"


def test_every_public_name_is_what_its_module_holds() -> None:
    for name in crucible.__all__:
        assert getattr(crucible, name).__name__ == name
    assert dir(crucible) == sorted(set(crucible.__all__))


def test_every_public_name_says_what_it_is() -> None:
    docs = {name: getattr(crucible, name).__doc__ or "" for name in crucible.__all__}
    # A dataclass without a docstring is given its signature.
    assert [name for name, doc in docs.items() if not doc.strip() or doc.startswith(f"{name}(")] == []


def test_every_strategy_is_public() -> None:
    assert {kind.__name__ for kind in STRATEGIES.values()} <= set(crucible.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Compiler'"):
        _ = crucible.Compiler


@pytest.mark.parametrize("hiding", ["trainer.py", "tasks.py", "strategies/__init__.py", "scripts.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, hiding: str) -> None:
    (tmp_path / "crucible").symlink_to(ROOT / "trainer" / "crucible")  # as an installation maps it
    file = tmp_path / hiding
    file.parent.mkdir(exist_ok=True)
    file.write_text("from crucible import Strategy\nprint('ran')\n")
    name = "explain_module" if "scripts" in hiding else "Strategy"
    done = python("-c", f"from crucible import {name}", cwd=tmp_path)
    assert done.returncode == 1
    package = hiding.split(".")[0].split("/")[0]
    complaint = f"ImportError: crucible: {file} hides crucible's own package {package!r}: rename that file or folder"
    assert done.stderr.splitlines()[-1] == complaint
    assert done.stdout == "", "and was not run"
