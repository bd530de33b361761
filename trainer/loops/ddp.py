"""Data parallel training by Lightning's DDP, without what its defaults cost in every step.

Lightning's own makes the process group with its device and wraps the module on a side stream, as a captured step needs:
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/strategies/ddp.py
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that a process group reads when it is made."""


class DDP(DDPStrategy):
    """Lightning's ``DDPStrategy`` with gradients as views of the buckets that are reduced: one copy a step less.

    Args:
        captures: Whether steps are captured in CUDA graphs with their collectives. NCCL's watch then must not ask the
            device for errors (https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel).
        gradient_as_bucket_view: As in torch's ``DistributedDataParallel``.
        options: Those of ``DDPStrategy`` and of ``DistributedDataParallel``, ``find_unused_parameters`` for instance.
    """

    def __init__(self, *, captures: bool = False, gradient_as_bucket_view: bool = True, **options: Any) -> None:
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **options)
        self.captures = captures
        self._error_handling = os.environ.get(ERROR_HANDLING)

    def setup_distributed(self) -> None:
        """Make the process group."""
        if self.captures:
            os.environ[ERROR_HANDLING] = "0"
        super().setup_distributed()

    def teardown(self) -> None:
        """Unwrap the module, and leave the environment as it was."""
        super().teardown()
        if self._error_handling is not None:
            os.environ[ERROR_HANDLING] = self._error_handling
        elif self.captures:
            os.environ.pop(ERROR_HANDLING, None)
