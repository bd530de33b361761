"""DDP: which strategy trains, what it leaves as it is, and how a SIGTERM ends it."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.processes import Pair
from tests.trainer.lightning_modules import Blocks, quiet_trainer
from tests.trainer.runs import overrides
from trainer.build import build_trainer
from trainer.callback import Compile
from trainer.config import compose
from trainer.loops.ddp import DDP
from trainer.telemetry.record import RunRecord

pytestmark = pytest.mark.xdist_group("two_processes")


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
    assert strategy._ddp_kwargs == {"find_unused_parameters": finds_unused}


class Heavy(Blocks):
    """Adds half of the gradients of the step before, which it keeps as they are."""

    before: list[Any] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        weights = [one for one in self.parameters() if one.grad is not None]
        kept = [one.grad for one in weights]
        for weight, gradient in zip(weights, self.before, strict=False):
            weight.grad = weight.grad + 0.5 * gradient
        self.before = kept


class Thaw(L.Callback):
    """Trains the first block from the third step on."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        next(pl_module.children()).requires_grad_(False)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        next(pl_module.children()).requires_grad_(trainer.global_step >= 2)


def trained_weights(ranks: int) -> list[tuple[bool, list[Tensor]]]:
    """Of a module that keeps gradients, and of ordinary ones, one of which is frozen at first: whether gradients lie in
    the buckets, and the weights at the end."""
    found = []
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(48, 9, generator=draws)[int(os.environ.get("RANK", "0")) :: ranks]
    data = TensorDataset(rows[:, :8], rows[:, 8:])
    for kind, callbacks in ((Heavy, []), (Blocks, []), (Blocks, [Thaw()])):
        torch.manual_seed(0)
        module, strategy = kind(), DDP() if ranks > 1 else "auto"
        options: dict[str, Any] = {"devices": ranks, "strategy": strategy, "use_distributed_sampler": False}
        trainer = quiet_trainer(max_epochs=1, callbacks=callbacks, **options)
        trainer.fit(module, DataLoader(data, batch_size=8 // ranks))
        views = isinstance(strategy, DDP) and strategy._ddp_kwargs["gradient_as_bucket_view"]
        found.append((views, [one.detach() for one in module.parameters()]))
    return found


def test_gradients_that_are_kept_and_weights_that_thaw_are_those_of_one_process(pair: Pair) -> None:
    references = [weights for _, weights in trained_weights(1)]
    for ranks in pair(trained_weights, 2):
        assert [views for views, _ in ranks] == [False, True, True]
        for (_, weights), reference in zip(ranks, references, strict=True):
            torch.testing.assert_close(weights, reference, rtol=1e-4, atol=1e-6)


def told_to_stop(folder: str, strategy: str, record: RunRecord | None) -> tuple[str, int]:
    """One rank gets a SIGTERM in its third step, under an owner's ``record`` before the first one; returns what has
    ended the training, and at which step."""

    class Told(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            if record is not None and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [Told(), Compile(record=record, verbose=False)]
    options: dict[str, Any] = {"devices": 2, "strategy": DDP() if strategy == "ours" else strategy}
    trainer = quiet_trainer(max_steps=9, callbacks=callbacks, default_root_dir=folder, **options)
    batches = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4)
    ended = ""
    try:
        trainer.fit(Blocks(), batches)
    except SIGTERMException:
        ended = "SIGTERM"
    own = {*vars(trainer._signal_connector), *vars(trainer.fit_loop.epoch_loop)}
    assert not own & {"_sigterm_notifier_fn", "_broadcast_sigterm_tensor"}, "the Trainer has its own back"
    return ended, trainer.global_step


@pytest.mark.parametrize("strategy", ["ours", "ddp"])
def test_a_sigterm_to_one_ends_both_at_one_step(strategy: str, pair: Pair, tmp_path: Path) -> None:
    assert pair(told_to_stop, str(tmp_path), strategy, None) == [("SIGTERM", 5), ("SIGTERM", 5)]


def test_a_sigterm_to_one_before_the_first_step_keeps_nobody_waiting(pair: Pair, tmp_path: Path) -> None:
    """Lightning's handler broadcasts, for which the other process is not there."""
    record = RunRecord(task="", label="eager")
    assert pair(told_to_stop, str(tmp_path), "ours", record) == [("SIGTERM", 1), ("SIGTERM", 1)]


def test_lightning_still_waits_for_a_flag_in_each_step() -> None:
    """Once it does not, ``trainer.loops.lightning_internals.on_sigterm`` can go."""
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert ".item()" in inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)
