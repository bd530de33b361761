"""Tasks: what is learned, the data it learns from, and what it declares to the compiler.

Strategies are tried and measured on them; a task of your own begins as a copy of one.
"""

from __future__ import annotations

from tasks.base import BatchCounts, Declaration, Task
from tasks.captioning.size import CaptionerSize
from tasks.captioning.task import Captioning, Coco, Lognormal, Shapes
from tasks.forces.task import Forces
from tasks.image_classification.task import ImageClassification, ImageFolder, LabelledShapes
from tasks.language.sources import Stdlib, TextFiles
from tasks.language.task import BertNetwork, Gpt2Network, LanguageModelling, LlamaNetwork, MaskedLM
from tasks.library_model.task import LibraryModel
from tasks.micro.task import Micro

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (Captioning, Forces, ImageClassification, LanguageModelling, LibraryModel, MaskedLM, Micro)
}
"""Tasks by their name on the command line."""

SCHEMAS: dict[str, type] = {
    **{f"task/{name}": task for name, task in TASKS.items()},
    "task/size/captioner": CaptionerSize,
    "task/data/shapes": Shapes,
    "task/data/lognormal": Lognormal,
    "task/data/coco": Coco,
    "task/data/labelled_shapes": LabelledShapes,
    "task/data/torchvision": ImageFolder,
    "task/data/stdlib": Stdlib,
    "task/data/text": TextFiles,
    "task/network/bert": BertNetwork,
    "task/network/gpt2": Gpt2Network,
    "task/network/llama": LlamaNetwork,
}
"""Configuration dataclasses by the group and name under which the command line registers them."""

__all__ = ["SCHEMAS", "TASKS", "BatchCounts", "Declaration", "Task"]
