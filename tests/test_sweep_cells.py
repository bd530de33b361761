"""What a sweep does around its cells: rounds, pairs, going on; the cells themselves are stand-ins."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.instant_cells import InstantCells
from trainer.sweep.launcher import IsolatedLauncher, set_aside
from trainer.sweep.plan import SweepOptions

SWEEP = ("-m", "hydra.sweep.dir=sweep")


@pytest.fixture
def cells(called: Any, monkeypatch: pytest.MonkeyPatch) -> InstantCells:
    """Instant cells, in an empty working directory."""
    return InstantCells(monkeypatch)


def test_rounds_take_turns_and_pairs_share_caches_that_go_when_both_have_finished(
    command_line: Any, cells: InstantCells
) -> None:
    assert command_line(*SWEEP, "compile=eager,whole", "repeat=cold,warm", "hydra.launcher.rounds=2") == 0
    expected = [
        f"compile={arm} repeat={start} round={number}"
        for number in (1, 2)
        for arm in ("eager", "whole")
        for start in ("cold", "warm")
    ]
    assert cells.titles == expected
    records = [json.loads((cell.directory / "record.json").read_text()) for cell in cells.ran]
    assert [(record["round"], record["start"]) for record in records] == [
        (number, start) for number in (1, 2) for _ in range(2) for start in ("cold", "warm")
    ]
    first, second, third, fourth = (cell.caches for cell in cells.ran[:4])
    assert first == second != third == fourth
    assert not list(Path("sweep/caches").iterdir())


def test_a_sweep_that_a_cell_of_another_one_has_started_has_no_round_of_that_one(
    command_line: Any, cells: InstantCells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRUCIBLE_ROUND", "2")
    assert command_line(*SWEEP, "compile=eager,whole") == 0
    assert cells.titles == ["compile=eager", "compile=whole"]
    assert [cell.record.round for cell in cells.ran] == [None, None]


def test_arms_with_options_of_their_own_are_cells_of_one_sweep(command_line: Any, cells: InstantCells) -> None:
    arms = "hydra.launcher.arms=[eager,'whole compile.whole.mode=max-autotune']"
    assert command_line(*SWEEP, arms, "seed=0,1") == 0
    whole = "compile=whole compile.whole.mode=max-autotune"
    assert cells.titles == [f"seed={seed} {arm}" for seed in (0, 1) for arm in ("compile=eager", whole)]
    assert all(cell.record.strategies[0]["mode"] == "max-autotune" for cell in cells.ran[1::2])


def test_every_cell_starts_from_empty_caches_of_its_own_but_for_the_store_of_cached(
    command_line: Any, cells: InstantCells
) -> None:
    cells.fails = lambda cell: cell.record.label == "eager"
    assert command_line(*SWEEP, "compile=eager,regional,cached") == 1
    assert len({cell.caches for cell in cells.ran}) == 3
    assert [(cell.record.label, cell.record.start) for cell in cells.ran] == [
        ("eager", "cold"),
        ("regional", "cold"),
        ("cached", None),
    ]
    for cell in cells.ran:
        assert ("repeat=cold" in cell.command) == (cell.record.start == "cold"), (
            "so that its record says how it started"
        )
    assert not list(Path("sweep/caches").iterdir()), "of a failed cell without a pair, too"
    cells.ran.clear()
    assert command_line("-m", "sweep=shared", "compile=regional", "hydra.launcher.caches=shared") == 0
    assert [(cell.caches, cell.record.start) for cell in cells.ran] == [(None, None)]


def test_arms_take_turns_within_a_seed(command_line: Any, cells: InstantCells) -> None:
    assert command_line(*SWEEP, "compile=eager,whole", "seed=0,1") == 0
    assert cells.titles == [f"compile={arm} seed={seed}" for seed in (0, 1) for arm in ("eager", "whole")]


def test_a_warm_cell_whose_cold_twin_failed_is_not_run_and_says_so(command_line: Any, cells: InstantCells) -> None:
    cells.fails = lambda cell: cell.record.start == "cold" and cell.record.label == "whole"
    assert command_line(*SWEEP, "compile=whole,eager", "repeat=cold,warm") == 1
    assert cells.titles == ["compile=whole repeat=cold", "compile=eager repeat=cold", "compile=eager repeat=warm"]
    record = json.loads(Path("sweep/1-compile=whole,repeat=warm/record.json").read_text())
    assert (record["status"], record["reason"]) == ("failed", "not run: its cold cell failed")
    assert [cell.record.status for cell in cells.ran] == ["failed", "finished", "finished"]


def test_a_sweep_gone_on_with_runs_what_is_not_finished(
    command_line: Any, cells: InstantCells, capfd: pytest.CaptureFixture[str]
) -> None:
    cells.fails = lambda cell: "seed=1" in cell.overrides
    sweep = "sweep=two words"
    assert command_line("-m", "seed=0,1,2", sweep) == 1
    said = capfd.readouterr()
    *_, compare, tensorboard, again = said.out.splitlines()
    assert again == "run what failed again with: python -m trainer -m seed=0,1,2 'sweep=two words'"
    assert (compare, tensorboard) == ("python -m scripts.compare 'two words'", "tensorboard --logdir 'two words'")
    _, told = (line.strip() for line in said.out.splitlines() if "RuntimeError" in line)
    assert told == "eager: failed: RuntimeError: no (two words/1-seed=1)", "once in the table, and once as it came"
    assert "Error executing job" not in said.err, "Hydra's line, after the table and what to do"
    cells.ran.clear()
    cells.fails = lambda cell: False
    assert command_line("-m", "seed=0,1,2", sweep) == 0
    assert cells.titles == ["seed=1"]
    assert "finished before, not run again: 2 of 3 cells\n  seed=0\n  seed=2\n" in capfd.readouterr().out


def test_a_sweep_gone_on_with_takes_further_cells(
    command_line: Any, cells: InstantCells, capfd: pytest.CaptureFixture[str]
) -> None:
    old = {"schema": 1, "task": "old", "events": [], "status": "finished", "steady_steps_per_second": 99.0}
    Path("sweep/0-seed=0").mkdir(parents=True)
    Path("sweep/0-seed=0/record.json").write_text(json.dumps(old))
    assert command_line(*SWEEP, "seed=0,1") == 0
    assert command_line("-m", "sweep=sweep", "seed=1,2") == 0
    assert cells.titles == ["seed=0", "seed=1", "seed=2"]
    assert "99.00" not in capfd.readouterr().out, "of the run that was in the folder before"
    assert sorted(file.parent.name for file in Path("sweep").glob("*/record.json")) == [
        *("0-seed=0", "1-seed=0", "2-seed=1", "3-seed=2"),
    ]


def test_a_cold_cell_runs_again_for_its_warm_twin(command_line: Any, cells: InstantCells) -> None:
    cells.fails = lambda cell: cell.record.start == "warm"
    assert command_line(*SWEEP, "repeat=cold,warm") == 1
    assert not list(Path("sweep/caches").iterdir())
    cells.ran.clear()
    cells.fails = lambda cell: False
    assert command_line(*SWEEP, "repeat=cold,warm") == 0
    assert cells.titles == ["repeat=cold", "repeat=warm"]


def test_what_an_earlier_attempt_left_is_set_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "sweep" / "0-seed=2").mkdir(parents=True)
        (tmp_path / "sweep" / "0-seed=2" / "record.json").write_text(str(number))
        set_aside(tmp_path / "sweep" / "0-seed=2")
    aside = tmp_path / "sweep-set-aside"
    assert [(aside / name / "record.json").read_text() for name in ("0-seed=2", "0-seed=2-2")] == ["1", "2"]
    assert not list((tmp_path / "sweep").iterdir())


def test_overrides_reach_the_cells_as_they_were_written(command_line: Any, cells: InstantCells) -> None:
    given = ("task/data=coco", "task.data.root=\"a b, c=[d] 'e'\"")
    assert command_line(*SWEEP, *given) == 0
    (cell,) = cells.ran
    assert set(given) < set(cell.command)
    assert cell.record.config["task"]["data"]["root"] == "a b, c=[d] 'e'"
    cells.ran.clear()
    assert command_line("-m", "sweep=tasks", "task=captioning,micro") == 0, "which have other options"
    assert [cell.record.task for cell in cells.ran] == ["captioning", "micro simple_linear"]


def test_a_sweep_named_in_an_experiment_runs_its_cells_once(
    command_line: Any, cells: InstantCells, tmp_path: Path
) -> None:
    experiment = tmp_path / "mine" / "experiment" / "arms.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweep: {dir: sweep}\n  sweeper: {params: {seed: '7,8'}}\n"
    )
    assert command_line("--config-dir", "mine", "experiment=arms") == 0
    assert cells.titles == ["seed=7", "seed=8"]
    assert all(cell.command[-3] == "hydra.mode=RUN" for cell in cells.ran)


def test_a_sweeper_gets_the_objective_and_nan_for_what_failed(
    command_line: Any, cells: InstantCells, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[Any] = []
    launch = IsolatedLauncher.launch

    def noted(*given: Any, **named: Any) -> list[Any]:
        returned.extend(launch(*given, **named))
        return returned

    monkeypatch.setattr(IsolatedLauncher, "launch", noted)
    cells.fails = lambda cell: cell.record.label == "whole"
    given = ("compile=eager,whole", "hydra.launcher.objective=useful_tokens_per_second")
    assert command_line(*SWEEP, *given) == 1
    assert [one.return_value for one in returned] == pytest.approx([100.0, math.nan], nan_ok=True)


def test_the_launcher_has_every_option_with_its_default() -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from tests.conftest import hydra_put_back
    from trainer import CONF
    from trainer.config import register

    with hydra_put_back():
        register()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", return_hydra_config=True)
    values = OmegaConf.to_container(config.hydra.launcher)
    assert values.pop("_target_").startswith("hydra_plugins.crucible.")
    assert values == dataclasses.asdict(SweepOptions())
