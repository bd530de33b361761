"""Fixtures shared by all tests: a stand-in for training, and a command line that can be called in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, Pair, compile_quickly, on_ranks

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core, each with threads for all cores, would be in its own way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each empty cache of Inductor's would begin with g++ trying out the processor's vector instructions: 6 CPU seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

STAND_IN = ROOT / "tests" / "stand_in"
STARTED = str(ROOT / "trainer" / "__main__.py")
"""What advice takes this process for: in a script's own words, the golden files would say ``crucible train``."""


SLOW_FILES = frozenset((ROOT / "tests" / "slow.txt").read_text().split())
"""Test files in tests/ that are slow as a whole: they start processes, browsers or Inductor, or train for seconds."""
SECONDS = {
    name: float(seconds) for seconds, name in map(str.split, (ROOT / "tests" / "seconds.txt").read_text().splitlines())
}
"""Processor seconds of test files that take more than two, by name in tests/."""
GROUPS = {
    file.relative_to(ROOT / "tests").with_suffix("").as_posix(): group[1]
    for file in (ROOT / "tests").rglob("test_*.py")
    if (group := re.search(r'xdist_group\("(\w+)"\)', file.read_text()))
}
"""The group of test files that run on one worker, by name."""


@pytest.fixture(autouse=True, scope="session")
def started_as_the_command() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [STARTED, *sys.argv[1:]])
        yield


def name_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").with_suffix("").as_posix()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow; files and groups that take longest come first, so that no core waits at the end.

    Those of the promises before all others: in a process where others had run, one once took all memory, and why is not
    known.
    """
    seconds: dict[str, float] = {}
    for name in {name_of(item) for item in items}:
        scope = GROUPS.get(name, name)
        seconds[scope] = seconds.get(scope, 0.0) + SECONDS.get(name, 1.0)

    def place(item: pytest.Item) -> tuple[bool, float, str]:
        scope = GROUPS.get(name := name_of(item), name)
        return not name.startswith("promises/"), -seconds[scope], scope

    for item in items:
        if name_of(item) in SLOW_FILES or not {"start_trainer", "pair"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file stay together (``--dist loadfile``), and so do files with one ``xdist_group``."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrGroup(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return GROUPS.get(file.removeprefix("tests/").removesuffix(".py"), file)

    return ByFileOrGroup(config, log)


FROZEN_MODULES = [0]


def pytest_collection_finish() -> None:
    """Spare the garbage collector what has been imported by now: it would look through half a million objects again
    and again, for a tenth of the time that a compile takes."""
    compile_quickly()
    gc.collect()
    gc.freeze()
    FROZEN_MODULES[0] = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """The same of what a test has imported: trainings of the next ones collect."""
    if len(sys.modules) > FROZEN_MODULES[0] + 100:
        pytest_collection_finish()


def pytest_sessionfinish() -> None:
    """Let the interpreter clear up at its end as ever."""
    gc.unfreeze()


@contextlib.contextmanager
def hydra_put_back() -> Iterator[None]:
    """Undo Hydra's registrations, and forget its configuration."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins

    from trainer.config import register

    def copied(group: dict[str, Any]) -> dict[str, Any]:
        return {name: copied(part) if isinstance(part, dict) else part for name, part in group.items()}

    Plugins.instance()  # registers Hydra's own configurations on first use: before the copy that is put back
    register()  # ours, too: once is enough
    store = ConfigStore.instance()
    repository = copied(store.repo)
    yield
    store.repo = repository
    GlobalHydra.instance().clear()


@pytest.fixture(scope="session")
def pair() -> Pair:
    """Call a function of a module's top level on two ranks; see ``tests.processes``."""
    return on_ranks


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what the command line does to the process: Hydra's registrations, the path, plug-ins, what is hidden."""
    monkeypatch.setattr("strategies.compile_errors._concealed", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("plugin", None)
    with hydra_put_back():
        yield
    sys.modules.pop("plugin", None)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    """Stand-in for ``trainer.run`` in this process; lists the calls it got. Works in an empty directory."""
    from trainer.telemetry.record import RunRecord

    calls: list[dict[str, object]] = []

    def run(config: object, *, run_dir: Path, command: list[str]) -> RunRecord:
        calls.append({"config": config, "run_dir": run_dir, "command": command})
        return RunRecord(task="stand-in", status="finished", final_loss=0.5)

    module = types.ModuleType("trainer.run")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainer.run", module)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def command_line(edge: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call the command line in this process; returns its exit code."""
    from trainer.cli import main

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [STARTED, *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    return call


def trainer_process(arguments: Sequence[str], *, cwd: Path, stand_in: bool = True) -> subprocess.Popen[str]:
    """Start ``python -m trainer`` in a session of its own, as a terminal would; with the stand-in for training."""
    path = [str(STAND_IN), str(ROOT)] if stand_in else [str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def start_trainer() -> Callable[..., subprocess.Popen[str]]:
    """``trainer_process``, as a fixture for tests in any directory."""
    return trainer_process
