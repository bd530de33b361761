"""Checkpoints of a run: written whole or not at all, exact at step boundaries, found again by ``resume=``."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parameter import is_lazy

from strategies.loop_protocol import Loop, gathered
from strategies.region_state import random_state, set_random_state
from trainer.loops.checkpoint_io import AtomicCheckpointIO, damaged
from trainer.loops.lightning import LightningLoop
from trainer.loops.lightning_internals import on_sigterm
from trainer.loops.ranks import Agreement
from trainer.process import StopRequest
from trainer.run_files import DIRECTORY, LAST, META

if TYPE_CHECKING:
    from trainer.loops.compiled_training import CompiledTraining

PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "pytorch-lightning_version")
"""What of Lightning's checkpoints a training goes on from."""


class NonFiniteLoss(RuntimeError):
    """The training went to NaN or infinity, and was not to continue."""


class FiniteLosses:
    """Watches one training: it ends where its loss is NaN or infinite, and its last finite checkpoint stays.

    No step waits for the device: losses are looked at where they are read for the curves in any case. A checkpoint,
    which waits for the device itself, is written only once every loss before it was read and the weights are finite. A
    gradient scaler leaves steps with infinite gradients out; their loss is finite, and they are no fault.
    ``mode``: ``fail``, or ``warn`` once and continue.
    """

    def __init__(self, mode: str, training: CompiledTraining) -> None:
        self._mode, self._training = mode, training
        self._loop: Loop | None = None
        self.saved: str | None = None
        """The last checkpoint, for the message."""

    def start(self, loop: Loop) -> None:
        """Weights that are infinite from the beginning, as a mask that is a parameter may be, are the module's own."""
        self._loop, self._weights = loop, not _spoilt(loop)

    def check(self, *, everything: bool) -> None:
        """Raise NonFiniteLoss, on all processes alike, where a loss was not finite; every process calls this.
        ``everything`` waits for the losses of all steps so far, and looks at the weights too."""
        loop, telemetry = self._loop, self._training.telemetry
        if loop is None:
            return
        found = telemetry.meter.look(everything=everything)
        if found is None and everything and self._weights and (names := _spoilt(loop)):
            found = telemetry.last_step.place(f"weights are not finite after it: {', '.join(names[:3])}")
        if not loop.any_rank(found is not None):
            return
        step, where = min(one for one in gathered(found) if one is not None)
        if self._mode == "fail":
            raise NonFiniteLoss(
                f"step {step} {where}. Last finite checkpoint: {self.saved or 'none was written'}. "
                "on_nonfinite_loss=warn continues in spite of it"
            )
        self._loop = None
        line = f"on_nonfinite_loss=warn: the run continues after step {step} {where}"
        rank_zero_warn(line)
        self._training.record.notes.append(line)


def _spoilt(loop: Loop) -> list[str]:
    """Names of the trainable weights that are not finite, as far as this process holds them; waits for the device."""
    weights = {
        name: getattr(weight.detach(), "_local_tensor", weight.detach())  # of a sharded one (DTensor), the own part
        for name, weight in loop.module.named_parameters()
        if weight.requires_grad and weight.is_floating_point() and weight.element_size() > 1 and not is_lazy(weight)
    }
    weights = {name: weight for name, weight in weights.items() if weight.numel()}
    if not weights:
        return []
    norms = torch._foreach_norm(list(weights.values()), math.inf)
    largest = torch.stack([norm.to(loop.device, torch.float32) for norm in norms]).tolist()
    return [name for name, value in zip(weights, largest, strict=True) if not math.isfinite(value)]


class Checkpoints(L.Callback):
    """Saves ``last.ckpt`` every N steps (see ``TrainerConfig.checkpoint_every_n_steps``), at the last step and when a
    stop was asked for, with all random states.

    All of them are written at the end of a batch, where the loop's counters, the data order and the random states
    belong together; after ``Trainer.fit`` has returned they no longer do. Each process resumes its own random states.
    One without any in the checkpoint (there are more processes now, or an earlier version kept the first one's only)
    begins as any run does.
    """

    def __init__(self, directory: Path, *, every_n_steps: int | None, stop: StopRequest, losses: FiniteLosses) -> None:
        self.path = directory / DIRECTORY / LAST
        self._every, self._stop, self._losses = every_n_steps, stop, losses
        self._restored: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals back from Lightning and put restored random states in force."""
        self._stop.install()
        on_sigterm(trainer, None, lambda: None)
        self._step = trainer.global_step
        self._agreement = None if trainer.world_size == 1 else Agreement()
        self._losses.saved = None if trainer.ckpt_path is None else f"{trainer.ckpt_path} (step {self._step})"
        self._losses.start(LightningLoop(trainer))
        if self._restored is not None:
            restore_own(self._restored, trainer)
            self._restored = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time; stop when that was asked for."""
        step = trainer.global_step
        if step == self._step:  # inside an accumulation
            return
        self._step = step
        self._stop.in_training = True  # a signal before this stops at once: nothing is trained that could be lost
        stop = self._stop.signum is not None
        if self._agreement is not None:
            # Processes see a signal at different steps: all stop a step after the first one, at the same one.
            (signum,) = self._agreement.exchange(self._stop.signum or 0)
            stop = signum > 0
            if stop:  # else one that has come in between stays, for the next time
                self._stop.signum = signum
        ends = step == trainer.max_steps
        if ends or step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._losses.check(everything=ends)
        if stop or (ends and self._every is not None) or (self._every and step % self._every == 0):
            trainer.save_checkpoint(self.path)
            self._losses.saved = f"{self.path} (step {step})"
        if stop:
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # Lightning would validate before it leaves, and compile for that

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What is being written is whole; from here on a signal ends the process at once."""
        if isinstance(writer := trainer.strategy.checkpoint_io, AtomicCheckpointIO):
            writer.wait_until_written()
        self._stop.in_training = False
        if self._agreement is not None:
            self._agreement.wait()
        self._losses.check(everything=False)  # the telemetry has read all by now

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whoever saves, nothing that is not finite takes the place of what was."""
        self._losses.check(everything=True)

    def state_dict(self) -> dict[str, Any]:
        """The random states of all processes, saved with every checkpoint; each process has to call this."""
        return {"ranks": gathered(random_states())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the random states for ``on_train_start``: building the loaders in between may draw numbers."""
        self._restored = state_dict.get("ranks", [state_dict])  # earlier versions kept one process's


def random_states() -> dict[str, Any]:
    """Random states of Python, NumPy, torch and every CUDA device, in types that ``torch.load`` accepts safely."""
    python, (kind, keys, *rest), host, cuda = random_state()
    keys = torch.from_numpy(keys.astype("int64"))
    return {"python": python, "numpy": [kind, keys, *rest], "torch": host, "cuda": cuda}


def restore_own(ranks: list[dict[str, Any]], trainer: L.Trainer) -> None:
    """Put this process's entry of ``ranks``, random states by rank, in force; where there is none, it stays as seeded.
    CUDA's only where the number of devices is the same."""
    rank, size = trainer.global_rank, trainer.world_size
    if len(ranks) < size:
        rank_zero_warn(
            f"resume: the checkpoint holds random states of {len(ranks)} processes, this run has {size}: those without "
            "begin as any run does"
        )
    if rank >= len(ranks):
        return
    states = ranks[rank]
    version, internal, gauss = states["python"]
    kind, keys, *rest = states["numpy"]
    array = (kind, keys.numpy().astype("uint32"), *rest)
    cuda = states["cuda"] if len(states["cuda"]) == torch.cuda.device_count() else []
    set_random_state(((version, tuple(internal), gauss), array, states["torch"], cuda))


def open_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """What ``checkpoint`` holds, mapped from the disk; of a directory without its weights.

    Reads all of it once (a second or more for a gigabyte), because torch.load compares no checksums. Raises
    ValueError when a part of it is damaged, when it is none of Lightning's or lacks one of ``PARTS``.
    """
    try:
        if (part := damaged(checkpoint)) is not None:
            raise ValueError(f"the file is damaged: {part} is not what its checksum says")
        # Memory-mapped, so that only the part that is read comes off the disk.
        file = checkpoint / META if checkpoint.is_dir() else checkpoint
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        if missing := [part for part in PARTS if part not in loaded]:
            raise ValueError(f"it holds no {', '.join(missing)}")
        return {**loaded, "global_step": int(loaded["global_step"])}
    except pickle.UnpicklingError as error:  # torch's own words advise to load it without this check
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(
            f"resume: {checkpoint} is refused: reading it would call {name[1]}, and could run code that somebody put "
            "there; allow a class of your own with torch.serialization.add_safe_globals"
            if name
            else f"resume: {checkpoint} is damaged, or holds more than tensors and plain data"
        ) from None
    except Exception as error:  # torch.load raises many classes for a file that is not what it seems
        raise ValueError(f"resume: {checkpoint} cannot be read as a checkpoint: {error}".splitlines()[0]) from error


# ---- what a resumed run does otherwise -----------------------------------------------------------------------------

ORDER = {"batch_size": "examples a batch", "world_size": "processes", "accumulate_grad_batches": "batches a step"}
"""What decides which examples a step takes, by its name in a checkpoint, and as a person says it."""


class Resuming(L.Callback):
    """Comes before all other callbacks: refuses what does not fit ``saved``, the checkpoint as ``open_checkpoint``
    gives it, before they begin, and puts into the record's ``notes`` what differs."""

    def __init__(self, notes: list[str], saved: Mapping[str, Any] | None) -> None:
        self._notes, self._saved = notes, saved
        self._plan: dict[str, Any] = {}
        self._settings: list[set[str]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The optimizers are there, their states are not restored yet."""
        if self._saved is not None:
            require_fit(trainer, self._saved)
            self._settings = [set(optimizer.param_groups[0]) for optimizer in trainer.optimizers]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All is restored. Raises ValueError where an optimizer lacks settings, which the checkpoint has taken away."""
        for optimizer, settings in zip(trainer.optimizers, self._settings, strict=False):
            if lost := sorted(settings - optimizer.param_groups[0].keys()):
                what = f"another optimizer than {type(optimizer).__name__}: it holds no {', '.join(lost)}"
                raise ValueError(f"resume: the checkpoint is of {what}")
        self._plan = plan_of(trainer)
        if self._saved is not None:
            # Earlier versions wrote none.
            before = self._saved.get("callbacks", {}).get(self.state_key, {}).get("order", {})
            for line in changes(before, self._plan, schedules=bool(trainer.lr_scheduler_configs)):
                self._notes.append(f"resume: {line}")
                rank_zero_warn(f"resume: {line}")
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._plan}


def plan_of(trainer: L.Trainer) -> dict[str, Any]:
    """The values of ``ORDER`` in this run, and its steps, for its checkpoints. The batch size is by length under
    buckets, and None where the loader does not say."""
    loader: Any = trainer.train_dataloader
    by_length = getattr(getattr(loader, "batch_sampler", None), "batch_sizes", None) or {}
    by_length = {int(length): int(rows) for length, rows in by_length.items()}
    return {
        "batch_size": getattr(loader, "batch_size", None) or by_length or None,
        "world_size": trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "max_steps": trainer.max_steps,
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, schedules: bool) -> Iterator[str]:
    """Lines about what the run that wrote a checkpoint did otherwise than this one, ``plan_of`` both; ``schedules``:
    whether this one has learning-rate schedules."""
    if differ := [name for name in ORDER if name in before and before[name] != now[name]]:
        line = "; ".join(f"{before[name]} {ORDER[name]} at the checkpoint, {now[name]} now" for name in differ)
        if differ != ["accumulate_grad_batches"]:
            line += ". The order does not continue: examples of this epoch may be trained twice or left out"
        if schedules:
            line += ". The learning-rate schedule counts steps, which hold another number of examples now"
        yield line
    if schedules and (steps := before.get("max_steps", now["max_steps"])) != now["max_steps"]:
        yield f"trainer.max_steps was {steps}, {now['max_steps']} now: a schedule that ends with them has other rates"


def require_fit(trainer: L.Trainer, saved: Mapping[str, Any]) -> None:
    """Raise ValueError unless the ``saved`` states are of as many optimizers, and of schedules like this run's:
    Lightning pairs off as many as both have, and a schedule takes over whatever state it is given."""
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    for states, what, ours in (
        (saved["optimizer_states"], "optimizers", trainer.optimizers),
        (saved["lr_schedulers"], "learning-rate schedules", schedules),
    ):
        if len(states) != len(ours):
            raise ValueError(f"resume: the checkpoint holds {len(states)} {what}, this run has {len(ours)}")
    for state, schedule in zip(saved["lr_schedulers"], schedules, strict=True):
        own = schedule.state_dict() if type(schedule).__module__.startswith("torch.") else {}  # others know themselves
        if lost := [name for name in own if not name.startswith("_") and name not in state]:
            kind = type(schedule).__name__
            raise ValueError(f"resume: the checkpoint's schedule is not this run's {kind}: it holds no {lost[0]}")
