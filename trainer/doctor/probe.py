"""Asks torch about itself and its devices, a line of JSON for each stage: run by ``torch_findings`` as a process.

A driver may hang or crash whoever asks it; how far this came says where. Run by its path, so it imports none of ours.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
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
    say("attention", **attention(torch))


def attention(torch: Any) -> dict[str, Any]:
    """The backend that ``scaled_dot_product_attention`` takes in bf16, and where cuDNN was loaded from."""
    facts: dict[str, Any] = {"backends": {}, "cudnn": None, "cudnn_files": [], "cudnn_failed": None}
    try:
        facts["cudnn"] = torch.backends.cudnn.version()
    except RuntimeError as error:  # another version than torch was built with
        facts["cudnn_failed"] = str(error).splitlines()[0]
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(128, 128, device="cuda", dtype=torch.bool).tril()
    choose = getattr(torch, "_fused_sdp_choice", None)  # private: torch has no public name for it
    for name, given in (("with a mask", {"attn_mask": mask}), ("causal", {"is_causal": True})):
        if choose is not None:
            facts["backends"][name] = torch.nn.attention.SDPBackend(choose(query, query, query, **given)).name.lower()
    with contextlib.suppress(RuntimeError):  # a device without a kernel for it
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward()
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        files = {line.split()[-1] for line in mapped if "libcudnn.so" in line}
        facts["cudnn_files"] = sorted(files)
    return facts


if __name__ == "__main__":
    main()
