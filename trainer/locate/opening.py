"""Opening: builds a training up to its first step and hands its bench to whoever wants to try things on it.

    from trainer.locate.opening import with_module
    with_module(module, loader, [Whole()], lambda bench: bench.site)

Nothing is trained: the first step is never taken, no checkpoint, record or artifact is written.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage

from strategies import Strategy
from trainer.build import build_trainer, compile_callback
from trainer.callback import Compile
from trainer.explain.batches import kind_of
from trainer.guards.rollback import throwaway, throwaway_trainer
from trainer.locate.bench import Bench
from trainer.locate.scope import searched
from trainer.loops.lightning import LightningLoop
from trainer.process import process_settings
from trainer.run import new_record
from trainer.settings import Config

Result = TypeVar("Result")
MOST_SECONDS = 60.0
"""After so long no further batch is looked at."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """How many batches to look at."""

    batches: int = 32
    """First batches of the epoch whose shapes are looked at."""
    shapes: int = 4
    """Different shapes that are kept and tried."""


def with_config(config: Config, looking: Looking, use: Callable[[Bench], Result]) -> Result:
    """What ``use`` makes of the bench of ``config.task`` under ``config.compile``. Raises ValueError for bad input."""
    strategies, notes = searched(config.compile.values())
    if config.trainer.devices != 1 or config.trainer.strategy != "auto":
        notes.append("several devices: tried on one, without what DDP or FSDP changes")
    tried = throwaway(config, strategies, val_every_n_steps=0, checkpoint_every_n_steps=0)
    with process_settings(tried.trainer), tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        compile_ = compile_callback(tried, new_record(tried, []))
        L.seed_everything(config.seed, verbose=False)
        data = config.task.build_data(seed=config.seed)
        module = config.task.build_module(max_steps=config.trainer.max_steps)
        opening = _Opening(compile_, looking, use, notes)
        trainer = build_trainer(tried, Path(folder), [opening, compile_])
        trainer.loggers = []
        return opening.run(trainer, module, {"datamodule": data})


def with_module(
    module: L.LightningModule,
    loader: Any,
    strategies: Iterable[Strategy],
    use: Callable[[Bench], Result],
    looking: Looking | None = None,
    **declared: Any,
) -> Result:
    """The same for any module trained on ``loader``; ``declared`` are further arguments of ``Compile``."""
    kept, notes = searched(strategies)
    compile_ = Compile(kept, parity="off", measure_peak=False, **declared)
    opening = _Opening(compile_, looking or Looking(), use, notes)
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        trainer = throwaway_trainer(folder, [opening, compile_], max_steps=1, limit_val_batches=0)
        return opening.run(trainer, module, {"train_dataloaders": loader})


class _Done(BaseException):
    """The bench was used. Not an Exception, so that nobody takes it for a failure."""


class _Opening(L.Callback):
    """Comes before ``Compile`` in the trainer's callbacks, and ends the training before its first step."""

    def __init__(self, compile_: Compile, looking: Looking, use: Callable[[Bench], Any], notes: Sequence[str]) -> None:
        self._compile, self._looking, self._use, self._notes = compile_, looking, use, list(notes)
        self._chosen: list[Any] = []
        self._kinds: dict[str, int] = {}
        self._looked_at = 0
        self._result: list[Any] = []

    def run(self, trainer: L.Trainer, module: L.LightningModule, data: dict[str, Any]) -> Any:
        """Fit up to the first batch; returns what the bench was used for."""
        try:
            trainer.fit(module, **data)
        except _Done:
            return self._result[0]
        raise ValueError("the training loader brings no batch")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Strategies are applied: stand between the training loader and the loop."""
        strategy: Any = trainer.strategy
        process = strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            processed = process(loader)
            return self._choose(processed) if trainer.state.stage is RunningStage.TRAINING else processed

        strategy.process_dataloader = process_dataloader

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Everything is in place: use the bench, then end."""
        program = self._compile.program
        assert program is not None
        on_device = [batch, *(_on_device(trainer, other) for other in self._chosen[1:])]
        kinds = list(self._kinds)[: len(on_device)]
        if len(self._kinds) > len(kinds):
            self._notes.append(
                f"{len(self._kinds)} shapes among the first {self._looked_at} batches, {len(kinds)} of them tried "
                "(--shapes)"
            )
        strategies = self._compile.strategies
        cuda_graphs = program.uses_cuda_graphs
        passes = LightningLoop(trainer, cuda_graphs=cuda_graphs)
        with passes.quiet():
            bench = Bench(
                trainer,
                program,
                strategies,
                on_device,
                passes,
                cuda_graphs=cuda_graphs,
                kinds=kinds,
                counts=[self._kinds[kind] for kind in kinds],
                notes=self._notes,
            )
            self._result.append(self._use(bench))
        raise _Done

    def _choose(self, loader: Any) -> Any:
        """The first batch of each shape."""
        began = time.perf_counter()
        for batch in loader:
            kind = kind_of(batch)
            if kind not in self._kinds and len(self._chosen) < self._looking.shapes:
                self._chosen.append(batch)
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
            self._looked_at += 1
            if self._looked_at >= self._looking.batches or time.perf_counter() - began > MOST_SECONDS:
                break
        # The loop is given one batch more than it will get to: its fetcher looks ahead.
        return [copy.deepcopy(batch) for batch in self._chosen[:1] * 2]


def _on_device(trainer: L.Trainer, batch: Any) -> Any:
    """As Lightning's training loop brings a batch to its device."""
    converted = trainer.precision_plugin.convert_input(batch)
    converted = trainer.lightning_module._on_before_batch_transfer(converted, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", converted, dataloader_idx=0)
