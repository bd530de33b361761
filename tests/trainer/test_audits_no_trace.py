"""Audits leave no trace in a training, raise no false alarm, and cost next to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from strategies import Optimizer
from tests.strategies.test_optimizer import OPTIMIZERS
from tests.trainer import guarded
from tests.trainer.audited import Captured, FaultFrom, audited, regional
from tests.trainer.clock import CLOCK, stop_time
from tests.trainer.guarded import Traceable
from tests.trainer.lightning_modules import Blocks
from tests.trainer.runs import curve, train
from tests.trainer.test_parity import other_draws
from trainer.telemetry.record import RunRecord


class Odd(Traceable):
    """Changes weights and gradients in its training step, steps a schedule by hand, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 1).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mine, head in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                mine.data = mine.data * 0.9 + head.data * 0.1
            self.teacher.bias.data.mul_(0.99)
            for gradient in [one.grad for one in self.head.parameters() if one.grad is not None]:
                gradient.mul_(0.9)
        self.log("drawn", torch.rand((), generator=self.generator), on_step=True, on_epoch=True)
        schedule: Any = self.lr_schedulers()
        schedule.step()
        return super().training_step(batch, batch_idx) + 0.1 * self.teacher(batch[0]).square().mean()


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    {"precision": "bf16-mixed"},
)


@pytest.fixture
def pairs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of eager are timed beside the run's own from its start on."""
    for name, value in {"STEADY_STEPS": 2, "APART_STEPS": 2, "SHARE": math.inf}.items():
        monkeypatch.setattr(f"trainer.guards.slowdown.{name}", value)


@pytest.mark.usefixtures("pairs_at_once")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_training_with_audits_and_timed_pairs_is_to_the_last_bit_the_one_without(
    options: dict[str, Any], tmp_path: Path
) -> None:
    ends = []
    for parity in ("off", "on"):
        module, logger = Odd(), CSVLogger(tmp_path, name=parity)
        strategies = [*regional(), Optimizer(backend="eager")]
        losses, record, _ = audited(module, tmp_path, strategies, parity=parity, logger=logger, **options)
        logged = [
            line for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines() if "seconds" not in line
        ]
        states = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        ends.append((losses, states, module, logged, torch.get_rng_state()))
    (without, plain, one, logged, drawn), (with_, same, other, again, drawn_too) = ends
    assert record.audits.steps[:4] == [1, 2, 4, 8]
    assert len(record.report["slowdown"]["on_later_batches"]) >= 2
    assert with_ == without
    assert all(torch.equal(tensor, same[name]) for name, tensor in plain.items())
    assert torch.equal(drawn, drawn_too)
    assert (one.calls, one.seen, one.facts) == (other.calls, other.seen, other.facts)
    assert _of_the_module(logged) == _of_the_module(again)
    torch.testing.assert_close(other.optimizers().state_dict(), one.optimizers().state_dict(), rtol=0, atol=0)


def _of_the_module(lines: list[str]) -> list[tuple[str, ...]]:
    names = lines[0].split(",")
    wanted = [names.index(name) for name in ("drawn_step", "train_loss") if name in names]
    rows = [tuple(line.split(",")[place] for place in wanted) for line in lines[1:]]
    return [row for row in rows if any(row)]


@pytest.mark.usefixtures("pairs_at_once")
@pytest.mark.parametrize("options", [*OPTIONS[:2], {"precision": "bf16-true"}], ids=str)
def test_audits_of_captured_steps_leave_no_trace_and_find_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    FaultFrom(1000)
    ends = []
    for parity in ("off", "on"):
        module = Blocks()
        losses, record, error = audited(module, tmp_path, [Captured()], parity=parity, **options)
        assert error is None
        ends.append((losses, {name: tensor.clone() for name, tensor in module.state_dict().items()}))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(tensor, ends[1][1][name]) for name, tensor in ends[0][1].items())
    assert record.audits.verdict == "clean"
    assert record.report["captured"]["replayed_steps"] > 10
    if "accumulate_grad_batches" not in options:
        assert len(record.report["slowdown"]["on_later_batches"]) >= 2


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NAdam": lambda given: torch.optim.NAdam(given, weight_decay=0.1),
    "Rprop": torch.optim.Rprop,
    "ASGD": lambda given: torch.optim.ASGD(given, t0=2),
}
EVERY_OPTIMIZER = {**OPTIMIZERS, **OTHERS}


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_no_optimizer_raises_a_false_alarm(name: str, tmp_path: Path) -> None:
    class Uses(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.layers = self.layers[:0]

        def configure_optimizers(self) -> Any:
            optimizer = EVERY_OPTIMIZER[name](self.parameters())
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    every: tuple[dict[str, Any], ...] = ({"gradient_clip_val": 0.1}, {"precision": "bf16-true"})
    for options in every[: 2 if name in ("AdamW", "Adam tensor rate", "SGD nesterov") else 1]:
        torch._dynamo.reset()
        _, record, error = audited(Uses(), tmp_path, [Optimizer(backend="eager")], **options)
        assert error is None
        assert record.audits.verdict == "clean"
        assert "update" in record.audits.worst, record.audits.not_compared


def test_other_random_numbers_than_eagers_are_not_taken_for_an_error(tmp_path: Path) -> None:
    with guarded.backend("tests_audited_draws", other_draws, guarded.as_it_is) as backend:
        _, record, error = audited(Traceable(), tmp_path, regional(backend))
    assert error is None
    assert record.audits.not_compared["loss"].startswith("compiled code may draw other random numbers")
    assert record.audits.worst["update"].share <= 1, "the optimizer is audited still"


def test_a_dropout_that_hardly_ever_drops_is_no_difference(tmp_path: Path) -> None:
    # No mask of the calibration drops anything, one of the step's does.
    with guarded.backend("tests_audited_draws", other_draws, guarded.as_it_is) as backend:
        _, record, error = audited(Traceable(dropout=0.003), tmp_path, regional(backend))
    assert error is None
    assert record.audits.unrepeated_steps == [2]


class Loud(Blocks):
    """Its fused optimizer is called in each step, also where the scaler leaves one out: one gradient overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e20 * self.loud

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize(("module", "scale"), [(Blocks, 2.0**120), (Loud, 2.0**70)])
def test_a_loss_scaler_that_leaves_steps_out_raises_no_alarm(
    module: type[Blocks], scale: float, tmp_path: Path
) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    strategies = [Optimizer(backend="eager")] if module is Blocks else regional()
    _, record, error = audited(module(), tmp_path, strategies, plugins=[plugin])
    assert error is None
    assert record.audits.verdict == "clean"
    assert scaler.get_scale() < scale, "steps were left out"


def test_a_step_that_takes_gradients_itself_is_not_audited_and_says_so(tmp_path: Path) -> None:
    class Penalty(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x_BD = batch[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.head(x_BD).sum(), x_BD, create_graph=True)
            return super().training_step(batch, batch_idx) + slope.square().mean()

    _, record, error = audited(Penalty(), tmp_path, regional())
    assert error is None
    assert record.audits.not_compared["loss"].startswith("eager cannot run the step's forward beside it")
    assert record.audits.worst["update"].share <= 1


def test_audits_cost_their_share_of_a_run_and_no_more(tmp_path: Path) -> None:
    from trainer.guards import audits

    taken: list[float] = []
    look = audits.eager_forward

    def slow(*arguments: Any, **named: Any) -> Any:
        CLOCK.sleep(0.2)
        taken.append(CLOCK.now)
        return look(*arguments, **named)

    class Steps(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            CLOCK.sleep(1.0)

    with pytest.MonkeyPatch.context() as patch:
        stop_time(patch)
        patch.setattr("trainer.guards.audits.time", CLOCK)
        patch.setattr(audits, "eager_forward", slow)
        _, record, error = audited(Blocks(), tmp_path, regional("eager"), Steps(), max_steps=600)
    assert error is None
    assert record.audits.steps[:5] == [1, 2, 4, 8, 16]
    assert 10 <= len(taken) <= 15, "a fifth of a second each, of 600 seconds"
    assert record.audits.seconds == pytest.approx(0.2 * len(taken))
    assert record.audits.steps[-1] > 400, "and they last until the end"


def test_audited_seconds_are_no_part_of_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.guards import audits

    look = audits.eager_forward

    def slow(*arguments: Any, **named: Any) -> Any:
        CLOCK.sleep(100.0)
        return look(*arguments, **named)

    monkeypatch.setattr(audits, "eager_forward", slow)
    stop_time(monkeypatch)
    _, record, _ = audited(Blocks(), tmp_path, regional("eager"))
    assert record.audits.steps[:4] == [1, 2, 4, 8]
    assert record.first_step_seconds < 50
    assert record.warmup_seconds < 50
    assert record.steady_step_seconds_mean < 50
    assert record.pause_seconds > 399


def test_eager_and_parity_off_have_none(tmp_path: Path) -> None:
    for strategies, options in (([], {}), (regional("eager"), {"parity": "off"})):
        _, record, _ = audited(Blocks(), tmp_path, strategies, **options)
        assert record.audits is None


def test_what_is_not_audited_says_why(tmp_path: Path) -> None:
    from tests.trainer.manual_modules import Accumulates

    _, record, _ = audited(Accumulates(), tmp_path, regional("eager"))
    assert (record.audits.verdict, record.audits.reason) == ("not audited", "manual optimization")

    class Custom(torch.optim.SGD):
        pass

    class Uses(Blocks):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Custom(self.parameters(), lr=0.05)

    _, record, _ = audited(Uses(), tmp_path, regional("eager"))
    assert "Custom is not an optimizer of torch.optim" in record.audits.not_compared["update"]
    assert record.audits.verdict == "clean"

    class Squares(Blocks):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.05)

    _, record, error = audited(Squares(), tmp_path, regional("eager"))
    assert error is None
    assert record.audits.not_compared["update"].startswith("LBFGS")


def test_record_summary_and_tensorboard_tell_of_them(tmp_path: Path) -> None:
    from trainer.console import summary

    record = train(tmp_path, strategy="regional")
    assert record.audits is not None
    assert (record.audits.verdict, record.audits.steps) == ("clean", [1, 2, 4])
    loaded = RunRecord.load(tmp_path)
    assert loaded.audits == record.audits
    assert summary(loaded)["audits"].startswith("clean: 3, of steps 1 to 4; update ")
    points = curve(tmp_path, "usage/audit_worst_of_tolerance")
    assert list(points) == [1, 2, 4]
    assert all(0 <= value <= 1 for value in points.values())
    assert curve(tmp_path, "usage/audit_seconds")[4] == pytest.approx(record.audits.seconds, abs=1e-3)
    assert math.isfinite(record.audits.seconds)
