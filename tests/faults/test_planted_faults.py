"""A few of the planted faults, of every kind, are caught; ``python -m tests.faults`` plants them all."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import plant
from tests.faults.catalogue import CATALOGUE

BY_NAME = {fault.name: fault for fault in CATALOGUE}
AUDITS = True
"""Whether steps are compared while training too, which catches the faults that begin later."""


@pytest.mark.parametrize(
    ("name", "precision", "said"),
    [
        ("half of the gradients halved", "bf16-mixed", "gradient of"),
        ("a small parameter's gradient times 10", "bf16-mixed", "gradient of 'layers."),
        ("AdamW's betas 0.5/0.9", "bf16-mixed", "optimizer state 'exp_avg"),
        ("bias correction stuck at step 1", "bf16-mixed", "update of"),
        ("weight decay left out", "bf16-mixed", "update of"),
        ("weight decay 10% too small", "bf16-mixed", "update of"),
        ("learning rate of the first step for ever", "32-true", "update of"),
        ("weights of the first call for ever", "bf16-mixed", "in step 2 of 3"),
        ("running means zeroed", "bf16-mixed", "buffer 'layers."),
        ("validation's graph 10% off", "32-true", "in eval mode, val_loss of validation_step"),
        ("a mask that never changes", "32-true", "does not depend on the random numbers"),
        ("dropout of 0.5 for 0.1, other draws than eager's", "32-true", "is not eager's"),
    ],
)
def test_a_fault_is_caught_before_the_first_step(name: str, precision: str, said: str) -> None:
    outcome = plant(BY_NAME[name], precision)
    assert (outcome.guard, outcome.step) == ("gate", 0)
    assert said in outcome.message


@pytest.mark.skipif(not AUDITS, reason="nothing is compared while training yet")
@pytest.mark.parametrize("name", [fault.name for fault in CATALOGUE if fault.guard == "audit"])
def test_a_fault_that_begins_later_is_caught_within_eight_steps(name: str) -> None:
    outcome = plant(BY_NAME[name], "32-true")
    assert outcome.guard == "audit"
    assert 0 < outcome.step <= 8


def test_there_are_many_faults_of_every_kind() -> None:
    assert len(CATALOGUE) >= 40
    assert len(BY_NAME) == len(CATALOGUE)
    assert {fault.kind for fault in CATALOGUE} == {
        "kernel", "gradient", "optimizer", "buffer", "random", "graph", "later"
    }  # fmt: skip
