"""Every experiment in small, as shipped, trains and validates on a CPU in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.language.task import LanguageModelling
from tests.sweep import some
from trainer import CONF
from trainer.config import compose
from trainer.run import run

SMOKE = sorted(file.stem for file in (Path(CONF) / "experiment").glob("*smoke.yaml"))


@pytest.mark.parametrize("name", some(SMOKE, every=3))
def test_it_finishes_and_validates_where_it_should(name: str, tmp_path: Path) -> None:
    command = [f"experiment={name}", "trainer.accelerator=cpu", "trainer.progress=none"]
    config = compose(command)
    record = run(config, run_dir=tmp_path, command=command)
    assert (record.status, record.steps, record.reason) == ("finished", config.trainer.max_steps, None)
    assert config.trainer.max_steps < 20
    assert bool(config.trainer.val_every_n_steps) == ("val/loss" in record.final_metrics)
    # A checkpoint of LLaMA-7B is 81 GB: the experiment leaves none.
    assert (tmp_path / "checkpoints" / "last.ckpt").exists() == (not name.startswith("llama"))
    if isinstance(config.task, LanguageModelling) and "ragged" not in name:
        assert record.padded_share == 0.0
        full = compose([f"experiment={name.removesuffix('_smoke')}"]).task
        assert type(config.task.network) is type(full.network)
        assert (config.task.data.packing, config.task.loss_chunks) == (full.data.packing, full.loss_chunks)


def test_every_experiment_has_one_in_small() -> None:
    rows = {file.stem for file in (Path(CONF) / "experiment").glob("*.yaml")} - set(SMOKE)
    # The default task has one without its name.
    assert {f"{row}_smoke" for row in rows - {"captioning_base"}} | {"smoke"} == set(SMOKE)


@pytest.mark.parametrize(("name", "rows", "positions"), [("gpt2", 32, 1024), ("llama_7b", 4, 2048)])
def test_a_full_experiment_has_the_batch_that_is_quoted(name: str, rows: int, positions: int) -> None:
    task = compose([f"experiment={name}"]).task
    assert (task.data.batch_size, task.network.max_tokens, task.data.max_tokens) == (rows, positions, None)
