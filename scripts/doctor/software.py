"""Software: Python and the installed packages against what is required, and variables that change compilation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.doctor.finding import Finding, error, ok, warning
from strategies.toolchain import SWITCHES, switched_off

DISTRIBUTION = "crucible-train"
OLDEST_PYTHON = (3, 11)
NEWEST_TORCH_TRIED = (2, 15)
"""The project's tests run on this one and on the oldest that it takes."""
REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)\s*(?P<bounds>[^;\[]*)$")
BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")
PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TORCH_DYNAMO_", "TRITON_", "PYTORCH_NVML_")
"""Of these, one that is not named below is reported as it stands."""

HARMLESS: dict[str, str] = {
    "TORCHINDUCTOR_CACHE_DIR": "where compiled code is kept",
    "TRITON_CACHE_DIR": "where Triton's kernels are kept",
    "TRITON_PTXAS_PATH": "the assembler that Triton calls",
    "TORCHINDUCTOR_COMPILE_THREADS": "processes that compile kernels",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1 tries several kernels for each product, as mode=max-autotune does",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1 keeps compiled graphs on disk, 0 does not",
    "TORCHINDUCTOR_CUDAGRAPHS": "1 replays graphs from CUDA graphs, as mode=reduce-overhead does",
    "TORCH_LOGS": "what the compiler logs",
    "CUDA_VISIBLE_DEVICES": "the devices that a process sees",
    "PYTORCH_CUDA_ALLOC_CONF": "how device memory is allocated",
    "PYTORCH_ALLOC_CONF": "how device memory is allocated",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1 asks NVML whether there is a device, without starting CUDA",
    "CXX": "the C++ compiler that Inductor calls",
    "CC": "the C compiler that Triton builds its launchers with",
    "OMP_NUM_THREADS": "threads of an operation on the CPU",
}
"""What they do, whatever their value."""

COSTLY: dict[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel: for finding errors, never for timing"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "kernels and communication are serialized: sharded training (trainer.strategy=fsdp) hides no communication",
    ),
    "TORCHDYNAMO_SUPPRESS_ERRORS": (
        "any",
        "what does not compile runs eager silently; any value switches it on",
    ),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("1", "every run compiles everything anew"),
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": ("1", "every run compiles everything anew"),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": ("0", "compiled graphs are not kept: every run compiles them anew"),
    "TORCHINDUCTOR_COMPILE_THREADS": ("1", "kernels are compiled one after the other"),
    "TORCHINDUCTOR_NAN_ASSERTS": ("1", "looks for NaN in every kernel's results"),
    "TORCHINDUCTOR_PROFILE": ("any", "times every kernel"),
    "TORCHDYNAMO_REPRO_AFTER": ("any", "writes a reproducer of each graph that fails: slow"),
    "TORCH_COMPILE_DEBUG": ("1", "writes all intermediate code to ./torch_compile_debug: slow"),
    "TORCH_COMPILE_CPROFILE": ("any", "profiles the compiler: slow"),
    "TORCH_COMPILE_OVERRIDE_BACKENDS": ("any", "compiles chosen graphs with another backend than a run asks for"),
    "TORCH_TRACE": ("any", "writes a log of every compile"),
    "TRITON_ALWAYS_COMPILE": ("1", "kernels are never taken from Triton's cache"),
    "TRITON_DEBUG": ("1", "kernels check their indices: slow"),
    "DISABLE_PTXAS_OPT": ("1", "kernels are assembled without optimisation"),
    "NVIDIA_TF32_OVERRIDE": ("0", "no product of matrices uses TF32, whatever trainer.matmul_precision says"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("any", "every allocation goes to the driver"),
}
"""The value that costs, and what it does then; ``any`` = whatever it is set to."""

WRONG: dict[str, tuple[str, str]] = {
    "TRITON_INTERPRET": ("1", "kernels are interpreted in Python on the CPU"),
}
"""The value with which no run makes sense, and what it does."""


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
    if name == "torch" and release[:2] > NEWEST_TORCH_TRIED:
        tried = ".".join(map(str, NEWEST_TORCH_TRIED))
        return warning(
            name, f"{version}, newer than {tried}, the newest that was tried", f"pip install 'torch=={tried}.*'"
        )
    return ok(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in leading[0].split(".") if part) if leading else ()


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """A line for each variable that is set; one line when none is."""
    found = False
    if (off := switched_off()) is not None:
        message, _, fix = off.partition(": ")
        yield error("environment", message, fix)
        found = True
    for name in sorted(environment):
        finding = judged(name, environment[name])
        if finding is not None:
            yield finding
            found = True
    if not found:
        yield ok("environment", "no variable that changes compilation is set")


def judged(name: str, value: str) -> Finding | None:
    """The line for one variable; None for one that has nothing to do with compiling."""
    if name in SWITCHES and value == "1":
        return None  # reported first, in the same words as a run's
    for table, report in ((WRONG, error), (COSTLY, warning)):
        if name in table:
            costs, meaning = table[name]
            if costs == value or (costs == "any" and value):
                return report("environment", f"{name}={value}: {meaning}", f"unset {name}, unless you mean it")
    if name in HARMLESS:
        return ok("environment", f"{name}={value}: {HARMLESS[name]}")
    if name in COSTLY or name in WRONG or name in SWITCHES:
        return ok("environment", f"{name}={value}: as if it were not set")
    if name.startswith(PREFIXES):
        return ok("environment", f"{name}={value}: an option of the compiler's own")
    return None
