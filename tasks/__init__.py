"""Tasks: what is learned, the data it learns from, and what it declares to the compiler."""

from __future__ import annotations

from tasks.base import BatchCounts, Declaration, Task
from tasks.bert_network import BertNetwork
from tasks.captioner_size import CaptionerSize
from tasks.captioning import Captioning
from tasks.data.coco import Coco
from tasks.data.csv_file import Csv
from tasks.data.image_folder import ImageFolder
from tasks.data.labelled_shapes import LabelledShapes
from tasks.data.lognormal import Lognormal
from tasks.data.shapes import Shapes
from tasks.data.text_files import TextFiles
from tasks.data.text_json_lines import JsonLines
from tasks.data.text_stdlib import Stdlib
from tasks.data.torchvision_dataset import TorchvisionDataset
from tasks.image_classification import ImageClassification
from tasks.language_modelling import LanguageModelling
from tasks.language_network import Gpt2Network, LlamaNetwork
from tasks.masked_lm import MaskedLM
from tasks.micro import Micro
from tasks.transformers_network import TransformersNetwork

TASKS: dict[str, type[Task]] = {
    "captioning": Captioning,
    "image_classification": ImageClassification,
    "language_modelling": LanguageModelling,
    "masked_lm": MaskedLM,
    "micro": Micro,
}
"""Tasks by their name on the command line."""

SCHEMAS: dict[str, type] = {
    "task/captioning": Captioning,
    "task/image_classification": ImageClassification,
    "task/language_modelling": LanguageModelling,
    "task/masked_lm": MaskedLM,
    "task/micro": Micro,
    "task/size/captioner": CaptionerSize,
    "task/data/shapes": Shapes,
    "task/data/lognormal": Lognormal,
    "task/data/coco": Coco,
    "task/data/csv": Csv,
    "task/data/labelled_shapes": LabelledShapes,
    "task/data/image_folder": ImageFolder,
    "task/data/torchvision": TorchvisionDataset,
    "task/data/stdlib": Stdlib,
    "task/data/text": TextFiles,
    "task/data/json_lines": JsonLines,
    "task/network/bert": BertNetwork,
    "task/network/gpt2": Gpt2Network,
    "task/network/llama": LlamaNetwork,
    "task/network/transformers": TransformersNetwork,
}
"""Configuration dataclasses by the group and name under which the command line registers them."""

__all__ = ["SCHEMAS", "TASKS", "BatchCounts", "Declaration", "Task"]
