"""Fixtures of the strategies' tests: a clean compiler, a backend that counts, small networks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from strategies import Program
from tasks import Declaration
from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning
from tests.strategies import backends

Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """No compiled code from other tests, and none left to them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> list[GraphModule]:
    """Graphs that ``backend=backends.COUNTING`` is given during the test."""
    backends.register()
    backends.graphs.clear()
    return backends.graphs


@pytest.fixture(scope="session")
def task() -> Captioning:
    """Captioning with three blocks each and a bridge between their widths."""
    return Captioning(
        size=CaptionerSize(
            image_size=32, encoder_layers=3, encoder_width=16, decoder_layers=3, decoder_width=24, vocabulary_size=259
        ),
        initialise="host",
    )


@pytest.fixture
def module(task: Captioning) -> nn.Module:
    """The task's LightningModule with seeded weights."""
    torch.manual_seed(0)
    return task.build_module(max_steps=10)


@pytest.fixture(scope="session")
def declared(task: Captioning) -> Declaration:
    """What the task declares."""
    return task.declare()


@pytest.fixture(scope="session")
def batch() -> Batch:
    """Two images with their captions."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.randint(3, 259, (2, 12), generator=generator)


def in_force(program: Program, parity: str = "off") -> Program:
    """``program`` as within a step: its regions are compiled at their first call, unless ``parity`` has it checked."""
    program.checking.mode = parity
    program.activate(True)
    return program


@contextlib.contextmanager
def one_step(program: Program) -> Iterator[None]:
    """Inside, a step is under way; afterwards what its checks found is in force, as between two steps of a training."""
    program.activate(True)
    try:
        yield
    finally:
        program.activate(False)
        for kind in program.kinds.values():
            kind.update_states()


def loss_and_gradients(module: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one forward of ``module.net`` and the gradients of one backward."""
    module.zero_grad(set_to_none=True)
    loss = module.get_submodule("net")(*batch)[0]
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None
    }
