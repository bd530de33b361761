"""Optuna over strategies and their options: what is asked, what is told, what a study that goes on does again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.instant_cells import InstantCells, ledger_of

optuna = pytest.importorskip("optuna")
SEARCH = ("-m", "hydra.sweep.dir=sweep", "hydra/sweeper=optuna")


@pytest.fixture
def cells(called: Any, monkeypatch: pytest.MonkeyPatch) -> InstantCells:
    """Instant cells, in an empty working directory."""
    return InstantCells(monkeypatch)


def study() -> Any:
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    storage = JournalStorage(JournalFileBackend("sweep/optuna.log"))
    return optuna.load_study(storage=storage, study_name="sweep")


@pytest.mark.parametrize(
    ("objective", "best", "value"),
    [
        ("seconds_to_steps", "regional", 10.0 * 2 + (105 - 5) / 2.0),
        ("useful_tokens_per_second", "whole", 400.0),
        ("final_loss", "whole", 0.25),
    ],
)
def test_the_objective_decides_what_is_best(
    command_line: Any, cells: InstantCells, capfd: Any, objective: str, best: str, value: float
) -> None:
    arguments = (f"hydra.sweeper.objective={objective}", "hydra.sweeper.trials=8", "compile=eager,regional,whole")
    # 10 s x speed of warm-up and 100 steps: eager 110 s, regional 70 s, whole 40 + 25 = 65 s; so make whole fail there.
    cells.fails = lambda cell: objective == "seconds_to_steps" and cell.described.label == "whole"
    assert command_line(*SEARCH, *arguments) == 0
    assert study().best_value == pytest.approx(value)
    assert study().best_params == {"compile": best}
    assert f"with compile={best} (trial " in capfd.readouterr().out.splitlines()[-1]
    assert 2 <= len({cell.overrides for cell in cells.ran}) <= 3


def test_options_of_a_strategy_are_asked_only_where_it_is_chosen(command_line: Any, cells: InstantCells) -> None:
    space = ("compile=eager,whole", "compile.whole.mode=default,max-autotune", "seed=int(interval(1,9))")
    assert command_line(*SEARCH, "hydra.sweeper.trials=8", *space) == 0
    for cell in cells.ran:
        named = {override.partition("=")[0] for override in cell.overrides}
        expected = {"compile", "seed"} | ({"compile.whole.mode"} if cell.described.label == "whole" else set())
        assert named == expected
    assert {cell.described.label for cell in cells.ran} == {"eager", "whole"}


def test_what_was_measured_before_is_not_run_again(command_line: Any, cells: InstantCells) -> None:
    assert command_line(*SEARCH, "hydra.sweeper.trials=6", "compile=eager,whole") == 0
    assert len(cells.ran) == 2
    assert len(study().trials) == 6
    assert len(ledger_of(Path("sweep"))["cells"]) == 2


def test_a_study_goes_on_with_what_was_running_when_it_was_killed(
    command_line: Any, cells: InstantCells, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command_line(*SEARCH, "hydra.sweeper.trials=3", "compile=eager,whole,regional") == 0
    killed = study().ask({"compile": optuna.distributions.CategoricalDistribution(["eager", "whole", "regional"])})
    assert command_line("-m", "sweep=sweep", "hydra.sweeper.trials=4") == 0
    *_, last = study().get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert last.params == killed.params
    assert "study goes on: 3 of 4 trials were told before" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compile=eager",), "hydra/sweeper=optuna has nothing to choose: give an option several values"),
        (("seed=0,1", "hydra.sweeper.objective=speed"), "hydra.sweeper.objective='speed' is not one of ('final_loss',"),
        (("seed=0,1", "hydra.sweeper.trials=0"), "hydra.sweeper.trials=0 must be at least 1"),
    ],
)
def test_what_cannot_be_searched_is_one_line(
    command_line: Any, cells: InstantCells, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert command_line(*SEARCH, *arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert cells.ran == []


@pytest.mark.parametrize(
    ("option", "package", "extra"),
    [("hydra/sweeper=optuna", "optuna", "sweep"), ("hydra/launcher=submitit_local", "submitit", "slurm")],
)
def test_what_is_not_installed_is_named_with_its_extra(
    command_line: Any, cells: InstantCells, capfd: Any, monkeypatch: Any, option: str, package: str, extra: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    assert command_line("-m", option, "seed=0,1") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"needs {package}: pip install 'crucible-train[{extra}]'")
