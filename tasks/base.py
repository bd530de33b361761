"""The Task noun: a LightningModule, its LightningDataModule and what they declare to the compiler; and what they need
of the machine. Only what certainly cannot be had is refused; where the system does not tell (no /proc), nothing is.

Importing this module must stay cheap (no torch): the command line imports every task to know its configuration.
A slotted dataclass is a new class, in which ``super()`` without arguments fails: subclasses name their base.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn

    from tasks.lightning_module import ScoredModule

MAX_WORKERS = 1024
"""Loader processes of a device: more would take a machine's memory before anything fails."""
Ragged = tuple[tuple[str, int, float, int], ...]
"""Of each tensor of ragged length in a batch: field, dimension, padding value, positions beyond the computed length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a task tells the compiler about its module. Paths are those of ``module.get_submodule(path)``."""

    whole: tuple[str, ...] = ()
    """Submodules whose forward calls together are the step's forward **and loss**; one graph each under ``whole``."""
    blocks: tuple[str, ...] = ()
    """Containers (ModuleList or Sequential) of repeated blocks; ``regional`` compiles each kind of block once."""
    parts: tuple[str, ...] = ()
    """Other submodules worth a region of their own: embeddings, the final norm with head and loss."""
    ragged: Ragged = ()
    """Tensors of ragged length in a batch, see ``strategies.Ragged``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """What one batch holds on this rank, known on the host without a device synchronisation."""

    samples: int
    """Examples in the batch."""
    tokens: int | None = None
    """Token positions computed, padding included; None for a task without tokens."""
    useful_tokens: int | None = None
    """Token positions that are not padding; None for a task without tokens."""
    attended: int | None = None
    """Pairs of positions that attend to each other, where samples and tokens do not say so: samples in one row."""


@dataclass(kw_only=True, slots=True)
class Task:
    """Base of every task. The dataclass fields are the task's configuration (``task.<field>=`` on the command line)."""

    name: ClassVar[str] = "task"
    """Directory and chart name of the task."""
    monitor: ClassVar[str | None] = None
    """Validation metric, lower is better, by which ``checkpoints/best.ckpt`` is chosen; None keeps no best one."""
    derives: ClassVar[bool] = False
    """Whether the loss holds a gradient of the network, so that ``second_order`` alone compiles it."""

    @property
    def title(self) -> str:
        """What records, tables and consoles call it: the name, and which model where the task has several."""
        return self.name

    def check(self) -> None:
        """Look for what the options name on this machine, before any work starts and torch is imported. Raises
        ValueError."""
        data = getattr(self, "data", None)
        if isinstance(data, Loading):
            data.check()

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        """Build the data module. Raises ValueError for unusable user input (a missing folder, a broken file)."""
        raise NotImplementedError

    def build_module(self, *, max_steps: int) -> lightning.LightningModule:
        """Build the module that trains for ``max_steps`` optimizer steps (the length of its schedule)."""
        raise NotImplementedError

    def declare(self) -> Declaration:
        """What the module declares to the compiler; an empty declaration means: find the blocks by yourself."""
        return Declaration()

    def count(self, batch: Any) -> BatchCounts:
        """Count one host or device batch without reading device memory."""
        raise NotImplementedError

    def training_flops(self, batch: Any) -> int | None:
        """Floating-point operations of forward and backward for this batch (matrix products, 2 per multiply-add).

        None: not known.
        """
        return None


@dataclass(kw_only=True, slots=True)
class TrainedTask(Task):
    """A task trained from random weights with AdamW under a linear warm-up and a cosine."""

    monitor: ClassVar[str | None] = "val/loss"
    embeds: ClassVar[bool] = False
    """Whether inputs are tokens that are looked up: every product then has two operands that need a gradient, and
    backward costs twice forward."""
    accuracy: ClassVar[str] = "val/accuracy"
    """Key of the mean of what the network scores beside the loss: the share of targets predicted right."""
    inputs: ClassVar[tuple[str, ...]] = ("inputs", "targets")
    """What of a batch the network takes in training, in its order."""
    blocks: ClassVar[tuple[str, ...]] = ("net.blocks",)
    parts: ClassVar[tuple[str, ...]] = ("net.tail",)
    """As in ``Declaration``."""

    learning_rate: float | None = None
    """Highest learning rate of AdamW, reached after the warm-up; null = the task's own rule."""
    weight_decay: float = 0.05
    """AdamW's decoupled decay of weights; biases and norms have none."""
    warmup_steps: int = 50
    """Optimizer steps of linear warm-up."""
    initialise: str = "auto"
    """Where initial weights are drawn: on the ``host``, or, with ``auto``, on the device where that is a CUDA device or
    the network has 1e9 parameters (milliseconds for the host's seconds, but other numbers from the same seed on another
    kind of device). A network that cannot be built without memory is drawn on the host."""

    def __post_init__(self) -> None:
        require_fields("task", self, weight_decay=0, warmup_steps=0)
        if math.isinf(self.weight_decay):
            raise ValueError(f"task.weight_decay={self.weight_decay} must be finite")
        require_choice("task.initialise", self.initialise, ("auto", "host"))
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(f"task.learning_rate={self.learning_rate} must be above 0 and finite")

    def ragged(self) -> Ragged:
        """As in ``Declaration``."""
        return ()

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with the loss and other parts apart."""
        return Declaration(whole=("net",), blocks=self.blocks, parts=self.parts, ragged=self.ragged())

    def build_net(self) -> nn.Module:
        """Build the network; its weights are drawn from torch's global generator.

        Raises ValueError for a network that cannot be built.
        """
        raise NotImplementedError

    def default_learning_rate(self) -> float:
        """The highest learning rate where none is given."""
        raise NotImplementedError

    def example(self, rows: int, positions: int) -> tuple[Tensor | None, ...]:
        """Arguments of the network for ``rows`` examples (of ``positions`` each, where it has positions), targets last.

        Their values do not matter: operations are counted with them.
        """
        raise NotImplementedError

    def build_module(self, *, max_steps: int) -> ScoredModule:
        """Build the module; see ``initialise`` for its weights. Raises ValueError for unusable input."""
        from tasks.lightning_module import ScoredModule, operations

        operations(self)  # counted once: now, and not within the first step, which is timed
        return ScoredModule(self, max_steps=max_steps)

    def training_flops(self, batch: Any) -> int | None:
        """Operations of forward, loss and backward, as ``tasks.lightning_module`` counts them."""
        from tasks.lightning_module import operations

        counts, known = self.count(batch), operations(self)
        if known is None:
            return None
        tokens = counts.tokens or 0
        attended = tokens**2 // counts.samples if counts.attended is None else counts.attended
        example, position, pair = known
        return example * counts.samples + position * tokens + pair * attended

    def max_positions(self) -> int | None:
        """Most positions of an example; None for a task without positions."""
        return None

    def counted_net(self) -> nn.Module:
        """The network whose operations are counted: without memory, unless it reads values."""
        from tasks.lightning_module import on_meta

        return on_meta(self.build_net)


@dataclass(kw_only=True, slots=True)
class Loading:
    """Base of every source of data."""

    batch_size: int = 16
    """Examples a batch on each device."""
    num_workers: int | None = None
    """Loader processes a device; null = one less than this process' cores, at most 8."""
    source: ClassVar[str] = ""
    """The option that says where the examples are; none where they are made."""

    def __post_init__(self) -> None:
        if self.source and not getattr(self, self.source):
            raise ValueError(f"task.data.{self.source}='' must name a file or a folder")
        require_fields("task.data", self, batch_size=1, num_workers=0)
        if self.num_workers is not None and self.num_workers > MAX_WORKERS:
            raise ValueError(f"task.data.num_workers={self.num_workers} must be at most {MAX_WORKERS} processes")

    def check(self) -> None:
        """See ``Task.check``."""
        if self.source and not os.path.exists(getattr(self, self.source)):
            raise ValueError(f"{self.place()}: no such file or folder")

    def place(self) -> str:
        """Where the examples come from, for messages."""
        return f"task.data.{self.source}={getattr(self, self.source)!r}" if self.source else "the data"

    def workers(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(8, cores - 1)


def require_fields(path: str, config: object, **minimums: float) -> None:
    """Raise ValueError unless each field of ``config``, an option under ``path``, is None (automatic) or at least its
    minimum."""
    for name, minimum in minimums.items():
        value = getattr(config, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"{path}.{name}={value} must be at least {minimum}")


def require_share(path: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{path}={value} must be at least 0 and below 1")


def require_choice(path: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{path}={value!r} is not one of {choices}")


def require_multiple(path: str, config: object, **divisors: str) -> None:
    """Raise ValueError unless each field of ``config``, an option under ``path``, is a multiple of another one."""
    for name, its_divisor in divisors.items():
        value, divisor = getattr(config, name), getattr(config, its_divisor)
        if value % divisor:
            raise ValueError(f"{path}.{name}={value} must be a multiple of {path}.{its_divisor}={divisor}")


def suggest(given: str, known: Iterable[str]) -> str:
    """What an error about ``given`` ends with: the names in ``known`` that resemble it."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(given.lower(), by_lower, n=3)
    return f"; near: {', '.join(by_lower[match] for match in matches)}" if matches else ""


# ---- what a run needs of this machine --------------------------------------------------------------------------------

Made = TypeVar("Made")

GIB = 1 << 30
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def require_memory(what: str, needed: int, *, device: int | None = None) -> None:
    """Raise ValueError where ``what``, which names the options, needs more bytes than there are.

    ``device``: all bytes of one; None: of this machine.
    """
    total = total_bytes() if device is None else device
    if total is not None and needed > total:
        place = "this machine" if device is None else "the device"
        sizes = f"needs at least {needed / GIB:,.2f} GiB of memory, {place} has {total / GIB:,.2f} GiB"
        raise ValueError(f"{what}: {sizes}")


def total_bytes() -> int | None:
    """Memory and swap of this machine, or what of it the container may take; None where the kernel does not tell."""
    memory = _meminfo("MemTotal")
    return None if memory is None else min(memory, _container()) + (_meminfo("SwapTotal") or 0)


def free_bytes() -> int | None:
    """Memory that can be had without swapping, or the container's; None where the kernel does not tell."""
    free = _meminfo("MemAvailable")
    return None if free is None else min(free, _container())


def _meminfo(name: str) -> int | None:
    found = None
    with suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+) kB", (PROC / "meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _container() -> int:
    """Most memory of the container."""
    with suppress(OSError, ValueError):  # there is no such file, or it says "max"
        return int((CGROUPS / "memory.max").read_text())
    return sys.maxsize


def cache_folder() -> Path:
    """The user's cache folder for this project (``$XDG_CACHE_HOME/crucible`` or ``~/.cache/crucible``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crucible"


def load_or_make(
    name: str, *, load: Callable[[Path], Made], make: Callable[[], Made], save: Callable[[Path, Made], object]
) -> Made:
    """Load the file ``name`` of the user's cache; else make its content, and keep it there.

    A file that does not load (an older library's format, a full disk) is made again. Where the cache cannot be written,
    the content lives in memory only. Written beside and renamed: processes that start together never read half a file.
    """
    path = cache_folder() / name
    with suppress(Exception):
        if path.is_file():
            return load(path)
    made = make()
    beside = path.with_name(f"{secrets.token_hex(4)}-{name}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save(beside, made)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    return made
