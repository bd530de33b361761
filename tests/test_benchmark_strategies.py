"""``python -m scripts.benchmark_strategies``: a sweep with the options that a measurement needs, then a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark_strategies import parse, sweep_arguments
from tests.instant_cells import InstantCells


def test_arms_rounds_and_warm_starts_become_one_sweep(
    command_line: Any, called: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = InstantCells(monkeypatch)
    arms = ["--arms", "eager", "[whole] compile.whole.mode=max-autotune", "seed=3"]
    options = parse([*arms, "--warm", "--rounds", "2", "--out", "out", "--", "trainer.max_steps=9"])
    assert options.arms == ["eager", "[whole] compile.whole.mode=max-autotune"]
    assert command_line(*sweep_arguments(options)) == 0
    whole = "compile=[whole] compile.whole.mode=max-autotune"
    assert [" ".join(cell.arm) for cell in cells.ran] == ["compile=eager"] * 2 + [whole] * 2 + ["compile=eager"] * 2 + [
        whole
    ] * 2
    assert [cell.start for cell in cells.ran] == ["cold", "warm"] * 4
    assert {cell.described.seed for cell in cells.ran} == {3}
    assert {cell.directory.parent for cell in cells.ran} == {Path("out")}
