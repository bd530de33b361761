"""What looking at a step by hand is made of: its length, its gradients, displaced weights, and what comes back."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from strategies import Program, Whole
from strategies.loop import Span
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.manual_modules import Accumulates, Adversaries
from trainer.callback import Compile
from trainer.guards.compare import Comparison, around_steps, displaced, parameters_of
from trainer.guards.eager import region_draws
from trainer.guards.slowdown import take_sample
from trainer.guards.snapshot import Snapshot
from trainer.loops.lightning import LightningLoop

UNIT = 2.0**-24


class OnFirstBatch(L.Callback):
    """Calls ``look(trainer, module, batch)`` while nothing is logged, before the first batch, and stops."""

    def __init__(self, look: Any) -> None:
        self._look, self.looked = look, False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.looked:
            passes = LightningLoop(trainer, cuda_graphs=False)
            with passes.quiet():
                self._look(trainer, pl_module, batch, passes)
            self.looked = trainer.should_stop = True


def on_first_batch(module: L.LightningModule, folder: Path, look: Any) -> None:
    callback = OnFirstBatch(look)
    L.seed_everything(0, verbose=False)
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=1, callbacks=[callback], default_root_dir=folder)
    data = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 1))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    assert callback.looked


@pytest.mark.parametrize(
    ("module", "span"),
    [
        (Adversaries(), Span(batches=1, steps=1)),
        (Adversaries(critic_steps=5), Span(batches=5, steps=5)),
        (Accumulates(), Span(batches=3, steps=1)),
        (Adversaries(critic_steps=100), Span(batches=1, steps=1)),
    ],
    ids=["both at once", "the second one rarely", "accumulation", "the second one too late to be waited for"],
)
def test_a_step_by_hand_lasts_until_every_optimizer_has_stepped(module: Any, span: Span, tmp_path: Path) -> None:
    def look(trainer: Any, module: Any, batch: Any, passes: LightningLoop) -> None:
        passes.step(batch)
        assert passes.span == span
        calls = len(getattr(module, "seen", []))
        passes.step(batch)
        assert passes.span == span
        assert len(getattr(module, "seen", [])) - calls in (0, span.batches, span.batches + 1)

    on_first_batch(module, tmp_path, look)


class Untidy(Adversaries):
    """Fails between toggling and untoggling; has a scheduler, an optimizer and a scaler of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        schedule: Any = self.lr_schedulers()
        schedule.step()
        self.own_optimizer.step()
        self.own_scaler.scale(torch.ones(()))
        self.own_scaler._growth_tracker.fill_(3)
        self.toggle_optimizer(self.optimizers()[0])  # type: ignore[index]
        if self.fails:
            raise LookupError("between toggling and untoggling")

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        self.own_optimizer = torch.optim.Adam(self.generator.parameters())
        self.own_scaler = torch.amp.GradScaler("cpu")
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]


@pytest.mark.parametrize("fails", [False, True])
def test_all_that_a_step_by_hand_changes_comes_back(fails: bool, tmp_path: Path) -> None:
    def look(trainer: Any, module: Any, batch: Any, passes: LightningLoop) -> None:
        def state() -> dict[str, Any]:
            optimizers = [*trainer.optimizers, module.own_optimizer]
            return copy.deepcopy(
                {
                    "weights": module.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "scaler": module.own_scaler.state_dict(),
                    "schedule": module.lr_schedulers().state_dict(),
                    "trained": [parameter.requires_grad for parameter in module.parameters()],
                    "toggled": list(module._param_requires_grad_state.values()),
                    "progress": trainer.fit_loop.state_dict(),
                    "hooks": [optimizer._on_after_step for optimizer in trainer.strategy._lightning_optimizers],
                    "patched": vars(trainer.strategy).get("backward"),
                    "seen": module.seen,
                }
            )

        before = state()
        snapshot = Snapshot(passes, batch)
        module.fails = fails
        for _ in range(2):
            with pytest.raises(LookupError) if fails else contextlib.nullcontext():
                passes.step(batch)
            changed = {name for name, value in state().items() if str(value) != str(before[name])}
            assert changed == set(before) - {"hooks", "patched"}
            snapshot.restore()
            after = state()
            assert {name for name, value in after.items() if str(value) != str(before[name])} == set()
            torch.testing.assert_close(after["weights"], before["weights"], rtol=0, atol=0)
            module.fails = fails
        module.fails = False

    on_first_batch(Untidy(), tmp_path, look)


def test_weights_are_one_rounding_off_within_a_step_and_right_after_it() -> None:
    layer, clamped = nn.Linear(8, 8), nn.Linear(8, 8)
    parameters = [*layer.parameters(), *clamped.parameters()]
    exact = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    taken: list[list[Tensor]] = []

    def off(now: Tensor, then: Tensor) -> float:
        return float(((now.detach() - then) / then).abs().max())

    def closure() -> Tensor:
        assert all(0 < off(now, then) < 4 * UNIT for now, then in zip(parameters, exact, strict=True))
        loss = layer(torch.ones(1, 8)).sum()
        loss.backward()
        return loss

    with displaced(parameters, UNIT, seed=3), around_steps([optimizer], lambda of: taken.append(parameters_of(of))):
        optimizer.step(closure)
        with torch.no_grad():
            clamped.weight.clamp_(-0.1, 0.1)
    torch.testing.assert_close(layer.bias.detach(), exact[1] - 0.5, rtol=4 * UNIT, atol=4 * UNIT)
    assert torch.equal(clamped.bias, exact[3])
    torch.testing.assert_close(clamped.weight.detach(), exact[2].clamp(-0.1, 0.1), rtol=4 * UNIT, atol=4 * UNIT)
    assert [[id(one) for one in each] for each in taken] == [[id(one) for one in layer.parameters()]], "once evaluated"


def test_several_losses_are_one_vector_and_none_are_no_figure() -> None:
    several = Comparison(6.0)
    several.keep_step(torch.tensor([3.0, 4.0, float("nan")]), {}, unit=UNIT)
    for losses, apart in (([3.0, 4.5, float("nan")], 0.1), ([3.0, 4.0, 1.0], float("inf")), ([3.0, 4.0], float("inf"))):
        assert float(several.distances_of_step(torch.tensor(losses), {})["loss"]) == pytest.approx(apart)
    none = Comparison(6.0)
    none.keep_step(torch.empty(0), {}, unit=UNIT)
    assert "loss" not in none.distances_of_step(torch.empty(0), {})


def test_only_what_a_region_draws_counts() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    program = Program(module=module)
    regions = {path: SimpleNamespace(path=path, module=module[int(path)]) for path in ("0", "1")}
    for path, drawn in (("1", []), ("0", ["0"])):
        program.regions[:] = [regions[path]]  # type: ignore[list-item]
        with region_draws(program) as found:
            module(torch.randn(2, 4))
        assert found == drawn


def test_seconds_are_those_of_one_optimizer_step() -> None:
    calls: list[int] = []
    loop: Any = SimpleNamespace(
        device=torch.device("cpu"), broadcast=lambda value: value, span=Span(steps=10**9), step=calls.append
    )
    sample = take_sample(loop, Program(module=nn.Linear(1, 1)), 1, pairs=5)
    assert len(calls) == 2 * 2 * 5
    assert sample.eager_median < 1e-9


def test_ddp_that_takes_its_first_backward_for_all_has_no_preflight() -> None:
    trainer: Any = quiet_trainer()
    trainer.strategy.model = SimpleNamespace(static_graph=True)
    assert "static_graph=True" in str(LightningLoop(trainer).why_not_apart())


class OnItsOwn(L.LightningModule):
    """Optimizes by hand with an optimizer that nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(8, 1)
        self.own = [torch.optim.SGD(self.layer.parameters(), lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.own[0].zero_grad()
        self.manual_backward(loss)
        self.own[0].step()
        return loss

    def configure_optimizers(self) -> None:
        """None of Lightning's."""


def test_a_module_with_no_optimizer_that_anyone_knows_trains_and_says_why_it_is_not_compared(tmp_path: Path) -> None:
    module = OnItsOwn()
    before = module.layer.weight.detach().clone()
    callback = Compile([Whole(backend="eager")], whole=["layer"], measure_peak=False)
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback], default_root_dir=tmp_path)
    data = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 1))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    assert not torch.equal(module.layer.weight, before)
    assert "not with optimizers of configure_optimizers" in callback.record.report["parity"]["reason"]
