"""What holds for every task: one graph of forward and loss, code that blocks share, operations that torch counts, no
difference by padding."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from strategies import Ragged
from strategies.padding import to_edge
from tasks import Task, lightning_module
from tests.tasks.conftest import MICRO, counted_flops, opened, small

CODES = {
    "captioning": 4,
    "captioning of two widths": 4,
    "image_classification": 3,
    "image_classification by convolutions": 9,
    "language_modelling": 2,
    "language_modelling with llama": 2,
    "masked_lm": 3,
    "micro": 2,
}
"""By task, with how many pieces of code its declared blocks and parts run: one of a kind."""


def built(name: str) -> tuple[Task, L.LightningModule, Any]:
    """A small task, its module with seeded weights, and a batch."""
    task = small(name)
    torch.manual_seed(0)
    module, data = task.build_module(max_steps=10), opened(task)
    loaded = next(iter(data.train_dataloader()))
    batch = data.transfer_batch_to_device(loaded, torch.device("cpu"), 0)
    assert task.count(batch) == task.count(loaded)
    assert task.training_flops(batch) == task.training_flops(loaded)
    return task, module, batch


@pytest.mark.parametrize("name", [*CODES, "language_modelling in chunks", *MICRO])
def test_forward_and_loss_compile_as_one_graph_in_each_mode(
    name: str, counter: CompileCounter, capsys: pytest.CaptureFixture[str]
) -> None:
    _, module, batch = built(name)
    breaks = name == "micro graph_breaker"
    eager = module.training_step(batch, 0).item()
    module.net.compile(backend=counter, fullgraph=not breaks)
    loss = module.training_step(batch, 0)
    loss.backward()
    # Of the graph breaker before its print, between that and the branch, and what follows.
    assert counter.frame_count == (3 if breaks else 1)
    assert loss.item() == pytest.approx(eager)
    with torch.no_grad():
        module.eval().scores(batch)
    assert counter.frame_count == (6 if breaks else 2)
    assert capsys.readouterr().out == ""


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


@pytest.mark.parametrize("name", [*CODES, *MICRO])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    task, module, batch = built(name)
    lightning_module._counted.clear()
    state = torch.get_rng_state()
    counted = task.training_flops(batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in module.parameters())
    assert counted == counted_flops(lambda: module.training_step(batch, 0))


@pytest.mark.parametrize("name", [name for name in CODES if "image" not in name])
def test_padding_changes_neither_loss_nor_scores(name: str) -> None:
    task, module, batch = built(name)
    ragged = [Ragged(*entry) for entry in task.declare().ragged]
    padded, longer = (to_edge(to_edge(batch, ragged, 20), ragged, edge) for edge in (20, 27))
    loss, correct, count = module.eval().scores(padded)
    assert 0 <= int(correct) <= int(count)
    for one, other in zip(module.scores(longer), (loss, correct, count), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(module.train().training_step(padded, 0), loss)
