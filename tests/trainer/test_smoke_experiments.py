"""Every experiment in small, as shipped, trains and validates on a CPU in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import CONF
from trainer.config import compose
from trainer.run import run

SMOKE = sorted(file.stem for file in (Path(CONF) / "experiment").glob("*smoke.yaml"))


@pytest.mark.parametrize("name", SMOKE)
def test_it_finishes_and_validates_where_it_should(name: str, tmp_path: Path) -> None:
    command = [f"experiment={name}", "trainer.accelerator=cpu", "trainer.progress=none"]
    config = compose(command)
    record = run(config, run_dir=tmp_path, command=command)
    assert (record.status, record.steps, record.reason) == ("finished", config.trainer.max_steps, None)
    assert config.trainer.max_steps < 20
    assert bool(config.trainer.val_every_n_steps) == ("val/loss" in record.final_metrics)


def test_every_experiment_has_one_in_small() -> None:
    rows = {file.stem for file in (Path(CONF) / "experiment").glob("*.yaml")} - set(SMOKE)
    # The default task has one without its name.
    assert {f"{row}_smoke" for row in rows - {"captioning_base"}} | {"smoke"} == set(SMOKE)
