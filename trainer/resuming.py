"""Resuming: what of a checkpoint has to fit this run, and what is said where its order or settings are others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR

ORDER = {"batch_size": "examples a batch", "world_size": "processes", "accumulate_grad_batches": "batches a step"}
"""What decides which examples a step takes, as ``order_of`` names it and as a person does."""
KEPT = ("initial_lr", "weight_decay")
"""Settings of an optimizer that nothing changes while it trains."""


def order_of(trainer: L.Trainer) -> dict[str, Any]:
    """The values of ``ORDER`` in this run, for its checkpoints. The batch size is by length under buckets, and None
    where the loader does not say."""
    loader: Any = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    if size is None:
        by_length = getattr(getattr(loader, "batch_sampler", None), "batch_sizes", None) or {}
        size = {int(length): int(rows) for length, rows in by_length.items()} or None
    return {
        "batch_size": size,
        "world_size": trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def changes(before: Mapping[str, Any], trainer: L.Trainer) -> Iterator[str]:
    """Lines about what the run that wrote a checkpoint (``before``: its ``order_of``) did otherwise than this one."""
    now = order_of(trainer)
    differ = [name for name in ORDER if name in before and before[name] != now[name]]
    if differ:
        line = "; ".join(f"{before[name]} {ORDER[name]} at the checkpoint, {now[name]} now" for name in differ)
        if differ != ["accumulate_grad_batches"]:
            line += ". The order does not continue: examples of this epoch may be trained twice or left out"
        if trainer.lr_scheduler_configs:
            line += ". The learning-rate schedule counts steps, which hold another number of examples now"
        yield f"resume: {line}"
    for config in trainer.lr_scheduler_configs:
        schedule: Any = config.scheduler
        alone = sum(other.scheduler.optimizer is schedule.optimizer for other in trainer.lr_scheduler_configs) == 1
        if type(schedule) is LambdaLR and alone:
            saved = [float(group["lr"]) for group in schedule.optimizer.param_groups]
            pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            ours = [float(base) * share(schedule.last_epoch) for base, share in pairs]
            if not all(math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-12) for pair in zip(saved, ours, strict=True)):
                yield (
                    f"resume: at step {trainer.global_step} the checkpoint's learning rate is {_listed(saved)}, this "
                    f"run's schedule gives {_listed(ours)}; trainer.max_steps and warm-up steps are part of a schedule"
                )


class Resuming(L.Callback):
    """Comes before all other callbacks: refuses what does not fit before they begin, and notes the order.

    Without a checkpoint, or with one of an earlier version, there is nothing to say.
    """

    def __init__(self, notes: list[str]) -> None:
        """``notes``: the record's, for what a resumed run does otherwise."""
        self._notes = notes
        self._order: dict[str, Any] = {}
        self._order_before: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
        self._groups: list[list[dict[str, Any]]] | None = None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what has to fit. Some of Lightning's strategies load checkpoints after ``on_fit_start``."""
        self._saved = {name: checkpoint[name] for name in ("optimizer_states", "lr_schedulers")}
        if self._groups is not None:
            refuse_other_state(trainer, self._saved)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the optimizers before their states are restored."""
        self._groups = [[dict(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        if self._saved is not None:
            refuse_other_state(trainer, self._saved)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare with the checkpoint, now that all is restored."""
        self._order = order_of(trainer)
        if self._saved is not None and self._groups is not None:
            for line in (*replaced(trainer, self._groups), *changes(self._order_before, trainer)):
                self._notes.append(line)
                rank_zero_warn(line)
        self._saved = self._groups = None

    def state_dict(self) -> dict[str, Any]:
        """The order, saved with every checkpoint."""
        return {"order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the checkpoint's order."""
        self._order_before = state_dict["order"]


def refuse_other_state(trainer: L.Trainer, saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless the ``saved`` states are of optimizers and schedules like this run's.

    Lightning pairs off as many as both have, and a schedule takes over whatever state it is given.
    """
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    for name, what, ours in (
        ("optimizer_states", "optimizers", trainer.optimizers),
        ("lr_schedulers", "learning-rate schedules", schedules),
    ):
        if len(saved[name]) != len(ours):
            raise ValueError(f"resume: the checkpoint holds {len(saved[name])} {what}, this run has {len(ours)}")
    for state, schedule in zip(saved["lr_schedulers"], schedules, strict=True):
        if not type(schedule).__module__.startswith("torch."):
            continue  # what its state has to hold, only its author knows
        fresh = schedule.state_dict()
        lost = [name for name in fresh if not name.startswith("_") and name not in state]
        if lost or len(state.get("base_lrs", ())) != len(fresh.get("base_lrs", ())):
            what = f"holds no {', '.join(lost)}" if lost else "is for another number of parameter groups"
            raise ValueError(
                f"resume: the checkpoint's schedule is not this run's {type(schedule).__name__}: it {what}"
            )


def replaced(trainer: L.Trainer, before: list[list[dict[str, Any]]]) -> Iterator[str]:
    """Lines about settings of ``before`` (parameter groups by optimizer) that the checkpoint has replaced.

    Raises ValueError where it has taken one away, because it is of another class of optimizer.
    """
    for optimizer, groups in zip(trainer.optimizers, before, strict=True):
        for ours, now in zip(groups, optimizer.param_groups, strict=True):
            if lost := sorted(ours.keys() - now.keys()):
                raise ValueError(
                    f"resume: the checkpoint is of another optimizer than {type(optimizer).__name__}: "
                    f"it holds no {', '.join(lost)}"
                )
            for key in KEPT:
                if key in ours and not math.isclose(float(ours[key]), float(now[key])):
                    yield f"resume: the checkpoint's {key}={now[key]:g} stays, in place of this run's {ours[key]:g}"


def _listed(rates: list[float]) -> str:
    return ", ".join(dict.fromkeys(f"{rate:.4g}" for rate in rates))
