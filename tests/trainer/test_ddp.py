"""DDP by the command line: which strategy trains, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import overrides
from trainer.build import build_trainer
from trainer.config import compose
from trainer.loops.ddp import DDP


@pytest.mark.parametrize(
    ("given", "finds_unused", "captures"),
    [
        (("trainer.strategy=ddp",), False, False),
        (("trainer.strategy=auto",), False, False),
        (("trainer.strategy=ddp_find_unused_parameters_true",), True, False),
        (("trainer.strategy=ddp", "compile=cuda_graph"), False, True),
    ],
)
def test_several_devices_are_trained_by_ours(
    given: tuple[str, ...], finds_unused: bool, captures: bool, tmp_path: Path
) -> None:
    config = compose([*overrides(task="micro"), "trainer.accelerator=cpu", "trainer.devices=2", *given])
    strategy = build_trainer(config, tmp_path, []).strategy
    assert isinstance(strategy, DDP)
    assert strategy.captures == captures
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": True, "find_unused_parameters": finds_unused}
