"""Checkpoints of a model that is spread over processes: one whole file, or a directory to which all write."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, empty

from trainer.loops.checkpoint_io import (
    META,
    SPREAD,
    AtomicCheckpointIO,
    beside,
    is_directory,
    load_directory,
    mapped,
    named,
    on_host,
    remove,
    replace,
)
from trainer.loops.processes import host_group
from trainer.telemetry.files import written_whole


class ShardedCheckpoints(ModelParallelStrategy):
    """Saving and loading of a strategy that spreads a model. Keys and layouts are those of one process.

    ``save_distributed_checkpoint`` decides between a directory and one file, which the first process assembles in its
    host memory. After a kill either is the old checkpoint or the new one, and both are loaded.
    """

    # As any strategy does; the base gathers and renames, and loads in ``load_checkpoint``.
    lightning_restore_optimizer = ParallelStrategy.lightning_restore_optimizer
    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    optimizer_state = ParallelStrategy.optimizer_state
    load_model_state_dict = ParallelStrategy.load_model_state_dict
    load_optimizer_state_dict = ParallelStrategy.load_optimizer_state_dict

    def teardown(self) -> None:
        """Wait for what is being written: the base does not ask."""
        super().teardown()
        self.checkpoint_io.teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a directory, or one file by the strategy's ``checkpoint_io``. Every process calls this."""
        if self._save_distributed_checkpoint:
            save_directory(checkpoint, Path(filepath), self)
            return

        def whole(_: str, tensor: Tensor) -> Tensor | None:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            return full.cpu() if self.is_global_zero else None

        checkpoint |= {part: mapped(checkpoint[part], whole) for part in SPREAD if part in checkpoint}
        ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What ``checkpoint_path`` (a directory or a file) holds, each process its own part of weights and optimizer
        states. Without optimizers their states are left out."""
        assert self.lightning_module is not None
        if isinstance(self.checkpoint_io, AtomicCheckpointIO):
            self.checkpoint_io.settle()
        spread = {f"state_dict.{key}": value for key, value in self.lightning_module.state_dict().items()}
        for place, optimizer in enumerate(self.optimizers):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            spread |= {f"optimizer_states.{place}.state.{i}": each for i, each in enumerate(parameters)}

        def placed(name: str, tensor: Tensor) -> Tensor:
            like = spread.get(name if name in spread else ".".join(name.split(".", 4)[:4]))
            if not isinstance(like, DTensor) or not tensor.ndim:
                return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()  # no view of a file
            mesh = like.device_mesh
            placements = like.placements if tensor.shape == like.shape else [Replicate()] * mesh.ndim
            if tensor.is_meta:
                return empty(tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)
            # Each process takes its part of the file without asking the first one.
            return distribute_tensor(tensor, mesh, placements, src_data_rank=None).clone()

        path, parts = Path(checkpoint_path), SPREAD if self.optimizers else SPREAD[:1]
        if is_directory(path):
            return load_directory(path, placed, parts=parts, weights_only=weights_only)
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return loaded | {part: mapped(loaded[part], placed, part) for part in parts if part in loaded}


def save_directory(checkpoint: Mapping[str, Any], path: Path, strategy: ModelParallelStrategy) -> None:
    """Write ``checkpoint`` by all processes, so that ``path`` is the old one or the new one, never a half.

    Raises OSError in all of them where one cannot write; where a thread does, in all at their next ``settle``.
    """
    writer = strategy.checkpoint_io if isinstance(strategy.checkpoint_io, AtomicCheckpointIO) else AtomicCheckpointIO()
    writer.settle()
    path = Path(strategy.broadcast(path))
    new, group = beside(path, "new"), host_group("checkpoints")
    tensors: dict[str, Any] = {"state_dict": {}}

    def taken(name: str, tensor: Tensor) -> Tensor:
        # What is not spread may differ, as running means do: the first process's is kept, as by every strategy.
        if strategy.is_global_zero or isinstance(tensor, DTensor):
            part, _, key = name.partition(".")
            target, key = (tensors[part], key) if part in tensors else (tensors, name)
            target[key] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    rest = {**checkpoint, **{part: mapped(checkpoint[part], taken, part) for part in SPREAD if part in checkpoint}}

    with _first_alone(group, path) as first:
        if first and path.is_dir() and not is_directory(path) and any(path.iterdir()):
            raise FileExistsError(errno.EEXIST, "a folder with other files than a checkpoint's")
        if first:
            remove(new)
            new.mkdir(parents=True)

    def finish() -> None:
        with _first_alone(group, path) as first:
            if first:
                with written_whole(new / META, "wb") as file:
                    torch.save(rest, file)
                replace(path)

    if not writer.background:
        with named(path):
            save(tensors, storage_writer=FileSystemWriter(new), process_group=group)
        finish()
        return
    stager = DefaultStager(StagingOptions(*[False] * 4))  # copies before it returns
    saved: Any = async_save(tensors, storage_writer=FileSystemWriter(new), process_group=group, async_stager=stager)
    if strategy.is_global_zero:
        rest = on_host(rest)

    def written() -> None:
        with contextlib.closing(stager), named(path):
            saved.result()
        finish()

    writer.write_beside(written)


@contextlib.contextmanager
def _first_alone(group: ProcessGroup, path: Path) -> Iterator[bool]:
    """Inside, the first process acts alone; what the system says to it is raised in all, with ``path``."""
    refused: OSError | None = None
    try:
        yield group.rank() == 0
    except OSError as error:
        refused = OSError(error.errno, error.strerror, str(path))
    said = [refused]
    torch.distributed.broadcast_object_list(said, 0, group)
    if said[0] is not None:
        raise said[0]
