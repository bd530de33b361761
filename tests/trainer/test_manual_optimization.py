"""Modules that optimize by hand are compared, timed, warmed and rolled back like others, and nothing is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from strategies import Buckets, Optimizer, Regional
from tests.strategies import backends
from tests.trainer import guarded, ragged_modules
from tests.trainer.clock import CLOCK
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.manual_modules import Accumulates, Adversaries
from trainer.build import Mixed
from trainer.callback import Compile
from trainer.guards.compare import ParityError


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


def logged(logger: CSVLogger, names: set[str]) -> list[list[str]]:
    rows = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    places = [place for place, name in enumerate(rows[0]) if name in names]
    return [[row[place] for place in places] for row in rows if any(row[place] for place in places)]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("compiled", ["modules", "optimizers too"])
def test_two_networks_against_each_other_train_to_the_last_bit_as_without_preflight(
    compiled: str, tmp_path: Path
) -> None:
    runs = []
    for parity in ("off", "strict"):
        torch._dynamo.reset()
        strategies: list[Any] = [Regional(backend="eager")]
        strategies += [Optimizer(backend="eager")] if compiled == "optimizers too" else []
        compile_ = Compile(strategies, parity=parity, on_compile_error="fail" if parity == "off" else "eager")
        module, logger, profiler = Adversaries(), CSVLogger(tmp_path / parity), SimpleProfiler()
        end = trained(module, tmp_path, compile_, logger=logger, profiler=profiler)
        runs.append((module, end, logged(logger, {"critic", "generator"}), compile_.record))
        assert len(profiler.recorded_durations["optimizer_step"]) == 12
    (plain, before, lines, _), (checked, after, lines_after, record) = runs
    assert checked.seen == plain.seen
    assert [step for _, _, step in plain.seen] == list(range(12)), "global_step counts both optimizers"
    assert lines_after == lines
    assert len(lines) == 7
    assert (after.global_step, after.progress) == (before.global_step, before.progress)
    same(after.optimizers, before.optimizers)
    same(checked.state_dict(), plain.state_dict())
    assert all(parameter.requires_grad for parameter in checked.parameters())
    facts = record.report["parity"]
    assert (facts["verdict"], "draws" in facts) == ("passed", False)
    assert facts["weights"]["tensors"] == facts["updated_tensors"] == 24
    assert record.report["slowdown"]["before_the_first_step"]["compiled_seconds"]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_accumulation_with_a_schedule_trains_to_the_last_bit_as_without_preflight(
    precision: str, tmp_path: Path
) -> None:
    runs = []
    for parity in ("off", "on"):
        torch._dynamo.reset()
        plugins = [Mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))]
        compile_ = Compile([Regional(backend="eager")], parity=parity)
        module = Accumulates()
        end = trained(module, tmp_path, compile_, plugins=plugins if precision == "16-mixed" else None)
        runs.append((module, end, compile_.record, plugins[0].scaler))
    (plain, before, _, scaler), (checked, after, record, scaler_after) = runs
    assert checked.rates == plain.rates == [0.05, 0.05, 0.025, 0.025, 0.025, 0.0125]
    assert (after.global_step, after.progress, after.schedules) == (2, before.progress, before.schedules)
    same(after.optimizers, before.optimizers)
    same(checked.state_dict(), plain.state_dict())
    assert checked.scaler.state_dict() == plain.scaler.state_dict()
    assert scaler_after is not None
    assert scaler is not None
    assert scaler_after.state_dict() == scaler.state_dict()
    facts = record.report["parity"]
    assert facts["verdict"] == "passed"
    assert facts["updated_tensors"] == 16, "three batches, until it steps"
    assert (facts["gradient_norm"]["eager"] <= 0.1 * 1.001) is True, "as the optimizer takes them, clipped"


@pytest.mark.parametrize(
    ("wrong", "of", "said"),
    [("forward", "critic", "loss"), ("backward", "generator", "gradient norm"), ("backward", "critic", "gradient of")],
)
def test_a_wrong_program_is_found_in_either_network(wrong: str, of: str, said: str, tmp_path: Path) -> None:
    # The generator steps in every third batch only, and what it begins with is random in every one of them.
    one_percent = guarded.scaled(1.01)
    pair = (one_percent, guarded.as_it_is) if wrong == "forward" else (guarded.as_it_is, one_percent)
    with guarded.backend(f"tests_wrong_{wrong}", *pair) as backend:
        compile_ = Compile([Regional(backend=backend)], blocks=[f"{of}.layers"])
        with pytest.raises(ParityError, match=said):
            trained(Adversaries(critic_steps=3, optimizer=torch.optim.SGD), tmp_path, compile_)
    facts = compile_.record.report["parity"]
    assert facts["draws_random_numbers"]
    assert "draws" not in facts, "what is drawn outside of the regions is eager's own"
    assert max(facts[of]["difference"] for of in ("loss", "gradients")) > 5e-3
    assert compile_.record.steps == 0


def rounded_elsewhere(run: Any) -> list[Any]:
    """As a compiler that adds up in another order: floating results one rounding off, up or down."""
    results = []
    for result in run():
        if isinstance(result, Tensor) and result.is_floating_point():
            sign = torch.empty(result.shape).bernoulli_(0.5, generator=DRAWS) * 2 - 1
            result = result * (1 + torch.finfo(result.dtype).eps * sign).to(result.dtype)
        results.append(result)
    return results


DRAWS = torch.Generator()


@pytest.mark.parametrize(
    ("closure", "precision", "optimizer"),
    [
        (False, "32-true", torch.optim.Adam),
        (True, "bf16-mixed", torch.optim.Adam),
        (True, "32-true", torch.optim.SGD),
        (False, "bf16-mixed", torch.optim.RMSprop),
    ],
)
def test_another_rounding_is_no_error(closure: bool, precision: Any, optimizer: Any, tmp_path: Path) -> None:
    DRAWS.manual_seed(5)
    with guarded.backend("tests_rounded_elsewhere", rounded_elsewhere, rounded_elsewhere) as backend:
        compile_ = Compile([Regional(backend=backend)])
        module = Adversaries(critic_steps=2, optimizer=optimizer, closure=closure)
        trained(module, tmp_path, compile_, precision=precision, limit_train_batches=1)
    facts = compile_.record.report["parity"]
    assert facts["verdict"] == "passed"
    assert 0 < facts["gradients"]["difference"] <= facts["gradients"]["tolerance"]
    assert facts["weights"]["difference"] == 0, "after the same gradients"


@pytest.mark.parametrize("backend", [backends.BROKEN_FORWARD, backends.BROKEN_BACKWARD])
def test_what_does_not_compile_goes_on_eager(backend: str, tmp_path: Path) -> None:
    eager, module = Adversaries(), Adversaries()
    trained(eager, tmp_path, None)
    compile_ = Compile([Regional(backend=backend)], on_compile_error="eager")
    with pytest.warns(UserWarning, match=r"on_compile_error=eager: generator\.layers\.0, .*run eager"):
        trained(module, tmp_path, compile_, profiler="simple")
    assert module.seen == eager.seen
    assert compile_.record.regions == 0 or compile_.record.regions_compiled == 0


class Slow(Accumulates):
    """Takes a while outside of the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        CLOCK.sleep(0.001)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("clock")
def test_what_is_slower_than_eager_goes_on_eager(tmp_path: Path) -> None:
    with guarded.backend("tests_slow_by_hand", guarded.slowed(0.001), guarded.as_it_is) as backend:
        compile_ = Compile([Regional(backend=backend)], warmup_steps=1, on_slower="eager")
        module = Slow()
        with pytest.warns(UserWarning, match="on_slower=eager: 3 regions go on eager"):
            end = trained(module, tmp_path, compile_, max_epochs=54)
    facts = compile_.record.report["slowdown"]
    # An optimizer step is three batches.
    assert facts["before_the_first_step"]["eager_seconds"][0] == pytest.approx(0.003)
    assert facts["on_later_batches"][-1]["compiled_seconds"] == pytest.approx([0.012])
    assert end.global_step == 108, "timing again in the middle of the training leaves no trace"


class TextByHand(ragged_modules.TextModel):
    """Ragged texts, optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def test_every_shape_is_warmed_and_nothing_is_compiled_later(tmp_path: Path) -> None:
    runs = []
    for warm in (False, True):
        torch._dynamo.reset()
        buckets = Buckets(count=2, warm=warm, on_recompile="fail")
        compile_ = Compile([buckets, Regional(backend="eager")], ragged=ragged_modules.RAGGED, parity="off")
        torch.manual_seed(0)
        module = ragged_modules.fit(ragged_modules.TextData(), [compile_], module=TextByHand())
        runs.append((module.trained, compile_.record))
    assert [loss for *_, loss in runs[1][0]] == [loss for *_, loss in runs[0][0]]
    assert runs[1][1].report["warming"]["shapes"]
