"""Lightning's DDP, with gradients that are views of what is reduced, and with steps that can be captured.

https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.loops.lightning_internals import hooks_within_step

DDP_WARMUP_STEPS = 11
"""Steps with a reduction after which DDP neither rebuilds its buckets nor times itself, as torch's notes have it."""

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
