"""What every strategy promises on every task: eager's losses and names, and a record that leaves nothing out.

Strategies and tasks are taken from their registries, so that a new one is covered the day it is added. A handful of
combinations, one with a composite among them, promise the same.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from strategies import STRATEGIES
from strategies.compose import label
from tasks import TASKS
from tests.conftest import ROOT
from tests.trainer.conftest import Baseline
from tests.trainer.runs import (
    MODULE_STRATEGIES,
    STEPS,
    curve,
    last_checkpoint,
    order_of,
    overrides,
    refusal,
    relative_differences,
    train,
)
from trainer.config import compose
from trainer.telemetry.record import RunRecord

ALWAYS = (
    "started",
    "device",
    "device_type",
    "precision",
    "import_seconds",
    "first_step_seconds",
    "warmup_seconds",
    "warmup_steps",
    "steps",
    "steady_steps",
    "pause_seconds",
    "peak_process_memory_gib",
    "final_loss",
    "total_seconds",
)
"""Figures that every finished run has."""
COMBINATIONS = {
    "[optimizer,modular,dynamic]": "dynamic+modular+optimizer",
    "[whole,cached,buckets]": "cached+buckets+whole",
    "[cached,buckets,optimizer,regional]": "cached+buckets+regional+optimizer",
    "[checkpointing,regional]": "checkpointing+regional",
    "full_stack": "cached+buckets+regional+optimizer+cuda_graph",
}
"""Label by combination; without a CUDA device, cuda_graph leaves itself out."""
NOT_ON_A_CPU = ("peak_device_memory_gib", "model_flops_utilization", "joules_per_sample")
OF_THE_COMPILER = (
    "compile_seconds",
    "cache",
    "cache_hits",
    "cache_misses",
    "regions",
    "regions_compiled",
    "graphs",
    "graph_breaks",
    "recompiles",
    "cudagraph_skips",
)


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory, private_cache: None
) -> Callable[[str, str], tuple[Path, RunRecord]]:
    """Train a task under a strategy, once a session for each pair; strategies alone validate after the third step."""
    import torch

    made: dict[tuple[str, str], tuple[Path, RunRecord]] = {}

    def make(task: str, strategy: str) -> tuple[Path, RunRecord]:
        if (task, strategy) not in made:
            torch._dynamo.reset()
            run_dir = tmp_path_factory.mktemp(f"{task}-{strategy}")
            changes = ("trainer.val_every_n_steps=3",) if strategy in STRATEGIES else ()
            # What ahead-of-time compilation does to a combination is seen on one task, and to a strategy on each.
            backend = "eager" if strategy in COMBINATIONS and task != "captioning" else "aot_eager"
            made[task, strategy] = run_dir, train(run_dir, *changes, task=task, strategy=strategy, backend=backend)
        return made[task, strategy]

    return make


Trained = Callable[[str, str], tuple[Path, RunRecord]]
ARMS = ["eager", *sorted(STRATEGIES), *sorted(COMBINATIONS)]


def every_task_with(arms: list[str], *, refused: bool = False) -> pytest.MarkDecorator:
    """Every pair of task and arm that fit each other, or, ``refused``, that do not."""
    pairs = [(task, arm) for task in sorted(TASKS) for arm in arms if bool(refusal(task, arm)) is refused]
    return pytest.mark.parametrize(("task", "strategy"), pairs)


EVERY_STRATEGY = every_task_with(sorted(STRATEGIES))
EVERY_COMBINATION = every_task_with(sorted(COMBINATIONS))
EVERY_ARM = every_task_with(ARMS)


@EVERY_STRATEGY
def test_losses_are_eagers_at_every_step(
    task: str, strategy: str, trained: Trained, baseline: Callable[..., Baseline]
) -> None:
    if STRATEGIES[strategy].reorders_data:
        # Eager sees other batches. What it trains alone is eager in its order; compiled beside it must equal that.
        run_dir, record = trained(task, f"[regional,{strategy}]")
        eager = baseline(task, order=strategy)
    else:
        run_dir, record = trained(task, strategy)
        eager = baseline(task)
    losses = curve(run_dir)
    assert list(losses) == list(range(1, STEPS + 1))
    assert len(set(losses.values())) == STEPS, "the model learns"
    assert max(relative_differences(losses, eager.losses)) <= eager.tolerance
    assert record.final_loss == pytest.approx(losses[STEPS])


@EVERY_COMBINATION
def test_losses_of_a_combination_are_eagers_at_every_step(
    task: str, strategy: str, trained: Trained, baseline: Callable[..., Baseline]
) -> None:
    run_dir, record = trained(task, strategy)
    eager = baseline(task, order=order_of(strategy, task))
    losses = curve(run_dir)
    assert list(losses) == list(range(1, STEPS + 1))
    assert max(relative_differences(losses, eager.losses)) <= eager.tolerance
    assert record.regions_compiled == record.regions
    assert record.graph_breaks == 0
    assert record.compile_seconds is not None
    assert record.warmup_seconds is not None
    assert record.warmup_seconds >= record.compile_seconds, "what was compiled belongs to warm-up steps"
    if "buckets" in record.label and not refusal(task, "buckets"):
        edges = record.report["buckets"]["edges"]
        assert (len(edges), [edge % 16 for edge in edges]) == (2, [0, 0])
    if "optimizer" in record.label:
        assert record.report["optimizer"]["form"] == "functional"
    if "cuda_graph" in record.label:
        assert "cuda_graph: left out, CUDA graphs need a CUDA device" in record.notes


@pytest.mark.parametrize("strategy", [name for name in sorted(COMBINATIONS) if name.startswith("[")])
def test_a_combination_is_one_whatever_the_order_of_its_names(strategy: str) -> None:
    names = strategy.strip("[]").split(",")
    # Each name comes first, last and in between once.
    for order in (names[::-1], *(names[start:] + names[:start] for start in range(len(names)))):
        compiled = compose(overrides(f"[{','.join(order)}]")).compile
        assert label(compiled.values()) == COMBINATIONS[strategy]


@every_task_with(ARMS, refused=True)
def test_a_strategy_that_cannot_be_applied_to_a_task_is_refused_with_the_reason(
    task: str, strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=refusal(task, strategy)):
        train(tmp_path, task=task, strategy=strategy)


@EVERY_ARM
def test_state_dict_keys_are_eagers(
    task: str, strategy: str, trained: Trained, baseline: Callable[[str], Baseline]
) -> None:
    run_dir, _ = trained(task, strategy)
    assert list(last_checkpoint(run_dir)["state_dict"]) == baseline(task).state_dict_keys


@EVERY_ARM
def test_the_record_of_a_finished_run_is_complete(task: str, strategy: str, trained: Trained) -> None:
    _, record = trained(task, strategy)
    expected = COMBINATIONS.get(strategy, strategy)
    assert (record.status, record.exit_code, record.reason) == ("finished", 0, None)
    title = "micro ragged" if task == "micro" else TASKS[task].name
    assert (record.task, record.label, record.steps) == (title, expected, STEPS)
    assert record.steady_steps is not None
    assert record.warmup_steps is not None
    assert record.steady_steps + record.warmup_steps == STEPS
    for name in ALWAYS:
        assert getattr(record, name) is not None, name
    assert record.config["trainer"]["max_steps"] == STEPS
    assert record.versions["torch"]


@EVERY_ARM
def test_a_figure_that_does_not_exist_is_none(task: str, strategy: str, trained: Trained) -> None:
    _, record = trained(task, strategy)
    for name in NOT_ON_A_CPU:
        assert getattr(record, name) is None, name
    if strategy == "eager":
        for name in OF_THE_COMPILER:
            assert getattr(record, name) is None, name
        assert record.strategies == []
    # aot_eager never asks Inductor's cache.
    assert (record.cache, record.cache_hits, record.cache_misses) == (None, None, None)


@every_task_with(MODULE_STRATEGIES)
def test_every_region_is_compiled_without_a_break(task: str, strategy: str, trained: Trained) -> None:
    _, record = trained(task, strategy)
    assert record.regions
    assert record.regions_compiled == record.regions
    assert record.graphs
    assert record.graph_breaks == 0
    assert record.compile_seconds is not None
    assert record.compile_seconds > 0
    assert record.compile_phases_seconds["dynamo"] > 0
    assert not [event for event in record.events if event.kind != "recompile"]


@EVERY_STRATEGY
def test_events_say_why_and_where(task: str, strategy: str, trained: Trained) -> None:
    # A validation runs without gradients, so that everything compiled is compiled again.
    _, record = trained(task, strategy)
    if strategy in MODULE_STRATEGIES:
        assert record.recompiles
    for event in record.events:
        assert event.reason.strip()
        assert event.location is not None
        assert ".py:" in event.location
        # The gate compares in eval mode; without it, it is the validation after the third step.
        assert event.step in (3, 4) or event.phase in ("preflight", "comparing with eager")


@EVERY_ARM
def test_the_record_is_read_back_as_it_was_written(task: str, strategy: str, trained: Trained) -> None:
    run_dir, record = trained(task, strategy)
    assert RunRecord.load(run_dir) == RunRecord.load(run_dir / "record.json") == record
    assert sorted(path.name for path in run_dir.glob(".record*")) == []


def test_a_report_reads_a_record_without_torch(trained: Trained) -> None:
    run_dir, _ = trained("captioning", "eager")
    code = (
        "import sys; from pathlib import Path; from trainer.telemetry.record import RunRecord; "
        f"assert RunRecord.load(Path({str(run_dir)!r})).status == 'finished'; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
