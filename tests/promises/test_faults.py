"""The test of the checks: every fault of the table is found by the step that it has to be found by, and ends no run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from crucible import RunRecord

from tests.promises.faults import CATALOGUE, Planted, missed, plant
from tests.sweep import some
from trainer.guards import ParityError

SAID = {
    "output 1% too large": "output",
    "all gradients doubled, from step 5": "gradient",
    "running means zeroed": "running_mean",
    "validation's graph 10% off": "output",
    "one column is not a number, from step 5": "output",
}
"""What is wrong, as the record has to name it."""
BY_NAME = {fault.name: fault for fault in CATALOGUE}
FIRST = [fault.name for fault in CATALOGUE if fault.begins == 1]
ANEW = [fault.name for fault in CATALOGUE if fault.kind == "anew"]
SECOND = [fault.name for fault in CATALOGUE if fault.begins == 5 and fault.name not in SAID]
LATE = [fault.name for fault in CATALOGUE if fault.begins not in (1, 5) and fault.name not in ANEW]


def slow(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "name",
    [
        *FIRST[::2],
        *ANEW[:2],
        *slow(ANEW[2:]),
        *slow([*FIRST[1::2], *(name for name in SAID if name not in FIRST)]),
        *some(slow(SECOND), every=2),
        *some(slow(LATE), every=3),
    ],
)
def test_a_fault_is_found_in_time(name: str) -> None:
    outcome = plant(BY_NAME[name])
    assert missed(BY_NAME[name], outcome) is None
    if name in SAID:
        assert outcome.record is not None
        it_is_named(outcome.record, SAID[name], BY_NAME[name])


def it_is_named(record: RunRecord, said: str, fault: Planted) -> None:
    eager = record.eager_evaluations if fault.kind == "evaluation" else record.eager_parts
    assert said in " ".join(eager.values())
    assert list(eager) == ["layers.0", "layers.1"]
    if fault.begins > 1:
        assert record.audits.verdict == "went eager"
        assert record.audits.last_clean_step < fault.begins
        assert "checkpoint" in (record.audits.reason or "")
    else:
        assert record.report["parity"]["verdict"] == "failed"


@pytest.mark.slow
def test_under_bf16_nearly_all_are_found() -> None:
    """One in twenty; ``python -m tests.promises.faults --bf16`` tries all."""
    faults = [fault for fault in CATALOGUE if not fault.only_single][::20]
    wrong = {fault.name: what for fault in faults if (what := missed(fault, plant(fault, bf16=True))) is not None}
    assert len(wrong) <= 0.05 * len(faults), wrong


@pytest.mark.parametrize("name", ["output 1% too large", "all gradients doubled, from step 5"])
def test_an_option_ends_the_run(name: str) -> None:
    outcome = plant(BY_NAME[name], on_difference="fail")
    assert isinstance(outcome.ended, ParityError)
    assert outcome.steps <= BY_NAME[name].by


def test_there_are_many_faults_of_every_kind() -> None:
    assert len(CATALOGUE) >= 100
    assert len(BY_NAME) == len(CATALOGUE)
    kinds = {fault.kind for fault in CATALOGUE}
    others = {"optimizer", "buffer", "random", "evaluation", "memory", "shape", "later", "anew"}
    assert kinds == {"forward", "gradient", *others}
