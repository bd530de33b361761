"""The optimizer and clipping on this process's own shards of the parameters.

Under FSDP2 parameters, gradients and optimizer state are DTensors, and each operation on them goes through DTensor's
dispatch. It looks up how tensors are laid out. Where an operation has no meta kernel, as fused optimizers have none, it
runs the operation on tensors of the full sizes to learn the shape of its result: ten seconds for a large model, and
again whenever an argument that is a number changes (``_propagate_tensor_meta_non_cached`` in
https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/tensor/_sharding_prop.py). An elementwise step needs
none of that: here the same functions of torch.optim get the local tensors. ``param_groups``, ``state`` and state dicts
hold DTensors as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

ELEMENTWISE = frozenset({ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD})
"""Optimizers whose step of one element depends on that element alone. Adafactor and Muon take means and products of a
whole matrix, LBFGS of all parameters: they keep DTensors. A subclass may do anything."""


def step_on_shards(optimizer: Optimizer) -> bool:
    """Have each step of ``optimizer`` work on this process's own shards, from now on; whether it can.

    Torch's steps gather parameters, gradients and state in lists (``_init_group``) and hand them to a function. What is
    in those lists becomes local.
    """
    if type(optimizer) not in ELEMENTWISE or not hasattr(optimizer, "_init_group"):
        return False
    gathered: Callable[..., Any] = optimizer._init_group
    whole: list[tuple[Tensor, DTensor]] = []
    """Of the step under way: the local tensors and the parameters that they are of."""

    def init_group(group: dict[str, Any], *lists: list[Any], **named: Any) -> Any:
        result = gathered(group, *lists, **named)
        every = [*lists, *(one for one in named.values() if isinstance(one, list))]
        if isinstance(optimizer, SGD):  # it files new momentum under what is in its list of parameters
            whole.extend((local_of(one), one) for one in every[0] if isinstance(one, DTensor))
        for one in every:
            one[:] = map(local_of, one)
        return result

    def file_momentum(*_: Any) -> None:
        for local, parameter in whole:
            if local in optimizer.state:
                momentum, state = optimizer.state.pop(local)["momentum_buffer"], optimizer.state[parameter]
                if not isinstance(state.get("momentum_buffer"), DTensor):
                    state["momentum_buffer"] = None if momentum is None else sharded_like(parameter, momentum)
        whole.clear()

    optimizer._init_group = init_group
    if isinstance(optimizer, SGD):
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(optimizer.register_step_post_hook(file_momentum).id, last=False)  # the user's see the state
    return True


def local_of(value: Any) -> Any:
    """This process's own part of a DTensor, without a copy; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def sharded_like(parameter: DTensor, local: Tensor) -> DTensor:
    """The DTensor of which every process holds a ``local`` part, laid out as ``parameter`` is."""
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor | None:
    """Scale the gradients to a norm of at most ``largest``, as ``torch.nn.utils.clip_grad_norm_`` does, with one
    reduction over all processes. Returns the norm before, 0-D; None, with nothing done, where the gradients are not all
    sharded over one and the same dimension of processes."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    meshes = {one.device_mesh for one in gradients if isinstance(one, DTensor)}
    if len(meshes) != 1 or (mesh := next(iter(meshes))).ndim != 1:
        return None
    if not all(isinstance(one, DTensor) and isinstance(one.placements[0], Shard) for one in gradients):
        return None
    local = [local_of(one) for one in gradients]
    norms = [one.to(torch.promote_types(one.dtype, torch.float32)) for one in torch._foreach_norm(local)]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=mesh.get_group())
    norm = squares.sqrt()
    torch._foreach_mul_(local, torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm
