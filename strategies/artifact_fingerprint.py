"""Fingerprint of a program: what must be the same for one run's compiled artifacts to be of any use to another.

Shapes of batches are not part of it: they are in torch's own keys inside the artifacts, so that runs of one fingerprint
gather the shapes they met. Nothing that differs from run to run (seed, paths, names) is part of it either.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strategies.base import Program


REVISION = 2
"""Raised when strategies let the compiler make something else of the same program: artifacts of before are stale."""


def facts_of(program: Program, *, leave_out: str) -> dict[str, Any]:
    """Everything that the fingerprint is made of, readable; the strategy named ``leave_out`` compiles nothing."""
    import torch

    return {
        "revision": REVISION,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": _version("triton"),
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        "device": device_facts(program.device or torch.device("cpu")),
        "precision": program.precision,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "strategies": [strategy.facts() for strategy in program.strategies if strategy.name != leave_out],
        "model": model_digest(program.module),
    }


def fingerprint_of(facts: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal digits, of ``facts``."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def device_facts(device: torch.device) -> dict[str, Any]:
    """What compiled code depends on. Inductor's keys hold the index of the device; C++ is built for the very CPU."""
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        return {"name": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}", "index": index}
    return {"name": f"{device.type} {device.index or 0}", **cpu_facts()}


def cpu_facts() -> dict[str, str]:
    """Model and instruction sets of the processor; a library built for others may end the process."""
    import torch

    facts = {"isa": torch.backends.cpu.get_cpu_capability(), "processor": platform.processor()}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
        named = {name.strip().lower(): value.strip() for name, value in lines.items()}
        facts["processor"] = named["model name"] if "model name" in named else facts["processor"]
        flags = " ".join(named[name] for name in ("flags", "features") if name in named)
        facts["flags"] = hashlib.sha256(flags.encode()).hexdigest()[:16]
    return facts


def model_digest(module: nn.Module) -> str:
    """SHA-256, in hexadecimal digits, of the tree: classes, and shape, type and gradient flag of each tensor."""
    digest = hashlib.sha256()
    for path, child in module.named_modules():
        digest.update(f"{path}:{type(child).__module__}.{type(child).__qualname__}\n".encode())
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for path, tensor in tensors:
            text = f"{kind} {path}:{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n"
            digest.update(text.encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
