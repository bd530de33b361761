"""Optimizers on local shards: numbers and state dicts are those of whole parameters, and no step touches a DTensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.processes import Pair
from trainer.loops.fsdp2 import ELEMENTWISE, clip_by_norm, step_on_shards

pytestmark = pytest.mark.xdist_group("two_processes")

OPTIONS: list[dict[str, Any]] = [{"maximize": True}, {"foreach": True}]
MORE: dict[type[Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True, "foreach": True}],
    torch.optim.Adam: [{"amsgrad": True, "weight_decay": 0.1}, {"fused": True}],
    torch.optim.AdamW: [{"fused": True, "amsgrad": True}],
    torch.optim.RMSprop: [{"centered": True, "momentum": 0.9}],
}


class DTensors(TorchDispatchMode):
    """Counts operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(one, DTensor) for one in tree_leaves((args, kwargs)))
        return function(*args, **(kwargs or {}))


def made(*, sharded: bool = True) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))  # one row: the second process has none
    if not sharded:
        return module
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return module


def whole(tree: Any) -> Any:
    return tree_map(lambda one: one.full_tensor().clone() if isinstance(one, DTensor) else copy.copy(one), tree)


def steps(kind: type[Optimizer], options: dict[str, Any], *, sharded: bool) -> tuple[list[Tensor], Any, int]:
    """Weights and state dict after three steps, and operations on DTensors in the last."""
    module = made(sharded=sharded)
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.02}]
    optimizer = kind(groups, **{"lr": 1e-2, **options})  # type: ignore[call-arg]
    if sharded:
        assert step_on_shards(optimizer)
    counted = DTensors()
    for step in range(3):
        module(torch.randn(3, 5)).square().mean().backward()
        if step == 2:
            with counted:
                optimizer.step()
        else:
            optimizer.step()
        assert all(isinstance(one, DTensor) == sharded for one in optimizer.state)
        optimizer.zero_grad()
    return [whole(one.detach()) for one in module.parameters()], whole(optimizer.state_dict()), counted.count


def each_optimizer() -> list[str]:
    torch.distributed.init_process_group("gloo")
    found = []
    for kind in sorted(ELEMENTWISE, key=lambda one: one.__name__):
        for options in [*OPTIONS, *MORE.get(kind, [])]:
            named = f"{kind.__name__} {options}"
            weights, state, count = steps(kind, options, sharded=True)
            assert count == 0, f"{named}: {count} operations on DTensors"
            expected, expected_state, _ = steps(kind, options, sharded=False)
            torch.testing.assert_close(weights, expected, msg=lambda it: f"{named}: {it}")  # noqa: B023
            torch.testing.assert_close(state["state"], expected_state["state"], msg=lambda it: f"{named}: {it}")  # noqa: B023
            found.append(named)
    return found


def test_each_optimizer_steps_as_on_whole_parameters(pair: Pair) -> None:
    first, second = pair(each_optimizer)
    assert first == second
    assert len(first) == len(OPTIONS) * len(ELEMENTWISE) + sum(map(len, MORE.values()))


class Own(torch.optim.Adam):
    """Someone's: it may do anything in its step."""


def test_others_keep_dtensors() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for kind in (Own, torch.optim.LBFGS, torch.optim.Adafactor):
        assert not step_on_shards(kind([weight]))


def clipped(largest: float) -> tuple[float, float, float]:
    """Norm, torch's norm, and how far gradients are from torch's."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    module, reference = made(), made()
    for one in (module, reference):
        torch.manual_seed(1)
        one(torch.randn(3, 5)).square().mean().backward()
    norm = clip_by_norm(module.parameters(), largest)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), largest)
    assert isinstance(expected, DTensor)
    apart = max(
        float((one.grad.full_tensor() - other.grad.full_tensor()).abs().max())  # type: ignore[union-attr]
        for one, other in zip(module.parameters(), reference.parameters(), strict=True)
    )
    return float(norm), float(expected.full_tensor()), apart


@pytest.mark.parametrize("largest", [0.01, 100.0])
def test_gradients_are_clipped_by_the_norm_over_all_processes(largest: float, pair: Pair) -> None:
    first, second = pair(clipped, largest)
    assert first == second
    norm, expected, apart = first
    assert norm == pytest.approx(expected, rel=1e-6)
    assert apart < 1e-8


def test_what_is_not_sharded_is_left_to_torch() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    assert clip_by_norm([weight], 0.1) is None
    assert weight.grad.tolist() == [1, 1]
