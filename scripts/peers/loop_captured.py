"""Peer: the loop by hand with its network compiled and whole steps replayed from one CUDA graph.

As torch's notes on CUDA graphs write it: https://docs.pytorch.org/docs/stable/notes/cuda.html. Batches have one shape.
On several devices each block and part is compiled in place, and the optimizer steps this process's shards.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from scripts.peers.work import Work, together

STEPS_BEFORE_CAPTURE, OF_SEVERAL = 3, 11
"""As the notes have it: state of the optimizer, workspaces of kernels; DDP's own work in its first steps."""


def train(work: Work) -> None:
    module, several = work.placed(), distributed.is_initialized()
    blocks = work.blocks() if several else []
    for path in [*blocks, *work.config.task.declare().parts] if several else work.networks():
        network: Any = module.get_submodule(path)
        if several:
            network.compile(backend=work.backend)
        else:
            network = torch.compile(network, backend=work.backend)
            module.set_submodule(path, network)
    # DDP that is to be captured is made on a side stream, see the notes.
    aside = several and work.device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream()) if aside else contextlib.nullcontext():
        forward = together(work, blocks)
    optimizer, schedule = work.optimizer_and_schedule()
    shards = local_shards(optimizer) if work.sharded else []
    for group in optimizer.param_groups:  # it keeps its count and learning rate on the device
        group.update(capturable=True, lr=torch.tensor(float(group["lr"]), device=work.device))

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        with work.autocast():
            loss: Tensor = forward(batch)
        loss.backward()
        for parameter, local in shards:
            if parameter.grad is not None:
                local.grad, parameter.grad = parameter.grad.to_local(), None
        if work.clip is not None and shards:
            clip_shards([local.grad for _, local in shards if local.grad is not None], work.clip)
        elif work.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), work.clip)
        optimizer.step()
        return loss.detach()

    replayed = Replayed(step, optimizer, before=OF_SEVERAL if several else STEPS_BEFORE_CAPTURE)
    for batch in work.batches():
        loss = replayed(batch)
        if schedule is not None:
            schedule.step()
        work.stepped(loss)
    if not replayed.replays:
        raise RuntimeError("run.peer=loop_captured replayed no step: it captures one after the first steps")
    del replayed
    gc.collect()  # a graph that is still there holds NCCL's communicators, and the group waits for them at its end


class Replayed:
    """Calls ``step`` on a side stream ``before`` times, captures it once and replays it from then on."""

    def __init__(self, step: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, *, before: int) -> None:
        self.replays = 0
        self._step, self._optimizer, self._before = step, optimizer, before
        self._side, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._kept: list[Any] = []
        self._loss: Tensor | None = None

    def __call__(self, batch: Any) -> Tensor:
        if self._before:
            self._before -= 1
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                loss = self._step(batch)
            torch.cuda.current_stream().wait_stream(self._side)
            return loss
        leaves, form = pytree.tree_flatten(batch)
        if self._loss is None:
            self._kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._optimizer.zero_grad()  # gradients of the steps before lie outside of the graph's memory
            # thread_local: the data loader's pinning thread may call CUDA meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._loss = self._step(pytree.tree_unflatten(self._kept, form))
        for kept, leaf in zip(self._kept, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                continue  # counts for the meter, which no step reads
            if kept.shape != leaf.shape:
                raise ValueError("run.peer=loop_captured takes batches of one shape: task.data.pad_to= pads to one")
            kept.copy_(leaf)
        self._graph.replay()
        self.replays += 1
        return self._loss.clone()


def local_shards(optimizer: torch.optim.Optimizer) -> list[tuple[Any, nn.Parameter]]:
    """Each parameter, and what this process holds of it, which the optimizer steps from now on: of a DTensor, a fused
    optimizer resolves each step anew, which takes many seconds where a learning rate changes."""
    shards = []
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            local = group["params"][index] = nn.Parameter(parameter.to_local().detach())
            shards.append((parameter, local))
    return shards


def clip_shards(gradients: list[Tensor], largest: float) -> None:
    """Clip to ``largest`` the norm that the gradients of all processes have together."""
    squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
    distributed.all_reduce(squares)
    torch._foreach_mul_(gradients, (largest / (squares.sqrt() + 1e-6)).clamp(max=1.0))
