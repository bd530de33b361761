"""The classifier network: the numbers of the models themselves, one graph, published sizes and operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import list_models
from torchvision.transforms.functional import normalize

from tasks.image_classification.model import MEAN, STD, ClassifierNet, build_model, skeleton
from tasks.image_classification.task import ImageClassification

KINDS = ("resnet18", "vit_ti_16", "mobilenet_v3_small", "timm/test_vit")
"""A network whose stem and tail are taken apart, another one, and two of which only blocks and parts are known."""


def example(size: int = 64, *, images: int = 4, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(0, classes, (images,), generator=generator)


@pytest.mark.parametrize("name", KINDS)
def test_names_logits_and_loss_are_those_of_the_model_itself(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, classes=7, image_size=64).eval()
    keys = [f"model.{key}" for key in model.state_dict()]
    weights = sorted(f"model.{name}" for name, _ in model.named_parameters())
    images, labels = example()
    expected = model(normalize(images.float() / 255, list(MEAN), list(STD)))
    net = ClassifierNet(model).eval()
    torch.testing.assert_close(net(images), expected, rtol=1e-4, atol=1e-4)
    loss, correct, count = net(images, labels)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(expected, labels), rtol=1e-4, atol=1e-4)
    assert (int(correct), int(count)) == (int((expected.argmax(-1) == labels).sum()), 4)
    assert list(net.state_dict()) == keys
    assert sorted(name for name, _ in net.named_parameters(remove_duplicate=False)) == weights


@pytest.mark.parametrize(("name", "expected"), [("resnet18", True), ("vit_ti_16", False)])
def test_convolutional_networks_are_channels_last(name: str, expected: bool) -> None:
    net = ClassifierNet(build_model(name, classes=7, image_size=64))
    seen: list[torch.Tensor] = []
    stem = net.model.conv1 if name == "resnet18" else net.model.conv_proj
    stem.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    net(example()[0])
    assert seen[0].is_contiguous(memory_format=torch.channels_last) is expected
    weights = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) is expected for weight in weights)


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("resnet50", "Bottleneck", 16),
        ("vit_l_16", "EncoderBlock", 24),
        ("regnet_y_400mf", "ResBottleneckBlock", 16),
        ("efficientnet_b0", "MBConv", 16),
        ("swin_t", "SwinTransformerBlock", 12),
        ("shufflenet_v2_x0_5", "InvertedResidual", 16),
        ("timm/convnext_atto", "ConvNeXtBlock", 12),
        *((name, "ClassifierNet", 1) for name in ("alexnet", "googlenet", "inception_v3", "densenet121")),
        *((name, "ClassifierNet", 1) for name in ("vgg11", "mobilenet_v2")),
    ],
)
def test_repeated_blocks_are_found_whatever_holds_them_and_no_region_lies_in_another(
    name: str, kind: str, count: int
) -> None:
    declared = ImageClassification(model=name, image_size=224).declare()
    module = nn.ModuleDict({"net": ClassifierNet(skeleton(name, classes=1, image_size=224))})
    blocks: list[str] = []
    for path in declared.blocks:
        container = module.get_submodule(path)
        is_list = isinstance(container, nn.Sequential | nn.ModuleList)
        blocks += [f"{path}.{child}" for child, _ in container.named_children()] if is_list else [path]
    assert [type(module.get_submodule(path)).__name__ for path in blocks] == [kind] * count
    if kind == "ClassifierNet":
        assert declared.whole == declared.blocks == declared.parts == ("net",)
        return
    regions = [*blocks, *declared.parts]
    assert all(module.get_submodule(path) is not None for path in regions)
    assert not [(one, other) for one in regions for other in regions if other.startswith(f"{one}.")]


@pytest.mark.parametrize(
    ("name", "parameters", "giga_multiply_adds"),
    [
        # torchvision's own table (docs: "Table of all available classification weights").
        ("alexnet", 61_100_840, 0.71),
        ("resnet50", 25_557_032, 4.09),
        ("vit_l_16", 304_326_632, 61.55),
        # DeiT's, table 1 of https://arxiv.org/abs/2012.12877 (5 M and 22 M), counted by timm.
        ("vit_ti_16", 5_717_416, 1.25),
        ("vit_s_16", 22_050_664, 4.60),
    ],
)
def test_parameters_and_operations_are_as_published(name: str, parameters: int, giga_multiply_adds: float) -> None:
    model = skeleton(name, classes=1000, image_size=224)
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    sizes: list[int] = []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    hook = first.register_forward_hook(lambda _, inputs, output: sizes.append(output.numel()))
    task = ImageClassification(model=name, classes=1000, image_size=224)
    training = task.training_flops(type("Batch", (), {"targets": torch.zeros(2)}))
    hook.remove()
    # Twice as many backward, but nobody asks for the gradient of the image.
    forward = (training + 2 * sizes[0] * first.weight[0].numel()) / 3
    assert forward == pytest.approx(2 * 2 * giga_multiply_adds * 1e9, rel=0.01)


def test_every_classification_network_of_torchvision_can_be_built_without_memory() -> None:
    # One of each family and every one that needs an argument of its own; the others differ in sizes.
    for name in ("googlenet", "inception_v3", "maxvit_t", "regnet_x_400mf", "swin_v2_t", "vgg11_bn", "vit_b_32"):
        assert name in list_models()
        assert skeleton(name, classes=5, image_size=224).training


@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("inception_v3", 80)])
def test_networks_with_auxiliary_heads_train_without_them(name: str, size: int) -> None:
    torch.manual_seed(0)
    net = ClassifierNet(build_model(name, classes=5, image_size=size))
    loss = net(*example(size, images=2, classes=5))[0]
    loss.backward()
    assert all(weight.grad is not None for weight in net.parameters())


def test_timms_networks_need_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"timm/resnet50 needs timm: pip install -e '\.\[models\]'"):
        build_model("timm/resnet50", classes=5, image_size=64)
