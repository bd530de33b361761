"""Whole steps from graphs under Lightning: eager's losses, counters, logs and gradients, or a reason why not."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import Regional, region
from strategies.cuda_graph import step_graphs
from strategies.cuda_graph.host_recorder import HostRecorder
from tests.trainer.capturing import Captured
from tests.trainer.lightning_modules import quiet_trainer
from tests.trainer.recording import Recorded, RecordedNetwork, RecordingEngine
from trainer.callback import Compile
from trainer.guards import ParityError


class Net(L.LightningModule):
    """Layers with dropout and batch statistics; logs its loss."""

    def __init__(self, optimizer: str = "adamw_fused") -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.optimizer = optimizer
        self.last = 0.0

    def loss(self, batch: Any) -> Tensor:
        x_BD, target_B1 = batch
        return nn.functional.mse_loss(self.net(x_BD), target_B1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adamw_fused":
            optimizer = torch.optim.AdamW(parameters, lr=0.05, fused=True)
        elif self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr=0.05)
        else:
            optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        if self.optimizer == "sgd":
            return optimizer
        if self.optimizer == "one_cycle":
            optimizer = torch.optim.AdamW(parameters, lr=0.05, fused=True)
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        else:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CountsSteps(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = self.last + 1
        return self.loss(batch)


class Slot:
    __slots__ = ("value",)


class FillsSlot(Net):
    def __init__(self) -> None:
        super().__init__()
        self.slot = Slot()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self.slot, "value"):
            self.slot.value = 2.0
        return self.loss(batch) * self.slot.value

    def on_train_batch_end(self, *_: Any) -> None:
        del self.slot.value


class ReadsLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * 2 if loss.item() > 0 else loss


class HoldsGenerator(Net):
    random = random.Random(0)


class SparseBatch(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].to_sparse(), batch[1]]

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0].to_dense(), batch[1]])


class NestedBatch(SparseBatch):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [torch.nested.nested_tensor(list(batch[0])), batch[1]]

    def loss(self, batch: Any) -> Tensor:
        return Net.loss(self, [batch[0].to_padded_tensor(0.0), batch[1]])


class HasHook(Net):
    def on_after_backward(self) -> None:
        pass


class Manual(Net):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Watch(L.Callback):
    """Losses, logged values and steps as a callback sees them."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[float] = []
        self.steps: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else 0.0)  # 0: the step was skipped
        self.logged.append(float(trainer.callback_metrics.get("loss_step", -1.0)))
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(
    module: L.LightningModule,
    folder: Path,
    callback: L.Callback | None = None,
    rows: int = 48,
    batches: Any = None,
    loader: bool = True,
    **options: Any,
) -> Watch:
    L.seed_everything(0, verbose=False)
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    given: dict[str, Any] = {"batch_size": 4} if batches is None else {"batch_sampler": batches}
    data = DataLoader(TensorDataset(torch.randn(rows, 8), torch.randn(rows, 1)), **given)
    watch = Watch()
    trainer = quiet_trainer(
        callbacks=[watch, *([] if callback is None else [callback])],
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"accelerator": "cpu", "max_steps": 20, "max_epochs": -1, **options},
    )
    trainer.fit(module, data if loader else None)
    watch.final = {name: float(value) for name, value in trainer.callback_metrics.items()}  # type: ignore[attr-defined]
    watch.state = {name: value.clone() for name, value in module.state_dict().items()}  # type: ignore[attr-defined]
    watch.optimizer = trainer.optimizers[0].state_dict()  # type: ignore[attr-defined]
    return watch


def both(
    kind: type[Net], folder: Path, *arguments: Any, rows: int = 48, **options: Any
) -> tuple[Any, Any, dict[str, Any]]:
    eager = fit(kind(*arguments), folder, None, rows, **options)
    captured = Captured([Recorded()])
    graphed = fit(kind(*arguments), folder, captured, rows, **options)
    assert graphed.losses == pytest.approx(eager.losses, rel=1e-5)
    assert graphed.steps == eager.steps
    assert graphed.rates == eager.rates, "the user sees the schedule's floats"
    assert graphed.logged == pytest.approx(eager.logged, rel=1e-5)
    assert graphed.final == pytest.approx(eager.final, rel=1e-5)
    for name, value in eager.state.items():  # type: ignore[attr-defined]
        torch.testing.assert_close(graphed.state[name], value)  # type: ignore[attr-defined]
    return eager, graphed, captured.facts


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd"])
def test_a_whole_step_is_one_graph_with_eagers_losses(optimizer: str, clip: float | None, tmp_path: Path) -> None:
    _, _, report = both(Net, tmp_path, optimizer, gradient_clip_val=clip)
    assert report["graphs"] == 1
    assert (report["eager_steps"], report["replayed_steps"]) == (2, 18)
    assert report["captured"][0].startswith("whole step on 4x8 4x1")
    assert report["refused"] == []


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd"])
def test_accumulated_batches_keep_their_gradients(optimizer: str, tmp_path: Path) -> None:
    _, _, report = both(Net, tmp_path, optimizer, accumulate_grad_batches=3, max_steps=8)
    assert [name.split(" on ")[0] for name in report["captured"]] == ["forward and backward"] * 2 + ["whole step"]


@pytest.mark.parametrize(
    ("rows", "accumulate", "optimizer"),
    [((4, 2, 4), 3, "sgd"), ((2, 4, 4, 4, 4, 4), 3, "sgd"), ((4, 2), 1, "adamw"), ((2, 4), 1, "adamw")],
)
def test_no_gradient_is_lost_that_only_some_batches_have(
    rows: tuple[int, ...], accumulate: int, optimizer: str, tmp_path: Path
) -> None:
    class Short(Net):
        """A layer that batches of two rows alone use."""

        def __init__(self, optimizer: str) -> None:
            super().__init__(optimizer)
            self.short = nn.Linear(8, 1)

        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            return loss + nn.functional.mse_loss(self.short(batch[0]), batch[1]) if len(batch[0]) == 2 else loss

    ends = list(itertools.accumulate(rows * 2))
    batches = [list(range(end - size, end)) for end, size in zip(ends, rows * 2, strict=True)]
    options = {"rows": ends[-1], "batches": batches, "accumulate_grad_batches": accumulate, "max_steps": 12}
    _, _, report = both(Short, tmp_path, optimizer, **options)
    assert report["refused"][-1] == "not every weight has a gradient in each micro-batch"


def test_a_batch_that_is_changed_in_place_stays_changed(tmp_path: Path) -> None:
    class Cached(Net):
        """The same tensors in each epoch, as on a device that holds the whole data set."""

        def train_dataloader(self) -> Any:
            batches = [[torch.randn(4, 8), torch.randn(4, 1)] for _ in range(3)]
            return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

        def loss(self, batch: Any) -> Tensor:
            batch[0].mul_(1.2)
            return super().loss(batch)

    eager, _, report = both(Cached, tmp_path, "sgd", loader=False)
    assert len(set(eager.losses)) == 20
    assert report["replayed_steps"] > 10


def test_sparse_gradients_are_not_captured(tmp_path: Path) -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__("sgd")
            self.embedding = nn.Embedding(5, 8, sparse=True)

        def loss(self, batch: Any) -> Tensor:
            return super().loss([batch[0] + self.embedding((batch[0][:, 0] > 0).long()), batch[1]])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    _, _, report = both(Sparse, tmp_path, accumulate_grad_batches=2, max_steps=8)
    assert report["refused"][-1] == "sparse gradients differ in size"


def test_an_optimizer_that_reads_its_state_on_the_host_runs_after_the_graph(tmp_path: Path) -> None:
    # On a CPU AdamW without fused keeps its step count there; on CUDA it can be captured.
    _, graphed, report = both(Net, tmp_path, "adamw", accumulate_grad_batches=2, max_steps=8)
    assert all(name.startswith("forward and backward") for name in report["captured"])
    assert "the optimizer runs after each graph" in report["refused"][-1]
    assert graphed.optimizer["param_groups"][0]["capturable"] is False


def test_betas_that_change_all_the_time_leave_the_optimizer_out(tmp_path: Path) -> None:
    _, _, report = both(Net, tmp_path, "one_cycle")
    assert "hyperparameters change all the time" in report["refused"][0]
    assert [name.split(" on ")[0] for name in report["captured"]] == ["forward and backward"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CountsSteps, "changes self.last (test_step_capture.py:"),
        (FillsSlot, "changes self.slot.value (test_step_capture.py:"),
        (ReadsLoss, "not permitted when stream is capturing"),
        (HoldsGenerator, "on the host from HoldsGenerator.random"),
        (SparseBatch, "the batch: it holds a tensor of layout torch.sparse_coo"),
        (NestedBatch, "the batch: it holds a nested tensor"),
        (HasHook, "HasHook.on_after_backward"),
        (Manual, "manual optimization"),
    ],
)
def test_what_a_graph_would_not_repeat_is_not_captured(kind: type[Net], reason: str, tmp_path: Path) -> None:
    _, _, report = both(kind, tmp_path)
    assert report["graphs"] == 0
    assert any(reason in refused for refused in report["refused"]), report["refused"]


def test_a_validation_between_steps_changes_nothing(tmp_path: Path) -> None:
    class Validates(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(4, 8), torch.ones(4, 1)), batch_size=4)

    for accumulate in (1, 2):
        _, _, report = both(
            Validates, tmp_path, accumulate_grad_batches=accumulate, val_check_interval=4, num_sanity_val_steps=0
        )
        assert report["replayed_steps"] > report["eager_steps"]


def test_a_step_without_a_loss_is_skipped_as_ever(tmp_path: Path) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
            return None if len(batch[0]) == 2 else self.loss(batch)

    _, _, report = both(Skips, tmp_path, "sgd", rows=46, max_steps=40)
    assert report["replayed_steps"] > 30


def test_further_shapes_run_eager_once_there_are_enough_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 1)
    captured = Captured([Recorded()])
    fit(Net(), tmp_path, captured, rows=46, max_steps=40)
    report = captured.facts
    assert report["graphs"] == 1
    assert report["refused"] == ["there are 1 graphs already"]


def test_what_is_prepared_is_no_steady_step(tmp_path: Path) -> None:
    captured = Captured([Recorded()])
    captured.audit_at = (10,)
    fit(Net(), tmp_path, captured)
    waiting = [step for step, done in enumerate(captured.done) if not done]
    assert waiting == [0, 1, 2, 10]


# ---- the user's code is called as in eager ---------------------------------------------------------------------------


UNSEEN = threading.local()
"""What lies in one is no state of a step's that a recorder looks at."""


class Counted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        UNSEEN.calls += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("parity", ["on", "strict", "off"])
def test_each_batch_is_called_once_in_python_or_replayed(parity: str, accumulate: int, tmp_path: Path) -> None:
    captured = Captured([Recorded()], parity=parity)
    captured.audit_at = (12,)
    UNSEEN.calls = 0
    watch = fit(Counted(), tmp_path, captured, rows=40, accumulate_grad_batches=accumulate)
    facts, batches = captured.facts, len(watch.losses)
    assert facts["replayed_steps"] + facts["eager_steps"] == batches
    assert UNSEEN.calls == facts["eager_steps"] + facts["graphs"], "a graph is made in the one call of a step"
    assert facts["replayed_steps"] > batches // 2
    if parity != "off":
        assert facts["parity"]["verdict"] == "passed"
        assert facts["parity"]["audits"] >= 1
        assert not any("second time" in note for note in captured.program.notes)


FACTOR = 1.0


class Scaled(torch.autograd.Function):
    """Its backward reads a global, which no forward knows of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * FACTOR


class ReadsInItsBackward(Net):
    def __init__(self) -> None:
        super().__init__("sgd")

    def loss(self, batch: Any) -> Tensor:
        return super().loss((Scaled.apply(batch[0] * self.net[0].weight[0]), batch[1]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global FACTOR
        FACTOR = 1.0 if self.global_step < 10 else 3.0


def test_what_a_backward_reads_is_part_of_the_graph(tmp_path: Path) -> None:
    _, _, report = both(ReadsInItsBackward, tmp_path)
    assert report["graphs"] == 2


@pytest.mark.parametrize("on_difference", ["eager", "fail"])
def test_a_captured_step_that_differs_goes_eager_or_ends_the_run(
    on_difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostRecorder, "_entered", lambda *_: None)
    compile_ = Compile([Recorded()], on_difference=on_difference)
    line = (
        r"the captured step runs without a graph from step 18 on: the replay of .* differs from the step without it: "
    )
    line += r".*; it may have been so since step 8, the last one that was audited clean"
    ended = pytest.raises(ParityError, match=r'^on_difference="fail": ' + line)
    with ended if on_difference == "fail" else pytest.warns(UserWarning, match=line):
        fit(ReadsInItsBackward(), tmp_path, compile_)
    assert compile_.record.status == ("failed" if on_difference == "fail" else "finished")
    assert compile_.record.audits.verdict == ("failed" if on_difference == "fail" else "went eager")


def helper(batch_idx: int) -> None:
    """Has no use for it."""


def uses() -> dict[str, tuple[Callable[[Any, Any, int], Any], bool]]:
    factors = [1.0] * 100

    def handed_on(self: Any, batch: Any, batch_idx: int) -> Any:
        helper(batch_idx)
        return Net.training_step(self, batch, batch_idx=batch_idx)

    @torch.enable_grad()
    def decorated(self: Any, *arguments: Any, **named: Any) -> Any:
        return Net.training_step(self, *arguments, **named)

    return {
        "handed on": (handed_on, False),
        "decorated": (decorated, False),
        "not reached": (lambda self, batch, batch_idx: self.loss(batch) * (batch_idx if self.last else 1.0), False),
        "untouched": (lambda self, batch, batch_idx: self.loss(batch), False),
        "index of a list": (lambda self, batch, batch_idx: self.loss(batch) * factors[batch_idx], True),
        "text": (lambda self, batch, batch_idx: self.loss(batch) * len(f"{batch_idx}"), True),
        "modulo": (lambda self, batch, batch_idx: self.loss(batch) * (1.0 + (batch_idx % 2 == 7)), True),
        "of C": (lambda self, batch, batch_idx: self.loss(batch) * min(1, len(range(batch_idx + 1))), True),
        "factor": (lambda self, batch, batch_idx: self.loss(batch) * batch_idx, True),
        "unpacked": (lambda self, *given: self.loss(given[0]) * (1.0 + given[1]), True),
        "returned": (lambda self, batch, batch_idx: {"loss": self.loss(batch), "index": batch_idx}, True),
    }


@pytest.mark.parametrize("name", list(uses()))
def test_the_number_of_a_batch_counts_where_it_is_used(name: str, tmp_path: Path) -> None:
    step, used = uses()[name]

    class Uses(Net):
        pass

    Uses.training_step = step  # type: ignore[method-assign]
    _, _, report = both(Uses, tmp_path, "sgd", rows=80)
    assert (report["graphs"] == 0) == used, report
    assert used == any("batch_idx" in reason for reason in report["refused"])
    assert used or report["replayed_steps"] == 18


def test_a_step_that_fails_in_its_capture_is_called_again_and_said(tmp_path: Path) -> None:
    class Other(RecordingEngine):
        def capture(self, call: Any) -> Any:
            super().capture(call)
            raise RuntimeError("the driver gives up")

    class Fails(Recorded):
        engine = Other

    eager = fit(Net(), tmp_path)
    captured = Captured([Fails()])
    assert fit(Net(), tmp_path, captured).losses == pytest.approx(eager.losses, rel=1e-5)
    assert sum("was called a second time on this batch" in note for note in captured.program.notes) == 2
    assert "the driver gives up" in captured.program.given_up["step"]


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("capturing", "parity", "count"),
    [
        (Recorded, "on", "replayed_steps"),
        (Recorded, "off", "replayed_steps"),
        (RecordedNetwork, "on", "replayed_calls"),
    ],
)
def test_code_that_is_missing_in_a_capture_is_compared_first_and_captured_later(
    capturing: type[Recorded], parity: str, count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "is_looked_at", lambda args: False)  # the stand-in for a capture is a mode
    ended = 0
    for number in range(1, 9):  # one of these steps is captured

        class Resets(Blocks):
            def on_train_batch_start(self, batch: Any, batch_idx: int, at: int = number) -> None:
                if batch_idx == at:
                    torch._dynamo.reset()

        eager, compile_ = fit(Resets(), tmp_path), Compile([Regional(backend="aot_eager"), capturing()], parity=parity)
        assert fit(Resets(), tmp_path, compile_).losses == pytest.approx(eager.losses, rel=1e-5)
        record = compile_.record
        assert not record.eager_parts
        assert record.report["recorded"][count]
        lines = [note for note in record.notes if "code was missing" in note]
        assert len(lines) <= 1
        ended += len(lines)
    assert ended
