"""Micro models: torch's own numbers, operations as torch counts them, graphs, breaks, and data that can be learned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tasks.micro.data import GeneratedBatch
from tasks.micro.model import TransformerBlock
from tasks.micro.task import DIMENSIONS, Micro
from tests.tasks.conftest import counted_flops, opened
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
    train, val = (
        [data.transfer_batch_to_device(batch, torch.device("cpu"), 0) for batch in loader]
        for loader in (data.train_dataloader(), data.val_dataloader())
    )
    settings = module.configure_optimizers()

    def evaluated() -> tuple[float, float]:
        with torch.no_grad():
            loss, correct, count = module.eval().scores(val[0])
        module.train()
        return float(loss), float(correct / count)

    before = evaluated()
    for step in range(60):
        settings["optimizer"].zero_grad()
        module.training_step(train[step % len(train)], step).backward()
        settings["optimizer"].step()
        settings["lr_scheduler"]["scheduler"].step()
    loss, accuracy = evaluated()
    assert loss < before[0] - 0.1
    assert accuracy > before[1]


def test_inputs_have_the_precision_of_the_weights() -> None:
    task = small("convnet")
    module, data = task.build_module(max_steps=1), task.build_data(seed=0)
    trainer = quiet_trainer(precision="64-true")
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val/loss"] > 0


@EVERY_MODEL
def test_operations_are_those_that_torch_counts_before_and_after_a_batch_is_moved(model: str) -> None:
    task = small(model)
    data = opened(task)
    loaded = next(iter(data.train_dataloader()))
    net, batch = seeded(task), data.transfer_batch_to_device(loaded, torch.device("cpu"), 0)
    assert task.count(batch) == task.count(loaded)
    counted = counted_flops(lambda: net(batch.inputs, batch.targets)[0])
    assert task.training_flops(batch) == task.training_flops(loaded) == counted


@EVERY_MODEL
def test_forward_and_loss_are_one_graph_but_of_the_graph_breaker(
    model: str, capsys: pytest.CaptureFixture[str], counter: CompileCounter
) -> None:
    task = small(model)
    net, batch = seeded(task), first_batch(task)
    eager = net(batch.inputs, batch.targets)[0].item()
    net.compile(backend=counter, fullgraph=model != "graph_breaker")
    assert net(batch.inputs, batch.targets)[0].item() == pytest.approx(eager)
    # Before the print, between it and the branch, and what follows.
    assert counter.frame_count == (3 if model == "graph_breaker" else 1)
    assert capsys.readouterr().out == ""


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


def test_padding_changes_neither_loss_nor_scores() -> None:
    task = small("ragged")
    net, batch = seeded(task).eval(), first_batch(task)
    longer = nn.functional.pad(batch.inputs, (0, 5))
    targets = nn.functional.pad(batch.targets, (0, 5), value=-100)
    loss, correct, count = net(batch.inputs, batch.targets)
    assert count == batch.useful_tokens
    for one, other in zip(net(longer, targets), (loss, correct, count), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(net(longer)[:, :-5], net(batch.inputs))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "convnets"}, r"task\.model='convnets' is not one of .*; near: convnet$"),
        ({"image_size": 64}, r"task\.image_size=64: task\.model=simple_linear has none$"),
        ({"model": "transformer_block", "layers": 2}, r"task\.layers=2: task\.model=transformer_block has none"),
        ({"width": 0}, r"task\.width=0 must be at least 1"),
        ({"train_examples": 31}, r"task\.train_examples=31 must be at least 32"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Micro(**options)  # type: ignore[arg-type]
    assert len(str(refused.value).splitlines()) == 1
