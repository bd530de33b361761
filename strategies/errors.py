"""Compile errors: tells what the compiler failed at from what the user's own code raised, and from lack of memory."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from pathlib import Path

import torch
from torch._dynamo import exc as dynamo_errors
from torch._dynamo.symbolic_convert import SpeculationLogDivergence
from torch._inductor import exc as inductor_errors
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from strategies.credentials import hidden

# Private to torch, which has no public names for them:
# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/exc.py, .../torch/_inductor/exc.py
OF_THE_COMPILER: tuple[type[BaseException], ...] = (
    dynamo_errors.TorchDynamoException,
    dynamo_errors.FailOnRecompileLimitHit,
    SpeculationLogDivergence,  # tracing began anew and met something else: a group that joined an SGD with momentum
    inductor_errors.OperatorIssue,
    inductor_errors.SubgraphLoweringException,
    inductor_errors.InvalidCxxCompiler,
    inductor_errors.CppCompileError,
    GuardOnDataDependentSymNode,  # a branch on a size that data decide, with fullgraph=True
)

TORCH_AND_LIGHTNING = ("torch", "torchvision", "triton", "lightning", "pytorch_lightning", "lightning_fabric", "numpy")
_OURS = tuple(f"{Path(__file__).parents[1] / package}/" for package in ("strategies", "trainer"))
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def is_compile_error(error: BaseException) -> bool:
    """Whether the compiler raised ``error``, before any of the code in question ran."""
    return isinstance(error, OF_THE_COMPILER) and not is_out_of_memory(error)


def is_recompile_limit(error: BaseException) -> bool:
    """Whether torch refused to compile one piece of code once more; nothing of the call has run."""
    return isinstance(error, dynamo_errors.FailOnRecompileLimitHit)


def is_double_backward(error: BaseException) -> bool:
    """Whether a gradient was to be taken of a gradient, or could have been, which AOTAutograd does not support."""
    return "does not currently support double backward" in str(error) or needs_kept_buffers(error)


def needs_kept_buffers(error: BaseException) -> bool:
    """Whether a backward was to keep its graph (``retain_graph=True``), and was compiled to write over it."""
    return "compiled with non-empty donated buffers" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, is a host or device without memory."""
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or any(words in str(error) for words in ("out of memory", "can't allocate memory"))
        or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
    )


REPLACED = {
    "Hard failure due to ": (
        "one piece of code was compiled as often as torch._dynamo.config.recompile_limit allows; the record's events "
        "name the guard that failed each time"
    ),
    "does not currently support double backward": (
        "a gradient of a gradient (create_graph=True, as in a gradient penalty) cannot be taken through compiled code; "
        "on_compile_error=eager leaves the regions concerned eager, or name other blocks and parts to compile"
    ),
}
"""What takes the place of torch's words, by a piece of them."""
REMEDY = "on_compile_error=eager runs such regions eager; fullgraph=false compiles around what breaks a graph"
"""Note to an error of the compiler that ends a run."""
LONGEST = 400
"""Characters of an error's own words that a line has; the traceback has all."""


def one_line(error: BaseException) -> str:
    """Class and first line of an error, the next one too where that only announces it, and the user's line of code.

    Credentials in it are hidden: it goes into the record.
    """
    name, lines = type(error).__name__, [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = next((ours for words, ours in REPLACED.items() if words in str(error)), None)
    if ours is not None or not lines:
        return f"{name}: {ours}" if ours else name
    if lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:
        return hidden(lines[-1])  # the worker's traceback ends with the error itself
    text = f"{name}: {lines[0]}"
    if len(lines) > 1 and lines[0].endswith(":"):  # the reason itself stands on the next line
        text += f" {lines[1]}"
    if len(text) > LONGEST:  # every key of a state dict that does not fit
        text = f"{text[:LONGEST]} ..."
    if "from user code:" in lines[:-1]:
        text += f" ({lines[lines.index('from user code:') + 1]})"
    if REMEDY in getattr(error, "__notes__", ()):
        text += f"; {REMEDY}"
    return hidden(text)


def first_line(error: BaseException) -> str:
    """What went wrong at first, in one line, and where in code that is neither torch's nor ours."""
    # The end of a capture that failed raises an error of its own; the cause came before.
    while error.__context__ is not None:
        error = error.__context__
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if origin_of(frame.filename) == "other"]
    return f"{line} ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else line


@functools.cache
def origin_of(filename: str) -> str:
    """``torch`` (and Lightning, numpy and this project), ``stdlib`` or ``other``."""
    path = Path(filename)
    if filename.startswith(("<", _TORCH)) or is_ours(filename):
        return "torch"
    for part in ("site-packages", "dist-packages"):
        if part in path.parts:
            return "torch" if path.parts[path.parts.index(part) + 1] in TORCH_AND_LIGHTNING else "other"
    return "stdlib" if filename.startswith(_STDLIB) else "other"


def is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)
