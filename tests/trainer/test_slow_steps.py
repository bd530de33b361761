"""Steps that take ten times the median: found, attributed to what was seen beside them, told once."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.trainer.clock import CLOCK, stop_time
from tests.trainer.lightning_modules import Blocks
from trainer.callback import Compile
from trainer.console import summary
from trainer.telemetry.curves import MAX_LISTED, Allocations, SlowSteps, cause_of
from trainer.telemetry.facts import sentence, slow_steps_table
from trainer.telemetry.meter import SeenShapes, Step, shape_of
from trainer.telemetry.record import Event, RunRecord, SlowStep

LONG = 0.4
QUIET = Allocations()
EVENT = Event(kind="recompile", reason="size", location="model.py:3 forward", step=7)


@pytest.mark.parametrize(
    ("marks", "during", "cause", "detail"),
    [
        ({"compiled": True, "recompiled": True}, QUIET, "recompile", "model.py:3 forward"),
        ({"compiled": True}, QUIET, "capture", None),
        ({"waited_seconds": 0.8, "collected_seconds": 0.6}, QUIET, "data_wait", "0.8 s"),
        ({"waited_seconds": 0.3, "collected_seconds": 0.6}, QUIET, "garbage_collection", "0.6 s"),
        ({"new_shape": ((4, 3), (4,)), "waited_seconds": 0.3}, Allocations(1, 2), "first_of_shape", "4x3 4"),
        (
            {"after": "validating"},
            Allocations(1, 2),
            "allocator",
            "1 retries, 2 allocations by the driver in this window",
        ),
        ({"after": "validating"}, QUIET, "validation", None),
        ({"after": "saving"}, QUIET, "checkpoint", None),
        ({"after": "timing eager"}, QUIET, "pause", "timing eager"),
        ({}, QUIET, "unknown", None),
    ],
)
def test_the_surest_cause_is_named(marks: dict[str, Any], during: Allocations, cause: str, detail: str | None) -> None:
    assert cause_of(Step(7, seconds=1.0, **marks), 0.01, during, [EVENT]) == (cause, detail)


def judged(seconds: list[float], *, warmup_steps: int = 2, window: int = 4) -> tuple[SlowSteps, list[SlowStep]]:
    told: list[SlowStep] = []
    slow = SlowSteps(warmup_steps=warmup_steps, report=told.append)
    steps = [Step(number, seconds=taken) for number, taken in enumerate(seconds, 1)]
    for first in range(0, len(steps), window):
        part = steps[first : first + window]
        slow.look(part, [step.seconds for step in part if step.number > warmup_steps], QUIET, [])
    return slow, told


def test_ten_times_the_median_is_slow_and_less_is_not() -> None:
    slow, told = judged([5.0, 5.0, *[0.01] * 5, 0.099, *[0.01] * 5, 0.101, 0.01])
    assert [(step.step, step.seconds, step.median_seconds) for step in told] == [(14, 0.101, 0.01)]
    assert slow.causes == {"unknown": 1}
    assert slow.count == 1


def test_steps_before_there_is_a_median_are_judged_once_there_is_one() -> None:
    slow, told = judged([5.0, 5.0, 0.01, 0.5, *[0.01] * 5])
    assert slow.count is None, "nine steps: too few"
    assert told == []
    slow, told = judged([5.0, 5.0, 0.01, 0.5, *[0.01] * 12])
    assert [step.step for step in told] == [4]


def test_what_is_listed_is_bounded_and_all_are_counted() -> None:
    slow, _ = judged([0.01] * 900 + [1.0] * (MAX_LISTED + 20))
    assert (len(slow.listed), slow.count) == (MAX_LISTED, MAX_LISTED + 20)
    assert "20 more are counted" in slow_steps_table(slow.listed, slow.count)


def test_shapes_are_those_of_the_tensors_of_any_kind_of_batch() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(2)
    for batch in ((x, y), [x, y], {"x": x, "n": 3, "y": y}, type("Batch", (), {"__init__": vars_of(x, y)})()):
        assert shape_of(batch) == ((2, 3), (2,))
    seen = SeenShapes()
    assert seen.new((x, y)) is not None
    assert seen.new((x, y)) is None
    assert shape_of(None) == ()


def test_shapes_settle_unless_most_batches_have_one_of_their_own() -> None:
    again, own = SeenShapes(), SeenShapes()
    settled = []
    for number in range(100):
        again.new(torch.zeros(1 + number % 40))
        own.new(torch.zeros(1 + number))
        settled.append((again.settle, own.settle))
    assert settled[:16] == [(False, False)] + [(True, True)] * 15
    assert settled[16:40] == [(False, False)] * 24, "so far they are alike"
    assert settled[46:] == [(True, False)] * 54


def vars_of(x: Tensor, y: Tensor) -> Any:
    def init(self: Any) -> None:
        self.x, self.y = x, y

    return init


class Cycle:
    """Rubbish that takes long to be collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        CLOCK.sleep(LONG)


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Three hundred examples; one batch of them takes long, one is short."""

    def __len__(self) -> int:
        return 300

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        if 100 in indices:  # of step 26
            CLOCK.sleep(LONG)
        if 196 in indices:  # of step 50: a batch of another shape
            indices = indices[:3]
        return [(torch.randn(8), torch.randn(1)) for _ in indices]


class Disturbed(Blocks):
    """Steps of five milliseconds; some are disturbed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = batch_idx + 1
        CLOCK.sleep(LONG if step in (30, 36, 50) else 0.005)
        if step == 40:
            Cycle()
            gc.collect()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run in which five steps are slow, each for a reason of its own."""
    import lightning as L

    record = RunRecord(task="disturbed")
    folder = tmp_path_factory.mktemp("disturbed")
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[Compile(record=record, warmup_steps=2)],
        default_root_dir=folder,
        max_steps=60,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=10,
        val_check_interval=35,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        stop_time(patch)
        loader = DataLoader(Examples(), batch_size=4)
        trainer.fit(Disturbed(), loader, DataLoader(Examples(), batch_size=4))
    record.save(folder)
    return RunRecord.load(folder)


def test_each_disturbed_step_is_found_with_its_cause(disturbed: RunRecord) -> None:
    found = {step.step: step.cause for step in disturbed.slow_steps}
    planted = {26: "data_wait", 30: "unknown", 36: "validation", 40: "garbage_collection", 50: "first_of_shape"}
    assert found == planted
    assert disturbed.slow_step_count == sum(disturbed.slow_step_causes.values()) == len(planted)
    assert all(step.seconds == pytest.approx(LONG, abs=0.01) for step in disturbed.slow_steps)


def test_the_summary_counts_them(disturbed: RunRecord) -> None:
    assert "took ten times the median or more: " in summary(disturbed)["slow steps"]
    assert "slow steps" not in summary(RunRecord(task="any", slow_step_count=0))


def test_the_collector_is_watched_during_a_run_only(disturbed: RunRecord) -> None:
    assert not [callback for callback in gc.callbacks if "GarbageMonitor" in repr(callback)]


def test_a_slow_step_is_one_sentence() -> None:
    slow = SlowStep(step=7, seconds=1.0, median_seconds=0.01, cause="first_of_shape", detail="4x3")
    assert sentence(slow) == "step 7 took 1 s, 100 times the median: the first batch of its shape (4x3)"
    assert "| 7 | 1 | 100 | the first batch of its shape | 4x3 |" in slow_steps_table([slow], 1)
