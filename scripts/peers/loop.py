"""Peer: a loop by hand, eager or with ``network = torch.compile(network)``, as most people write it.

``loop_eager``, ``loop_compile`` and, with mode="reduce-overhead", ``loop_reduce_overhead``. On several devices the step
is under DDP; or sharded by FSDP2, each block compiled in place before, as torchtitan does it.
"""

from __future__ import annotations

from typing import Any

import torch

from scripts.peers.work import Work, together


def train(work: Work, *, compiled: bool = True, mode: str | None = None) -> None:
    module = work.placed()
    blocks = work.blocks() if work.sharded else []
    if compiled:
        for path in blocks or work.networks():
            network: Any = module.get_submodule(path)
            if blocks:
                network.compile(backend=work.backend, mode=mode)
            else:
                network = torch.compile(network, backend=work.backend, mode=mode)
                module.set_submodule(path, network)
    step = together(work, blocks)
    optimizer, schedule = work.optimizer_and_schedule()
    for batch in work.batches():
        optimizer.zero_grad()
        with work.autocast():
            loss = step(batch)
        loss.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), work.clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        work.stepped(loss if mode is None else loss.detach().clone())  # a graph's next replay overwrites its outputs
