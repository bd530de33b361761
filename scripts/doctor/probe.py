"""Asks torch about its devices, or has it compile a tiny function; prints JSON. Run as a process, by its path.

A driver may hang or crash whoever asks it; how far this came says where. It imports none of our modules.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any


def report(stage: str, **facts: Any) -> None:
    """Print one stage's facts at once: what comes next may end the process."""
    print(json.dumps({"stage": stage, **facts}), flush=True)


def devices() -> None:
    """Import torch, then ask for its devices, then use each of them."""
    import torch

    report("torch", version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, path=torch.__file__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    # torch says why there is no device in a warning only.
    report("cuda", available=available, reasons=[str(each.message).splitlines()[0] for each in caught])
    if not available:
        return
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()  # private: torch has no public name for it
    report("driver", version=f"{driver // 1000}.{driver % 1000 // 10}" if driver else None)
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        product = torch.ones(64, 64, device=f"cuda:{number}") @ torch.ones(64, 64, device=f"cuda:{number}")
        free, total = torch.cuda.mem_get_info(number)
        report(
            "device",
            number=number,
            name=properties.name,
            capability=[properties.major, properties.minor],
            works=float(product[0, 0]) == 64.0,
            free_gib=free / 2**30,
            total_gib=total / 2**30,
            bf16=torch.cuda.is_bf16_supported(),
        )


def tiny() -> None:
    """Compile a function for the device that a run would take, and compare it and its gradient with eager."""
    began = time.perf_counter()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    imported = time.perf_counter()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x) * x.sin()).sum()

    gradients = []
    for run in (function, torch.compile(function)):
        x = torch.linspace(-2, 2, 256, device=device, requires_grad=True)
        run(x).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    report(
        "compile",
        device=device,
        import_seconds=imported - began,
        compile_seconds=time.perf_counter() - imported,
        difference=float((gradients[0] - gradients[1]).abs().max()),
    )


if __name__ == "__main__":
    tiny() if sys.argv[1:] == ["compile"] else devices()
