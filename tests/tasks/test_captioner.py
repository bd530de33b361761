"""The caption network: torchvision's numbers, one graph, operations counted as torch counts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch._dynamo.testing import CompileCounter
from torchvision.models import VisionTransformer, vit_b_16

from tasks.captioning.data import CaptionBatch
from tasks.captioning.model import CaptionNet, ImageEncoder
from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning
from tests.tasks.conftest import counted_flops

BASE = Path(__file__).resolve().parents[2] / "conf" / "task" / "size" / "base.yaml"


def example(size: CaptionerSize, *, images: int = 4, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (images, 3, size.image_size, size.image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    tokens = torch.randint(3, size.vocabulary_size, (images, length), generator=generator)
    tokens[:, 0] = 1
    tokens[0, 5:] = 0
    return pixels, tokens


def test_the_encoder_gives_the_numbers_of_torchvisions_vision_transformer() -> None:
    torch.manual_seed(0)
    ours = ImageEncoder(CaptionerSize(image_size=32, encoder_layers=3, encoder_width=32))
    torch.manual_seed(0)
    reference = VisionTransformer(32, 16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=128)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    x = reference._process_input(images.float() / 127.5 - 1.0)
    x = torch.cat((reference.class_token.expand(2, -1, -1), x), dim=1)
    torch.testing.assert_close(ours(images), reference.encoder(x))


def test_the_encoder_is_as_large_as_torchvisions() -> None:
    values = yaml.safe_load(BASE.read_text())
    del values["defaults"]
    with torch.device("meta"):
        net = CaptionNet(CaptionerSize(**values))
        vit = vit_b_16()
    count = sum(parameter.numel() for parameter in vit.parameters())
    head = sum(parameter.numel() for parameter in vit.heads.parameters())
    assert sum(parameter.numel() for parameter in net.encoder.parameters()) == count - head
    assert count == 86_567_656


def test_evaluation_counts_right_predictions_and_ignores_padding(net: CaptionNet, size: CaptionerSize) -> None:
    images, tokens = example(size)
    train_loss, *nothing = net(images, tokens)
    assert nothing == [None, None]
    net.eval()
    loss, correct, count = net(images, tokens)
    assert count == (tokens[:, 1:] != 0).sum()
    assert 0 <= int(correct) <= int(count)
    torch.testing.assert_close(loss, train_loss)
    torch.testing.assert_close(net(images, torch.nn.functional.pad(tokens, (0, 7)))[0], loss)


def test_no_position_sees_a_later_token(net: CaptionNet, size: CaptionerSize) -> None:
    images, tokens = example(size)
    image = net.encoder(images)
    before = net.decoder(tokens, image)
    tokens[:, 6:] = 9
    after = net.decoder(tokens, image)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


def test_forward_and_loss_compile_as_one_graph_in_each_mode(
    net: CaptionNet, size: CaptionerSize, counter: CompileCounter
) -> None:
    eager = net(*example(size))[0].item()
    net.compile(backend=counter, fullgraph=True)
    loss = net(*example(size))[0]
    loss.backward()
    assert counter.frame_count == 1
    assert loss.item() == pytest.approx(eager)
    net.eval()
    with torch.no_grad():
        net(*example(size))
    assert counter.frame_count == 2


@pytest.mark.parametrize("path", [*Captioning().declare().blocks, *Captioning().declare().parts])
def test_blocks_of_one_kind_share_one_compile_and_each_part_has_its_own(
    net: CaptionNet, size: CaptionerSize, path: str, counter: CompileCounter
) -> None:
    declared = net.get_submodule(path.removeprefix("net."))
    regions = list(declared) if isinstance(declared, nn.ModuleList) else [declared]
    assert len(regions) == (3 if path.endswith("blocks") else 1)
    for region in regions:
        region.compile(backend=counter, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            net(*example(size))[0].backward()
        assert counter.frame_count == 1
        net.eval()
        with torch.no_grad():
            net(*example(size))
    assert counter.frame_count == 2


@pytest.mark.parametrize("same_width", [True, False])
def test_training_flops_are_those_that_torch_counts(size: CaptionerSize, same_width: bool) -> None:
    size = replace(size, decoder_width=size.encoder_width) if same_width else size
    net = CaptionNet(size)
    batch = CaptionBatch(*example(size), 0)
    assert Captioning(size=size).training_flops(batch) == counted_flops(lambda: net(*example(size))[0])
