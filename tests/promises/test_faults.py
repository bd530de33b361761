"""The test of the checks: every fault of the table is found by the step that it has to be found by, and ends no run."""

from __future__ import annotations

import pytest

from tests.promises.faults import CATALOGUE, missed, plant
from tests.sweep import some
from trainer.guards import ParityError

BY_NAME = {fault.name: fault for fault in CATALOGUE}
FEW = [fault.name for fault in CATALOGUE if fault.begins in (1, 5)]
MANY = [fault.name for fault in CATALOGUE if fault.name not in FEW]


@pytest.mark.parametrize("name", [*FEW, *some((pytest.param(name, marks=pytest.mark.slow) for name in MANY), every=2)])
def test_a_fault_is_found_in_time(name: str) -> None:
    assert missed(BY_NAME[name], plant(BY_NAME[name])) is None


@pytest.mark.slow
def test_under_bf16_nearly_all_are_found() -> None:
    """A tenth of them; ``python -m tests.promises.faults --bf16`` tries all."""
    faults = [fault for fault in CATALOGUE if not fault.only_single][::10]
    wrong = {fault.name: what for fault in faults if (what := missed(fault, plant(fault, bf16=True))) is not None}
    assert len(wrong) <= 0.05 * len(faults), wrong


@pytest.mark.parametrize("name", ["output 1% too large", "all gradients doubled, from step 5"])
def test_an_option_ends_the_run(name: str) -> None:
    outcome = plant(BY_NAME[name], on_difference="fail")
    assert isinstance(outcome.ended, ParityError)
    assert outcome.steps <= BY_NAME[name].by


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("output 1% too large", "output"),
        ("all gradients doubled, from step 5", "gradient"),
        ("running means zeroed", "running_mean"),
        ("validation's graph 10% off", "output"),
        ("one column is not a number, from step 5", "output"),
    ],
)
def test_what_is_wrong_is_named(name: str, said: str) -> None:
    record = plant(BY_NAME[name]).record
    assert record is not None
    reasons = " ".join(record.eager_parts.values())
    assert said in reasons
    assert list(record.eager_parts) == ["layers.0", "layers.1"]
    if BY_NAME[name].begins > 1:
        assert record.audits is not None
        assert record.audits.verdict == "went eager"
        assert record.audits.last_clean_step is not None
        assert record.audits.last_clean_step < BY_NAME[name].begins
        assert "checkpoint" in (record.audits.reason or "")
    else:
        assert record.report["parity"]["verdict"] == "failed"


def test_there_are_many_faults_of_every_kind() -> None:
    assert len(CATALOGUE) >= 100
    assert len(BY_NAME) == len(CATALOGUE)
    kinds = {fault.kind for fault in CATALOGUE}
    assert kinds == {"forward", "gradient", "optimizer", "buffer", "random", "evaluation", "memory", "shape", "later"}
