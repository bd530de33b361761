"""Asks torch about itself and its devices, a line of JSON for each stage: run by ``torch_findings`` as a process.

A driver may hang or crash whoever asks it; how far this came says where. Run by its path, so it imports none of ours.
"""

from __future__ import annotations

import json
import warnings
from typing import Any


def say(stage: str, **facts: Any) -> None:
    """Print one stage's facts at once: what comes next may end the process."""
    print(json.dumps({"stage": stage, **facts}), flush=True)


def main() -> None:
    """Import torch, then ask for its devices, then use each of them."""
    import torch

    say("torch", version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, path=torch.__file__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    # torch says why there is no device in a warning only.
    reasons = [str(each.message).splitlines()[0] for each in caught]
    say("cuda", available=available, reasons=reasons)
    if not available:
        return
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()  # private: torch has no public name for it
    said = f"{driver // 1000}.{driver % 1000 // 10}" if driver else None
    say("driver", version=said)
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        product = torch.ones(64, 64, device=f"cuda:{number}") @ torch.ones(64, 64, device=f"cuda:{number}")
        free, total = torch.cuda.mem_get_info(number)
        say(
            "device",
            number=number,
            name=properties.name,
            capability=[properties.major, properties.minor],
            works=float(product[0, 0]) == 64.0,
            free_gib=free / 2**30,
            total_gib=total / 2**30,
            bf16=torch.cuda.is_bf16_supported(),
        )


if __name__ == "__main__":
    main()
