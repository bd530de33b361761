"""Fill in a record from what a training measured, at its end, whichever way it ended."""

from __future__ import annotations

import lightning as L

from strategies import Program, Stage
from strategies.optimizer_step import installed
from trainer.telemetry.files import finite
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry


def fill_in(
    record: RunRecord, trainer: L.Trainer, telemetry: Telemetry, program: Program | None, *, together: bool
) -> None:
    """Write what ``telemetry`` measured and ``program`` reports into ``record``; ``together`` as in
    ``Telemetry.fill``."""
    telemetry.fill(record, together=together)
    if program is not None:
        if (profile := telemetry.profile()) is not None:
            program.report["profile"] = profile
        record.report = program.report
        record.eager_parts = dict(program.eager_parts)
        record.ended_in_eager = ended_in_eager(program)
        # What was tried for a choice and not taken was compiled as well.
        if program.strategies or "auto" in program.report:
            record.take(telemetry.compiler.figures())
            record.events = list(telemetry.compiler.events)
    record.final_metrics = finite({name: float(value) for name, value in trainer.callback_metrics.items()})


def ended_in_eager(program: Program) -> bool | None:
    """Whether nothing is left that is compiled or captured; None where nothing was to be."""
    if not program.eager_parts:
        return None if not program.regions and not _compiles_optimizer(program) else False
    regions = any(region.path not in program.eager_parts for region in program.regions)
    captured = program.captures_steps and program.step is not None and program.step.captures > 0
    return not (regions or captured or _compiles_optimizer(program))


def _compiles_optimizer(program: Program) -> bool:
    if not any(strategy.stage is Stage.OPTIMIZER for strategy in program.strategies):
        return False
    updates = [installed(optimizer) for optimizer in program.optimizers]
    return "optimizer" not in program.eager_parts or any(getattr(one, "form", "eager") != "eager" for one in updates)
