"""Build: a training up to its first step, whose bench is handed to whoever wants to try things on it.

    from scripts.bisect.build import with_module
    with_module(module, loader, [Whole()], lambda bench: bench.site)

Nothing is trained: the first step is never taken, no checkpoint, record or artifact is written.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning as L

from scripts.bisect.bench import Bench
from scripts.bisect.trial import searched
from scripts.explain.recorder import kind_of, wrap_training_loader
from strategies import Strategy
from trainer.build import build_trainer, compile_callback
from trainer.callback import Compile
from trainer.guards.rollback import throwaway, throwaway_trainer
from trainer.loops.lightning import LightningLoop
from trainer.process import process_settings
from trainer.run import new_record
from trainer.settings import Config

Result = TypeVar("Result")
MAX_SECONDS = 60.0
"""After so long no further batch is looked at."""


def with_config(config: Config, use: Callable[[Bench], Result], *, batches: int, shapes: int) -> Result:
    """What ``use`` makes of the bench of ``config.task`` under ``config.compile``. Raises ValueError for bad input.

    The shapes of the epoch's first ``batches`` are looked at, and so many different ``shapes`` are kept and tried.
    """
    strategies, notes = searched(config.compile.values())
    if config.trainer.devices not in (None, 1) or config.trainer.strategy != "auto":
        notes.append("several devices: tried on one, without what DDP or FSDP changes")
    tried = throwaway(config, strategies, val_every_n_steps=0, checkpoint_every_n_steps=0)
    with process_settings(tried.trainer), tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        compile_ = compile_callback(tried, new_record(tried, []))
        L.seed_everything(config.seed, verbose=False)
        data = config.task.build_data(seed=config.seed)
        module = config.task.build_module(max_steps=config.trainer.max_steps)
        callback = _BenchCallback(compile_, use, notes, batches=batches, shapes=shapes)
        trainer = build_trainer(tried, Path(folder), [callback, compile_])
        trainer.loggers = []
        return callback.run(trainer, module, datamodule=data)


def with_module(
    module: L.LightningModule,
    loader: Any,
    strategies: Iterable[Strategy],
    use: Callable[[Bench], Result],
    *,
    batches: int = 32,
    shapes: int = 4,
    **declared: Any,
) -> Result:
    """The same for any module trained on ``loader``; ``declared`` are further arguments of ``Compile``."""
    kept, notes = searched(strategies)
    compile_ = Compile(kept, parity="off", measure_peak=False, save=False, verbose=False, **declared)
    callback = _BenchCallback(compile_, use, notes, batches=batches, shapes=shapes)
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        trainer = throwaway_trainer(folder, [callback, compile_], max_steps=1, limit_val_batches=0)
        return callback.run(trainer, module, train_dataloaders=loader)


class _Done(BaseException):
    """The bench was used. Not an Exception, so that nobody takes it for a failure."""


class _BenchCallback(L.Callback):
    """Comes before ``Compile`` in the trainer's callbacks, and ends the training before its first step."""

    def __init__(
        self, compile_: Compile, use: Callable[[Bench], Any], notes: Sequence[str], *, batches: int, shapes: int
    ) -> None:
        self._compile, self._use, self._notes = compile_, use, list(notes)
        self._max_batches, self._max_shapes = batches, shapes
        self._chosen: list[Any] = []
        self._kinds: Counter[str] = Counter()
        self._result: list[Any] = []

    def run(self, trainer: L.Trainer, module: L.LightningModule, **data: Any) -> Any:
        """Fit up to the first batch; returns what the bench was used for."""
        try:
            trainer.fit(module, **data)
        except _Done:
            return self._result[0]
        raise ValueError("the training loader brings no batch")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Strategies are applied: stand between the training loader and the loop."""
        wrap_training_loader(trainer, self._choose)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Everything is in place: use the bench, then end."""
        program = self._compile.program
        assert program is not None
        kinds = list(self._kinds)[: len(self._chosen)]
        if len(self._kinds) > len(kinds):
            self._notes.append(
                f"{len(self._kinds)} shapes among the first {self._kinds.total()} batches, {len(kinds)} of them tried "
                "(--shapes)"
            )
        cuda_graphs = program.uses_cuda_graphs
        passes = LightningLoop(trainer, cuda_graphs=cuda_graphs)
        on_device = [batch, *(passes.to_device(other) for other in self._chosen[1:])]
        with passes.quiet():
            bench = Bench(
                trainer,
                program,
                self._compile.strategies,
                on_device,
                passes,
                cuda_graphs=cuda_graphs,
                kinds=kinds,
                notes=self._notes,
            )
            self._result.append(self._use(bench))
        raise _Done

    def _choose(self, loader: Any) -> Any:
        """The first batch of each shape."""
        began = time.perf_counter()
        for batch in loader:
            kind = kind_of(batch)
            if kind not in self._kinds and len(self._chosen) < self._max_shapes:
                self._chosen.append(batch)
            self._kinds[kind] += 1
            if self._kinds.total() >= self._max_batches or time.perf_counter() - began > MAX_SECONDS:
                break
        # The loop is given one batch more than it will get to: its fetcher looks ahead.
        return [copy.deepcopy(batch) for batch in self._chosen[:1] * 2]
