"""``compile=optimizer`` on a CUDA device: eager's numbers, few kernels, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from strategies import Optimizer, Program
from strategies.optimizer.step import installed
from tests.strategies.modules import Block, Stack

pytestmark = pytest.mark.gpu


def pair(**options: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer], Program]:
    modules: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Stack(nn.ModuleList([Block() for _ in range(6)])).cuda())
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3, **options) for module in modules]
    program = Program(module=modules[1], optimizers=(optimizers[1],), device=torch.device("cuda"))
    Optimizer().begin(program)
    return modules, list(optimizers), program


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=["default", "fused", "capturable"])
def test_parameters_and_state_are_eagers(options: dict[str, bool]) -> None:
    modules, optimizers, program = pair(**options)
    schedules = [OneCycleLR(optimizer, max_lr=1e-2, total_steps=30) for optimizer in optimizers]
    for step in range(20):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).cuda()
        for module, optimizer, schedule in zip(modules, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-4, atol=1e-5)
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=1e-3, atol=1e-5)
    update = installed(optimizers[1])
    assert update.state == "compiled", update.reason
    report = program.report["optimizer"]
    assert (report["form"], report["chunks"]) == ("functional", 7)
    assert report["graphs"] <= 4, "one for the blocks and one for the rest, and those once more with betas that change"


def test_a_step_is_one_kernel_a_chunk_and_never_waits_for_the_device() -> None:
    # Inductor takes at most 250 tensors into one kernel (combo_kernel_max_num_args), 16 for each parameter of AdamW: a
    # chunk of up to 15 parameters is one kernel.
    modules, optimizers, _ = pair()
    for _ in range(3):
        modules[1](torch.randn(4, 8, device="cuda")).square().mean().backward()
        optimizers[1].step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizers[1].step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernels = [event.key for event in profile.key_averages() if "triton" in event.key for _ in range(event.count)]
    assert len(kernels) == 7, kernels


def test_a_captured_step_follows_a_schedule() -> None:
    modules, optimizers, _ = pair()
    update: Any = installed(optimizers[1])
    for parameter, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        other.grad = parameter.grad.clone()
    for step in range(3):  # two betas that change become tensors
        for optimizer in optimizers:
            optimizer.param_groups[0]["betas"] = (0.9 - step / 100, 0.98 + step / 1000)
            optimizer.step()
    assert update.state == "compiled"
    graph = torch.cuda.CUDAGraph()
    number = update.constants()
    with torch.no_grad(), torch.cuda.graph(graph):
        update()
    for step in range(5):
        for optimizer in optimizers:
            optimizer.param_groups[0].update(lr=1e-3 / (1 + step), betas=(0.8 + step / 100, 0.99))
        optimizers[0].step()
        update.prepare()
        update.count()
        graph.replay()
    assert update.constants() == number
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-4, atol=1e-5)
    assert float(optimizers[1].state_dict()["state"][0]["step"]) == 8
