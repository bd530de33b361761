"""Asks torch about its devices, and has it compile a tiny function. Run as a process; prints findings as lines of JSON.

A driver may hang or crash whoever asks it; how far this came says where.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.doctor.findings import COMPILES, GIB, Finding, error, ok, warning
from strategies.compile_options import cpp_compiler, cudnn_attention_fails, missing_toolchain, triton_lacks

if TYPE_CHECKING:
    import torch

BOARDS = Path("/proc/driver/nvidia/gpus")
"""What the kernel's driver knows, whatever torch says."""
LITTLE_DEVICE_GIB = 1.0
TOLERANCE = 1e-4


def devices() -> Iterator[Finding]:
    """Import torch, then ask for its devices, then use each of them."""
    import torch

    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only"
    yield ok("torch imports", f"{torch.__version__} ({build})")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:  # torch says why in a warning only
        boards = len(list(BOARDS.iterdir())) if BOARDS.is_dir() else 0
        yield without_cuda(boards, cuda, str(caught[0].message).splitlines()[0] if caught else "")
        return
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()  # private: torch has no public name for it
    yield ok("cuda driver", f"for CUDA {driver // 1000}.{driver % 1000 // 10}, torch is built with {cuda}")
    for number in range(torch.cuda.device_count()):
        torch.ones(64, 64, device=f"cuda:{number}").sum().item()  # raises where this torch has no kernels for it
        free, total = torch.cuda.mem_get_info(number)
        yield device(number, torch.cuda.get_device_properties(number), free_gib=free / GIB, total_gib=total / GIB)
        if cudnn_attention_fails(torch.__version__, torch.cuda.get_device_capability(number)):
            yield warning(
                "attention",
                "where cuDNN runs it, its backward can give NaN at lengths of 64 modulo 128 (pytorch issue 196678)",
                "pad to other lengths, as buckets do; torch.backends.cuda.enable_cudnn_sdp(False); or torch 2.14",
            )


def without_cuda(boards: int, cuda: str | None, why: str) -> Finding:
    """Torch, built with ``cuda``, has no device, and says ``why`` or nothing; ``boards`` are in the machine."""
    if not boards or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ok("cuda", "no NVIDIA device is to be seen: runs use the CPU" + (f" ({why})" if why else ""))
    why = why or ("it is built without CUDA" if cuda is None else "it does not say why")
    fix = "install a torch that is built for this driver: https://pytorch.org/get-started/locally, or update the driver"
    return (warning if cuda is None else error)("cuda", f"{boards} boards, but torch cannot use them: {why}", fix)


def device(number: int, properties: torch.cuda._CudaDeviceProperties, *, free_gib: float, total_gib: float) -> Finding:
    """Whether a device can be compiled for, and has memory left."""
    try:
        triton: str | None = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    name, capability = f"device {number}", (properties.major, properties.minor)
    message = f"{properties.name}, compute capability {capability[0]}.{capability[1]}"
    message += f", {free_gib:.1f} of {total_gib:.1f} GiB free"
    if lacks := triton_lacks(triton is not None, properties.name, capability):
        return error(name, message, lacks)
    if free_gib < LITTLE_DEVICE_GIB:
        fix = "another process has the memory: nvidia-smi, or choose with CUDA_VISIBLE_DEVICES"
        return warning(name, message, fix)
    return ok(name, f"{message}, Triton {triton}")


def cpp(*, needed: bool) -> Finding:
    """Whether there is a compiler. With a device, whose kernels Triton writes, it is not ``needed``."""
    if missing := missing_toolchain():
        message, _, fix = missing.rpartition(": ")
        return (error if needed else warning)(COMPILES, message, fix)
    return ok(COMPILES, cpp_compiler())


def findings() -> Iterator[Finding]:
    """Devices, what compiles for them, and a tiny function that is compiled."""
    has_device = False
    for finding in devices():
        has_device |= finding.name.startswith("device")
        yield finding
    yield cpp(needed=not has_device)
    yield tiny()


def tiny() -> Finding:
    """Compile a function for the device that a run would take, and compare it and its gradient with eager."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x) * x.sin()).sum()

    gradients = []
    for run in (function, torch.compile(function)):
        x = torch.linspace(-2, 2, 256, device=device, requires_grad=True)
        run(x).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    if not any(file.is_file() for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*")):
        return error("compile", "nothing was compiled: the compiler is switched off", "see the environment above")
    difference, took = float((gradients[0] - gradients[1]).abs().max()), time.perf_counter() - began
    if not difference <= TOLERANCE:
        return error(
            "compile",
            f"a tiny function compiles on {device}, but differs from eager by {difference:.1e}",
            "another torch, driver or compiler: run the trainer with parity=strict before you trust it",
        )
    return ok("compile", f"a tiny function, forward and backward, on {device} in {took:.1f} s")


if __name__ == "__main__":
    for finding in findings():
        print(json.dumps(dataclasses.asdict(finding)), flush=True)  # at once: what comes next may end the process
