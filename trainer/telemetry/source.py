"""Source: which frame of a stack is the user's, and the text of a line."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
