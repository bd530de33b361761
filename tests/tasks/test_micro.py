"""Micro models: torch's own numbers, operations as torch counts them, graphs, breaks, and data that can be learned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tasks.micro.data import GeneratedBatch
from tasks.micro.model import TransformerBlock
from tasks.micro.task import DIMENSIONS, Micro
from tests.tasks.conftest import fit, opened
from tests.trainer.lightning_modules import quiet_trainer

SMALL: dict[str, dict[str, int]] = {
    "convnet": {"width": 4, "image_size": 16},
    "transformer_block": {"width": 64, "positions": 8},
    "ragged": {"width": 16, "positions": 32, "layers": 3},
}
"""Dimensions by model; 16 features where nothing is given."""
EVERY_MODEL = pytest.mark.parametrize("model", DIMENSIONS)


def small(model: str, **options: int) -> Micro:
    options = {"batch_size": 8, "width": 16, "val_examples": 12, **SMALL.get(model, {}), **options}
    return Micro(model=model, initialise="host", **options)


def first_batch(task: Micro) -> GeneratedBatch:
    data = opened(task)
    return data.transfer_batch_to_device(next(iter(data.train_dataloader())), torch.device("cpu"), 0)


def seeded(task: Micro) -> nn.Module:
    torch.manual_seed(0)
    return task.build_module(max_steps=60).net


@EVERY_MODEL
def test_a_model_learns_its_data_within_a_few_steps(model: str) -> None:
    task = small(model, train_examples=64, batch_size=32)
    torch.manual_seed(0)
    module, data = task.build_module(max_steps=60), opened(task)
    batch = data.transfer_batch_to_device(next(iter(data.val_dataloader())), torch.device("cpu"), 0)
    found = []
    for steps in (0, 60):
        if steps:
            fit(task, steps=steps, module=module.train())
        with torch.no_grad():
            loss, correct, count = module.eval().scores(batch)
        found.append((float(loss), float(correct / count)))
    assert found[1][0] < found[0][0] - 0.1
    assert found[1][1] > found[0][1]


def test_inputs_have_the_precision_of_the_weights() -> None:
    task = small("convnet")
    module, data = task.build_module(max_steps=1), task.build_data(seed=0)
    trainer = quiet_trainer(precision="64-true")
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val/loss"] > 0


@pytest.mark.usefixtures("counter")
def test_one_graph_asked_of_the_graph_breaker_fails_at_the_line_that_prints() -> None:
    task = small("graph_breaker")
    net, batch = seeded(task), first_batch(task)
    net.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'(?s)micro/model\.py", line \d+, in forward.*print\('):
        net(batch.inputs, batch.targets)


def test_the_graph_breakers_branch_is_taken_by_the_data() -> None:
    net = seeded(small("graph_breaker"))
    x_BD = torch.randn(4, 16)
    for sign, branch in ((1, torch.relu), (-1, torch.tanh)):
        with torch.no_grad():
            net.first.bias.fill_(5.0 * sign)
            torch.testing.assert_close(net(x_BD), net.tail(net.second(branch(net.first(x_BD))).relu(), None))


def test_the_block_gives_the_numbers_of_torchs_encoder_layer() -> None:
    torch.manual_seed(0)
    ours = TransformerBlock(32, 4, causal=False)
    reference = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    attention = ours.attention
    with torch.no_grad():
        for theirs, mine in (
            (reference.self_attn.in_proj_weight, torch.cat((attention.query.weight, attention.key_value.weight))),
            (reference.self_attn.in_proj_bias, torch.cat((attention.query.bias, attention.key_value.bias))),
        ):
            theirs.copy_(mine)
    reference.self_attn.out_proj = attention.output
    reference.norm1, reference.norm2 = ours.attention_norm, ours.mlp_norm
    reference.linear1, reference.linear2 = ours.mlp[0], ours.mlp[2]
    x_BSD = torch.randn(2, 7, 32)
    torch.testing.assert_close(ours(x_BSD), reference(x_BSD))


@EVERY_MODEL
def test_an_example_depends_on_the_seed_and_its_number_alone(model: str) -> None:
    def examples(seed: int, **options: int) -> list[tuple[Tensor, Tensor]]:
        data = small(model, **options).build_data(seed=seed)
        data.setup("fit")
        batches = [data.transfer_batch_to_device(rows, torch.device("cpu"), 0) for rows in data.val_dataloader()]
        return [pair for batch in batches for pair in zip(batch.inputs, batch.targets, strict=True)]

    def cut(example: tuple[Tensor, Tensor]) -> list[list[float]]:
        inputs, targets = example
        return [inputs[:4].tolist(), targets[:4].tolist() if targets.ndim else [targets.item()]]

    few, many = examples(0), examples(0, val_examples=20, train_examples=40, batch_size=5)
    assert (len(few), len(many)) == (12, 20)
    assert [cut(example) for example in few] == [cut(example) for example in many[:12]]
    assert cut(few[0]) != cut(few[1])
    assert cut(few[0]) != cut(examples(1)[0])


def test_images_are_channels_last_and_lengths_are_ragged() -> None:
    task = small("convnet")
    assert first_batch(task).inputs.is_contiguous(memory_format=torch.channels_last)
    assert task.count(first_batch(task)).tokens is None
    task = small("ragged")
    data = opened(task)
    lengths = data.train_set.lengths
    assert len(set(lengths)) > 5
    assert 4 <= min(lengths) <= max(lengths) == 32
    batch = first_batch(task)
    counts = task.count(batch)
    assert (counts.samples, counts.tokens) == (8, 8 * batch.inputs.shape[1])
    assert counts.useful_tokens == (batch.inputs != 0).sum()
