"""Two trainings with one ``Compile`` and an evaluation between them, each looked at from within its last step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from strategies.base import Strategy
from tests.trainer.lightning_modules import Losses, quiet_trainer
from tests.trainer.runs import STEPS, overrides
from trainer.callback import Compile
from trainer.config import compose
from trainer.telemetry.record import RunRecord

HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


@dataclass(kw_only=True)
class Training:
    """One of the two; ``within`` and ``after``: what a strategy may have changed, in the last step and at the end."""

    record: RunRecord
    report: dict[str, Any]
    """As it was when the training was over."""
    losses: list[float]
    within: dict[str, Any] = field(repr=False)
    after: dict[str, Any] = field(repr=False)


class Look(L.Callback):
    """Looks around in each step, while what is compiled is in force."""

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self.batch: Any = None
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        program = self._compile.program
        of_program = {
            "kept": sorted(program.kept),
            "captures": program.captures,
            "padding": program.padding is not None,
        }
        tensors = {"inputs": self.batch.inputs, "targets": self.batch.targets}
        # A dimension that is marked as dynamic is an attribute of the tensor.
        batch = {name: (one.dtype, one.shape, one.stride(), sorted(vars(one))) for name, one in tensors.items()}
        self.found = {**looked_at(pl_module, trainer.optimizers), "program": of_program, "batch": batch}


def looked_at(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """What strategies change, by the name of its place."""
    weights = dict([*module.named_parameters(), *module.named_buffers()])
    return {
        "weights": {name: (type(one), one.dtype, one.stride()) for name, one in weights.items()},
        "calls": {path: one._compiled_call_impl is not None for path, one in module.named_modules()},
        "attributes": {path: sorted(vars(one)) for path, one in module.named_modules()},
        "hooks": {path: [len(getattr(one, name)) for name in HOOKS] for path, one in module.named_modules()},
        "optimizers": {str(place): sorted(vars(one)) for place, one in enumerate(optimizers)},
        "settings of Dynamo": torch._dynamo.config.get_config_copy(),
        "settings of torch": {
            "matmul precision": torch.get_float32_matmul_precision(),
            "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
            "benchmark": torch.backends.cudnn.benchmark,
            "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
            "default dtype": torch.get_default_dtype(),
        },
    }


def differences(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> list[str]:
    """Where two looks differ, with both findings."""
    return [
        f"{kind} {name or 'itself'}: {one[kind].get(name)}, then {other[kind].get(name)}"
        for kind in one
        for name in sorted(one[kind].keys() | other[kind].keys())
        if one[kind].get(name) != other[kind].get(name)
    ]


def train_twice(folder: Path, arm: str, strategies: Sequence[Strategy] | None = None) -> list[Training]:
    """Train the smallest task, validate it, and train it again; the strategies of ``arm``, or those that are given."""
    config = compose(overrides(arm, task="micro"))
    task = config.task
    declared = task.declare()
    compile_ = Compile(
        config.compile.values() if strategies is None else strategies,
        whole=declared.whole,
        blocks=declared.blocks,
        parts=declared.parts,
        ragged=declared.ragged,
        save=False,
        verbose=False,
        measure_peak=False,
    )
    torch.manual_seed(0)
    module = task.build_module(max_steps=2 * STEPS)
    options: dict[str, Any] = {"default_root_dir": folder, "max_steps": STEPS}
    trainings = []
    for validates in (True, False):
        look, losses = Look(compile_), Losses()
        trainer = quiet_trainer(**options, limit_val_batches=0, callbacks=[compile_, look, losses])
        trainer.fit(module, task.build_data(seed=0))
        trainings.append(
            Training(
                record=compile_.record,
                report=copy.deepcopy(compile_.record.report),
                losses=losses.values,
                within=look.found,
                after=looked_at(module, trainer.optimizers),
            )
        )
        if validates:
            quiet_trainer(**options, callbacks=[compile_]).validate(module, task.build_data(seed=0), verbose=False)
    return trainings
