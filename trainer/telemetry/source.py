"""Source: which frame of a stack is the user's, the text of a line, and what a failed guard says of the code."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainer.telemetry.files import cut

LIBRARIES = sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, key=len)
PACKAGES = re.compile(r".*[/\\](site|dist)-packages[/\\]")
"""Where packages lie in any environment, also one within the project's folder."""
MACHINERY = ("torch", "lightning", "pytorch_lightning", "lightning_fabric")
EXAMPLES = re.compile(r"[/\\]demos[/\\]")
"""Models that come with Lightning, which are somebody's model all the same."""
RESUMED = re.compile(r"^torch_dynamo_resume_in_(?P<function>.+)_at_\d+$")
"""Name of what Dynamo makes of the rest of a function behind a break."""
STACK_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<number>\d+), in (?P<function>.+)$')
MAX_CODE = 160
"""Characters of a line of code that are kept."""


@dataclass(kw_only=True, slots=True)
class Line:
    """A line of somebody's code."""

    file: str
    number: int
    function: str | None = None
    code: str | None = None
    """The text of the line; None where the file cannot be read."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" + (f" in {self.function}" if self.function else "")


def line(file: str, number: int, function: str | None = None) -> Line:
    """The line with its text."""
    if function is not None and (resumed := RESUMED.match(function)):
        function = resumed["function"]
    code = linecache.getline(file, number).strip()
    return Line(file=file, number=number, function=function, code=code[:MAX_CODE] or None)


def lines_of_stack(text: str) -> list[Line]:
    """Lines of a printed stack, outermost first."""
    found = (STACK_LINE.match(one) for one in text.splitlines())
    return [line(each["file"], int(each["number"]), each["function"].strip()) for each in found if each]


def is_machinery(file: str) -> bool:
    """Whether a file belongs to torch, Lightning or no file at all."""
    inside = installed(file) or ""
    return file.startswith("<") or (re.split(r"[/\\]", inside)[0] in MACHINERY and not EXAMPLES.search(inside))


def is_library(file: str) -> bool:
    """Whether a file was installed rather than written by the user."""
    return file.startswith("<") or installed(file) is not None


def installed(file: str) -> str | None:
    """The path of an installed file from the folder on that its package lies in; None for a file of the user's own,
    wherever that is: of an editable installation, or beside an environment in the project's folder."""
    if packages := PACKAGES.match(file):
        return file[packages.end() :]
    for name in MACHINERY:  # which may run from a checkout
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            if file.startswith(folder + os.sep):
                return name + file[len(folder) :]
    return next((file[len(folder) + 1 :] for folder in reversed(LIBRARIES) if file.startswith(folder + os.sep)), None)


def of_interest(stack: Iterable[Line]) -> tuple[Line | None, Line | None, Line | None]:
    """Of a stack, outermost first: the innermost line outside torch and Lightning; the innermost one of the user's own
    where that is another; and the innermost one of all where that is in torch or Lightning."""
    frames = list(stack)
    if not frames:
        return None, None, None
    outside = [frame for frame in frames if not is_machinery(frame.file)]
    own = [frame for frame in outside if not is_library(frame.file)]
    where = outside[-1] if outside else frames[-1]
    called_from = own[-1] if own and own[-1] != where else None
    inside = frames[-1] if frames[-1] != where and is_machinery(frames[-1].file) else None
    return where, called_from, inside


def shown(file: str) -> str:
    """A path as a reader likes it: from the site-packages, from the working directory, or whole."""
    return installed(file) or file.removeprefix(f"{Path.cwd()}{os.sep}")


# ---- guards that failed -----------------------------------------------------------------------------------------
#
# Torch's text about one is read into what changed, from what to what, and what usually helps. It has two forms: a
# sentence about a tensor (``tensor 'x' size mismatch at index 0. expected 3, actual 4``), and a Python expression that
# was true for the compiled code (``self.scale == 0.5  # return x * self.scale``).

TENSOR = re.compile(
    r"tensor '(?P<name>.+?)' (?P<what>size|stride|dtype|device|rank|requires_grad|dispatch key set|Tensor device index)"
    r"[\w ]*? mismatch(?: at index (?P<index>\d+))?\.? ?expected (?P<before>.*?)[,.] actual (?P<after>.*)"
)
TENSOR_KINDS = {
    "size": "shape",
    "stride": "strides",
    "requires_grad": "requires gradient",
    "dispatch key set": "dispatch",
    "Tensor device index": "device",
}
COMPILE_ID = re.compile(r"^\d+/\d+(_\d+)?: ")
AS_TENSOR = re.compile(r"___as_tensor\((?P<number>[^()]+)\)\.item\(\)")
"""How torch writes a Python number that it has begun to treat as a tensor."""
HINT = re.compile(r'\(HINT: guard on "(?P<name>[^"]+)"\)')
"""How torch names a variable of a closure."""
COMPARISON = re.compile(r"^(?P<what>.+?) (?P<sign>==|!=|is not|is|>=|<=|>|<) (?P<value>.+)$")
SIGNS = {
    "___dict_contains": "keys",
    ".keys()": "keys",
    "___check_type_id": "kind of object",
    "___check_obj_id": "identity",
    "hasattr": "attribute",
    "___check_metadata": "attribute",
}
"""Kinds by a piece of the guard's text; the first that matches."""
MAX_VALUE = 80
"""Characters of a value that are shown."""

FIXES: dict[str, str] = {
    "shape": (
        "pad to a few lengths (compile=[...,buckets]) or make the dimension symbolic (compile=[...,dynamic], or "
        "torch._dynamo.mark_dynamic); the last, smaller batch of an epoch goes away with drop_last"
    ),
    "rank": "hand in tensors with the same number of dimensions: unsqueeze before the call",
    "strides": "call .contiguous() (or fix the memory format) before the compiled module",
    "dtype": "cast before the compiled module, or let autocast do it: each dtype has a graph of its own",
    "device": "move it to the device before the compiled module",
    "requires gradient": "detach it, or let it require a gradient, in every batch alike",
    "dispatch": "the same tensor comes under another mode (inference, autocast, a subclass): use one for all calls",
    "training flag": "train() and eval() have a graph each; flip them seldom, and not within a step",
    "gradient mode": "torch.no_grad and enable_grad have a graph each; enter them around the compiled module alike",
    "autocast": "enter autocast around all calls of the compiled module, or around none",
    "global state": "a process-wide setting of torch changed between two calls: set it once, before the first step",
    "number": (
        "make it a tensor (an attribute: a buffer that is filled in place), or do not read it in the compiled module: "
        "a Python number is a constant to the compiler, and what depends on it is compiled again"
    ),
    "flag": "a Python flag that changes is a constant to the compiler: set it once, before the first step",
    "None at first": "fill it before the first compiled call, in __init__ or with one eager call",
    "global variable": "hand it in as a tensor argument, or keep it constant: globals are constants to the compiler",
    "text": "a string that changes is a constant to the compiler: hand in a tensor, or choose before the call",
    "length": "the number of items is part of the graph: pad the list or dict, or stack the items into one tensor",
    "keys": "use the same keys in the same order in every batch; put what is optional in as a tensor of zeros",
    "kind of object": "hand in objects of one class at this place",
    "identity": "the object at this place was replaced by another: create it once, and reuse it",
    "value carried over a break": "goes away with the graph break at this line",
    "attribute": "modules of one class differ here, and share their code: give them the same attributes and hooks",
    "size relation": "the compiled code takes any size for which this holds: pad so that it always does",
    "other": "torch's guard says what changed; keep it constant, or hand it in as a tensor",
}
"""What usually helps, by the kind of guard that failed; torch prints no hint about recompiles."""


class Change(NamedTuple):
    """What made a guard fail: one of the kinds in ``FIXES``, an expression or a tensor, and ``before -> after``."""

    kind: str
    what: str
    change: str | None


def guard_of(text: str) -> str:
    """The guard alone: without the number of the compiled code, the line of code and the stack."""
    if not text.strip():
        return ""
    guard = COMPILE_ID.sub("", text.strip().splitlines()[0]).split("  #")[0].strip()
    return AS_TENSOR.sub(r"\g<number>", guard)


def change_of(text: str) -> Change:
    """What torch describes as ``text``. Of a Python value it says only what the guard expected."""
    change = _classified(guard_of(text))
    hint = HINT.search(text)
    return change._replace(what=hint["name"]) if hint else change


def _classified(guard: str) -> Change:
    if tensor := TENSOR.search(guard):
        what = f"tensor {tensor['name']}" + (f", dimension {tensor['index']}" if tensor["index"] else "")
        kind = TENSOR_KINDS.get(tensor["what"], tensor["what"])
        return Change(kind, what, f"{tensor['before']} -> {tensor['after'].strip(' .')}")
    if "requires_grad mismatch" in guard:
        return Change("requires gradient", guard.partition(" requires_grad")[0], None)
    if "GLOBAL_STATE" in guard or "___check_global_state" in guard:
        kind = "gradient mode" if "grad_mode" in guard else "autocast" if "autocast" in guard else "global state"
        return Change(kind, guard.partition(":")[2].strip() or "torch's global state", None)
    for sign, kind in SIGNS.items():
        if sign in guard:
            return Change(kind, guard, None)
    if "___stack" in guard:
        value = guard.partition("== ")[2]
        return Change("value carried over a break", "a result of this line", f"{cut(value, MAX_VALUE)} -> ?")
    if guard.startswith("not ") and guard[4:].replace(".", "").isidentifier():
        return Change("length", guard[4:], "empty -> not empty")
    if guard.startswith("TYPE_MISMATCH"):
        return Change("kind of object", guard, None)
    compared = COMPARISON.match(guard)
    return Change("other", guard, None) if compared is None else _compared(guard, compared)


def _compared(guard: str, compared: re.Match[str]) -> Change:
    what, sign, value = compared["what"], compared["sign"], cut(compared["value"], MAX_VALUE)
    change = f"{value} -> ?"
    relation = ".size()" in what or ".stride()" in what
    if what.startswith("len("):
        # torch writes the negation: ``len(x) != 1`` says that 1 was expected.
        return Change("length", what[4:-1], f"{change} items")
    if sign not in ("==", "is"):
        return Change("size relation" if relation else "other", guard, None)
    if what.endswith(".training"):
        return Change("training flag", what, change)
    if relation or "%" in what:
        return Change("size relation", guard, change)
    if value[:1] in "'\"":
        return Change("text", what, change)
    if what.startswith("G["):
        return Change("global variable", what.replace("G['", "").replace("']", "", 1), change)
    if value in ("True", "False"):
        return Change("flag", what, change)
    if value == "None":
        return Change("None at first", what, change)
    return Change("number" if _is_number(value) else "other", what, change)


def _is_number(value: str) -> bool:
    try:
        return isinstance(ast.literal_eval(value), int | float | complex)
    except (ValueError, SyntaxError):
        return value in ("nan", "inf", "-inf")
