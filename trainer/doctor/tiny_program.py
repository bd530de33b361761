"""Compiles and differentiates one tiny function for real: run by ``compiling`` as a process, prints JSON."""

from __future__ import annotations

import json
import time


def main() -> None:
    """Compile for the device that a run would take, and compare with eager."""
    began = time.perf_counter()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    imported = time.perf_counter()

    def tiny(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x) * x.sin()).sum()

    gradients = []
    for run in (tiny, torch.compile(tiny)):
        x = torch.linspace(-2, 2, 256, device=device, requires_grad=True)
        run(x).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    print(
        json.dumps(
            {
                "device": device,
                "import_seconds": imported - began,
                "compile_seconds": time.perf_counter() - imported,
                "difference": float((gradients[0] - gradients[1]).abs().max()),
            }
        )
    )


if __name__ == "__main__":
    main()
