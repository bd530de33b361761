"""One run, from configuration to record: the story of the trainer, readable top to bottom."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import socket
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from torch.distributed import DistError, TCPStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from strategies.compile_errors import is_out_of_memory, one_line, redact
from strategies.compiler_warmup import stop_compiling
from trainer.build import Job, task_options
from trainer.checkpoints import NonFiniteLoss
from trainer.console import ERROR_LOG, print_end, relative_path
from trainer.loops.rank_failures import AND_SO, RankFailed, fail_record
from trainer.loops.ranks import describe_process
from trainer.process import (
    Interrupted,
    Launch,
    StopRequest,
    detect_launch,
    is_first_process,
    process_settings,
    undisturbed,
)
from trainer.run_end import finalize
from trainer.run_files import claim, find_checkpoint, release, restore_file
from trainer.run_start import initial_record
from trainer.settings import Config
from trainer.telemetry import hardware
from trainer.telemetry.record import RunRecord
from trainer.telemetry.source_lines import raised_at

OTHERS_LOG = "error.rank*.log"
"""Tracebacks of the other processes, after the name of their host."""
FOLDER = "crucible/run_dir"
PORT = "crucible/port"
"""Keys in the store of the processes."""
JOIN_SECONDS = 300
"""How long a process that was started again waits for rank 0."""
_stores: list[Any] = []
"""Kept open: rank 0's may serve the others until the process group takes it over."""
_runs = itertools.count()
"""Of this process: a later one is another run, and no restart."""


def run(config: Config, *, run_dir: Path, command: list[str]) -> RunRecord:
    """Train ``config.task`` under ``config.compile``, or as a peer does, and leave record, checkpoints and TensorBoard
    in ``run_dir``.

    Args:
        config: The whole configuration, already checked field by field.
        run_dir: Directory of this run, created when missing.
        command: The overrides that were given, for the line that says how to go on.

    Returns:
        The record, its ``status`` finished, interrupted or failed, as written to ``run_dir``.

    Raises:
        ValueError: Input that cannot be used, found before training began. The folder has no record then, or that of
            the run that was to be resumed in it.
        OSError: Nothing can be written into ``run_dir``.
        SystemExit: The task's code called ``sys.exit``; the record says ``failed`` and where.
    """
    first = is_first_process()
    console = Console(quiet=not first)
    began = time.time()
    record = initial_record(config, command)
    record.versions, record.import_seconds = hardware.versions(), hardware.process_age_seconds()
    if (launch := detect_launch(os.environ)) is not None:
        run_dir = shared_run_folder(launch, config, record, run_dir)
    job = _job(config, record, run_dir, console)
    replaced = claim(record, run_dir, str(run_dir) if record.restarts else config.resume) if first else None
    stop, refused = StopRequest(console.print), False
    ended: SystemExit | None = None
    try:
        with process_settings(config.trainer), stop:
            job.train(stop)
            job.wait_for_ranks()
            record.status = "interrupted" if stop.signum else "finished"
            record.signal = stop.signum
    except Interrupted as interrupted:
        stop_compiling()
        record.status, record.signal, record.reason = "interrupted", interrupted.signum, str(interrupted)
        with contextlib.suppress(ValueError):  # torchrun stops all where one has failed, which that has written
            if launch is not None and (theirs := RunRecord.load(run_dir)).status == "failed":
                record.status, record.reason = theirs.status, f"{theirs.reason}{AND_SO}"
    except Exception as error:
        cause = job.root_cause(error)
        stopped = stop.signum or getattr(cause, "signum", None)
        # What breaks while everything stops is part of stopping; a loss is not.
        if stopped and not isinstance(error, NonFiniteLoss):
            record.status, record.signal, record.reason = "interrupted", stopped, one_line(cause)
        else:
            record.status, record.reason, record.failed_at = "failed", one_line(cause), raised_at(cause)
        if record.status == "failed" and not job.started:
            refused = isinstance(error, ValueError) or is_out_of_memory(error)
            if isinstance(error, ValueError):
                raise
            if refused:
                raise ValueError(f"{task_options(command)}: not enough memory: {record.reason}") from error
        _log_error(run_dir, error, cause, launch)
    except SystemExit as error:
        ended, record.status = error, "failed"
        record.reason = f"sys.exit({'' if error.code is None else repr(error.code)}) was called in {_place(error)}"
        _log_error(run_dir, error, error, launch)
    except BaseException as error:
        record.status, record.reason = "failed", one_line(error)
        raise
    finally:
        job.end()
        with undisturbed():
            finalize(record, run_dir if first and not refused else None, console, close_pages=job.close_pages)
            if refused and first:
                restore_file(replaced, run_dir)
    print_end(console, record, run_dir, full=config.trainer.summary == "full")
    for log in sorted(run_dir.glob(OTHERS_LOG)) if record.status == "failed" else ():
        if log.stat().st_mtime >= began:  # else of an earlier start
            line = f"traceback of another process: {relative_path(log)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if ended is not None:
        raise ended
    return record


def _job(config: Config, record: RunRecord, run_dir: Path, console: Console) -> Job:
    module, _, name = config.run.job.rpartition(".")
    job: Job = getattr(importlib.import_module(module), name)(config, record, run_dir, console)
    return job


def _log_error(run_dir: Path, error: BaseException, cause: BaseException, launch: Launch | None) -> None:
    """Write the traceback into the run's folder: of each process whose own it is, into a file of its own."""
    if launch is not None and launch.by == "torchrun":  # whose summary at the end shows it
        get_error_handler().record_exception(cause)
    log = ERROR_LOG
    if not is_first_process():
        if isinstance(cause, RankFailed):
            return
        rank = rank_zero_only.rank  # type: ignore[attr-defined]
        log = OTHERS_LOG.replace("*", str(rank))
        fail_record(
            run_dir, f"rank {describe_process(rank)}: {one_line(cause)}"
        )  # the first may be killed with this one
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        text = "".join(traceback.format_exception(error))
        (run_dir / log).write_text(f"{socket.gethostname()}\n" * (log != ERROR_LOG) + redact(text), encoding="utf-8")
    except OSError:  # a full disk, perhaps
        traceback.print_exc()


def _place(error: BaseException) -> str:
    """Where it was raised, as ``file:line``; for ``exit()``, where that was called."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != "<frozen _sitebuiltins>"]
    return f"{relative_path(Path(frames[-1].filename))}:{frames[-1].lineno}"


def shared_run_folder(launch: Launch, config: Config, record: RunRecord, wanted: Path) -> Path:
    """The folder of the run that this process takes part in: rank 0's, or the one of the run's earlier start.

    Where torchrun or SLURM has started the run again, it resumes from the last checkpoint in that folder: sets
    ``config.resume`` and ``record.restarts``.
    """
    run_dir, again = (wanted, False) if launch.job is not None else _agreed_folder(launch, wanted)
    with contextlib.suppress(ValueError):
        earlier = RunRecord.load(run_dir)
        again = again or (launch.job is not None and earlier.launched_by == launch.name)
        record.restarts = earlier.restarts if again else 0
    record.restarts += again
    if again or launch.rank > 0:
        with contextlib.suppress(ValueError):  # none was saved yet
            config.resume = str(find_checkpoint(str(run_dir)))
    return run_dir


def _agreed_folder(launch: Launch, wanted: Path) -> tuple[Path, bool]:
    """The folder that rank 0 has written into the store of torchrun's agents, and whether it did so when the run was
    started before: that store outlives the processes. Another launcher has none: there rank 0 serves one itself."""
    store, *_ = next(rendezvous("env://"))
    _stores.append(store)
    key = f"{FOLDER}{next(_runs)}"
    again = launch.rank == 0 and store.check([key])
    if launch.rank == 0 and not again:
        store.set(key, str(wanted))
    folder = Path(store.get(key).decode())
    if launch.rank == 0 and folder != wanted:
        release(wanted)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _stores.append(_fresh_store(launch, store))
    return folder, again


def _fresh_store(launch: Launch, agents: Any) -> Any:
    """A store of this start alone, served by rank 0, for the process group. In that of torchrun's agents are addresses
    of the processes before, for which new ones would wait. https://github.com/pytorch/pytorch/issues/135712"""
    connect = functools.partial(TCPStore, os.environ["MASTER_ADDR"], world_size=launch.processes)
    if launch.rank == 0:
        store = connect(port=0, is_master=True, wait_for_workers=False, multi_tenant=True)
        agents.set(PORT, str(store.port))
    deadline = time.monotonic() + JOIN_SECONDS
    while launch.rank > 0:
        with contextlib.suppress(OSError, DistError):  # its server is gone
            port = int(agents.get(PORT))
            socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5).close()  # else torch prints a page
            store = connect(port=port, timeout=timedelta(seconds=5))
            if store.add(f"crucible/rank{launch.rank}", 1) == 1:
                break  # else a process before this one has been there, and that start is about to end
        if time.monotonic() > deadline:
            raise TimeoutError(f"{launch.place}: rank 0 has not started again within {JOIN_SECONDS} s")
        time.sleep(0.5)
    os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store
