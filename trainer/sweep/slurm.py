"""SLURM: the queues of a sweep as jobs of a cluster, by submitit; each cell is a process of its own there too."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.sweep.ledger import Ledger
from trainer.sweep.plan import PlannedCell, SubmititOptions
from trainer.sweep.processes import CellEnd, CellProcess, Signals
from trainer.sweep.sweep import Sweep
from trainer.telemetry.record import RunRecord

POLL_SECONDS = 0.2


@dataclass(slots=True)
class Queue:
    """What one job does: its cells, one after the other. Called on the cluster, perhaps more than once: a job that is
    put into the queue again (preempted, or its time up) continues with the cell that it was at, from its checkpoint."""

    processes: list[CellProcess]
    ends: list[CellEnd] = field(default_factory=list)

    def __call__(self) -> list[CellEnd]:
        """Run what is left of the cells; how they ended, as far as they were run."""
        while len(self.ends) < len(self.processes):
            process = self.processes[len(self.ends)]
            process.start()
            end = None
            while end is None:
                time.sleep(POLL_SECONDS)
                end = process.poll()
            self.ends.append(end)
            if end.record.status == "interrupted" or self._failed_cold():
                break
        return self.ends

    def checkpoint(self) -> Any:
        """Called by submitit when the job is about to be ended: let the cell write its checkpoint, then start over."""
        import submitit

        process = self.processes[len(self.ends)]
        process.send(signal.SIGTERM)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
        fresh = [dataclasses.replace(process) for process in self.processes]
        return submitit.helpers.DelayedSubmission(Queue(fresh, list(self.ends)))

    def _failed_cold(self) -> bool:
        """Whether the last cell failed and the next one needs its caches."""
        if self.ends[-1].exit_code == 0 or len(self.ends) == len(self.processes):
            return False
        ended, following = (self.processes[len(self.ends) + offset].cell for offset in (-1, 0))
        return following.start == "warm" and following.pair == ended.pair


@dataclass(slots=True)
class _Submitted:
    job: Any
    cells: list[PlannedCell]
    outputs: list[CellProcess]

    def last_line(self) -> str:
        return next((line for process in reversed(self.outputs) if (line := process.last_line())), "waiting")


def run_jobs(
    queues: Sequence[Sequence[PlannedCell]],
    sweep: Sweep,
    signals: Signals,
    *,
    options: SubmititOptions,
    folder: Path,
) -> None:
    """Submit every queue and wait for all of them; a signal cancels what has not ended."""
    executor = _executor(options, folder)
    wanted = [[cell for cell in queue if not sweep.is_done(cell)] for queue in queues]
    waiting = [cells for cells in wanted if cells]
    running: list[_Submitted] = []

    def cancel(number: int) -> None:
        for submitted in running:
            submitted.job.cancel(check=False)

    signals.pass_on = cancel
    while (waiting and signals.received is None) or running:
        while waiting and len(running) < options.jobs_at_once and signals.received is None:
            cells = waiting.pop(0)
            processes = [sweep.process_of(cell, variables={}, to_file=True) for cell in cells]
            job = executor.submit(Queue(processes))
            running.append(_Submitted(job, cells, processes))
            for cell in cells:
                sweep.starts(cell)
                sweep.note(cell, job_id=str(job.job_id))
        for submitted in [each for each in running if each.job.done()]:
            running.remove(submitted)
            _collect(submitted, sweep, stopped=signals.received)
        sweep.view.show({each.cells[0].number: each.last_line for each in running}, signals.received)
        time.sleep(POLL_SECONDS)


def refuse_unfinished(ledger: Ledger, options: SubmititOptions, folder: Path) -> None:
    """Raise ValueError when a job of this sweep, submitted by a process that has ended, still waits or runs."""
    import submitit

    executor = _executor(options, folder)
    kind = submitit.LocalJob if options.executor == "local" else submitit.SlurmJob
    ids = {entry.job_id for entry in ledger.entries.values() if entry.job_id and entry.state == "running"}
    if busy := sorted(name for name in ids if not kind(executor.folder, name).done()):
        raise ValueError(f"{ledger.directory}: jobs {', '.join(busy)} of this sweep are not over: wait, or cancel them")


def _executor(options: SubmititOptions, folder: Path) -> Any:
    import submitit

    try:
        executor = submitit.AutoExecutor(
            folder=folder, cluster=options.executor, slurm_max_num_timeout=options.max_num_timeout
        )
    except RuntimeError as error:  # no srun on this machine
        raise ValueError(f"hydra/launcher=submitit_slurm: {error}") from error
    executor.update_parameters(name="crucible", **options.parameters())
    return executor


def _collect(submitted: _Submitted, sweep: Sweep, *, stopped: int | None) -> None:
    """Tell the sweep how the cells of a job ended, those included that the job never came to."""
    try:
        ends: list[CellEnd] = submitted.job.result()
        cause = "not run"
    except Exception as error:  # cancelled, over its time, no node: submitit has several errors, and pickles any other
        ends, cause = [], f"job {submitted.job.job_id}: {str(error).strip().splitlines()[-1] or type(error).__name__}"
    for cell, end in zip(submitted.cells, ends, strict=False):
        sweep.ended(cell, end)
    for cell in submitted.cells[len(ends) :]:
        if stopped is None and ends and not sweep.wants(cell):
            continue
        sweep.ended(cell, _unfinished(cell, cause, stopped))


def _unfinished(cell: PlannedCell, cause: str, stopped: int | None) -> CellEnd:
    """How a cell ended whose job did not report it."""
    try:
        record = RunRecord.load(cell.directory)
    except ValueError:
        record = cell.described
    if record.status == "finished":
        return CellEnd(exit_code=0, record=record, seconds=record.total_seconds or 0.0)
    if record.status == "running":
        record.status, record.reason, record.signal = ("interrupted" if stopped else "failed"), cause, stopped
        record.save(cell.directory)
    return CellEnd(exit_code=record.exit_code, record=record, seconds=record.total_seconds or 0.0)
