"""Run: a few steps of a task, or of any LightningModule, under strategies, and what the compiler made of them.

    from scripts.explain.run import explain_module
    print(explain_module(module, loader, [Whole()]).as_json())

Nothing of the training is kept: the module is this process's own, no checkpoint, record or artifact is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch._dynamo.utils as dynamo_utils
from lightning.pytorch.callbacks import ModelCheckpoint

from scripts.arguments import reject_auto
from scripts.explain import BATCHES, Explanation, findings
from strategies import Modular, Program, Strategy
from strategies.base import label, ordered
from strategies.compile_errors import is_compile_error, one_line
from trainer.bucketed_loaders import loss_of_padding
from trainer.build import build_trainer, compile_callback
from trainer.callback import Compile
from trainer.loops.lightning import throwaway_trainer
from trainer.loops.lightning_internals import lightning_classes
from trainer.process import process_settings
from trainer.run_start import initial_record
from trainer.settings import Config
from trainer.telemetry import hardware

ONE_DEVICE = "several devices: {} on one, without what DDP or FSDP changes"
NO_INDUCTOR = "what Inductor makes of the graphs: there is no GPU"
VALIDATION_BATCHES = 2


def explain(
    config: Config, *, batches: int = BATCHES, before_steps: Callable[[], object] = lambda: None
) -> Explanation:
    """Explain ``config.task`` under ``config.compile``, trained on ``batches``, one a step.

    ``before_steps`` is called once Lightning has set its signal handlers: for whoever has handlers of their own.
    Raises ValueError for what a run would refuse.
    """
    given = list(config.compile.values())
    strategies = prepared(given)
    if not strategies:
        raise ValueError(f"compile={label(given)}: compiles nothing, there is nothing to explain")
    with training(
        config,
        strategies,
        lambda made: [made, Quiet(made, before_steps)],
        max_steps=batches,
        accumulate_grad_batches=1,  # what comes after the first batch comes after the first step: see Event.is_expected
        val_every_n_steps=-(-batches // 2) if config.trainer.val_every_n_steps else 0,
        val_batches=VALIDATION_BATCHES,
        checkpoint_every_n_steps=None,
        warmup_steps=0,
    ) as (compile_, trainer, module, data):
        explanation = explained(compile_, trainer, module, given, datamodule=data)
    if several_devices(config):
        explanation.not_looked_at.append(ONE_DEVICE.format("looked at"))
    return explanation


def explain_module(
    module: L.LightningModule, loader: Any, strategies: Iterable[Strategy], *, batches: int = BATCHES, **declared: Any
) -> Explanation:
    """Explain any module trained on ``batches`` of ``loader``; ``declared`` are further arguments of ``Compile``."""
    given = ordered(strategies)
    if not isinstance(module, lightning_classes(L.LightningModule)):
        raise ValueError(f"explain_module: {type(module).__name__} is not a LightningModule")
    compile_ = Compile(
        prepared(given), parity="off", warmup_steps=0, measure_peak=False, save=False, verbose=False, **declared
    )
    compile_.record.task = type(module).__name__
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        trainer = throwaway_trainer(folder, module, [compile_, Quiet(compile_)], max_epochs=1, max_steps=batches)
        return explained(compile_, trainer, module, given, train_dataloaders=loader)


def prepared(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Copies of ``strategies`` that let graphs break and store nothing, and without a GPU do without Inductor.

    Raises ValueError where it is still to be chosen what they are.
    """
    strategies = list(strategies)
    reject_auto(strategies)
    return [changed(strategy) for strategy in strategies if strategy.name != "cached"]


def changed(options: Any) -> Any:
    """A copy of a strategy, or of a part of ``modular``, for ``prepared``."""
    names = {option.name for option in dataclasses.fields(options)}
    changes: dict[str, Any] = {}
    if isinstance(options, Modular):
        changes["parts"] = {name: changed(part) for name, part in options.parts.items()}
    if "fullgraph" in names and not options.one_graph:
        changes["fullgraph"] = False
    if "backend" in names and options.backend == "inductor" and not torch.cuda.is_available():
        changes |= {"backend": "aot_eager", "mode": "default", "options": {}}
    return dataclasses.replace(options, **changes)


class Quiet(L.Callback):
    """Comes after ``Compile``: what a run logs line by line is reported at the end, and whether padding counts."""

    def __init__(self, compile_: Compile, before_steps: Callable[[], object] = lambda: None) -> None:
        self._compile, self._before_steps = compile_, before_steps
        self._batch: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compile.telemetry.compiler.lines_left = 0
        self._before_steps()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        program = self._compile.program
        if program is not None and program.padding is not None and self._batch is not None:
            line = loss_of_padding(pl_module, self._batch, program.padding.ragged)
            self._compile.record.notes += [line] if line else []


def explained(
    compile_: Compile, trainer: L.Trainer, module: L.LightningModule, given: Sequence[Strategy], **data: Any
) -> Explanation:
    """Train; a compile that fails is something to explain, every other error is the user's."""
    failures: list[str] = []
    compiled_before = len(dynamo_utils.get_compilation_metrics())
    try:
        with quiet_compiler():
            trainer.fit(module, **data)
    except Exception as error:
        if not is_compile_error(error):
            raise
        failures.append(one_line(error))
    record, compiler = compile_.record, compile_.telemetry.compiler
    compiler.collect()
    fallbacks = [f"{one.texts[0]} ({one.where or 'n/a'})" for one in findings(compiler.events, "fallback")]
    metrics = dynamo_utils.get_compilation_metrics()[compiled_before:]
    skips = Counter(" ".join(one.cudagraph_skip_reason.split()) for one in metrics if one.cudagraph_skip_reason)
    skipped = [f"{count} graphs left out of CUDA graphs: {reason}" for reason, count in skips.items()]
    reasons = [one for one in dict.fromkeys(record.eager_parts.values()) if not any(one in text for text in fallbacks)]
    every_failure = list(dict.fromkeys([*fallbacks, *failures, *reasons]))
    not_looked_at = [] if torch.cuda.is_available() else [NO_INDUCTOR]
    if any(strategy.name == "cached" for strategy in given):
        not_looked_at.append("cached: left out, so that no store is read or written")
    return Explanation(
        task=record.task,
        strategies=label(given),
        device=hardware.device_name(trainer.strategy.root_device),
        versions=hardware.versions(),
        batches=trainer.fit_loop.epoch_loop.total_batch_idx + 1,
        breaks=findings(compiler.events, "graph_break"),
        recompiles=findings(compiler.events, "recompile", first_steps=max(1, planned_shapes(compile_.program))),
        failures=every_failure,
        notes=[*(note for note in record.notes if not any(note in one for one in every_failure)), *skipped],
        not_looked_at=not_looked_at,
    )


def planned_shapes(program: Program | None) -> int:
    """Shapes of batch with which a training begins, one after the other."""
    padding = None if program is None else program.padding
    return 0 if padding is None or not padding.warm else len(padding.batch_sizes)


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Silence what is logged of what is explained anyway; whoever sets TORCH_LOGS wants to read it."""
    before = logging.root.manager.disable
    if not os.environ.get("TORCH_LOGS"):
        logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo")
            warnings.filterwarnings("ignore", module=r"trainer\.guards")
            yield
    finally:
        logging.disable(before)


# ---- a training up to its first steps, which bisect looks at as well -------------------------------------------------


@contextlib.contextmanager
def training(
    config: Config, strategies: Iterable[Strategy], callbacks: Callable[[Compile], list[L.Callback]], **options: Any
) -> Iterator[tuple[Compile, L.Trainer, L.LightningModule, L.LightningDataModule]]:
    """What applies ``strategies``, trainer, module and data of ``config``, on one device, in a folder that goes away,
    with torch's settings.

    ``callbacks`` makes Lightning's of the first, in their order; ``options`` are further ones of ``TrainerConfig``.
    Raises ValueError for what a run would refuse.
    """
    settings = dataclasses.replace(
        config.trainer, devices=1, strategy="auto", measure_peak=False, progress="none", **options
    )
    tried = dataclasses.replace(
        config,
        compile={strategy.name: strategy for strategy in strategies},
        trainer=settings,
        parity="off",
        on_compile_error="eager",
        on_slower="warn",
        resume=None,
        repeat=None,
        profile="off",
    )
    with process_settings(tried.trainer), tempfile.TemporaryDirectory(prefix="steps-") as folder:
        compile_ = compile_callback(tried, initial_record(tried, []))
        L.seed_everything(config.seed, verbose=False)
        data = config.task.build_data(seed=config.seed)
        module = config.task.build_module(max_steps=config.trainer.max_steps)
        trainer: Any = build_trainer(tried, Path(folder), callbacks(compile_))
        # Take away what would write: TensorBoard's files and the best checkpoint.
        trainer.loggers = []
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, ModelCheckpoint)]
        yield compile_, trainer, module, data


def several_devices(config: Config) -> bool:
    return config.trainer.devices not in (None, 1) or config.trainer.strategy != "auto"
