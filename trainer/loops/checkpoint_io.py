"""The writer of whole checkpoints: never a half, at once or while training continues."""

from __future__ import annotations

import contextlib
import copy
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from tasks.resources import free_bytes, gib
from trainer.loops.sharded import beside, is_directory, load_directory, mapped, replace
from trainer.telemetry.files import written_whole


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs and renames. Lightning's own writer stages in the system's temporary folder,
    and across file systems its final move is a copy that a kill leaves half done.

    Args:
        background: Whether ``save_checkpoint`` copies to host memory (pinned where the tensors are on a GPU) and
            returns, while a thread writes. The next save waits for that, and so does the end of the training. What
            does not fit into half of the free memory is written at once.
    """

    def __init__(self, *, background: bool = False) -> None:
        super().__init__()
        self.background = background
        self.refused: OSError | None = None
        """What the system said to a write of this process in a group: the others wait for it, and all end with it."""
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` so that ``path`` is the old file or the new one, never a half. Raises OSError, in a
        group of processes only later and in all."""
        self.settle()
        if self.refused is not None:
            return
        if self.background and (host := on_host(checkpoint)) is not None:
            self._writing = self._thread.submit(self._write, host, Path(path))
        else:
            self._write(checkpoint, Path(path))

    def settle(self) -> None:
        """Wait for what is being written. Raises OSError that it has met, outside of a group."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """What a file or a directory of several processes' parts holds; the latter in host memory."""
        self.settle()
        if is_directory(Path(path)):
            return load_directory(Path(path), weights_only=weights_only)
        return super().load_checkpoint(path, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a directory, once nothing is being written."""
        self.settle()
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for what is being written; what that has met is no reason beside an error that has come before."""
        with contextlib.suppress(*[OSError] if sys.exc_info()[1] is not None else []):
            self.settle()

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        try:
            target = beside(path, "new") if is_directory(path) else path
            with written_whole(target, "wb") as file:
                torch.save(checkpoint, file)
            if target != path:
                replace(path)
        except (OSError, RuntimeError) as error:
            # Where the system refuses a write, torch complains of an archive that it cannot finish.
            refused = error if isinstance(error, OSError) else error.__context__
            if not isinstance(refused, OSError) or refused.errno is None:
                raise
            said = OSError(refused.errno, refused.strerror, str(path))
            if not grouped() or torch.distributed.get_world_size() == 1:
                raise said from error
            self.refused = said


def on_host(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """A copy that no later step changes, in host memory; None where that would take more than half of what is free."""
    tensors: dict[Any, Tensor] = {}
    keys: dict[int, Any] = {}

    def found(_: str, tensor: Tensor) -> None:
        # Tied weights are tensors of their own in a state dict, and are written once.
        keys[id(tensor)] = key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        tensors[key] = tensor

    mapped(checkpoint, found)
    size, free = sum(tensor.nbytes for tensor in tensors.values()), free_bytes()
    if free is not None and size > free // 2:
        rank_zero_warn(f"a checkpoint of {gib(size)} is written at once: {gib(free)} of host memory are free")
        return None
    with torch.no_grad():
        copies = {
            key: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
            for key, tensor in tensors.items()
        }
    host = copy.deepcopy(checkpoint, {place: copies[key] for place, key in keys.items()})
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return host


def grouped() -> bool:
    """Whether this process is one of a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
