"""Train a Lightning module twice, plain and under strategies, and hold one training against the other."""

from __future__ import annotations

import contextlib
import math
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from crucible import Compile, RunRecord, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH, ROWS = 16, 8
CLOSE = 1e-4
"""Relative distance of losses in single precision after a few steps: rounding, and far less than a changed step."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """A stem, blocks, and a head of one number."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Module(L.LightningModule):
    """A net and the plainest training step; tests override what they need another way."""

    block: Callable[[], nn.Module] = Block

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net: Any = Net([type(self).block() for _ in range(2)]) if net is None else net

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Losses(L.Callback):
    """Keeps the loss of every step, and what ``global_step`` was after it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.values.append(float(outputs["loss"]))


@dataclass
class Outcome:
    """What one training did."""

    module: Any
    losses: list[float]
    steps: int
    ended: BaseException | None = None
    """What ended it before its time."""
    record: RunRecord | None = None
    trainer: Any = None
    warned: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def end(self) -> str:
        """In words."""
        if self.ended is None:
            return f"finished, {self.steps} steps"
        line = str(self.ended).partition("\n")[0]
        place = traceback.extract_tb(self.ended.__traceback__)[-1]
        return (
            f"ENDED at step {self.steps} by {type(self.ended).__name__}: {line[:300]} ({place.filename}:{place.lineno})"
        )


def vectors(count: int, *, rows: int = ROWS, seed: int = 0) -> list[Tensor]:
    """As many batches."""
    return [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * seed + i)) for i in range(count)]


def loader(batches: Sequence[Any]) -> Any:
    """A loader that gives these batches as they are."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Collect what is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words: list[str] = []
        yield words
        words += [str(one.message) for one in caught]


def train(
    make: Callable[[], L.LightningModule],
    strategies: Sequence[Strategy] | None,
    *,
    data: Any = None,
    validation: Any = None,
    datamodule: Any = None,
    callbacks: Sequence[L.Callback] = (),
    then: Callable[[L.Trainer, Any], Any] | None = None,
    compile_options: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """Seed, make the module and train it; ``strategies=None``: plain Lightning, without the callback.

    ``then`` is given the trainer and the module after the training; what it raises counts as an end.
    """
    torch._dynamo.reset()
    L.seed_everything(0, verbose=False)
    module = make()
    losses = Losses()
    compiling = None
    if strategies is not None:
        compiling = Compile(
            list(strategies), **{"save": False, "verbose": False, "measure_peak": False, **(compile_options or {})}
        )
    if data is None and datamodule is None:
        data = vectors(6)
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, **silent, **options}
    ended: BaseException | None = None
    with tempfile.TemporaryDirectory() as folder, quiet() as warned:
        trainer = L.Trainer(
            callbacks=[losses, *callbacks, *([] if compiling is None else [compiling])],
            default_root_dir=folder,
            **options,
        )
        try:
            if datamodule is not None:
                trainer.fit(module, datamodule=datamodule)
            else:
                trainer.fit(
                    module,
                    loader(data) if isinstance(data, list) else data,
                    loader(validation) if isinstance(validation, list) else validation,
                )
            if then is not None:
                then(trainer, module)
        except Exception as error:
            ended = error
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(
        module, losses.values, trainer.global_step, ended, compiling and compiling.record, trainer, warned, metrics
    )


def apart(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest relative distance; infinite where one has more numbers. Equal infinities and NaNs are no distance."""
    if len(left) != len(right):
        return math.inf
    worst = 0.0
    for one, other in zip(left, right, strict=True):
        if one == other or (math.isnan(one) and math.isnan(other)):
            continue
        distance = abs(one - other) / max(abs(other), 1e-3)
        worst = max(worst, distance if distance == distance else math.inf)
    return worst


def assert_as_eager(eager: Outcome, seen: Outcome, close: float = CLOSE) -> None:
    """The same end, the same losses, the same weights and buffers."""
    assert eager.ended is None, eager.end
    assert seen.end == eager.end
    assert len(eager.losses) >= 1
    assert apart(seen.losses, eager.losses) <= close, (seen.losses, eager.losses)
    assert apart(list(seen.metrics.values()), list(eager.metrics.values())) <= close, (seen.metrics, eager.metrics)
    expected, given = eager.module.state_dict(), seen.module.state_dict()
    assert list(given) == list(expected)
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            # relative to the largest, and not to each: what is zero in exact arithmetic is all rounding
            largest = float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0
            torch.testing.assert_close(
                given[name], tensor, rtol=10 * close, atol=10 * close * max(largest, 1e-2), equal_nan=True, msg=name
            )
        else:
            assert torch.equal(given[name], tensor), name
