"""Steps: a training up to its first steps, for who looks at what is compiled: what ``explain`` and ``bisect`` share.

Nothing is trained for keeps: the module is this process's own, no checkpoint, record or artifact is written.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from strategies import Strategy
from trainer.build import build_trainer, compile_callback
from trainer.callback import Compile
from trainer.guards.rollback import throwaway
from trainer.process import process_settings
from trainer.run import new_record
from trainer.settings import Config

ONE_DEVICE = "several devices: {} on one, without what DDP or FSDP changes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What ``trainer.fit`` needs, and the callback that applies the strategies."""

    trainer: L.Trainer
    module: L.LightningModule
    data: L.LightningDataModule
    compile_: Compile


@contextmanager
def training(
    config: Config,
    strategies: Iterable[Strategy],
    callbacks: Callable[[Compile], list[L.Callback]],
    *,
    command: Sequence[str] = (),
    **options: Any,
) -> Iterator[Training]:
    """The training of ``config`` under ``strategies`` on one device, in a folder that goes away, with torch's settings.

    Args:
        callbacks: Lightning's callbacks, made of the one that applies the strategies, in their order.
        command: Of the record that is thrown away.
        options: Further ones of ``TrainerConfig``.

    Raises ValueError for what a run would refuse.
    """
    tried = throwaway(config, strategies, **options)
    with process_settings(tried.trainer), tempfile.TemporaryDirectory(prefix="steps-") as folder:
        compile_ = compile_callback(tried, new_record(tried, list(command)))
        L.seed_everything(config.seed, verbose=False)
        data = config.task.build_data(seed=config.seed)
        module = config.task.build_module(max_steps=config.trainer.max_steps)
        trainer: Any = build_trainer(tried, Path(folder), callbacks(compile_))
        # Take away what would write: TensorBoard's files and the best checkpoint.
        trainer.loggers = []
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, ModelCheckpoint)]
        yield Training(trainer=trainer, module=module, data=data, compile_=compile_)


def several_devices(config: Config) -> bool:
    return config.trainer.devices not in (None, 1) or config.trainer.strategy != "auto"


def wrap_training_loader(trainer: L.Trainer, wrap: Callable[[Any], Any]) -> None:
    """Have the training loop iterate over what ``wrap`` makes of its loader."""
    strategy: Any = trainer.strategy
    process = strategy.process_dataloader

    def process_dataloader(loader: Any) -> Any:
        processed = process(loader)
        return wrap(processed) if trainer.state.stage is RunningStage.TRAINING else processed

    strategy.process_dataloader = process_dataloader


def copied(batch: Any) -> Any:
    """A batch that a step may change."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # a class that refuses; then steps get the same object
        return batch


def kind_of(batch: Any) -> str:
    """Dtypes and shapes of everything in a batch that is a tensor, and the types of the rest, with names."""
    return ", ".join(_parts("", batch)) or "empty"


def _parts(name: str, value: Any) -> Iterator[str]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Tensor):
        shape = " x ".join(map(str, value.shape)) or "scalar"
        yield f"{name} {str(value.dtype).removeprefix('torch.')} {shape}".strip()
        return
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(option.name, getattr(value, option.name)) for option in dataclasses.fields(value)]
    else:
        if value is not None:
            yield f"{name} {type(value).__name__}".strip()
        return
    for key, item in items:
        yield from _parts(f"{name}.{key}" if name else str(key), item)
