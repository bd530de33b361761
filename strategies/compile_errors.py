"""Errors: what the compiler failed at, apart from what the user's own code raised and from lack of memory; each in one
line. And credentials, known by name and by value: refused as an option, left out of what a run writes.

Options and messages end up in ``record.json``, TensorBoard, ``.hydra/`` and ``multirun.yaml``. Importing this must stay
cheap (no torch).
"""

from __future__ import annotations

import functools
import re
import signal
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TORCH_AND_LIGHTNING = ("torch", "torchvision", "triton", "lightning", "pytorch_lightning", "lightning_fabric", "numpy")
_OURS = tuple(f"{Path(__file__).parents[1] / package}/" for package in ("strategies", "trainer"))
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


class CannotCapture(RuntimeError):
    """A step that no CUDA graph can stand for; the message says why."""


@functools.cache
def of_the_compiler() -> tuple[type[BaseException], ...]:
    """Private to torch, which has no public names for them:
    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/exc.py, .../torch/_inductor/exc.py"""
    from torch._dynamo import exc as dynamo_errors
    from torch._dynamo.symbolic_convert import SpeculationLogDivergence
    from torch._inductor import exc as inductor_errors
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        dynamo_errors.TorchDynamoException,
        dynamo_errors.FailOnRecompileLimitHit,
        SpeculationLogDivergence,  # tracing began anew and met something else: a group that joined an SGD with momentum
        inductor_errors.OperatorIssue,
        inductor_errors.SubgraphLoweringException,
        inductor_errors.InvalidCxxCompiler,
        inductor_errors.CppCompileError,
        GuardOnDataDependentSymNode,  # a branch on a size that data decide, with fullgraph=True
    )


def is_compile_error(error: BaseException) -> bool:
    """Whether the compiler raised ``error``, before any of the code in question ran."""
    return isinstance(error, of_the_compiler()) and not is_out_of_memory(error)


def is_recompile_limit(error: BaseException) -> bool:
    """Whether torch refused to compile one piece of code once more; nothing of the call has run."""
    from torch._dynamo import exc as dynamo_errors

    unsupported = isinstance(error, dynamo_errors.Unsupported)  # where no graph may break
    return isinstance(error, dynamo_errors.FailOnRecompileLimitHit) or (
        unsupported and "recompile limit exceeded" in str(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, is a host or device without memory."""
    import torch

    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or any(words in str(error) for words in ("out of memory", "can't allocate memory"))
        or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
    )


SECOND_ORDER = "compile=second_order compiles what takes it as one graph"
NAME_WHAT_DERIVES = "the method that takes it may be named in compile.second_order.functions"
"""The same where that strategy is in use."""
REPLACED = {
    "Hard failure due to ": (
        "one piece of code was compiled as often as torch._dynamo.config.recompile_limit allows; the record's events "
        "name the guard that failed each time"
    ),
    "does not currently support double backward": (
        f"a gradient of its gradient is taken (create_graph=True), and compiled code has none; {SECOND_ORDER}"
    ),
    "attempted to trace torch._numpy.random function": (
        "its forward draws random numbers from numpy, which no graph does; fullgraph=false compiles around them"
    ),
    "qualname: record_function.__enter__": (
        "record_function.__enter__ is not traced; Lightning's PyTorchProfiler calls it in a hook on each module: "
        "PyTorchProfiler(record_module_names=False) does not"
    ),
}
"""What takes the place of torch's words, by a piece of them."""
_NOT_TRACED = ("Attempted to inline function marked as skipped", "Skip calling")
"""How Dynamo begins where it does not look into a function, which it names further down."""
_ITS_NAME = re.compile(r"(?:qualname: |<function )([\w.]+)")
INNER_GRADIENT = ("requires_grad_() call", "torch.autograd.grad` with")
"""In what Dynamo says of a gradient that a forward takes."""
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
        return f"{name}: {helped(ours)}" if ours else name
    if lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:
        return redact(lines[-1])  # the worker's traceback ends with the error itself
    text = f"{name}: {lines[0]}"
    if len(lines) > 1 and lines[0].endswith(":"):  # the reason itself stands on the next line
        text += f" {lines[1]}"
    if lines[0].startswith(_NOT_TRACED) and (function := _ITS_NAME.search(str(error))):
        text += f": {function[1]}"
    if len(text) > LONGEST:  # every key of a state dict that does not fit
        text = f"{text[:LONGEST]} ..."
    if "from user code:" in lines[:-1]:
        places = [line for line in lines[lines.index("from user code:") :] if line.startswith('File "')]
        users = [line for line in places if origin_of(line.split('"')[1]) == "other"]
        text += f" ({(users or places)[-1]})" if places else ""
    if not _derives() and any(words in text for words in INNER_GRADIENT):
        text += f"; where that is for a gradient within the loss, {SECOND_ORDER}"
    if REMEDY in getattr(error, "__notes__", ()):
        text += f"; {REMEDY}"
    return redact(text)


def helped(reason: str) -> str:
    """``reason`` with what helps where ``second_order`` is in use already."""
    return reason.replace(SECOND_ORDER, NAME_WHAT_DERIVES) if _derives() else reason


def _derives() -> bool:
    return getattr(sys.modules.get("torch._dynamo.config"), "trace_autograd_ops", False) is True


def raised_by_signal(error: BaseException) -> bool:
    """Whether a handler of a signal has raised it, wherever the program was then."""
    handlers = [getattr(one, "func", one) for one in map(signal.getsignal, signal.valid_signals()) if callable(one)]
    called = [one if hasattr(one, "__code__") else getattr(one, "__func__", type(one).__call__) for one in handlers]
    codes = {one.__code__ for one in called if hasattr(one, "__code__")}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def root_of(error: BaseException) -> BaseException:
    """What went wrong at first: the end of a capture that failed raises an error of its own; the cause came before."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def first_line(error: BaseException) -> str:
    """What went wrong at first, in one line, and where in code that is neither torch's nor ours."""
    error = root_of(error)
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if origin_of(frame.filename) == "other"]
    return f"{line} ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else line


def users_line() -> str:
    """File and line of the nearest code that is neither torch's nor the standard library's, nor ours; else nothing."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if origin_of(frame.f_code.co_filename) == "other":
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def origin_of(filename: str) -> str:
    """``torch`` (and Lightning, numpy and this project), ``stdlib`` or ``other``."""
    import torch

    path = Path(filename)
    if filename.startswith(("<", f"{Path(torch.__file__).parent}/")) or is_ours(filename):
        return "torch"
    for part in ("site-packages", "dist-packages"):
        if part in path.parts:
            return "torch" if path.parts[path.parts.index(part) + 1] in TORCH_AND_LIGHTNING else "other"
    return "stdlib" if filename.startswith(_STDLIB) else "other"


def is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


# ---- credentials -----------------------------------------------------------------------------------------------------

HIDDEN = "***"
"""Stands where a credential was."""
_SURE = (
    r"pass(?:word|wd|phrase)|secret(?:[_-]?key)?|(?:api|access|account)[_-]?key|connection[_-]?string|authorization"
    r"|(?:access|api|auth|hf|refresh|sas|security)[_-]?token"
)
_STORAGE = rf"{_SURE}|(?:^|[._-])(?:key|o?auth|sas|sig|pass|pwd|cookie)|token|signature|credentials?"
ANYWHERE = re.compile(rf".*(?:{_SURE})", re.IGNORECASE)
"""Names of options that hold a credential wherever they stand; a ``token`` or ``key`` may be a word or a field."""
STORAGE = re.compile(rf".*(?:{_STORAGE})", re.IGNORECASE)
"""Names that do so among the ``storage_options`` of a file system."""
_TEXT = r"""(?!\$\{|null\b|None\b|\*\*\*)[^\s"'&,;}\])]+"""
VALUES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(://)[^\s/@:]*:(?!\d+(?:/|\s|$))[^\s@]+(?=@)",  # user:password@host, but no host:port
        r"(https?://)[^\s/@:]{16,}(?=@)",  # a token in the user's place
        r"((?:^|[?&#])(?:[\w-]*(?:signature|credential|token)|sig|key|AWSAccessKeyId)=)[^\s&]+",  # a signed URL
        r"(\bBearer\s+)(?=\S*\d|\S{20})[\w.~+/=-]{8,}",
        r"(\bBasic\s+)(?=\S*[\d=])[a-z0-9+/]{8,}={0,2}(?!\S)",
        rf"""(\bauthorization["']?\s*[=:]\s*["']?)(?:\w+\s+)?{_TEXT}""",
        rf"""((?:{_SURE})["']\s*:\s*["'])[^"']+""",  # a mapping as Python or JSON writes it
        rf"""((?:{_SURE})[=:]["']?){_TEXT}""",
        rf"(\bstorage_options(?=\.)[\w.-]*(?:{_STORAGE})=){_TEXT}",
        r"\b(?-i:(?:AKIA|ASIA)[0-9A-Z]{16})\b",
        r"\b(?:gh[pousr]_\w{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}|hf_[a-z0-9]{30,}|xox[abprs]-[\w-]{10,})",
        r"\b(?-i:eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # a JSON web token
        r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]+",
    )
)
"""Credentials in a text; what a first group matches is not a secret and stays."""


SHORTEST = 6
"""Characters from which on a text of the environment is hidden; a shorter one could be a part of any word."""
_concealed: set[str] = set()
"""Texts to hide wherever they stand, whatever their form."""


def conceal(texts: Iterable[str]) -> None:
    """From now on hide ``texts``, which options took from the environment, in all that this process writes or shows.
    Numbers and short ones are no secrets, and would be found in figures and words."""
    _concealed.update(text for text in texts if len(text) >= SHORTEST and not text.isdecimal())


def redact(text: str) -> str:
    """``text`` with ``***`` in the place of what ``conceal`` was given, and of credentials that are known by form."""
    for one in sorted(_concealed, key=len, reverse=True):  # one may be a part of another
        text = text.replace(one, HIDDEN)
    return _redacted_by_form(text)


def _redacted_by_form(text: str) -> str:
    for pattern in VALUES:
        text = pattern.sub(lambda match: (match[1] if match.lastindex else "") + HIDDEN, text)
    return text


def without_credentials(value: Any, found: list[str] | None = None, *, path: str = "", secret: bool = False) -> Any:
    """A copy of ``value`` (nested mappings, lists, scalars) with ``***`` in the place of credentials.

    ``path`` is the dotted name of ``value``; ``secret`` says that a name above it is a credential's. ``found`` gets the
    name of each option that holds some.
    """
    if isinstance(value, Mapping):
        inner = {name: f"{path}.{name}".lstrip(".") for name in value}
        return {
            name: without_credentials(part, found, path=inner[name], secret=secret or _names_one(inner[name]))
            for name, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        # Headers may be pairs: [Authorization, Bearer ...].
        pair = len(value) == 2 and isinstance(value[0], str) and _names_one(f"{path}.{value[0]}")
        parts = [
            without_credentials(part, found, path=path, secret=secret or (pair and place == 1))
            for place, part in enumerate(value)
        ]
        return tuple(parts) if isinstance(value, tuple) else parts
    if value is None or isinstance(value, bool) or not (secret or isinstance(value, (str, bytes))):
        return value
    literal, before = str(value), None
    while literal != before:  # interpolations may hold others
        before, literal = literal, re.sub(r"\$\{[^{}]*\}", "", literal)
    # What is looked for in order to refuse it has no value of the environment: it holds the interpolation.
    cover = redact if found is None else _redacted_by_form
    if literal.strip() in ("", "???") or not (secret or cover(literal) != literal):  # ??? is a missing one
        return value
    if found is not None:
        found.append(path)
    return HIDDEN if secret else cover(str(value))


def refuse_credentials(values: Any, path: str = "") -> None:
    """Raise ValueError, naming the options, when ``values`` hold credentials; ``${oc.env:NAME}`` is none."""
    found: list[str] = []
    without_credentials(values, found, path=path)
    files = "the file system's own variables (AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or files"
    variable = "the environment, and name the variable: '${oc.env:NAME}'"
    if found:
        raise ValueError(
            "\n".join(
                f"{name} must not hold credentials, which the run would write into its files: set them in "
                + (files if name.startswith(("compile.cached.", "CRUCIBLE_")) else variable)
                for name in dict.fromkeys(found)
            )
        )


def _names_one(path: str) -> bool:
    """Whether an option of the dotted name ``path`` holds a credential by its name."""
    *parents, name = path.split(".")
    return (STORAGE if "storage_options" in parents else ANYWHERE).fullmatch(name) is not None
