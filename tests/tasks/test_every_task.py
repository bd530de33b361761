"""What holds for every task: one graph of forward and loss, code that blocks share, operations that torch counts."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tasks import Task
from tests.tasks.conftest import counted_flops, opened
from tests.trainer.runs import SMALLEST
from trainer.config import compose

CODES = {
    "captioning": 4,
    "captioning of two widths": 4,
    "image_classification": 3,
    "language_modelling": 2,
    "language_modelling with llama": 2,
    "masked_lm": 3,
    "micro": 2,
}
"""By task, with how many pieces of code its declared blocks and parts run: one of a kind."""
MORE = {
    "captioning of two widths": ["task.size.decoder_width=32"],
    "language_modelling in chunks": ["task.loss_chunks=2"],
    "language_modelling with llama": ["task/network=llama_tiny"],
}


def built(name: str) -> tuple[Task, L.LightningModule, Any]:
    """A small task, its module with seeded weights, and a batch."""
    given = name.split()[0]
    task: Any = compose([f"task={given}", *SMALLEST[given], *MORE.get(name, [])]).task
    torch.manual_seed(0)
    module, data = task.build_module(max_steps=10), opened(task)
    return task, module, data.transfer_batch_to_device(next(iter(data.train_dataloader())), torch.device("cpu"), 0)


@pytest.mark.parametrize("name", [*CODES, "language_modelling in chunks"])
def test_forward_and_loss_compile_as_one_graph_in_each_mode(name: str, counter: CompileCounter) -> None:
    _, module, batch = built(name)
    eager = module.training_step(batch, 0).item()
    module.net.compile(backend=counter, fullgraph=True)
    loss = module.training_step(batch, 0)
    loss.backward()
    assert counter.frame_count == 1
    assert loss.item() == pytest.approx(eager)
    with torch.no_grad():
        module.eval().scores(batch)
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", CODES)
def test_blocks_of_one_kind_share_one_compile_and_each_part_has_its_own(name: str, counter: CompileCounter) -> None:
    task, module, batch = built(name)
    declared = task.declare()
    for path in (*declared.blocks, *declared.parts):
        named = module.get_submodule(path)
        for region in named.children() if isinstance(named, nn.ModuleList | nn.Sequential) else [named]:
            region.compile(backend=counter, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            module.training_step(batch, 0).backward()
    assert counter.frame_count == CODES[name]


@pytest.mark.parametrize("name", CODES)
def test_operations_are_those_that_torch_counts(name: str) -> None:
    task, module, batch = built(name)
    assert task.training_flops(batch) == counted_flops(lambda: module.training_step(batch, 0))
