"""Plant every fault and print the table of its page of docs: ``python -m tests.faults [NAME OR KIND ...]``.

``TRAINED=600`` trains each module for so many steps before, until it knows its batches.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import dataclass

import lightning as L
import torch

from tests.faults.catalogue import CATALOGUE, Planted
from tests.faults.module import Small, batches, train
from trainer.guards.compare import ParityError

PRECISIONS = ("32-true", "bf16-mixed")
STEPS = 8
"""Steps that the guards have."""


@dataclass
class Outcome:
    """What became of one planted fault."""

    guard: str | None
    """None: not seen."""
    step: int = 0
    message: str = ""


def plant(fault: Planted, precision: str, *, seed: int = 0, trained: int = 0) -> Outcome:
    """Train with ``fault``, after ``trained`` steps without; who caught it, and after how many steps."""
    L.seed_everything(seed, verbose=False)
    module, data = Small(**fault.module), batches(STEPS, fault.lengths, fault.rows)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for number in range(trained):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            module.loss(data[number % STEPS]).backward()
        optimizer.step()
    try:
        train(module, [fault.plant()], data, precision=precision, **fault.trainer)
    except ParityError as error:
        audits = error.record.audits  # type: ignore[attr-defined]
        if audits is not None and audits.verdict == "failed":
            return Outcome("audit", audits.steps[-1], str(error))
        return Outcome("gate", 0, str(error))
    return Outcome(None)


def main(names: list[str]) -> None:
    """Print the table; ``names`` are names or kinds of the faults to plant, all without."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    print("| fault | kind | " + " | ".join(PRECISIONS) + " |\n|---|---|" + "---|" * len(PRECISIONS))
    for fault in CATALOGUE:
        if names and not any(name in (fault.name, fault.kind) for name in names):
            continue
        cells = []
        for precision in PRECISIONS:
            outcome = plant(fault, precision, trained=int(os.environ.get("TRAINED", "0")))
            if outcome.guard is None:
                cells.append("no fault there" if fault.only_single and precision != "32-true" else "**not seen**")
            else:
                cells.append(f"{outcome.guard}, {f'step {outcome.step}' if outcome.step else 'before step 1'}")
            if names:
                print(f"    {precision}: {outcome.message}", file=sys.stderr)
        print(f"| {fault.name} | {fault.kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
