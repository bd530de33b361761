"""Checkpoints of a run: written whole or not at all, exact at step boundaries, found again by ``resume=``."""

from __future__ import annotations

import os
import pickle
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from trainer.atomic import written_whole
from trainer.interrupt import StopRequest

DIRECTORY = "checkpoints"
LAST = "last.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs and renames. Lightning's own writer stages in the system's temporary folder,
    and across file systems its final move is a copy that a kill leaves half done."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` so that ``path`` is the old file or the new one, never a half."""
        with written_whole(Path(path), "wb") as file:
            torch.save(checkpoint, file)


class Checkpoints(L.Callback):
    """Saves ``last.ckpt`` every N steps, at the last step and when a stop was asked for, with all random states.

    All of them are written at the end of a batch, where the loop's counters, the data order and the random states
    belong together; after ``Trainer.fit`` has returned they no longer do. Each process resumes its own random states.
    One without any in the checkpoint (there are more processes now, or an earlier version kept the first one's only) is
    seeded by the run's seed, the step and its rank.
    """

    def __init__(self, directory: Path, *, every_n_steps: int, stop: StopRequest, at_end: bool = True) -> None:
        self.path = directory / DIRECTORY / LAST
        self._every = every_n_steps
        self._at_end = at_end
        self._stop = stop
        self._step = 0
        self._restored: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals back from Lightning and put restored random states in force."""
        self._stop.install()
        self._stop.in_training = True
        self._step = trainer.global_step
        self._last_step = trainer.max_steps
        self._alone = trainer.world_size == 1
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
        stop = self._stop.signum is not None if self._alone else self._agreed_stop(trainer, step)
        if stop or (self._at_end and step == self._last_step) or (self._every and step % self._every == 0):
            trainer.save_checkpoint(self.path)
        if stop:
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # Lightning would validate before it leaves, and compile for that

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on a signal ends the process at once."""
        self._stop.in_training = False

    def state_dict(self) -> dict[str, Any]:
        """The random states of all processes, saved with every checkpoint; each process has to call this."""
        mine = random_states()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return {"ranks": [mine]}
        ranks: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, mine)
        return {"ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the random states for ``on_train_start``: building the loaders in between may draw numbers."""
        self._restored = state_dict.get("ranks", [state_dict])  # earlier versions kept one process's

    def _agreed_stop(self, trainer: L.Trainer, step: int) -> bool:
        # Ranks see a signal at different steps and must leave at the same one; asking each step would synchronise.
        if step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return False
        return self._stop.agreed(trainer)


def random_states() -> dict[str, Any]:
    """Random states of Python, NumPy, torch and every CUDA device, in types that ``torch.load`` accepts safely."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_own(ranks: list[dict[str, Any]], trainer: L.Trainer) -> None:
    """Put this process's entry of ``ranks`` in force, random states by rank; where there is none, a seed of its own."""
    rank, size = trainer.global_rank, trainer.world_size
    if len(ranks) < size:
        rank_zero_warn(
            f"resume: the checkpoint holds random states of {len(ranks)} processes, this run has {size}: those without "
            "are seeded by seed, step and rank"
        )
    if rank < len(ranks):
        restore_random_states(ranks[rank])
        return
    seed = (int(os.environ.get("PL_GLOBAL_SEED", "0")) + trainer.global_step * size + rank) % 2**32
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def restore_random_states(states: dict[str, Any]) -> None:
    """Put ``random_states`` back in force; CUDA's only where the number of devices is the same."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def find_checkpoint(resume: str) -> Path:
    """The checkpoint that ``resume=<run directory or file>`` means. Raises ValueError when there is no whole one."""
    given = Path(resume).expanduser()
    candidates = [given / DIRECTORY / LAST, given / LAST] if given.is_dir() else [given]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        what = f"no {DIRECTORY}/{LAST} in it" if given.is_dir() else "no such file or directory"
        raise ValueError(f"resume={resume}: {what}")
    if not zipfile.is_zipfile(found):  # a torch checkpoint is a zip file, whose directory stands at its end
        raise ValueError(f"resume={resume}: {found.name} is not a whole checkpoint")
    return found


def step_of(checkpoint: Path) -> int:
    """Optimizer step at which ``checkpoint`` was saved. Raises ValueError when it is none of Lightning's."""
    try:
        # Memory-mapped, so that only the part that is read comes off the disk.
        return int(torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["global_step"])
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
