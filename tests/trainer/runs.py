"""Small runs for tests: the overrides that make any task small, and what a run left behind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from strategies import STRATEGIES, Stage
from trainer.config import compose
from trainer.run import run
from trainer.telemetry.record import RunRecord

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
SCALARS = frozenset(
    key
    for cell in re.findall(r"^\| (`[a-z_]+/[^|]*) \|", REFERENCE, re.MULTILINE)
    for key in re.findall(r"`([a-z_]+/[a-z0-9_]+)`", cell)
)
PAGES = frozenset(re.findall(r"^- `((?:run|compile)/\w+)`:", REFERENCE, re.MULTILINE))
"""Documented keys of TensorBoard's scalars and text pages."""
OF_TEXTS = (
    *("task.network.layers=2", "task.network.width=16", "task.network.vocabulary_size=512"),
    *("task.network.max_tokens=64", "task.data.batch_size=2", "task.data.max_documents=96"),
)
SMALLEST: dict[str, tuple[str, ...]] = {
    "captioning": (
        "task.size.image_size=32",
        *(f"task.size.{half}_layers=2" for half in ("encoder", "decoder")),
        *(f"task.size.{half}_width=16" for half in ("encoder", "decoder")),
        "task.size.vocabulary_size=300",
        "task.data.batch_size=2",
        "task.data.train_images=64",
        "task.data.val_images=2",
        "task.data.num_workers=0",
        "task.data.max_objects=2",
        # One shape, so that nothing is compiled again for symbolic ones.
        "task.data.pad_to=48",
    ),
    "forces": (
        "task.batch_size=2",
        "task.most_atoms=8",
        "task.pad_to=8",
        "task.width=8",
        "task.layers=2",
        "task.radials=4",
        "task.train_examples=64",
        "task.val_examples=2",
    ),
    "image_classification": (
        "task.model=timm/test_vit",
        "task.image_size=32",
        "task.data.batch_size=2",
        "task.data.train_images=64",
        "task.data.val_images=2",
        "task.data.num_workers=0",
    ),
    "language_modelling": (*OF_TEXTS, "task.data.packing=documents", "task.data.pad_to=64"),
    "library_model": ("task.tiny=true",),
    "masked_lm": (*OF_TEXTS, "task.data.pad_to=64"),
    # The ragged one, so that every strategy applies; tests/tasks/test_micro.py holds the others.
    "micro": (
        "task.model=ragged",
        "task.batch_size=2",
        "task.width=16",
        "task.positions=32",
        "task.pad_to=32",
        "task.layers=2",
        "task.train_examples=64",
        "task.val_examples=2",
    ),
}
"""Overrides by task; a task that is not here runs at its default size."""

NEEDS: dict[str, tuple[str, ...]] = {
    "buckets": ("compile.buckets.count=2",),
    "auto": ("compile.auto.remember=false",),
    "cuda_graph": ("compile.cuda_graph.required=false",),
    "full_stack": ("compile.buckets.count=2",),
}
"""Overrides by strategy or composite: what it cannot run without, or is too slow without, in a test."""

MODULAR_PARTS: dict[str, dict[str, str]] = {
    "captioning": {"encoder": "whole", "decoder": "regional", "tail": "whole"},
    "image_classification": {"stem": "whole", "blocks": "regional", "tail": "whole"},
    "language_modelling": {"blocks": "regional", "tail": "whole"},
    "masked_lm": {"embed": "whole", "blocks": "regional", "tail": "whole"},
    "micro": {"blocks": "regional", "tail": "whole"},
}
"""How ``modular`` compiles each part, by task: every part that it declares."""

NOT_FOR: dict[str, dict[str, str]] = {
    "image_classification": dict.fromkeys(("buckets", "dynamic"), "no tensor of the batch is declared ragged")
}
"""What the error says, by task and by strategy that cannot be applied to it."""

ALONE: dict[str, tuple[str, ...]] = {"forces": ("eager", "second_order"), "library_model": ("eager",)}
"""By task, the arms of the contract, where it has not all: nothing else compiles ``forces``, and library models do not
validate, which the contract asks of what compiles; tests/trainer/test_captured_library_models.py compiles them."""

STEPS = 4
MODULE_STRATEGIES = sorted(
    name
    for name, strategy in STRATEGIES.items()
    if strategy.stage is Stage.MODULE and name != "auto" and not strategy.removed
)
"""Strategies that hand modules to the compiler."""


def refusal(task: str, arm: str) -> str | None:
    """What the error says where ``arm`` cannot be applied to ``task``; None where it can."""
    return next((NOT_FOR[task][name] for name in arm.strip("[]").split(",") if name in NOT_FOR.get(task, {})), None)


def order_of(arm: str, task: str = "captioning") -> str:
    """The arm that trains ``task`` eager on the examples in the order of ``arm``."""
    names = ["buckets"] if arm == "full_stack" else arm.strip("[]").split(",")
    names = [name for name in names if not refusal(task, name)]
    reordering = [name for name in names if name in STRATEGIES and STRATEGIES[name].reorders_data]
    return reordering[0] if reordering else "eager"


def overrides(strategy: str = "eager", *, task: str = "captioning", backend: str = "eager") -> list[str]:
    """A few exactly repeatable steps, each one logged, no validation; the strategy, or ``[first,second]``, with a fast
    backend."""
    given = [f"task={task}", "trainer=debug", *SMALLEST.get(task, ()), f"compile={strategy}"]
    for name in strategy.strip("[]").split(","):
        kind = STRATEGIES.get(name)
        if kind is not None and "backend" in kind.__dataclass_fields__:
            given.append(f"compile.{name}.backend={backend}")
        given.extend(NEEDS.get(name, ()))
        if name == "full_stack":
            given.extend(f"compile.{part}.backend={backend}" for part in ("regional", "optimizer"))
        if name == "modular":
            given.extend(
                f"+compile.modular.parts.{part}={{how:{how},backend:{backend}}}"
                for part, how in MODULAR_PARTS.get(task, {}).items()
            )
    return [*given, f"trainer.max_steps={STEPS}", "trainer.val_every_n_steps=0", "trainer.progress=none"]


def train(run_dir: Path, *changes: str, strategy: str = "eager", task: str = "captioning", **named: str) -> RunRecord:
    """Run ``overrides`` with ``changes`` in ``run_dir``."""
    command = [*overrides(strategy, task=task, **named), *changes]
    return run(compose(command), run_dir=run_dir, command=command)


def events_of(run_dir: Path) -> EventAccumulator:
    """Everything in the run's TensorBoard files."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    return events.Reload()


def curve(run_dir: Path, key: str = "train/loss") -> dict[int, float]:
    """Points of one scalar by optimizer step, oldest first."""
    return {event.step: event.value for event in events_of(run_dir).Scalars(key)}


def last_checkpoint(run_dir: Path) -> dict[str, Any]:
    """The checkpoint that ``resume=<run_dir>`` would go on from."""
    import torch

    loaded: dict[str, Any] = torch.load(run_dir / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    return loaded


def relative_differences(left: Mapping[int, float], right: Mapping[int, float]) -> list[float]:
    """``|left - right| / |right|`` at each step; both must have the same steps."""
    assert list(left) == list(right)
    return [abs(left[step] - right[step]) / abs(right[step]) for step in left]
