"""``python -m scripts.matrix``: rows that exist, sweeps that are compared, wrong arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import matrix
from tests.instant_cells import InstantCells
from trainer.cli import CONF
from trainer.config import compose


@pytest.mark.parametrize("row", matrix.ROWS, ids=lambda row: row.name)
def test_every_row_is_a_workload_that_exists_also_in_small(row: matrix.Row, edge: None) -> None:
    assert compose(row.cells(smoke=False)).trainer.max_steps == row.steps
    [small] = row.cells(smoke=True)
    assert (CONF / "experiment" / f"{small.removeprefix('experiment=')}.yaml").is_file()


@pytest.mark.parametrize("arm", sorted({arm for row in matrix.ROWS for arm in row.arms}))
def test_every_arm_is_one_that_exists(arm: str, edge: None) -> None:
    compile_, *overrides = arm.split()
    config = compose(["experiment=smoke", f"compile={compile_}", *overrides])
    assert bool(config.compile) is (compile_ != "eager")


class Sweep:
    """In the place of a sweep's process: over at once with ``exit_code``."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code, self.commands = exit_code, []

    def __call__(self, command: list[str]) -> Sweep:
        self.commands.append(command)
        return self

    def wait(self, timeout: float | None = None) -> int:
        return self.exit_code

    def kill(self) -> None:
        pass


def swept(monkeypatch: pytest.MonkeyPatch, exit_code: int, *arguments: str) -> tuple[int, Sweep, list[Any]]:
    sweep, compared = Sweep(exit_code), []
    monkeypatch.setattr(matrix.subprocess, "Popen", sweep)
    monkeypatch.setattr(matrix.compare, "main", compared.append)
    monkeypatch.setattr(matrix.report, "main", compared.append)
    return matrix.main(list(arguments)), sweep, compared


def test_each_row_is_a_sweep_of_its_own_and_all_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    code, sweep, compared = swept(monkeypatch, 0, "gpt2", "resnet50", "--out", "out", "--rounds", "2", "--warm")
    assert code == 0
    assert [command[4] for command in sweep.commands] == ["sweep=out/gpt2", "sweep=out/resnet50"]
    assert {"experiment=gpt2", "hydra.launcher.rounds=2", "repeat=cold,warm"} <= set(sweep.commands[0])
    folders = [str(Path("out", name)) for name in ("gpt2", "resnet50")]
    assert compared == [folders, [*folders, "-o", "out/report.html"]]


def test_arms_rounds_and_warm_starts_become_one_sweep(
    command_line: Any, called: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = InstantCells(monkeypatch)
    row = matrix.Row(name="one", experiment="smoke", steps=9, arms=("eager", "[whole] compile.whole.mode=max-autotune"))
    options = matrix.parse(["--warm", "--rounds", "2", "--out", "out"])
    assert command_line(*matrix.sweep_arguments(row, options)) == 0
    whole = "compile=[whole] compile.whole.mode=max-autotune"
    arms = ["compile=eager"] * 2 + [whole] * 2
    assert [" ".join(cell.arm) for cell in cells.ran] == arms * 2
    assert [cell.start for cell in cells.ran] == ["cold", "warm"] * 4
    assert {cell.directory.parent for cell in cells.ran} == {Path("out/one")}


def test_a_failed_cell_does_not_end_it_and_shows_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code, sweep, compared = swept(monkeypatch, 1, "gpt2", "resnet50")
    assert (code, len(sweep.commands), len(compared)) == (1, 2, 2)


@pytest.mark.parametrize("exit_code", [2, 130])
def test_a_sweep_that_is_refused_or_stopped_ends_it(monkeypatch: pytest.MonkeyPatch, exit_code: int) -> None:
    code, sweep, compared = swept(monkeypatch, exit_code, "gpt2", "resnet50")
    assert (code, len(sweep.commands), compared) == (exit_code, 1, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp2"], "'gtp2' is not a row; there are captioning, "),
        (["--rounds", "0"], "must be at least 1"),
    ],
)
def test_wrong_arguments_end_it_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        matrix.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
