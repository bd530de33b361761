"""Tasks: what is learned, the data it learns from, and what it declares to the compiler."""

from __future__ import annotations

from tasks.base import BatchCounts, Declaration, Task
from tasks.captioner_size import CaptionerSize
from tasks.captioning import Captioning
from tasks.data.coco import Coco
from tasks.data.csv_file import Csv
from tasks.data.lognormal import Lognormal
from tasks.data.shapes import Shapes

TASKS: dict[str, type[Task]] = {"captioning": Captioning}
"""Tasks by their name on the command line."""

SCHEMAS: dict[str, type] = {
    "task/captioning": Captioning,
    "task/size/captioner": CaptionerSize,
    "task/data/shapes": Shapes,
    "task/data/lognormal": Lognormal,
    "task/data/coco": Coco,
    "task/data/csv": Csv,
}
"""Configuration dataclasses by the group and name under which the command line registers them."""

__all__ = ["SCHEMAS", "TASKS", "BatchCounts", "Declaration", "Task"]
