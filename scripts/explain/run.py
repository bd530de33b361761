"""Run: a few steps of a task, or of any LightningModule, under strategies, and what the compiler made of them.

    from scripts.explain.run import explain_module
    print(explain_module(module, loader, [Whole()]).as_json())

Nothing is trained for keeps: the module is this process's own, no checkpoint, record or artifact is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from scripts.explain import Explanation, merged
from scripts.explain.recorder import Options, StepRecorder, quiet_compiler
from strategies import Modular, Strategy
from strategies.compose import label
from strategies.errors import is_compile_error, one_line
from trainer.auto import refuse_choice
from trainer.build import build_trainer, compile_callback
from trainer.callback import Compile, CompiledNothing
from trainer.guards.rollback import throwaway, throwaway_trainer
from trainer.process import process_settings
from trainer.run import new_record
from trainer.settings import Config
from trainer.telemetry import hardware, source

ONE_DEVICE = "several devices: {} on one, without what DDP or FSDP changes"
VALIDATION_BATCHES = 2
MAX_STEPS = 1_000_000_000


def explain(config: Config, options: Options, *, command: Sequence[str] = ()) -> Explanation:
    """Explain ``config.task`` under ``config.compile``. Raises ValueError for what a run would refuse."""
    given = list(config.compile.values())
    strategies = prepared(given, options.backend)
    if not strategies:
        raise ValueError(f"compile={label(given)}: compiles nothing, there is nothing to explain")
    options.progress("building data and model")
    recorders: list[StepRecorder] = []

    def callbacks(compile_: Compile) -> list[L.Callback]:
        recorders.append(StepRecorder(compile_, options))
        return [compile_, *recorders]

    with training(
        config,
        strategies,
        callbacks,
        command=command,
        max_steps=MAX_STEPS,
        val_every_n_steps=2 if config.trainer.val_every_n_steps else 0,
        val_batches=VALIDATION_BATCHES,
        checkpoint_every_n_steps=None,
        warmup_steps=0,
    ) as made:
        explanation = _fit(made.trainer, made.module, made.compile_, recorders[0], given, datamodule=made.data)
    explanation.command = list(command)
    if several_devices(config):
        explanation.not_looked_at.append(ONE_DEVICE.format("looked at"))
    if config.trainer.val_every_n_steps and not recorders[0].validated:
        explanation.not_looked_at.append("validation: the steps were over before one")
    return explanation


def explain_module(
    module: L.LightningModule,
    loader: Any,
    strategies: Iterable[Strategy],
    options: Options | None = None,
    **declared: Any,
) -> Explanation:
    """Explain any module trained on ``loader``; ``declared`` are further arguments of ``trainer.callback.Compile``."""
    options, given = options or Options(), list(strategies)
    compile_ = Compile(
        prepared(given, options.backend),
        parity="off",
        warmup_steps=0,
        measure_peak=False,
        save=False,
        verbose=False,
        **declared,
    )
    compile_.record.task = type(module).__name__
    recorder = StepRecorder(compile_, options)
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        trainer = throwaway_trainer(folder, [compile_, recorder], max_epochs=1)
        return _fit(trainer, module, compile_, recorder, given, train_dataloaders=loader)


def prepared(strategies: Iterable[Strategy], backend: str) -> list[Strategy]:
    """Copies of ``strategies`` that compile with ``backend``, let graphs break and store nothing.

    Raises ValueError where it is still to be chosen what they are.
    """
    strategies = list(strategies)
    refuse_choice(strategies)
    return [_copy(strategy, backend) for strategy in strategies if strategy.name != "cached"]


def backends_of(strategies: Iterable[Strategy]) -> list[str]:
    """The backends that ``strategies`` compile with, each once."""
    names: list[str] = []
    for strategy in strategies:
        parts = strategy.parts.values() if isinstance(strategy, Modular) else [strategy]
        names += [part.backend for part in parts if hasattr(part, "backend")]
    return list(dict.fromkeys(names))


def _copy(strategy: Strategy, backend: str) -> Strategy:
    if isinstance(strategy, Modular):
        parts = {name: dataclasses.replace(part, **_changes(part, backend)) for name, part in strategy.parts.items()}
        return dataclasses.replace(strategy, parts=parts)
    changes = _changes(strategy, backend)
    if strategy.name == "optimizer":  # an update has no graph breaks to allow
        changes.pop("fullgraph", None)
    return dataclasses.replace(strategy, **changes)


def _changes(options: Any, backend: str) -> dict[str, Any]:
    names = {option.name for option in dataclasses.fields(options)}
    changes: dict[str, Any] = {"fullgraph": False}
    if backend != "configured" and "backend" in names and options.backend != backend:
        changes["backend"] = backend
        if backend != "inductor":  # mode and options are Inductor's
            changes |= {"mode": "default", "options": {}}
    return {name: value for name, value in changes.items() if name in names}


def _fit(
    trainer: L.Trainer,
    module: L.LightningModule,
    compile_: Compile,
    recorder: StepRecorder,
    given: Sequence[Strategy],
    **data: Any,
) -> Explanation:
    failures: list[str] = []
    try:
        with _compile_failures(failures, recorder), quiet_compiler():
            trainer.fit(module, **data)
    finally:
        recorder.close()
    explanation = _explanation(recorder, compile_, trainer, failures)
    explanation.strategies = label(given)
    if any(strategy.name == "cached" for strategy in given):
        explanation.not_looked_at.append("cached: left out, so that no store is read or written")
    strict = [each.name for each in given if each.name != "optimizer" and getattr(each, "fullgraph", False)]
    if explanation.breaks and strict:
        explanation.notes.append(
            f"{', '.join(strict)}: fullgraph=true, so a run ends at the first of these breaks and splits nothing"
        )
    return explanation


@contextlib.contextmanager
def _compile_failures(failures: list[str], recorder: StepRecorder) -> Iterator[None]:
    """A compile that fails is something to explain, and so is an error that eager does not raise; others are errors."""
    try:
        yield
    except Exception as error:
        if is_compile_error(error) or isinstance(error, CompiledNothing):
            failures.append(one_line(error))
            return
        if not recorder.eager_passed:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where, _, _ = source.of_interest(source.line(each.filename, each.lineno or 0, each.name) for each in frames)
        failures.append(
            f"{one_line(error)}, at {where}; eager raises nothing on this batch: compiled, the code does not "
            "do the same"
        )


def _explanation(recorder: StepRecorder, compile_: Compile, trainer: L.Trainer, failures: list[str]) -> Explanation:
    used, compiler, record = backends_of(compile_.strategies), recorder.compiler, compile_.record
    explanation = Explanation(
        task=record.task,
        strategies=record.label,
        backend=", ".join(used),
        device=hardware.device_name(trainer.strategy.root_device),
        versions=hardware.versions(),
        breaks=merged(compiler.breaks),
        recompiles=merged(compiler.recompiles),
        failures=list(dict.fromkeys([*compiler.failures, *failures, *record.eager_parts.values()])),
        notes=list(record.notes),
    )
    missing = explanation.not_looked_at
    if "inductor" not in used:
        missing.append(
            f"what Inductor makes of the graphs: the backend is {' and '.join(used)}; --backend inductor does"
        )
    left_out = Counter(compiler.left_out_of_cuda_graphs)
    explanation.notes += [f"{count} graphs left out of CUDA graphs: {reason}" for reason, count in left_out.items()]
    if used and all(name == "eager" for name in used):
        missing.append("backward graphs: backend eager compiles none; --backend aot_eager does")
    for each in explanation.breaks:
        if each.region is not None:
            compiler.graphs_of(each.region).breaks += 1
    for recompile in explanation.unexpected:
        if recompile.region is not None:
            compiler.graphs_of(recompile.region).recompiles += recompile.count
    explanation.graphs = list(compiler.graphs.values())
    if (chosen := recorder.chosen) is not None:
        explanation.batches, explanation.batches_run = chosen.looked_at, chosen.run
        explanation.batch_kinds, explanation.stopped = dict(chosen.kinds.most_common()), chosen.stopped
    return explanation


# ---- a training up to its first steps, which bisect looks at as well -------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What ``trainer.fit`` needs, and the callback that applies the strategies."""

    trainer: L.Trainer
    module: L.LightningModule
    data: L.LightningDataModule
    compile_: Compile


@contextlib.contextmanager
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
