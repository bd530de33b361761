"""Reproducer: a Python file that shows the failure of one submodule, with state and inputs beside it."""

from __future__ import annotations

import inspect
import os
import pickle
import pprint
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strategies.options import file_of_backend
from trainer.explain.source import is_library
from trainer.locate.capture import Captured

FILE, STATE = "reproduce.py", "reproduce.pt"
TEMPLATE = Path(__file__).with_name("reproducer_template.txt")


def write(captured: Captured, folder: Path, *, symptom: str, reason: str | None) -> Path:
    """Write the file and what it loads into ``folder``; returns the file.

    Raises ValueError, saying why, where the submodule cannot be run outside of this process.
    """
    arguments = dict(captured.arguments)
    if symptom == "breaks":
        arguments["fullgraph"] = True  # so that the break is an error, which says where
    backend = arguments["backend"]
    if not isinstance(backend, str):
        raise ValueError(f"backend {backend!r} has no name to load it by")
    roots, modules = imports(captured.module)
    file = file_of_backend(backend)
    if file is not None:
        root, name = importable(file)
        roots, modules = [*roots, root], [*modules, name]
    state = {"module": captured.module, "args": captured.args, "kwargs": captured.kwargs}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(state, folder / STATE)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        (folder / STATE).unlink(missing_ok=True)
        raise ValueError(f"{captured.path} cannot be saved: {error}") from error
    kind = type(captured.module)
    values = {
        "PATH": captured.path,
        "KIND": f"{kind.__module__}.{kind.__qualname__}",
        "SOURCE": source_of(kind),
        "SYMPTOM": symptom,
        "REASON": " ".join((reason or "").split()),
        "ROOTS": [root for root in dict.fromkeys(roots) if not is_library(f"{root}{os.sep}")],
        "MODULES": list(dict.fromkeys(modules)),
        "ARGUMENTS": arguments,
        "BUDGET": captured.activation_memory_budget,
        "DEVICE": captured.device,
        "AUTOCAST": captured.autocast,
        "MATMUL": captured.matmul_precision,
        "TORCH": torch.__version__,
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        plain = name in ("PATH", "KIND", "SOURCE", "REASON", "TORCH")
        text = text.replace(f"@{name}@", str(value) if plain else pprint.pformat(value, width=100))
    (folder / FILE).write_text(text, encoding="utf-8")
    return folder / FILE


def imports(module: nn.Module) -> tuple[list[str], list[str]]:
    """Folders that have to be on the path, and modules to import, so that ``module`` can be loaded."""
    kinds = {type(each) for each in module.modules()}
    found = [importable(Path(file)) for kind in kinds if (file := _file_of(kind)) is not None]
    return [root for root, _ in found], []


def importable(file: Path) -> tuple[str, str]:
    """The folder on the path below which ``file`` is, and its name as a module. Raises ValueError if there is none."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__file__", None) and Path(str(module.__file__)) == file:
            depth = name.count(".") + (file.name == "__init__.py")
            return str(file.resolve().parents[depth]), name
    raise ValueError(f"{file} is no module that can be imported")


def source_of(kind: type) -> str:
    """File and line of a class."""
    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (TypeError, OSError):
        return "unknown file"


def _file_of(kind: type) -> str | None:
    module: Any = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None)
