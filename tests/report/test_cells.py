"""Cells: which runs belong together, and what workloads and arms are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.micro.task import DIMENSIONS, Micro
from tests.report.records import record
from trainer.report.runs import Run, group
from trainer.settings import Config
from trainer.sweep.environment import initial_record
from trainer.telemetry.record import RunRecord


def cells_of(*records: RunRecord) -> Any:
    return group([Run(Path(str(number)), one) for number, one in enumerate(records)])


def configured(arm: str = "eager", **settings: Any) -> RunRecord:
    """A record whose configuration holds ``settings``, with ``__`` for dots."""
    one = record(arm)
    for name, value in settings.items():
        *sections, last = name.split("__")
        place = one.config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return one


def test_seeds_lengths_guards_and_places_make_no_workload_of_their_own() -> None:
    cells = cells_of(
        configured(),
        configured(seed=1),
        configured(trainer__max_steps=9, trainer__val_every_n_steps=3, trainer__progress="none"),
        configured(parity="off", resume="somewhere"),
        configured(task__data__root="/elsewhere"),
    )
    assert [cell.workload for cell in cells] == ["captioning"]
    assert len(cells[0].cold) == 5


def test_what_a_step_depends_on_makes_a_workload_and_names_it() -> None:
    cells = cells_of(configured(), configured(task__data__batch_size=64), configured(trainer__precision="32-true"))
    assert [cell.workload for cell in cells] == [
        "captioning (batch_size=32)",
        "captioning (batch_size=64)",
        "captioning (precision=32-true, batch_size=32)",
    ]


def test_the_fewest_settings_that_tell_workloads_apart_are_named() -> None:
    sizes = [
        configured(task__network__layers=layers, task__network__width=64 * layers, task__network__heads=2)
        for layers in (2, 12)
    ]
    assert [cell.workload for cell in cells_of(*sizes)] == ["captioning (layers=2)", "captioning (layers=12)"]


def test_arms_are_told_by_parameters_that_are_not_defaults_or_differ_from_their_fellows() -> None:
    names = [
        cell.arm
        for cell in cells_of(
            record("eager"),
            record("regional"),
            record("whole mode=default"),
            record("whole mode=reduce-overhead"),
            record("buckets+regional backend=aot_eager"),
        )
    ]
    assert names == [
        "eager",
        "regional",
        "whole (mode=default)",
        "whole (mode=reduce-overhead)",
        "buckets+regional (regional.backend=aot_eager)",
    ]
    assert [cell.arm for cell in cells_of(record("whole mode=default"))] == ["whole"]


def test_a_strategy_of_somebody_elses_is_told_by_what_differs() -> None:
    names = [cell.arm for cell in cells_of(record("mine speed=1"), record("mine speed=2"), record("other size=3"))]
    assert names == ["mine (speed=1)", "mine (speed=2)", "other"]


def test_where_a_cache_lies_and_what_an_older_record_lacks_make_no_arm() -> None:
    older, newer = record("cached"), record("cached url=s3://bucket")
    newer.strategies[0]["max_gib"] = 10.0
    assert [cell.arm for cell in cells_of(older, newer)] == ["cached"]


def test_runs_are_placed_by_how_they_started_and_ended() -> None:
    (cell,) = cells_of(
        record("whole", start="cold"),
        record("whole", start="warm"),
        record("whole", cache="cold"),  # nobody saw to it, but every graph was compiled anew
        record("whole", cache="mixed"),
        record("whole", status="failed", reason="no"),
        record("whole", status="interrupted"),
        record("whole", status="running"),
    )
    assert [len(runs) for runs in (cell.cold, cell.warm, cell.failed)] == [3, 1, 3]
    assert cell.command.startswith("python -m trainer task=captioning")


@pytest.mark.parametrize("model", DIMENSIONS)
def test_a_record_of_micro_says_which_of_its_models_it_is_of(model: str) -> None:
    assert initial_record(Config(task=Micro(model=model)), []).task == f"micro {model}"


def test_models_of_micro_have_names_of_their_own() -> None:
    def micro(task: str, model: str) -> Run:
        one = record("eager", task=task)
        one.config["task"]["model"] = model
        return Run(Path(task), one)

    cells = group([micro(f"micro {model}", model) for model in ("ragged", "convnet")])
    assert [(cell.workload, len(cell.runs)) for cell in cells] == [("micro ragged", 1), ("micro convnet", 1)]


def test_an_option_that_strategies_had_once_makes_an_arm_only_where_it_was_set() -> None:
    cells = cells_of(record("cuda_graph"), record("cuda_graph max_graphs=64"), record("cuda_graph max_graphs=2"))
    assert [len(cell.runs) for cell in cells] == [2, 1]
