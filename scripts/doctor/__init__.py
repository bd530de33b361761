"""Doctor: checks a machine before anything is trained on it. Needs nothing installed; torch is asked in processes.

Here is what needs no torch: Python and the packages, what this process may use of processors and memory, its folders,
and the variables that change compilation. A ``Finding`` is one line; ``call`` runs what may hang or crash.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strategies.cached.store import distrust_of
from strategies.options import SWITCHES, cache_directories, switched_off, unwritable
from tasks.base import CGROUPS, free_bytes, words

OK, WARNING, ERROR = "ok", "warning", "error"
COLOURS = {OK: "32", WARNING: "33", ERROR: "31"}
"""ANSI codes; rich may be one of the things that are missing."""
INDENT = " " * 25
DISTRIBUTION = "crucible-train"
OLDEST_PYTHON = (3, 11)
REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)\s*(?P<bounds>[^;\[]*)$")
BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")
GIB = 1 << 30
LITTLE_DISK_GIB, NO_DISK_GIB = 2.0, 0.1
"""A cold compile of a model of ordinary size writes some hundred MiB."""
SHARED = Path("/dev/shm")
LITTLE_SHARED_GIB = 1.0
LITTLE_MEMORY_GIB = 4.0
"""Importing torch and Inductor and compiling in a few processes takes about three."""
NAMES = ("CUDA_VISIBLE_DEVICES", "CXX", "CC", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TORCH_DYNAMO_", "TORCH_LOGS", "TRITON_")
"""Of variables that are shown as they stand where they cost nothing."""
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

    def lines(self, *, colour: bool) -> str:
        """One line, and the fix on the next."""
        status = f"{self.status:<8}"
        if colour:
            status = f"\033[{COLOURS[self.status]}m{status}\033[0m"
        text = f"{status} {self.name:<15} {self.message}"
        return text if self.fix is None else f"{text}\n{INDENT}-> {self.fix}"


def ok(name: str, message: str) -> Finding:
    return Finding(name, OK, message)


def warning(name: str, message: str, fix: str) -> Finding:
    return Finding(name, WARNING, message, fix)


def error(name: str, message: str, fix: str) -> Finding:
    return Finding(name, ERROR, message, fix)


def call(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[str, str, str | None]:
    """Run ``command`` to its end or for ``seconds``; what it has started ends with it, at a Ctrl-C too.

    Returns what it printed, its errors, and why it did not end well, in a line, or None where it did.
    """
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    late = False
    try:
        try:
            output, errors = child.communicate(timeout=seconds)
        finally:
            late = child.returncode is None
            if late:
                os.killpg(child.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        output, errors = child.communicate()
    if late:
        return output, errors, f"it took longer than {seconds:g} s and was stopped"
    if child.returncode < 0:
        return output, errors, f"it was killed by {signal.Signals(-child.returncode).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    failed = lines[-1] if lines else f"it ended with exit code {child.returncode}"
    return output, errors, failed if child.returncode else None


def packages() -> Iterator[Finding]:
    """A line for Python and for each package that a run cannot do without."""
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield error("python", f"{version}, at least {wanted} is needed", f"python{wanted} -m venv .venv")
    else:
        yield ok("python", f"{version} ({sys.executable})")
    for name, bounds in requirements():
        yield installed(name, bounds)


def requirements() -> Iterator[tuple[str, str]]:
    """Name and bounds of each required package: of the checkout, or of what is installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file() and sys.version_info >= OLDEST_PYTHON:
        import tomllib

        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        try:
            lines = importlib.metadata.requires(DISTRIBUTION) or []
        except importlib.metadata.PackageNotFoundError:
            lines = []
    for line in lines:
        if found := REQUIREMENT.match(line):  # those of extras have a marker, and are not required
            yield found["name"], found["bounds"].strip()


def installed(name: str, bounds: str) -> Finding:
    """Whether ``name`` is installed in a version within ``bounds``, as pip writes them."""
    fix = f"pip install '{name}{bounds}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return error(name, "is not installed", fix)
    release = _numbers(version)
    for relation, wanted in BOUND.findall(bounds):
        if (release >= _numbers(wanted)) != (relation == ">="):
            return error(name, f"{version}, {relation}{wanted} is needed", fix)
    return ok(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in leading[0].split(".") if part) if leading else ()


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """A line for each variable that costs something, and one for all others that change compilation."""
    if (off := switched_off()) is not None:
        message, _, fix = off.partition(": ")
        yield error("environment", message, fix)
    others, found = [], off is not None
    for name, value in sorted(environment.items()):
        setting = f"{name}={value}"
        key = setting if setting in COSTLY else f"{name}="
        if name in SWITCHES and value == "1":
            continue  # reported first, in the same words as a run's
        if key in COSTLY and value:
            report, found = error if key in WRONG else warning, True
            yield report("environment", f"{setting}: {COSTLY[key]}", f"unset {name}, unless you mean it")
        elif name in NAMES or name.startswith(PREFIXES):
            others.append(setting)
    if others or not found:
        yield ok("environment", ", ".join(others) or "no variable that changes compilation is set")


def places() -> Iterator[Finding]:
    """A line for each folder that compiling and training write to."""
    for variable, directory in cache_directories().items():
        name = "inductor cache" if "INDUCTOR" in variable else "triton cache"
        yield place(name, directory, f"set {variable} to a folder on another disk", runs_files=True)
    yield place("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder on another disk")
    yield place("here", Path.cwd(), "work in another folder, or set hydra.run.dir: runs leave their files here")
    if SHARED.is_dir():
        yield shared_memory(shutil.disk_usage(SHARED).total / GIB)


def place(name: str, directory: Path, other: str, *, runs_files: bool = False) -> Finding:
    """Whether a folder can be written to, by nobody else, with room; ``other`` is how to choose another one."""
    if reason := unwritable(directory):
        return error(name, f"{directory} cannot be written to: {reason}", other)
    free_gib = shutil.disk_usage(directory).free / GIB
    message = f"{directory}, {free_gib:.1f} GiB free"
    if free_gib < NO_DISK_GIB:
        return error(name, f"{directory} is full: {free_gib * 1024:.0f} MiB free", other)
    if runs_files and (reason := distrust_of(os.path.realpath(directory))):
        message = f"{directory}: {reason}, and compiled code in it is unpickled and loaded"
        return warning(name, message, other.replace("on another disk", "that only you can write"))
    return warning(name, message, other) if free_gib < LITTLE_DISK_GIB else ok(name, message)


def shared_memory(total_gib: float) -> Finding:
    """Data workers hand batches over in shared memory; a container has 64 MiB of it by default."""
    message = f"{SHARED} holds {total_gib:.2f} GiB"
    if total_gib < LITTLE_SHARED_GIB:
        fix = "docker run --shm-size=8g (or --ipc=host), or task.data.num_workers=0"
        return warning("shared memory", f"{message}: workers of a data loader may die of it", fix)
    return ok("shared memory", message)


def limits(cgroups: Path = CGROUPS) -> Iterator[Finding]:
    """A line for processors and one for memory, by the kernel's account and the container's."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = words(cgroups / "cpu.max")  # microseconds of each period, or max
    quota = int(share[0]) / int(share[1]) if len(share) == 2 and share[0] != "max" else None
    yield processors(allowed, quota, os.environ.get("OMP_NUM_THREADS"))
    if (free := free_bytes()) is not None:
        message = f"{free / GIB:.1f} GiB free"
        fix = "close something, or set TORCHINDUCTOR_COMPILE_THREADS=1: each compiling process takes memory"
        yield warning("memory", message, fix) if free / GIB < LITTLE_MEMORY_GIB else ok("memory", message)


def processors(allowed: int, quota: float | None, threads: str | None) -> Finding:
    """Whether torch would start more threads than the container gets processors' time for (``quota``)."""
    if quota is None or quota >= allowed:
        return ok("processors", f"{allowed} (of {os.cpu_count()} in the machine)")
    message = f"{allowed} are seen, the container gets the time of {quota:g}"
    if threads is not None:
        return ok("processors", f"{message}; OMP_NUM_THREADS={threads}")
    fitting = max(1, int(quota))
    fix = f"set OMP_NUM_THREADS={fitting} and TORCHINDUCTOR_COMPILE_THREADS={fitting}: more threads wait in a queue"
    return warning("processors", message, fix)
