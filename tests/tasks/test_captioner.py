"""The caption network: torchvision's numbers, and predictions that see no later token and count no padding."""

from __future__ import annotations

import torch
from torchvision.models import VisionTransformer

from tasks.captioning.model import CaptionNet, ImageEncoder
from tasks.captioning.size import CaptionerSize


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


def test_no_position_sees_a_later_token(net: CaptionNet, size: CaptionerSize) -> None:
    images, tokens = example(size)
    image = net.encoder(images)
    before = net.decoder(tokens, image)
    tokens[:, 6:] = 9
    after = net.decoder(tokens, image)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])
