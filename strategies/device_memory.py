"""Memory: how much of a CUDA device could be had. Checks ask before they copy."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA ``device`` that nobody has, and those that torch's allocator keeps and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
