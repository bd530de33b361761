"""Look: a few steps of a task, or of any LightningModule, under strategies, and what the compiler made of them.

    from trainer.explain.look import explain_module
    print(explain_module(module, loader, [Whole()]).as_json())

Nothing is trained for keeps: the module is this process's own, no checkpoint, record or artifact is written.
"""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from strategies import Strategy
from strategies.compose import label
from strategies.errors import is_compile_error, one_line
from trainer.build import build_trainer, compile_callback
from trainer.callback import Compile, CompiledNothing
from trainer.explain import source
from trainer.explain.assemble import assembled
from trainer.explain.backends import prepared, strict
from trainer.explain.compiler import quiet_compiler
from trainer.explain.explanation import Explanation
from trainer.explain.watching import Watching
from trainer.guards.rollback import throwaway, throwaway_trainer
from trainer.process import process_settings
from trainer.run import new_record
from trainer.settings import Config

VALIDATION_BATCHES = 2
MOST_STEPS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to look."""

    backend: str = "configured"
    """One of ``trainer.explain.backends.BACKENDS``."""
    batches: int | None = None
    """Batches of the epoch to look at; None = all."""
    seconds: float = 120.0
    """After so many seconds no further batch is looked at."""
    profiles: bool = True
    """Whether the last steps are profiled, to tell what ran eager."""
    progress: Callable[[str], None] = lambda line: None
    """Told what is being done."""
    before_steps: Callable[[], None] = lambda: None
    """Called once Lightning has set its signal handlers: for whoever has handlers of their own."""


def explain(config: Config, options: Options, *, command: Sequence[str] = ()) -> Explanation:
    """Look at ``config.task`` under ``config.compile``. Raises ValueError for what a run would refuse."""
    strategies = prepared(config.compile.values(), options.backend)
    if not strategies:
        raise ValueError(f"compile={label(config.compile.values())}: compiles nothing, there is nothing to explain")
    seen = throwaway(
        config,
        strategies,
        max_steps=MOST_STEPS,
        val_every_n_steps=2 if config.trainer.val_every_n_steps else 0,
        val_batches=VALIDATION_BATCHES,
        checkpoint_every_n_steps=None,
        warmup_steps=0,
    )
    record = new_record(seen, list(command))
    with process_settings(seen.trainer), tempfile.TemporaryDirectory(prefix="explain-") as folder:
        compile_ = compile_callback(seen, record)
        L.seed_everything(config.seed, verbose=False)
        options.progress("building data and model")
        data = config.task.build_data(seed=config.seed)
        module = config.task.build_module(max_steps=config.trainer.max_steps)
        watching = _watching(compile_, options)
        trainer = _without_traces(build_trainer(seen, Path(folder), [compile_, watching]))
        return _look(trainer, module, compile_, watching, {"datamodule": data}, config, options, command)


def explain_module(
    module: L.LightningModule,
    loader: Any,
    strategies: Iterable[Strategy],
    options: Options | None = None,
    **declared: Any,
) -> Explanation:
    """Look at any module trained on ``loader``; ``declared`` are further arguments of ``trainer.callback.Compile``."""
    options = options or Options()
    given = list(strategies)
    compile_ = Compile(prepared(given, options.backend), parity="off", warmup_steps=0, measure_peak=False, **declared)
    compile_.record.task = type(module).__name__
    watching = _watching(compile_, options)
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        trainer = throwaway_trainer(folder, [compile_, watching], max_epochs=1)
        return _look(trainer, module, compile_, watching, {"train_dataloaders": loader}, given, options, ())


def _watching(compile_: Compile, options: Options) -> Watching:
    return Watching(
        compile_,
        batches=options.batches,
        seconds=options.seconds,
        profiles=options.profiles,
        progress=options.progress,
        before_steps=options.before_steps,
    )


def _without_traces(trainer: L.Trainer) -> L.Trainer:
    """Take away what would write: TensorBoard's files and the best checkpoint."""
    trainer.loggers = []
    kept = [each for each in trainer.callbacks if not isinstance(each, L.pytorch.callbacks.ModelCheckpoint)]  # type: ignore[attr-defined]
    trainer.callbacks = kept  # type: ignore[attr-defined]
    return trainer


def _look(
    trainer: L.Trainer,
    module: L.LightningModule,
    compile_: Compile,
    watching: Watching,
    data: dict[str, Any],
    given: Config | Sequence[Strategy],
    options: Options,
    command: Sequence[str],
) -> Explanation:
    failures: list[str] = []
    try:
        with _compile_failures(failures, watching), quiet_compiler():
            trainer.fit(module, **data)
    finally:
        watching.close()
    strategies = list(given.compile.values()) if isinstance(given, Config) else list(given)
    explanation = assembled(watching, compile_, trainer, failures)
    explanation.strategies, explanation.command = label(strategies), list(command)
    missing = explanation.not_looked_at
    if any(strategy.name == "cached" for strategy in strategies):
        missing.append("cached: left out, so that no store is read or written")
    if isinstance(given, Config) and (given.trainer.devices != 1 or given.trainer.strategy != "auto"):
        missing.append("several devices: looked at on one, without what DDP or FSDP changes")
    if isinstance(given, Config) and given.trainer.val_every_n_steps and not watching.validated:
        missing.append("validation: the look was over before one")
    if explanation.breaks and (names := strict(strategies)):
        explanation.notes.append(
            f"{', '.join(names)}: fullgraph=true, so a run ends at the first of these breaks and splits nothing"
        )
    return explanation


@contextlib.contextmanager
def _compile_failures(failures: list[str], watching: Watching) -> Iterator[None]:
    """A compile that fails is something to explain, and so is an error that eager does not raise; others are errors."""
    try:
        yield
    except Exception as error:
        if is_compile_error(error) or isinstance(error, CompiledNothing):
            failures.append(one_line(error))
            return
        if not watching.eager_passed:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where, _, _ = source.of_interest(source.line(each.filename, each.lineno or 0, each.name) for each in frames)
        failures.append(
            f"{one_line(error)}, at {where}; eager raises nothing on this batch: compiled, the code does not "
            "do the same"
        )
