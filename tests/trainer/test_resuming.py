"""Resuming under another strategy, with eager's losses; and with other settings: said where the run can go on, refused
where it cannot."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sweep import some
from tests.trainer.conftest import FLOOR
from tests.trainer.runs import MODULE_STRATEGIES, curve, last_checkpoint, order_of, relative_differences, train
from tests.trainer.test_resume_exactness import send_in_step
from trainer.checkpoints import changes, plan_of

STEPS = 3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> Path:
    """A run of a few steps, under a schedule that depends on their number."""
    directory = tmp_path_factory.mktemp("run")
    train(directory, f"trainer.max_steps={STEPS}", "task.warmup_steps=1")
    return directory


def resumed(run_dir: Path, tmp_path: Path, *changes: str) -> list[str]:
    """What the record says about resuming."""
    given = ("task.warmup_steps=1", f"trainer.max_steps={STEPS + 1}", *changes, f"resume={run_dir}")
    record = train(tmp_path / "new", *given)
    assert (record.status, record.steps) == ("finished", STEPS + 1)
    return [note.removeprefix("resume: ") for note in record.notes if note.startswith("resume: ")]


SCHEDULE_COUNTS = "The learning-rate schedule counts steps, which hold another number of examples now"
ORDER = "The order does not continue: examples of this epoch may be trained twice or left out"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("task.data.batch_size=4", f"2 examples a batch at the checkpoint, 4 now. {ORDER}. {SCHEDULE_COUNTS}"),
        (
            "trainer.accumulate_grad_batches=2",
            f"1 batches a step at the checkpoint, 2 now. {SCHEDULE_COUNTS}",
        ),
        ("trainer.accumulate_grad_batches=1", f"trainer.max_steps was {STEPS}, {STEPS + 1} now: a schedule"),
    ],
    ids=["batch size", "accumulation", "steps"],
)
def test_what_a_resumed_run_does_otherwise_is_said(run_dir: Path, tmp_path: Path, option: str, said: str) -> None:
    with pytest.warns(UserWarning, match="resume: "):
        notes = resumed(run_dir, tmp_path, option)
    assert any(note.startswith(said) for note in notes)


def test_a_run_that_goes_on_as_it_was_has_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        send_in_step(patch, 2, signal.SIGINT)
        assert train(tmp_path / "stopped", "task.warmup_steps=1").steps == 2
    assert last_checkpoint(tmp_path / "stopped")["callbacks"]["Resuming"]["order"] == {
        "batch_size": 2,
        "world_size": 1,
        "accumulate_grad_batches": 1,
        "max_steps": 4,
    }
    record = train(tmp_path / "new", "task.warmup_steps=1", f"resume={tmp_path / 'stopped'}")
    assert [note for note in record.notes if note.startswith("resume")] == []


@pytest.mark.parametrize("world", [1, 2])
def test_another_number_of_processes_is_said(world: int) -> None:
    sampler = SimpleNamespace(batch_sizes={16: 4, 32: 2})
    trainer: Any = SimpleNamespace(train_dataloader=SimpleNamespace(batch_size=None, batch_sampler=sampler))
    trainer.world_size, trainer.accumulate_grad_batches, trainer.max_steps = world, 1, 9
    before, now = {"batch_size": {16: 4, 32: 2}, "world_size": 2, "accumulate_grad_batches": 1}, plan_of(trainer)
    said = [] if world == 2 else [f"2 processes at the checkpoint, 1 now. {ORDER}"]
    assert list(changes(before, now, schedules=False)) == said
    assert list(changes({}, now, schedules=True)) == []  # an earlier version's checkpoint does not say


def no_schedules(checkpoint: dict[str, Any]) -> None:
    checkpoint["lr_schedulers"] = []


def no_optimizers(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = []


def a_weight() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1))]


def another_schedule(checkpoint: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([{"params": a_weight()} for _ in checkpoint["lr_schedulers"][0]["base_lrs"]], lr=0.1)
    checkpoint["lr_schedulers"] = [torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()]


def another_optimizer(checkpoint: dict[str, Any]) -> None:
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    other = torch.optim.SGD(a_weight(), lr=0.1, momentum=0.9).state_dict()["param_groups"][0]
    for group in groups:
        kept = {name: group[name] for name in ("params", "initial_lr")}
        group.clear()
        group.update({**other, **kept})


def other_groups(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["param_groups"].pop()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (no_schedules, "resume: the checkpoint holds 0 learning-rate schedules, this run has 1"),
        (no_optimizers, "resume: the checkpoint holds 0 optimizers, this run has 1"),
        (another_schedule, "resume: the checkpoint's schedule is not this run's LambdaLR: it holds no lr_lambdas"),
        (another_optimizer, "resume: the checkpoint is of another optimizer than AdamW: it holds no betas, eps"),
        (other_groups, "of the run that wrote it: ValueError: loaded state dict"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_state_that_does_not_fit_is_refused_before_the_first_step(
    run_dir: Path, tmp_path: Path, change: Any, complaint: str
) -> None:
    checkpoint = last_checkpoint(run_dir)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="resume") as raised:
        train(tmp_path / "new", f"resume={tmp_path / 'other.ckpt'}", f"trainer.max_steps={STEPS + 1}")
    assert complaint in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_refused_run_leaves_the_record_of_the_one_that_it_was_to_go_on_with(run_dir: Path) -> None:
    before = (run_dir / "record.json").read_bytes()
    with pytest.raises(ValueError, match="leaves nothing to do"):
        train(run_dir, f"resume={run_dir}", f"trainer.max_steps={STEPS}")
    assert (run_dir / "record.json").read_bytes() == before
    with pytest.raises(ValueError, match="holds the record of another run"):
        train(run_dir)
    assert (run_dir / "record.json").read_bytes() == before


COMBINATION = "[regional,optimizer,buckets,cached]"
ARMS = ["eager", *MODULE_STRATEGIES, "[regional,buckets]", COMBINATION]
PAIRS = list(zip(ARMS, [*ARMS[1:], ARMS[0]], strict=True))
SAVED_AT, ENDS_AT = 3, 6

TASK = "micro"  # the quickest that every arm applies to

GoneOn = Callable[[str, str], dict[int, float]]


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> GoneOn:
    """Losses after a checkpoint saved under one strategy, trained on under another."""
    saved: dict[str, Path] = {}
    made: dict[tuple[str, str], dict[int, float]] = {}

    def make(before: str, after: str) -> dict[int, float]:
        if before not in saved:
            saved[before] = tmp_path_factory.mktemp("saved")
            record = train(saved[before], f"trainer.max_steps={SAVED_AT}", task=TASK, strategy=before, backend="eager")
            assert record.status == "finished"
        if (before, after) not in made:
            run_dir = tmp_path_factory.mktemp("gone-on")
            changes = (f"trainer.max_steps={ENDS_AT}", f"resume={saved[before]}")
            record = train(run_dir, *changes, task=TASK, strategy=after, backend="eager")
            assert (record.status, record.steps) == ("finished", ENDS_AT)
            assert record.resumed_from == str(saved[before] / "checkpoints" / "last.ckpt")
            made[before, after] = curve(run_dir)
        return made[before, after]

    return make


@pytest.mark.parametrize(
    ("before", "after"), some([pytest.param(*pair, id=" to ".join(pair)) for pair in PAIRS], every=3)
)
def test_any_arm_goes_on_from_any_other(before: str, after: str, gone_on: GoneOn) -> None:
    losses = gone_on(before, after)
    assert list(losses) == list(range(SAVED_AT + 1, ENDS_AT + 1))
    eager = gone_on(order_of(before, TASK), order_of(after, TASK))
    assert max(relative_differences(losses, eager)) <= FLOOR


def test_the_order_of_the_examples_is_what_tells_the_arms_apart(gone_on: GoneOn) -> None:
    assert {arm: order_of(arm) for arm in ("regional", COMBINATION)} == {"regional": "eager", COMBINATION: "buckets"}
    assert max(relative_differences(gone_on("eager", "eager"), gone_on("eager", "buckets"))) > FLOOR
