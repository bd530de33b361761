"""Modules that optimize by hand train compiled with eager's losses, and are checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from strategies import Regional
from tests.strategies import backends
from tests.strategies.backends import Fault
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.manual_modules import Accumulates, Adversaries
from trainer.build import Mixed
from trainer.callback import Compile


@pytest.fixture(autouse=True)
def no_fault() -> Iterator[None]:
    Fault.clear()
    yield
    Fault.clear()


class End(L.Callback):
    """What Lightning knows when the training is over."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.global_step, self.progress = trainer.global_step, trainer.fit_loop.state_dict()
        self.optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        self.schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]


def trained(module: L.LightningModule, folder: Path, compile_: Compile | None, **options: Any) -> End:
    """Seed, train an epoch of six batches."""
    L.seed_everything(0, verbose=False)
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    end = End()
    trainer = quiet_trainer(
        callbacks=[end, *([compile_] if compile_ is not None else [])],
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"logger": False, "max_epochs": 1, **options},
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return end


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def losses_of(module: Adversaries) -> list[float]:
    return [loss for _, loss, _ in module.seen]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_accumulation_with_a_schedule_trains_as_in_eager(precision: str, tmp_path: Path) -> None:
    compile_, runs = Compile([Regional(backend="aot_eager")]), []
    for given in (None, compile_):
        plugins = [Mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))]
        module = Accumulates()
        end = trained(module, tmp_path, given, plugins=plugins if precision == "16-mixed" else None)
        runs.append((module, end, plugins[0].scaler))
    (plain, before, scaler), (checked, after, scaler_after) = runs
    assert checked.rates == plain.rates == [0.05, 0.05, 0.025, 0.025, 0.025, 0.0125]
    assert (after.global_step, after.progress, after.schedules) == (2, before.progress, before.schedules)
    if precision == "32-true":
        close(after.optimizers, before.optimizers)
        close(checked.state_dict(), plain.state_dict())
    assert checked.scaler.state_dict() == plain.scaler.state_dict()
    assert scaler_after.state_dict() == scaler.state_dict()
    assert compile_.record.report["parity"]["verdict"] == "passed"
    assert compile_.record.eager_parts == {}


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("of", ["critic", "generator"])
def test_a_wrong_program_is_found_in_either_network_and_trains_eager(which: str, of: str, tmp_path: Path) -> None:
    plain, module = Adversaries(critic_steps=3), Adversaries(critic_steps=3)
    trained(plain, tmp_path, None)
    setattr(Fault, which, 1.01)
    compile_ = Compile([Regional(backend=backends.FAULTY)], blocks=[f"{of}.layers"])
    with pytest.warns(UserWarning, match="not eager's"):
        trained(module, tmp_path, compile_)
    assert losses_of(module) == losses_of(plain)
    assert list(compile_.record.eager_parts) == [f"{of}.layers.0", f"{of}.layers.1"]
