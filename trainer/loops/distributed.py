"""Processes: what those of one training agree on, and how their gradients meet (``DDP``); and the loops of one.

They agree over gloo, from host to host: no device is waited for, and a broken one is not in the way. DDP and graphs:
https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from strategies.loop_protocol import LogCall
from trainer.loops.lightning_internals import (
    hooks_within_step,
    lightning_classes,
    on_sigterm,
    received_sigterm,
    replace,
)

Value = TypeVar("Value")

UNKNOWN = 2**62
"""In the place of a number of batches."""

_made: dict[str, tuple[object, dist.ProcessGroup]] = {}


def host_group(thread: str = "main") -> dist.ProcessGroup:
    """A gloo group of all processes beside the one that trains, made once for each of those; all processes call it.
    Each ``thread`` that communicates has its own, because the order of two threads differs between processes."""
    world = dist.group.WORLD
    if thread not in _made or _made[thread][0] is not world:
        group = dist.new_group(backend="gloo", timeout=group_timeout())
        assert isinstance(group, dist.ProcessGroup)
        _made[thread] = world, group
    return _made[thread][1]


def group_timeout() -> timedelta:
    """How long a collective of the group that trains waits for a process; a new group has torch's default else."""
    world: Any = dist.group.WORLD
    timeout: timedelta = world._get_backend(world._device_types[-1]).options._timeout
    return timeout


def max_over_ranks(value: int, world_size: int) -> int:
    """The largest ``value`` of all ``world_size`` processes that train together, once each has called this."""
    if world_size == 1:
        return int(value)
    tensor = torch.tensor(int(value))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, host_group())
    return int(tensor)


class Agreement:
    """Flags that all processes hold up once a step and read one step later, so that all act at the same step.

    Made by all processes alike, inside a process group. A process that is less than a step behind is not waited for.
    """

    def __init__(self) -> None:
        self._group = host_group()
        self._sent: tuple[torch.Tensor, dist.Work] | None = None

    def exchange(self, *flags: int) -> tuple[int, ...]:
        """Hold up ``flags``; returns the largest of each, of all processes, from the call before: zeros at first.

        Every process calls it at the same steps. Raises RuntimeError where one of them is gone.
        """
        before = self.wait() or (0,) * len(flags)
        tensor = torch.tensor(flags)
        self._sent = tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True)
        return before

    def wait(self) -> tuple[int, ...]:
        """The flags that are on their way, once all processes have held up theirs; empty without any."""
        if self._sent is None:
            return ()
        tensor, work = self._sent
        self._sent = None
        work.wait()
        return tuple(tensor.tolist())


class SigtermAgreement(Agreement):
    """Ends ``trainer``'s training by a SIGTERM at one step of all processes, in place of Lightning's own way.

    Lightning's reads a flag of the first process from the device in each step, which the host then waits for.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__()
        self._trainer, self._asked = trainer, False
        on_sigterm(trainer, self._notice, self._end_where_asked)

    def _notice(self, signum: int, _: Any) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if not self._asked and launcher is not None:
            launcher.kill(signum)
        self._asked = True

    def _end_where_asked(self) -> None:
        if any(self.exchange(self._asked)):
            raise received_sigterm(self._trainer)


class EpochEnds:
    """Ends each epoch at the same batch in all processes, where one of them has fewer batches than others, or nobody
    knows how many. Else the others would wait for it in a step that it never takes.

    Raises ValueError where a process has none at all.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer, self._agreement = trainer, Agreement()

    def batch_begins(self) -> None:
        """It may be the last one here."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        self._agreement.exchange(progress.is_last_batch)
        if self._trainer.accumulate_grad_batches > 1:  # the last batch takes an optimizer step in any case
            self.batch_ends()

    def batch_ends(self) -> None:
        """It was the last one where it was so anywhere."""
        if flags := self._agreement.wait():
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = bool(flags[0])

    def epoch_ends(self) -> None:
        """Without a batch, this process has asked nobody."""
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            raise ValueError(f"rank {self._trainer.global_rank} has no batch in epoch {self._trainer.current_epoch}")


def epoch_ends(trainer: L.Trainer) -> EpochEnds | None:
    """What ends epochs alike; None where all processes have as many batches."""

    def least_and_most(number: float | None) -> tuple[float, float]:
        whole = UNKNOWN if number in (None, math.inf) else int(number)
        return -max_over_ranks(-whole, trainer.world_size), max_over_ranks(whole, trainer.world_size)

    if trainer.world_size == 1:
        return None
    least, most = least_and_most(trainer.num_training_batches)
    earliest, latest = least_and_most(trainer.val_check_batch)
    if earliest < latest:  # a share of different numbers
        trainer.val_check_batch = earliest
    return None if least == most < UNKNOWN else EpochEnds(trainer)


DDP_WARMUP_STEPS = 11
"""Steps with a reduction after which DDP neither rebuilds its buckets nor times itself, as torch's notes have it."""


class RankReductions:
    """What all loops do alike; see ``Loop`` for what the members mean."""

    world_size: int
    step_function: Callable[..., Any] | None = None

    def any_rank(self, flag: bool) -> bool:
        return bool(max_over_ranks(flag, self.world_size))

    def all_ranks(self, flag: bool) -> bool:
        return not self.any_rank(not flag)

    def min_over_ranks(self, value: int) -> int:
        return -max_over_ranks(-value, self.world_size)


class DistributedLoop(RankReductions):
    """The part of ``Loop`` that concerns several processes; see there for what the members mean."""

    _trainer: L.Trainer

    def broadcast(self, value: Value) -> Value:
        return self._trainer.strategy.broadcast(value)

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        strategy = self._trainer.strategy
        return cast(Tensor, strategy.reduce(tensor.to(strategy.root_device), reduce_op=how))

    def collectives_obstacle(self) -> str | None:
        strategy = self._trainer.strategy
        if isinstance(strategy, lightning_classes(SingleDeviceStrategy, ModelParallelStrategy)):
            # Options of ours: what is gathered or reduced differs between the micro-batches of a step then.
            kept = not getattr(strategy, "reshard_after_backward", True) or getattr(
                strategy, "reduce_each_micro_batch", False
            )
            if kept and self._trainer.accumulate_grad_batches > 1:
                return "with accumulation, reshard_after_backward=false and reduce_each_micro_batch=true run uncaptured"
            return None
        model = strategy.model
        if not isinstance(strategy, lightning_classes(DDPStrategy)) or not isinstance(model, DistributedDataParallel):
            return f"no graph holds the steps of {type(strategy).__name__}; under ddp and fsdp2 it does"
        if model.find_unused_parameters:
            return "DDP with find_unused_parameters asks the device in every step which parameters were used"
        if model.static_graph:
            return "DDP with static_graph=True is not compared with eager, so that nothing would check its graphs"
        return None

    @property
    def capture_warmup_steps(self) -> int:
        return DDP_WARMUP_STEPS if isinstance(self._trainer.strategy, lightning_classes(DDPStrategy)) else 0

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return getattr(self._trainer.strategy, "stream", None)


class SingleProcessLoop(RankReductions):
    """Nobody has to be asked; see ``Loop`` for what the members mean."""

    cuda_graphs = False
    manual = False
    world_size = 1
    is_first_process = True
    capture_warmup_steps = 0
    stream: torch.cuda.Stream | None = None
    _fetching: tuple[Callable[[], Any], Callable[[], Any]] = (lambda: None, lambda: None)

    def broadcast(self, value: Value) -> Value:
        return value

    def reduced(self, tensor: Tensor, how: str = "sum") -> Tensor:
        return tensor

    def collectives_obstacle(self) -> str | None:
        return None

    def constants(self) -> Hashable:
        return ()  # nothing of it changes within a training

    def around_fetch(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        return replace(self, "_fetching", (before, after))

    def fetched(self, batches: Iterator[Value]) -> Iterator[Value]:
        """``batches``, each of which is fetched between what ``around_fetch`` was given."""
        while True:
            before, after = self._fetching
            before()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                after()
            yield batch

    def unreadable_types(self) -> Mapping[type, str]:
        return {}

    def recording_logs(self) -> contextlib.AbstractContextManager[list[tuple[LogCall, Any]]]:
        return contextlib.nullcontext([])

    def write_logs(self, calls: Iterable[tuple[LogCall, Any]]) -> None:
        """Nothing was kept."""


# ---- Lightning's DDP -------------------------------------------------------------------------------------------------

# Lightning's own (``_setup_model`` in lightning/pytorch/strategies/ddp.py of 2.6.0) makes the process group with its
# device, as a captured step needs. It always wraps the module on a side stream. Unless the steps run there as well,
# each parameter's gradient then crosses streams in every backward:
# https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/autograd/input_buffer.cpp

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that a process group reads when it is made."""
DUMP_WAIT, DUMP_WAIT_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "2500"
"""As above. A process ends four times this after a collective's timeout, so that its flight recorder can write."""


@contextlib.contextmanager
def group_variables() -> Iterator[None]:
    """A process group of NCCL that is made within it ends its process 10 s after a timeout, and not torch's 60, unless
    the user's environment says how long: a process that stands still keeps all its devices for that long."""
    if DUMP_WAIT in os.environ:
        yield
        return
    os.environ[DUMP_WAIT] = DUMP_WAIT_MS
    try:
        yield
    finally:
        del os.environ[DUMP_WAIT]


class DDP(DDPStrategy):
    """Lightning's ``DDPStrategy`` whose gradients are views of the buckets that are reduced.

    Args:
        captures: Whether steps are captured in CUDA graphs with their collectives. The module is then wrapped on
            ``stream``, where the steps before a capture have to run, and NCCL's watch leaves the device alone
            (https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel).
        gradient_as_bucket_view: As in torch's ``DistributedDataParallel``. None: where no code of the user's is called
            between a backward and the clearing of its gradients. A gradient kept there would be the next step's.
        options: Those of ``DDPStrategy`` and of ``DistributedDataParallel``, ``find_unused_parameters`` for instance.
    """

    stream: torch.cuda.Stream | None = None
    """On which the module was wrapped, each time; None = the current one."""

    def __init__(self, *, captures: bool = False, gradient_as_bucket_view: bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.captures, self._views = captures, gradient_as_bucket_view
        self._frozen: list[nn.Parameter] = []
        self._error_handling = os.environ.get(ERROR_HANDLING)

    def setup_distributed(self) -> None:
        if self.captures:
            os.environ[ERROR_HANDLING] = "0"
        with group_variables():
            super().setup_distributed()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the module again once it trains a weight that was frozen then: torch would not reduce its gradients, and
        each process would train its own."""
        if any(weight.requires_grad for weight in self._frozen):
            assert isinstance(self.model, DistributedDataParallel)
            self.model._remove_autograd_hooks()
            self.model = self.lightning_module
            self.configure_ddp()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        self._frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        views = self._views if self._views is not None else self.captures or not _sees_gradients(self.lightning_module)
        self._ddp_kwargs["gradient_as_bucket_view"] = views
        if self.captures and self.root_device.type == "cuda":
            self.stream = torch.cuda.Stream() if self.stream is None else self.stream
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # None: stays where it is
            return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def teardown(self) -> None:
        super().teardown()
        if self._error_handling is not None:
            os.environ[ERROR_HANDLING] = self._error_handling
        elif self.captures:
            os.environ.pop(ERROR_HANDLING, None)


def _sees_gradients(module: L.LightningModule | None) -> bool:
    """Whether code of the user's is called while there are gradients; neither Lightning's nor this project's is."""
    assert module is not None
    known = ("lightning", __name__.partition(".")[0])
    others = [one for one in module.trainer.callbacks if type(one).__module__.partition(".")[0] not in known]  # type: ignore[attr-defined]
    return not module.automatic_optimization or any(True for _ in hooks_within_step(module, others))
