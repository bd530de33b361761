"""Where a backend's code comes from, so that a process without our configuration can compile with it too."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend


def file_of_backend(name: str) -> Path | None:
    """The file that defines the backend called ``name``; None for those that come with torch.

    Raises ValueError where the file cannot be told.
    """
    found: Any = lookup_backend(name)
    while isinstance(found, functools.partial):
        found = found.func
    function = found if inspect.isroutine(found) else type(found)
    for wanted in _functions(found, function):
        module = inspect.getmodule(wanted)
        file = getattr(module, "__file__", None)
        if file is not None and not Path(file).is_relative_to(Path(torch.__file__).parent):
            return Path(file)
    if inspect.getmodule(function) is None:
        raise ValueError(f"where backend {name!r} is defined cannot be told")
    return None


def _functions(found: Any, function: Any) -> list[Any]:
    """The backend itself, and what torch's ``aot_autograd`` helper was given to build it from."""
    parts = getattr(found, "kwargs", {})
    return [function, *(part for part in parts.values() if inspect.isroutine(part))]
