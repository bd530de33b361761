"""Options of tasks that cannot be: each is refused as it is made, in one line that names it as it is typed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning, Shapes
from tasks.forces.task import Forces
from tasks.image_classification.model import build_model
from tasks.image_classification.task import ImageClassification, ImageFolder, LabelledShapes
from tasks.language.sources import Stdlib
from tasks.language.task import BertNetwork, LanguageModelling, LlamaNetwork, MaskedLM
from tasks.library_model.task import LibraryModel
from tasks.micro.task import Micro
from tests.tasks.conftest import opened
from tests.tasks.test_language_modelling import task_of


def built(**options: Any) -> Any:
    return ImageClassification(**options).build_module(max_steps=1)


unknown = partial(build_model, classes=5, image_size=64)
PACKED = Stdlib(packing="packed_documents")
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (Shapes, {"batch_size": 0}, "data.batch_size=0 must be at least 1"),
    (Shapes, {"train_images": -1}, "data.train_images=-1 must be at least 1"),
    (Shapes, {"max_objects": 10}, "data.max_objects=10 must be 1 to 9"),
    (Shapes, {"num_workers": -1}, "data.num_workers=-1 must be at least 0"),
    (
        Captioning,
        {"size": CaptionerSize(), "data": Shapes(pad_to=161)},
        "data.pad_to=161 must be at most task.size.max_tokens=160",
    ),
    (LabelledShapes, {"distinct": 0}, "data.distinct=0 must be at least 1"),
    (LabelledShapes, {"val_images": 0}, "data.val_images=0 must be at least 1"),
    (ImageFolder, {}, "data.root='' must name a file or a folder"),
    (ImageClassification, {"image_size": 0}, "image_size=0 must be at least 1"),
    (
        lambda **options: opened(ImageClassification(**options)),
        {"classes": 10},
        "classes=10 must be at least 30, the classes of the data",
    ),
    (built, {"model": "alexnet", "image_size": 32}, "image_size=32: alexnet cannot take it (..."),
    (built, {"model": "vit_ti_16", "image_size": 50}, "image_size=50: vit_ti_16 cannot be built for it (..."),
    (
        unknown,
        {"name": "resnet5"},
        "model='resnet5' is not a classification network that torchvision has (timm's are ...; near: resnet50...",
    ),
    (unknown, {"name": "deeplabv3_resnet50"}, "model=... is not a classification network..."),
    (
        unknown,
        {"name": "timm/resnet50000"},
        "model='timm/resnet50000' is not a classification network that timm has; near: timm/...",
    ),
    (Forces, {"least_atoms": 1}, "least_atoms=1 must be at least 2"),
    (Forces, {"least_atoms": 9, "most_atoms": 8}, "most_atoms=8 must be at least 9"),
    (Forces, {"pad_to": 9}, "pad_to=9 must be at least 16"),
    (Forces, {"cutoff": 0.0}, "cutoff=0.0 must be above 0 angstrom"),
    (Forces, {"force_weight": float("nan")}, "force_weight=nan must be at least 0"),
    (Stdlib, {"packing": "tight"}, "data.packing='tight' is not one of..."),
    (Stdlib, {"max_tokens": 1}, "data.max_tokens=1 must be at least 2"),
    (Stdlib, {"pad_to": 8}, "data.pad_to=8 needs task.data.packing=documents..."),
    (Stdlib, {"val_share": 1.0}, "data.val_share=1.0 must be..."),
    (
        Stdlib,
        {"packing": "packed_documents", "pad_to": 40},
        "data.pad_to=40 needs task.data.packing=documents, not packed_doc...",
    ),
    (task_of, {"data": Stdlib(max_tokens=17)}, "data.max_tokens=17 must be at most task.network.max_tokens=16"),
    (
        LlamaNetwork,
        {"heads": 4, "key_value_heads": 3},
        "network.heads=4 must be a multiple of task.network.key_value_head...",
    ),
    (BertNetwork, {"width": 10, "heads": 3}, "network.width=10 must be a multiple of task.network.heads=3"),
    (BertNetwork, {"vocabulary_size": 259}, "network.vocabulary_size=259 must be at least 260"),
    (BertNetwork, {"attention_dropout": 1.0}, "network.attention_dropout=1.0 must be at least 0 and below 1"),
    (
        MaskedLM,
        {"network": BertNetwork(dropout=0.1), "data": PACKED},
        "network.attention_dropout=0.1 must be 0 with task.data.packing=packed_documents: ...",
    ),
    (LanguageModelling, {"data": PACKED}, "data.packing='packed_documents' is not one of ('packed', 'documents')"),
    (LibraryModel, {"model": "lama"}, "model='lama' is not one of ...; near: llama"),
    (LibraryModel, {"model": "vit", "padded": True}, "padded=true: task.model=vit takes no attention_mask"),
    (Micro, {"model": "convnets"}, "model='convnets' is not one of ...; near: convnet"),
    (Micro, {"image_size": 64}, "image_size=64: task.model=simple_linear has none"),
    (Micro, {"model": "transformer_block", "layers": 2}, "layers=2: task.model=transformer_block has none"),
    (Micro, {"width": 0}, "width=0 must be at least 1"),
    (Micro, {"train_examples": 31}, "train_examples=31 must be at least 32"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_it_is_refused_in_one_line(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^task\.{'.*'.join(map(re.escape, message.split('...')))}$") as refused:
        make(**options)
    assert "\n" not in str(refused.value)
