"""What the tests of the audits share: faults that begin in the middle of a training, and a training that is audited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L

from strategies import Program, Regional, Strategy
from strategies.base import Stage
from strategies.optimizer.step import replace_step
from tests.trainer import guarded
from tests.trainer.lightning_modules import fit
from tests.trainer.recording import Recorded, RecordingEngine
from trainer.callback import Compile
from trainer.guards.compare import ParityError

FAULT: dict[str, Any] = {"on": False, "buffers": ()}
LONG = {"max_steps": 17, "max_epochs": -1}


class FaultFrom(L.Callback):
    """Something breaks from optimizer step ``step`` on."""

    def __init__(self, step: int) -> None:
        self._step = step
        FAULT.update(on=False, buffers=())

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        FAULT["on"] = trainer.global_step + 1 >= self._step


def late(change: guarded.Change) -> guarded.Change:
    return lambda run: change(run) if FAULT["on"] else run()


def late_backend(name: str, forward: guarded.Change, backward: guarded.Change = guarded.as_it_is) -> str:
    with guarded.backend(f"tests_late_{name}", late(forward), backward) as made:
        return made


def spoils_buffers(graph: Any, _: Any) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        results = graph(*inputs)
        for buffer in FAULT["buffers"] if FAULT["on"] else ():
            buffer.data.mul_(1.1)  # which autograd does not see
        return results

    return run


class LateHalf(Strategy):
    """An optimizer strategy that from the fault on leaves half of one update out."""

    name: ClassVar[str] = "late_half"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    parameter: ClassVar[str] = "head.bias"

    def begin(self, program: Program) -> None:
        half: Any = program.module.get_parameter(self.parameter)

        def update(optimizer: Any) -> None:
            before = half.detach().clone()
            type(optimizer).step(optimizer)
            if FAULT["on"]:
                half.lerp_(before, 0.5)

        replace_step(program.optimizers[0], update)


class _Engine(RecordingEngine):
    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, results = super().capture(call)
        return (lambda: None if FAULT["on"] else replay()), results


class Captured(Recorded):
    """Whose replays do nothing any more from the fault on."""

    name: ClassVar[str] = "captured"
    engine: ClassVar[type[RecordingEngine]] = _Engine


def audited(module: L.LightningModule, folder: Path, strategies: list[Any], *callbacks: Any, **options: Any) -> Any:
    """Losses, record and what ended the run, if anything did."""
    arguments = {name: options.pop(name) for name in ("parity", "on_difference") if name in options}
    compile_ = Compile(strategies, **arguments)
    error = None
    losses: list[float] = []
    try:
        losses = fit(module, folder, [*callbacks, compile_], **{**LONG, **options})
    except ParityError as caught:
        error = caught
    return losses, compile_.record, error


def regional(name: str = "eager") -> list[Any]:
    return [Regional(backend=name)]
