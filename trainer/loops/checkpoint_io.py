"""Checkpoints as files: never a half, written at once or while training continues, of one process or of several.

A model that is spread over processes is written whole, or into a directory by all of them. That holds ``meta.pt``, the
checkpoint of one process in which weights and optimizer states are tensors of the meta device. Beside it are those
tensors, as ``torch.distributed.checkpoint`` writes them. What is read from one is the checkpoint of one process again,
so that any strategy and any number of processes go on from it.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import errno
import io
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, empty

from strategies.loop_protocol import host_group
from trainer.run_files import INDEX, META, beside, is_directory
from trainer.telemetry.serialization import written_whole

SPREAD = ("state_dict", "optimizer_states")
"""What of a checkpoint is spread over the processes."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs and renames. Lightning's own writer stages in the system's temporary folder,
    and across file systems its final move is a copy that a kill leaves half done.

    In the ``background``, ``save_checkpoint`` copies to host memory (pinned where a file's tensors are on a GPU) and
    returns, while a thread writes. The next save waits for that, and so does the end of the training.
    """

    def __init__(self, *, background: bool = False) -> None:
        super().__init__()
        self.background = background
        self._writing: Future[object] | None = None
        self._thread = ThreadPoolExecutor(1)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` so that ``path`` is the old file or the new one, never a half. Raises OSError."""
        self.wait_until_written()
        if self.background:
            host = on_host(checkpoint)
            self.write_beside(lambda: self._write(host, Path(path)))
        else:
            self._write(checkpoint, Path(path))

    def write_beside(self, write: Callable[[], object]) -> None:
        """Call ``write`` in the thread, once what came before is done; ``wait_until_written`` raises what it raises."""
        self._writing = self._thread.submit(write)

    def wait_until_written(self) -> None:
        """Wait for what is being written. Raises OSError that it has met; that of a directory all processes raise."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        """What a file or a directory of several processes' parts holds; the latter in host memory."""
        self.wait_until_written()
        if is_directory(Path(path)):
            return load_directory(Path(path), weights_only=weights_only)
        return super().load_checkpoint(path, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or a directory once what is being written is whole; without that it stays. Waits for nothing:
        only the first process is asked to."""
        writing, remove = self._writing, super().remove_checkpoint
        if writing is None:
            remove(path)
        else:
            self.write_beside(lambda: (writing.result(), remove(path)))

    def teardown(self) -> None:
        """Wait for what is being written; what that has met is no reason beside an error that has come before."""
        with contextlib.suppress(*[Exception] if sys.exc_info()[1] is not None else []):
            self.wait_until_written()

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        target = beside(path, "new") if is_directory(path) else path
        try:
            with written_whole(target, "wb") as file:
                torch.save(checkpoint, file)
            if target != path:
                replace(path)
        except (OSError, RuntimeError) as error:
            # Where the system refuses a write, torch complains of an archive that it cannot finish.
            refused = error if isinstance(error, OSError) else error.__context__
            if not isinstance(refused, OSError) or refused.errno is None:
                raise
            raise OSError(refused.errno, refused.strerror, str(path)) from error


def on_host(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy that no later step changes, in host memory, with tied weights once."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    known: dict[int, Any] = {}

    def copied(_: str, tensor: Tensor) -> None:
        if tensor.is_meta:
            return
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Tied ones are two in a state dict. Others that wrap tensors have no memory of their own either.
        place = own.data_ptr() or id(tensor), own.shape, own.stride(), own.dtype
        if place not in copies:
            empty = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[place] = empty.copy_(tensor, non_blocking=True)
        known[id(tensor)] = copies[place]

    with torch.no_grad():
        mapped(checkpoint, copied)
    host = copy.deepcopy(checkpoint, known)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return host


def mapped(tree: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """A copy of ``tree`` (nested dictionaries and lists) with ``change(name, tensor)`` in the place of each tensor; a
    name is the keys that lead to it, with dots between them."""
    if isinstance(tree, Tensor):
        return change(name, tree)
    if isinstance(tree, dict):
        made = copy.copy(tree)  # with what torch hangs on a state dict
        made.update((key, mapped(value, change, f"{name}.{key}")) for key, value in tree.items())
        return made
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, change, f"{name}.{place}") for place, value in enumerate(tree))
    return tree


# ---- putting in place ------------------------------------------------------------------------------------------------


def replace(path: Path) -> None:
    """Put ``beside(path, "new")`` in the place of ``path``, where either is a directory.

    No rename replaces a directory. A kill between two of them leaves ``beside(path, "old")``, which is whole.
    """
    new, old = beside(path, "new"), beside(path, "old")
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(new, path)
    remove(old)


def remove(path: Path) -> None:
    """Remove a checkpoint of either kind, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """What the first process of those that failed inside has met is raised, with ``path``. torch's own is no
    ``Exception``, and prints tracebacks."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        chain: BaseException | None = reason
        while chain is not None and not (isinstance(chain, OSError) and chain.errno is not None):
            chain = chain.__cause__ or chain.__context__
        if isinstance(chain, OSError):
            raise OSError(chain.errno, f"{chain.strerror} (rank {rank})", str(path)) from error
        raise ValueError(f"{path}: rank {rank}: {reason}") from error


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_directory(
    path: Path,
    allocated: Callable[[str, Tensor], Tensor] | None = None,
    *,
    parts: tuple[str, ...] = SPREAD,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """The checkpoint in the directory ``path`` with the tensors of ``parts`` alone, which are some of ``SPREAD``.

    ``allocated`` makes what a tensor is read into, given its name and a meta tensor of its shape and type, in every
    process of the group. None: whole into host memory, each process by itself. Raises ValueError where one is damaged.
    """
    loaded: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    tensors: dict[str, Tensor] = {}

    def found(name: str, meta: Tensor) -> Tensor:
        tensors[name] = torch.empty_like(meta, device="cpu") if allocated is None else allocated(name, meta)
        return tensors[name]

    made = {part: mapped(loaded[part], found, part) for part in parts if part in loaded}
    reader = Reader(path)
    held = reader.read_metadata().state_dict_metadata
    if lost := [name for name in tensors if not isinstance(held.get(name), TensorStorageMetadata)]:
        raise ValueError(f"it holds no {lost[0]}")
    alone = allocated is None
    with named(path):
        load(tensors, storage_reader=reader, process_group=None if alone else host_group(), no_dist=alone)
    return {**{name: value for name, value in loaded.items() if name not in SPREAD}, **made}


class Reader(FileSystemReader):
    """torch's reader, but for an index that is unpickled without a look at what it would run."""

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:
        """The index. Raises UnpicklingError, which names what reading it would call."""
        with (Path(self.path) / INDEX).open("rb") as file:
            index: Metadata = _Index(file).load()
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name.endswith("Path"):
            return PurePath
        if module.startswith(dcp.__name__ + "."):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        elif module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        elif (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        elif (module, name) == ("builtins", "getattr"):  # so Python up to 3.11.3 finds what an enumeration holds
            return _member
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")


def _member(kind: Any, name: str) -> enum.Enum:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"GLOBAL builtins.getattr of {kind!r} is not allowed")
    return kind[name]


def damaged(path: Path) -> str | None:
    """The first part of a checkpoint of either kind that is not what its checksum says; None where all are."""
    if path.is_file():
        return _damaged(path)
    for place, stored in (Reader(path).read_metadata().storage_data or {}).items():
        with (path / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            content = io.BytesIO(file.read(stored.length))
        if len(content.getvalue()) < stored.length or _damaged(content):
            return f"{place.fqn} in {stored.relative_path}"
    return _damaged(path / META)


def _damaged(file: Path | IO[bytes]) -> str | None:
    with zipfile.ZipFile(file) as archive:
        # Without ``torch.serialization.set_crc32_options`` all of them are 0.
        return archive.testzip() if any(entry.CRC for entry in archive.infolist()) else None


# ---- a model that is spread over processes ---------------------------------------------------------------------------


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
            self.checkpoint_io.wait_until_written()
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

    Raises OSError in all of them where one cannot write; where a thread does, in all when they next wait for it.
    """
    writer = strategy.checkpoint_io if isinstance(strategy.checkpoint_io, AtomicCheckpointIO) else AtomicCheckpointIO()
    writer.wait_until_written()
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

    def write(held: dict[str, Any], rest: dict[str, Any]) -> None:
        with named(path):
            save(held, storage_writer=FileSystemWriter(new), process_group=group)
        with _first_alone(group, path) as first:
            if first:
                with written_whole(new / META, "wb") as file:
                    torch.save(rest, file)
                replace(path)

    if not writer.background:
        write(tensors, rest)
        return
    with contextlib.closing(DefaultStager(StagingOptions(*[False] * 4))) as stager:  # copies before it returns
        host: Any = stager.stage(tensors)
    writer.write_beside(partial(write, host, on_host(rest) if strategy.is_global_zero else rest))


@contextlib.contextmanager
def _first_alone(group: ProcessGroup, path: Path) -> Iterator[bool]:
    """Inside, the first process acts alone; what the system says to it is raised in all, with ``path``."""
    refused: OSError | None = None
    try:
        yield group.rank() == 0
    except OSError as error:
        refused = OSError(error.errno, error.strerror, str(path))
    refusals = [refused]
    torch.distributed.broadcast_object_list(refusals, 0, group)
    if refusals[0] is not None:
        raise refusals[0]
