"""Findings that need no torch, and how one is printed.

Here is what needs no torch: Python and the packages, what this process may use of processors and memory, its folders,
and the variables that change compilation. A ``Finding`` is one line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from strategies.cached.store import distrust_of
from strategies.compile_options import cache_directories, switched_off, unwritable
from tasks.base import free_bytes

OK, WARNING, ERROR = "ok", "warning", "error"
INDENT = " " * 25
COMPILES = "c++ compiler"
"""The finding after which a tiny function is compiled."""
PACKAGES = ("torch", "torchvision", "lightning", "hydra-core", "rich")
GIB = 1 << 30
LITTLE_DISK_GIB, NO_DISK_GIB = 2.0, 0.1
"""A cold compile of a model of ordinary size writes some hundred MiB."""
LITTLE_MEMORY_GIB = 4.0
"""Importing torch and Inductor and compiling in a few processes takes about three."""
COSTLY: dict[str, str] = {
    "CUDA_LAUNCH_BLOCKING=1": "the host waits for every kernel: for finding errors, never for timing",
    "CUDA_DEVICE_MAX_CONNECTIONS=1": "kernels and communication are serialized: trainer.strategy=fsdp hides none of it",
    "TORCHDYNAMO_SUPPRESS_ERRORS=": "what does not compile runs eager silently; any value switches it on",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1": "every run compiles everything anew",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES=1": "every run compiles everything anew",
    "TORCHINDUCTOR_FX_GRAPH_CACHE=0": "compiled graphs are not kept: every run compiles them anew",
    "TORCHINDUCTOR_COMPILE_THREADS=1": "kernels are compiled one after the other",
    "TORCHDYNAMO_REPRO_AFTER=": "writes a reproducer of each graph that fails: slow",
    "TORCH_COMPILE_DEBUG=1": "writes all intermediate code to ./torch_compile_debug: slow",
    "TRITON_ALWAYS_COMPILE=1": "kernels are never taken from Triton's cache",
    "TRITON_INTERPRET=1": "kernels are interpreted in Python on the CPU",
    "NVIDIA_TF32_OVERRIDE=0": "no product of matrices uses TF32, whatever trainer.matmul_precision says",
}
"""What a variable costs at this value; without one, at any."""
WRONG = ("TRITON_INTERPRET=1",)
"""Of those, with which no run makes sense."""


@dataclass
class Finding:
    name: str
    status: str
    """``ok``, ``warning`` (it works, but worse than it could) or ``error`` (a run would fail)."""
    message: str
    fix: str | None = None
    """What to do about it; every warning and error has one."""

    def __str__(self) -> str:
        """One line, and the fix on the next."""
        text = f"{self.status:<8} {self.name:<15} {self.message}"
        return text if self.fix is None else f"{text}\n{INDENT}-> {self.fix}"


def ok(name: str, message: str) -> Finding:
    return Finding(name, OK, message)


def warning(name: str, message: str, fix: str) -> Finding:
    return Finding(name, WARNING, message, fix)


def error(name: str, message: str, fix: str) -> Finding:
    return Finding(name, ERROR, message, fix)


def reason(errors: str) -> str:
    """The line of a traceback that tells most: the first of the error itself, before torch's advice."""
    lines = [line.rstrip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith((" ", "Traceback")) and ("Error" in line or "Exc" in line)]
    return (named or lines or ["no reason given"])[-1].strip()


def packages() -> Iterator[Finding]:
    """A line for Python and for each package without which nothing runs; pip sees to their versions."""
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    for name in PACKAGES:
        try:
            yield ok(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield error(name, "is not installed", "pip install crucible-train, or pip install -e . in a checkout")


def shared_names() -> Iterator[Finding]:
    """A line for each other distribution that installs a package of the name of one of ours."""
    with contextlib.suppress(ImportError):  # in a checkout that is not installed nothing of it can be overwritten
        crucible = importlib.import_module("crucible")
        if not hasattr(crucible, "other_owners"):
            where = crucible.__file__ or next(iter(crucible.__path__))
            fix = "rename that file or folder; where pip installed it, uninstall it and install crucible-train anew"
            yield error("package names", f"{where} hides crucible's own package 'crucible'", fix)
            return
        for other, package in crucible.other_owners():
            fix = f"keep them in two environments: pip uninstall {other}, then install {crucible.DISTRIBUTION} anew"
            message = f"{other} installs a package {package!r} too, as {crucible.DISTRIBUTION} does"
            yield error("package names", message, fix)


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """A line for each variable that costs something, or one where none does."""
    found = False
    if (off := switched_off()) is not None:
        message, _, fix = off.partition(": ")
        found = True
        yield error("environment", message, fix)
    for name, value in sorted(environment.items()):
        setting = f"{name}={value}"
        key = setting if setting in COSTLY else f"{name}="
        if key in COSTLY and value:
            report, found = error if key in WRONG else warning, True
            yield report("environment", f"{setting}: {COSTLY[key]}", f"unset {name}, unless you mean it")
    if not found:
        yield ok("environment", "no variable that makes compiled code slow, late or wrong is set")


def places() -> Iterator[Finding]:
    """A line for each folder that compiling and training write to."""
    for variable, directory in cache_directories().items():
        name = "inductor cache" if "INDUCTOR" in variable else "triton cache"
        yield place(name, directory, f"set {variable} to a folder on another disk", runs_files=True)
    yield place("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder on another disk")
    yield place("here", Path.cwd(), "work in another folder, or set hydra.run.dir: runs leave their files here")


def place(name: str, directory: Path, other: str, *, runs_files: bool = False) -> Finding:
    """Whether a folder can be written to, by nobody else, with room; ``other`` is how to choose another one."""
    if why := unwritable(directory):
        return error(name, f"{directory} cannot be written to: {why}", other)
    free_gib = shutil.disk_usage(directory).free / GIB
    message = f"{directory}, {free_gib:.1f} GiB free"
    if free_gib < NO_DISK_GIB:
        return error(name, f"{directory} is full: {free_gib * 1024:.0f} MiB free", other)
    if runs_files and (why := distrust_of(os.path.realpath(directory))):
        message = f"{directory}: {why}, and compiled code in it is unpickled and loaded"
        return warning(name, message, other.replace("on another disk", "that only you can write"))
    return warning(name, message, other) if free_gib < LITTLE_DISK_GIB else ok(name, message)


def limits() -> Iterator[Finding]:
    """A line for processors and one for memory, by the kernel's account and the container's."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield ok("processors", f"{allowed} (of {os.cpu_count()} in the machine)")
    if (free := free_bytes()) is not None:
        message = f"{free / GIB:.1f} GiB free"
        fix = "close something, or set TORCHINDUCTOR_COMPILE_THREADS=1: each compiling process takes memory"
        yield warning("memory", message, fix) if free / GIB < LITTLE_MEMORY_GIB else ok("memory", message)
