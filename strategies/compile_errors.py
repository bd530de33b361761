"""Compile errors: tells what the compiler failed at from what the user's own code raised, and from lack of memory."""

from __future__ import annotations

import torch
from torch._dynamo import exc as dynamo_errors
from torch._inductor import exc as inductor_errors

# Private to torch, which has no public names for them:
# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/exc.py, .../torch/_inductor/exc.py
OF_THE_COMPILER: tuple[type[BaseException], ...] = (
    dynamo_errors.TorchDynamoException,
    dynamo_errors.FailOnRecompileLimitHit,
    inductor_errors.OperatorIssue,
    inductor_errors.SubgraphLoweringException,
    inductor_errors.InvalidCxxCompiler,
    inductor_errors.CppCompileError,
)


def is_compile_error(error: BaseException) -> bool:
    """Whether the compiler raised ``error``, before any of the code in question ran."""
    return isinstance(error, OF_THE_COMPILER) and not is_out_of_memory(error)


def is_recompile_limit(error: BaseException) -> bool:
    """Whether torch refused to compile one piece of code once more; nothing of the call has run."""
    return isinstance(error, dynamo_errors.FailOnRecompileLimitHit)


def is_double_backward(error: BaseException) -> bool:
    """Whether a gradient was to be taken of a gradient (a gradient penalty), which AOTAutograd does not support."""
    return "does not currently support double backward" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, is a device without memory."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, torch.OutOfMemoryError):
            return True
        current = current.__cause__
    return False
