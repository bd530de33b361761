"""Environment variables that change compilation: each one that is set, what it does, and whether that is wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from strategies.toolchain import SWITCHES, switched_off
from trainer.doctor.finding import Finding, error, ok, warning

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
        "kernels and communication take turns: sharded training (trainer.strategy=fsdp) hides no communication",
    ),
    "TORCHDYNAMO_SUPPRESS_ERRORS": ("any", "what does not compile runs eager without a word; any value switches it on"),
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


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """A line for each variable that is set; one line when none is."""
    found = False
    if (off := switched_off()) is not None:
        said, _, mend = off.partition(": ")
        yield error("environment", said, mend)
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
        return None  # said first, by the same words as a run's
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
