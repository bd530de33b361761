"""One run of a peer, from configuration to record: the counterpart of ``trainer.run`` for what is not ours."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from scripts.peers.arms import ARMS, Work
from scripts.peers.names import PEERS, mark
from strategies.credentials import hidden
from trainer.build import batch_counter, note_machine
from trainer.console import ERROR_LOG
from trainer.filled_record import fill_in
from trainer.interrupt import Interrupted, StopRequest
from trainer.reasons import one_line
from trainer.run import new_record
from trainer.settings import Config
from trainer.telemetry import hardware
from trainer.telemetry.compiler import CompilerMonitor
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry
from trainer.torch_settings import process_settings

TORCH = Path(torch.__file__).parent


class NotCompiled(RuntimeError):
    """A peer that compiles has compiled nothing."""


def run(name: str, config: Config, *, run_dir: Path, command: list[str], backend: str) -> RunRecord:
    """Train ``config.task`` as the peer ``name`` does and leave a record in ``run_dir``, however it ends."""
    record = new_record(config, command)
    mark(record, name, backend=backend)
    record.save(run_dir)
    try:
        with process_settings(config.trainer), StopRequest(print):
            train(name, config, record, run_dir, backend)
        record.status = "finished"
    except Interrupted as interrupted:
        record.status, record.signal, record.reason = "interrupted", interrupted.signum, str(interrupted)
    except Exception as error:
        record.status, record.reason = "failed", one_line(error)
        (run_dir / ERROR_LOG).write_text(hidden(traceback.format_exc()), encoding="utf-8")
    finally:
        record.total_seconds = hardware.process_age_seconds()
        record.save(run_dir)
    return record


def train(name: str, config: Config, record: RunRecord, run_dir: Path, backend: str) -> None:
    """Seed and build in the order of our own runs, so that weights and batches are theirs; train; fill in the record.

    Raises NotCompiled.
    """
    telemetry = Telemetry(
        count=batch_counter(config.task, config.task.training_flops),
        warmup_steps=config.trainer.warmup_steps,
        log_every_n_steps=config.trainer.log_every_n_steps,
        measure_peak=config.trainer.measure_peak,
    )
    L.seed_everything(config.seed, verbose=False)
    data = config.task.build_data(seed=config.seed)
    module = config.task.build_module(max_steps=config.trainer.max_steps)
    work = Work(config=config, module=module, data=data, telemetry=telemetry, directory=run_dir, backend=backend)
    telemetry.compiler.start()
    try:
        trainer, functions = ARMS[name](work)
    finally:
        telemetry.compiler.stop()
    fill_in(record, trainer, telemetry, None, together=False)
    note_machine(record, trainer)
    record.skipped_items = config.task.skipped_items(data)
    if PEERS[name].compiles:
        note_compiler(record, telemetry.compiler, functions)


def note_compiler(record: RunRecord, compiler: CompilerMonitor, functions: Sequence[Any]) -> None:
    """Write what was compiled. Raises NotCompiled when that is nothing of ``functions``."""
    record.take(compiler.figures())
    record.events = list(compiler.events)
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    # Of a forward that torch wrote, the compiler enters a frame of its own, which says nothing of whose it is.
    frames = [(code.co_filename, code.co_firstlineno) for code in codes if not in_torch(code.co_filename)]
    done = compiler.compiled_frames()
    compiled = [frame in done for frame in frames]
    record.regions, record.regions_compiled = len(frames), sum(compiled)
    if not record.graphs or (frames and not any(compiled)):
        raise NotCompiled(
            f"{record.label} compiled {record.graphs or 0} graphs and none of its {len(frames)} regions"
            + "".join(f"; {event.reason}" for event in compiler.events[:1])
        )
    if missing := len(frames) - sum(compiled):
        record.notes.append(f"{record.label}: {missing} of {len(frames)} regions were not compiled")


def in_torch(filename: str) -> bool:
    """Whether a file is torch's."""
    return Path(filename).is_relative_to(TORCH)
