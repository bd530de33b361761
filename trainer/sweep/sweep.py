"""Sweep: runs what is left of its cells in turn, each in a process of its own that leaves a record; compares these."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from trainer.report import tables
from trainer.report.comparison import compare_runs
from trainer.report.runs import Run
from trainer.sweep.environment import ROUND_VARIABLE, SWEEP_VARIABLE, cache_variables
from trainer.sweep.plan import REFUSED, PlannedCell
from trainer.telemetry.record import RunRecord

OUTPUT_NAME = "output.txt"
POLL_SECONDS = 0.05


def run_cells(cells: Sequence[PlannedCell], signals: Sequence[int], log: Callable[[str], None]) -> None:
    """Run what is left, in order; with the first of ``signals``, a list that grows, no further cell starts."""
    _look_back(cells, log)
    for number, cell in enumerate(cells, 1):
        if signals:
            return
        if cell.exit_code is not None:
            continue
        name, began = f"[{number}/{len(cells)}] {cell.title}", time.monotonic()
        if cell.start == "warm" and (cold := _cold(cells, cell)).exit_code != 0:
            cell.record.status, cell.record.reason = "failed", f"not run: its cold cell {cold.record.status}"
            cell.record.save(cell.directory)
            cell.exit_code = 1
        else:
            log(f"{name} -> {cell.directory}")
            run_cell(cell, signals)
        record, left = cell.record, sum(each.exit_code is None for each in cells)
        speed = f" · {record.steady_steps_per_second:.2f} steps/s" if record.steady_steps_per_second else ""
        reason = f" · {record.reason.splitlines()[0]}" if cell.exit_code != 0 and record.reason else ""
        took = timedelta(seconds=round(time.monotonic() - began))
        log(f"{name}: {record.status}{speed} · {took}{reason} ({left} left)")
        if cell.caches is not None and cell is [each for each in cells if each.pair == cell.pair][-1]:
            shutil.rmtree(cell.caches, ignore_errors=True)  # nobody needs them any more


def _look_back(cells: Sequence[PlannedCell], log: Callable[[str], None]) -> None:
    """Find the cells that have finished before and need not run again; log why others do."""
    records = {cell.directory: loaded(cell.directory) for cell in cells}
    finished = {place: record for place, record in records.items() if record and record.status == "finished"}
    for cell in cells:
        if cell.start == "warm" and cell.directory not in finished:
            cold = _cold(cells, cell)
            if finished.pop(cold.directory, None) is not None:
                log(f"runs again, because {cell.title} needs its compile caches: {cold.title}")
    if finished:
        log(f"finished before, not run again: {len(finished)} of {len(cells)} cells")
    for cell in cells:
        if (record := finished.get(cell.directory)) is not None:
            cell.record, cell.exit_code = record, 0
            log(f"  {cell.title}")


def _cold(cells: Sequence[PlannedCell], warm: PlannedCell) -> PlannedCell:
    return next(each for each in cells if each.pair == warm.pair and each.start == "cold")


def run_cell(cell: PlannedCell, signals: Sequence[int]) -> None:
    """Run ``cell`` to its end; sets its exit code and its record.

    ``signals`` are those that the sweep got, a list that grows; all are passed on.
    """
    set_aside(cell.directory)
    cell.directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, SWEEP_VARIABLE: str(os.getpid()), ROUND_VARIABLE: str(cell.round or "")}
    if cell.caches is not None:
        if cell.start != "warm":
            shutil.rmtree(cell.caches, ignore_errors=True)
        environment |= cache_variables(cell.caches.resolve(), store=cell.start is not None)
    with (cell.directory / OUTPUT_NAME).open("ab") as output:
        # A process group of its own: Ctrl-C in the terminal reaches it once, through the sweep, and what it leaves
        # behind when it is killed can be killed with it.
        process = subprocess.Popen(
            cell.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            close_fds=False,  # it inherits the sweep's lock
        )
    passed_on = 0
    try:
        while (exit_code := process.poll()) is None:
            for number in signals[passed_on:]:
                process.send_signal(number)
                passed_on += 1
            time.sleep(POLL_SECONDS)
    finally:  # at an error of ours, too: nothing may stay behind
        if process.poll() is None:
            process.terminate()
    if exit_code != 0:  # processes that it started, other ranks for instance
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    cell.record, cell.exit_code = _settled(cell, exit_code, signals), exit_code


def _settled(cell: PlannedCell, exit_code: int, signals: Sequence[int]) -> RunRecord:
    """The record that it left, or that is written for it: finished, interrupted or failed, and why."""
    record = loaded(cell.directory) or cell.record  # refused or dead before the first record
    if record.status in ("failed", "interrupted") or (exit_code == 0 and record.status == "finished"):
        return record
    if signals:
        record.status, record.signal = "interrupted", signals[-1]
        record.reason = signal.Signals(signals[-1]).name
    else:
        record.status, record.reason = "failed", _cause(cell, exit_code)
    record.save(cell.directory)
    return record


def _cause(cell: PlannedCell, exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "killed (SIGKILL), as a system does that runs out of memory"
    if exit_code < 0:
        return f"killed ({signal.Signals(-exit_code).name})"
    with (cell.directory / OUTPUT_NAME).open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4096))
        text = stream.read().decode(errors="replace")
    printed = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]
    if exit_code == REFUSED or errors:  # torchrun has an exit code of its own
        return f"refused: {errors[0] if errors else 'see its output'}"
    return f"crashed (exit code {exit_code})" + (f": {printed[-1]}" if printed else "")


def loaded(directory: Path) -> RunRecord | None:
    with contextlib.suppress(ValueError):
        return RunRecord.load(directory)
    return None


def set_aside(directory: Path) -> None:
    """Move what an earlier attempt left out of the sweep, where neither TensorBoard nor a comparison finds it."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    aside = directory.parent.with_name(f"{directory.parent.name}-set-aside")
    aside.mkdir(exist_ok=True)
    target, count = aside / directory.name, 1
    while target.exists():
        count += 1
        target = aside / f"{directory.name}-{count}"
    directory.rename(target)


def summarize(runs: Sequence[Run], *, planned: int, sweep_dir: Path, width: int) -> str:
    """The comparison of a sweep's runs as text, with the reasons of those that did not finish, and how to see more."""
    out = io.StringIO()
    if runs:
        tables.show(compare_runs(runs), Console(file=out, width=width, highlight=False, color_system=None))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if len(runs) < planned:
        lines.append(f"stopped after {len(runs)} of {planned} cells")
    folder = shlex.quote(str(sweep_dir))
    return "\n".join([*lines, f"python -m scripts.compare {folder}", f"tensorboard --logdir {folder}"])
