"""Fixtures shared by all tests: a stand-in for training, and a command line that can be called in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core, each with threads for all cores, would be in its own way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "stand_in"


SLOW_FILES = frozenset(
    """
    evidence/test_report evidence/test_report_browser
    explain/test_explain_command explain/test_look explain/test_planted_cases explain/test_strangers
    faults/test_planted_faults
    locate/test_bisect_command locate/test_planted_cases locate/test_reproducer
    strategies/test_cached strategies/test_cached_s3 strategies/test_inductor_embeddings
    strategies/test_inductor_faults strategies/test_optimizer strategies/test_optimizer_replay
    tasks/test_captioning tasks/test_image_classification tasks/test_initial_weights tasks/test_language_modelling
    tasks/test_language_transformers tasks/test_masked_bert tasks/test_resume
    test_benchmark_peers test_compare test_doctor test_drift test_folders test_launcher test_matrix test_packaging
    test_streams test_submitit_launcher test_sweep_cells test_trust test_warm_cache
    trainer/test_audits_no_trace trainer/test_audits_processes trainer/test_auto trainer/test_batch_norm
    trainer/test_buckets trainer/test_cached_run trainer/test_cached_start trainer/test_captured_habits
    trainer/test_captured_strangers trainer/test_checkpoint_matrix trainer/test_compile_failures trainer/test_facts
    trainer/test_inductor trainer/test_inference trainer/test_interrupted_group trainer/test_interruption
    trainer/test_language_experiments trainer/test_loaders trainer/test_machine trainer/test_manual_optimization
    trainer/test_manual_pieces trainer/test_manual_processes trainer/test_nonfinite_losses
    trainer/test_optimizer_under_lightning trainer/test_other_peoples_models trainer/test_parity trainer/test_profile
    trainer/test_rehearsal trainer/test_replay_parity trainer/test_resume_exactness trainer/test_resuming
    trainer/test_rollback trainer/test_runs_that_eager_finishes trainer/test_several_processes trainer/test_signals
    trainer/test_smoke_experiments trainer/test_snapshot trainer/test_step_capture trainer/test_telling
    trainer/test_tensorboard_pages
    """.split()
)
"""Test files that are slow as a whole, in tests/: they start processes, browsers or Inductor, or train for seconds."""


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow; trainings first: their files take longest, and no core should wait at the end."""
    for item in items:
        name = item.path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        if name in SLOW_FILES or "start_trainer" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.parent.name != "trainer")


def pytest_collection_finish() -> None:
    """Spare the garbage collector what has been imported by now: it would look through half a million objects again
    and again, for a tenth of the time that a compile takes."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter clear up at its end as ever."""
    gc.unfreeze()


@contextlib.contextmanager
def hydra_put_back() -> Iterator[None]:
    """Undo Hydra's registrations, and forget its configuration."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins

    def copied(group: dict[str, Any]) -> dict[str, Any]:
        return {name: copied(part) if isinstance(part, dict) else part for name, part in group.items()}

    Plugins.instance()  # registers Hydra's own configurations on first use: before the copy that is put back
    store = ConfigStore.instance()
    repository = copied(store.repo)
    yield
    store.repo = repository
    GlobalHydra.instance().clear()


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what the command line does to the process: Hydra's registrations, the path, plug-in modules."""
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
        monkeypatch.setattr(sys, "argv", ["trainer", *arguments])
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
