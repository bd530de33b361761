"""A captured step is right by construction: modules that depend on Python state train as in eager, captured or not."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer import python_state_modules as modules
from tests.trainer.capturing import Captured
from tests.trainer.lightning_modules import Losses, quiet_trainer
from tests.trainer.recording import Recorded

STEPS, STEPS_UNTIL_REFUSED = 64, 24


def losses(name: str, folder: Path, *others: L.Callback, accelerator: str = "cpu") -> list[float]:
    """Losses of ``STEPS`` steps of one module; of fewer where capture is given up soon."""
    L.seed_everything(0, verbose=False)
    modules.SCALE, modules.SETTINGS["scale"], modules.Hyperparameters.scale = 1.0, 1.0, 1.0
    kind, reason = modules.MODULES[name]
    data = DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 1)), batch_size=2)
    watch = Losses()
    callbacks = [watch, *([modules.CALLBACKS[name]()] if name in modules.CALLBACKS else []), *others]
    trainer = quiet_trainer(
        callbacks=callbacks,
        default_root_dir=folder,
        logger=CSVLogger(folder) if name == "LogsToTheLogger" else False,
        accelerator=accelerator,
        devices=1,
        max_steps=STEPS if reason is None else STEPS_UNTIL_REFUSED,
        max_epochs=-1,
    )
    trainer.fit(kind(), data)
    return watch.values


@pytest.mark.parametrize("name", list(modules.MODULES))
def test_losses_are_eagers_step_by_step(name: str, tmp_path: Path) -> None:
    captured = Captured([Recorded()])
    seen = losses(name, tmp_path, captured)
    assert seen == pytest.approx(losses(name, tmp_path), rel=1e-5)
    report, (_, reason) = captured.facts, modules.MODULES[name]
    assert not any("second time" in note for note in captured.program.notes)
    if reason is None:
        assert len(seen) == STEPS
        assert report["refused"] == []
        assert report["replayed_steps"] > STEPS // 2
        assert report["parity"]["verdict"] == "passed"
    else:
        assert any(reason in refusal for refusal in report["refused"]), report["refused"]
