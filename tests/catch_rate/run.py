"""Train a case in eager, by ``torch.compile`` alone, and under our guards; say what became of the fault."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from crucible import Strategy
from torch import Tensor

from tests.catch_rate.case import Case
from tests.promises.planted import Clock
from tests.promises.training import CLOSE, Module, Net, Outcome, apart, train, vectors

FIRST, AUDIT, HEALED = "first check", "audit", "healed"
"""Found by the check of its first call, before anything was trained with it; by a later check, so that it runs eager
from the next step on; found, and what helps was used."""
REFUSED, AVOIDED, MISSED = "does not compile", "does not show", "not caught"
"""What the fault is in runs eager, with a line that says so; it is compiled and trains as eager does, by settings of
ours; it does not train as eager does, and nothing was said."""
ABSENT, LOUD, ALARM, FAILED = "not there", "an error", "false alarm", "ended"
"""Torch.compile alone trains as eager does; ends with an error, which is not silent; trains as eager does, and a check
called it different; a training that ended."""
CAUGHT = (FIRST, AUDIT, HEALED, REFUSED, AVOIDED)


class CasesNet(Net):
    """A stem, the case's blocks, and a head of one number."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        blocks: Any = self.blocks
        for block in blocks:
            x = block.called(x)
        return self.head(x)


class Training(Module):
    """The plainest training of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__(CasesNet(case.block() for _ in range(2)))
        self.begins = case.begins
        for block in self.net.blocks:
            block.prepare()
        self.begun = {name: one.detach().clone() for name, one in self.state_dict().items()}

    def on_train_batch_start(self, *_: Any) -> None:
        step = self.global_step + 1
        for block in self.net.blocks:
            block.before_step(step)
            if step == self.begins:
                block.later()

    def loss(self, batch: Any) -> Tensor:
        return self.net.blocks[0].loss(self, batch)

    def observed_numbers(self) -> list[float]:
        return [number for block in self.net.blocks for number in block.observed()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Bare(L.Callback):
    """``torch.compile`` without us."""

    def __init__(self, case: Case, backend: str) -> None:
        self.case, self.backend = case, backend

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        net: Any = pl_module.net
        for one in [net] if self.case.whole else net.blocks:
            one.compile(backend=self.backend)


@dataclass
class Line:
    """What became of one case, with one version of torch."""

    case: str
    torch: str
    planted: bool
    part: str
    changes: str
    issues: list[int]
    reported: str
    backend: str
    there: bool = False
    """Whether ``torch.compile`` alone differs from eager."""
    differs: dict[str, float] = field(default_factory=dict)
    """By how much, relative; only what differs."""
    bare_ended: str | None = None
    result: str = ""
    step: int | None = None
    """In which it was caught."""
    said: str = ""
    """What the run's record says."""
    left: dict[str, float] = field(default_factory=dict)
    """By how much our run differs from eager's."""
    seconds: float = 0.0


def distances(case: Case, eager: Outcome, seen: Outcome) -> dict[str, float]:
    """What of ``seen`` is not eager's, by how much."""
    close = CLOSE if case.precision == "32-true" else 2e-2
    one, other = (each.module.observed_numbers() for each in (eager, seen))
    found = {"observed": apart(other, one)}
    if not case.own_numbers:
        found["loss"] = apart(seen.losses, eager.losses)
        weights = {name for name, _ in eager.module.named_parameters()}
        left, right = eager.module.state_dict(), seen.module.state_dict()
        for kind, wanted in (("weights", True), ("buffers", False)):
            names = [name for name in left if (name in weights) == wanted]
            found[kind] = max((_moved_apart(left[at], right[at], eager.module.begun[at]) for at in names), default=0.0)
    if case.validates:
        found["metrics"] = apart([*seen.metrics.values()], [*eager.metrics.values()])
    return {kind: round(by, 6) for kind, by in found.items() if not by <= close * (10 if kind != "loss" else 1)}


def _moved_apart(eager: Tensor, seen: Tensor, begun: Tensor) -> float:
    """How far apart two tensors have moved, relative to how far eager's has."""
    moved = (eager.double() - begun.double()).norm()
    size = torch.maximum(moved, 1e-4 * begun.double().norm()).clamp(min=1e-6)
    by = float((seen.double() - eager.double()).norm() / size)
    return by if by == by else float("inf")


def trained(case: Case, strategies: list[Strategy] | None, *callbacks: L.Callback) -> Outcome:
    if case.after_another:
        case.block.earlier(True)
        _trained(case, strategies, *callbacks)
        case.block.earlier(False)
    return _trained(case, strategies, *callbacks)


def _trained(case: Case, strategies: list[Strategy] | None, *callbacks: L.Callback) -> Outcome:
    Clock.step = 0
    options: dict[str, Any] = {"val_check_interval": 3} if case.validates else {}
    return train(
        lambda: Training(case),
        strategies,
        data=vectors(case.steps),
        validation=vectors(1, seed=1) if case.validates else None,
        callbacks=[Clock(), *callbacks],
        precision=case.precision,
        **options,
    )


def started(case: Case) -> Line:
    return Line(
        case=case.name,
        torch=torch.__version__.partition("+")[0],
        planted=case.planted is not None,
        part=case.part,
        changes=case.changes,
        issues=list(case.issues),
        reported=case.reported,
        backend="planted" if case.planted is not None else case.backend,
    )


def tried(case: Case) -> Line:
    """Train it three times."""
    began = time.perf_counter()
    line = started(case)
    eager = trained(case, None)
    if eager.ended is not None or not all(map(math.isfinite, eager.losses)):
        line.result, line.said = FAILED, f"eager: {eager.end}"
        return line
    bare = trained(case, None, Bare(case, case.planted() if case.planted is not None else case.backend))
    line.bare_ended = None if bare.ended is None else bare.end.partition(" (/")[0]
    if bare.ended is None:
        line.differs = distances(case, eager, bare)
    line.there = bool(line.differs)
    _judge(
        line, case, eager, trained(case, case.strategies(case.planted() if case.planted is not None else case.backend))
    )
    line.seconds = round(time.perf_counter() - began, 1)
    return line


def _judge(line: Line, case: Case, eager: Outcome, ours: Outcome) -> None:
    record = ours.record
    if ours.ended is not None or record is None:
        line.result, line.said = FAILED, ours.end
        return
    line.left = distances(case, eager, ours)
    events = [one for one in record.events if one.kind == "fallback"]
    said = [one.reason for one in events] or list(dict.fromkeys(record.eager_parts.values()))
    here = f"{Path(__file__).parents[2]}{os.sep}"  # the page is the same wherever it is made
    line.said = "; ".join(one.partition("\n")[0].replace(here, "") for one in said)[:400]
    line.step = None if not events else min(one.step or 0 for one in events) + 1
    differed = any("not eager's" in one for one in said)
    if not line.there:
        line.result = ALARM if differed else ABSENT if line.bare_ended is None else LOUD
    elif any("it passes, from step" in one for one in said) and not line.left:
        line.result = HEALED
    elif differed:
        line.result = AUDIT if line.left else FIRST
    elif line.left:
        line.result = MISSED
    else:
        line.result = REFUSED if record.eager_parts else AVOIDED


def as_json(line: Line) -> dict[str, Any]:
    return dataclasses.asdict(line)


def quietly() -> None:
    """One thread, no news."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
