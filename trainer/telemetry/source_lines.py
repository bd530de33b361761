"""Source: which frame of a stack is the user's, and the text of a line.

Graph breaks, recompiles and failures are named by a line that the user can change.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strategies.compile_errors import is_ours

LIBRARIES = sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, key=len)
PACKAGES = re.compile(r".*[/\\](site|dist)-packages[/\\]")
"""Where packages lie in any environment, also one within the project's folder."""
MACHINERY = ("torch", "lightning", "pytorch_lightning", "lightning_fabric")
EXAMPLES = re.compile(r"[/\\]demos[/\\]")
"""Models that come with Lightning, which are somebody's model all the same."""
RESUMED = re.compile(r"^torch_dynamo_resume_in_(?P<function>.+)_at_\d+$")
"""Name of what Dynamo makes of the rest of a function behind a break."""
STACK_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<number>\d+), in (?P<function>.+)$')
LOCATION = re.compile(r"(?P<file>.+):(?P<number>\d+)(?: (?P<function>.+))?$")
"""As in ``Event``."""
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


def line(file: str, number: int, function: str | None = None) -> Line:
    if function is not None and (resumed := RESUMED.match(function)):
        function = resumed["function"]
    code = linecache.getline(file, number).strip()
    return Line(file=file, number=number, function=function, code=code[:MAX_CODE] or None)


def line_at(location: str | None) -> Line | None:
    """The line that an event is about, with its code; None where it names none."""
    found = LOCATION.match(location or "")
    return found and line(found["file"], int(found["number"]), found["function"])


def place_lines(location: str | None) -> list[str]:
    """Where it is and what stands there, a line each, as a person reads it; none where the place is not known."""
    if (place := line_at(location)) is None:
        return []
    where = f"  {display_path(place.file)}:{place.number}{f' in {place.function}' if place.function else ''}"
    return [where, *([f"    {place.code}"] if place.code else [])]


def raised_at(error: BaseException, *, own: bool = False) -> str | None:
    """``file:line function`` of the user's own innermost line that led to ``error``, else, unless ``own``, of another
    package's than torch's, Lightning's and ours; of what a loader's process has raised too, which is in the words of
    ``error``."""
    stack = [
        Line(file=frame.f_code.co_filename, number=number, function=frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]
    others = [one for one in [*stack, *lines_of_stack(str(error))] if not (is_ours(one.file) or is_machinery(one.file))]
    users = [one for one in others if installed(one.file) is None]
    return innermost(users or ([] if own else others))


def lines_of_stack(text: str) -> list[Line]:
    """Lines of a printed stack, outermost first, without their code."""
    found = (STACK_LINE.match(one) for one in text.splitlines())
    return [Line(file=one["file"], number=int(one["number"]), function=one["function"].strip()) for one in found if one]


def is_machinery(file: str) -> bool:
    """Whether a file belongs to torch, Lightning or no file at all."""
    inside = installed(file) or ""
    return file.startswith("<") or (re.split(r"[/\\]", inside)[0] in MACHINERY and not EXAMPLES.search(inside))


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


def innermost(stack: Sequence[Line]) -> str | None:
    """``file:line function`` of the last frame outside torch and Lightning, or the last; None for an empty stack."""
    outside = [frame for frame in stack if not is_machinery(frame.file)] or stack
    return f"{outside[-1].file}:{outside[-1].number} {outside[-1].function}" if outside else None


def display_path(file: str) -> str:
    """A path as a reader likes it: from the site-packages, from the working directory, or whole."""
    return installed(file) or file.removeprefix(f"{Path.cwd()}{os.sep}")
