"""Data parallel training by Lightning's DDP, without what its defaults cost in every step.

Lightning's own makes the process group with its device, as a captured step needs, and always wraps the module on a side
stream. Unless the steps run there as well, each parameter's gradient then crosses streams in every backward:
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/strategies/ddp.py (``_setup_model``)
https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/autograd/input_buffer.cpp
"""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.loops.processes import SigtermAgreement

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that a process group reads when it is made."""


class DDP(DDPStrategy):
    """Lightning's ``DDPStrategy`` without its waits: gradients are views of the buckets that are reduced, and a stop by
    SIGTERM is agreed on beside the device.

    Args:
        captures: Whether steps are captured in CUDA graphs with their collectives: the module is wrapped on
            ``stream``, where the steps before a capture have to run, and NCCL's watch leaves the device alone
            (https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel).
        gradient_as_bucket_view: As in torch's ``DistributedDataParallel``.
        options: Those of ``DDPStrategy`` and of ``DistributedDataParallel``, ``find_unused_parameters`` for instance.
    """

    stream: torch.cuda.Stream | None = None
    """On which the module was wrapped; None = the current one."""

    def __init__(self, *, captures: bool = False, gradient_as_bucket_view: bool = True, **options: Any) -> None:
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **options)
        self.captures = captures
        self._error_handling = os.environ.get(ERROR_HANDLING)
        self._sigterm: SigtermAgreement | None = None

    def setup_distributed(self) -> None:
        """Make the process group."""
        if self.captures:
            os.environ[ERROR_HANDLING] = "0"
        super().setup_distributed()

    def setup(self, trainer: L.Trainer) -> None:
        """Wrap the module and make the optimizers."""
        super().setup(trainer)
        if trainer.state.fn == "fit" and trainer.world_size > 1:
            self._sigterm = SigtermAgreement(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self.captures and self.root_device.type == "cuda":
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # None: stays where it is
            return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def on_train_end(self) -> None:
        """The training is over."""
        super().on_train_end()
        if self._sigterm is not None:
            self._sigterm.settle()

    def teardown(self) -> None:
        """Unwrap the module, and leave the environment as it was."""
        super().teardown()
        if self._error_handling is not None:
            os.environ[ERROR_HANDLING] = self._error_handling
        elif self.captures:
            os.environ.pop(ERROR_HANDLING, None)
