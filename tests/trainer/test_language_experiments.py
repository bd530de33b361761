"""The named language experiments in small: each runs as its full-size counterpart would, eager and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.language.task import LanguageModelling
from trainer.config import compose
from trainer.run import run

SMOKE = ("gpt2_smoke", "llama_7b_smoke")
BACKEND = "compile.regional.backend=aot_eager"


@pytest.mark.parametrize("name", SMOKE)
def test_an_experiment_in_small_trains_eager_and_compiled_alike(name: str, tmp_path: Path) -> None:
    losses = []
    for arm in (["compile=eager"], ["compile=regional", BACKEND]):
        torch._dynamo.reset()
        command = [f"experiment={name}", *arm, "trainer.accelerator=cpu", "trainer.progress=none"]
        record = run(compose(command), run_dir=tmp_path / arm[0], command=command)
        assert (record.status, record.steps, record.padded_share) == ("finished", 8, 0.0)
        losses.append(record.final_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # A checkpoint of LLaMA-7B is 81 GB: the experiment leaves none.
    assert (tmp_path / "compile=regional" / "checkpoints" / "last.ckpt").exists() == (name == "gpt2_smoke")


@pytest.mark.parametrize("name", SMOKE)
def test_an_experiment_in_small_differs_from_the_full_one_in_size_alone(name: str) -> None:
    small, full = (compose([f"experiment={one}"]).task for one in (name, name.removesuffix("_smoke")))
    assert isinstance(small, LanguageModelling)
    assert isinstance(full, LanguageModelling)
    assert type(small.network) is type(full.network)
    assert (small.data.packing, small.loss_chunks) == (full.data.packing, full.loss_chunks)


def test_a_full_experiment_has_the_batch_that_is_quoted() -> None:
    for name, rows, positions in (("gpt2", 32, 1024), ("llama_7b", 4, 2048)):
        task = compose([f"experiment={name}"]).task
        assert isinstance(task, LanguageModelling)
        assert (task.data.batch_size, task.network.limits()[1], task.data.max_tokens) == (rows, positions, None)
