"""The end of a run, the same for our command line and for a script of one's own; and what a script needs beside it.

``finalize`` does all that remains once a run's status is known. ``ScriptRun`` gives a training in somebody's script
what ``trainer.run`` gives ours: a complete record in a folder of its own, progress while it compiles, the table and
the verdict at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from torch import nn
from torch.nn.parameter import is_lazy

from strategies import Strategy
from strategies.compile_errors import one_line
from strategies.compiler_warmup import stop_compiling
from strategies.loop_protocol import Loop
from trainer.console import ProgressView, print_end, relative_path, summary
from trainer.report.run_verdict import run_verdict
from trainer.run_start import RECORDS_VARIABLE, origin
from trainer.telemetry import hardware
from trainer.telemetry.hardware import note_machine
from trainer.telemetry.record import FILE_NAME, NOT_STARTED, RunRecord, TrainingInfo
from trainer.telemetry.source_lines import raised_at
from trainer.telemetry.telemetry import Telemetry


def finalize(
    record: RunRecord,
    directory: Path | None,
    console: Console,
    *,
    close_pages: Callable[[dict[str, str]], None],
    since_seconds: float | None = 0.0,
) -> None:
    """All that remains once ``record.status`` is known: the verdict, TensorBoard's last pages and the file.

    ``directory`` is None where nothing is saved, as on all processes but the first; ``close_pages`` gets the summary's
    rows; the process was ``since_seconds`` old when the run began.
    """
    record.verdict = run_verdict(record)
    try:
        close_pages(summary(record))
    except Exception as error:  # a full disk; or a signal to the group, which broke off Lightning's closing of them
        note = f"TensorBoard's last pages were not written: {one_line(error)}"
        record.notes.append(note)
        console.print(note)
    age_seconds = hardware.process_age_seconds()  # None where the system does not say
    if age_seconds is not None and since_seconds is not None:
        record.total_seconds = age_seconds - since_seconds
    if directory is None:
        return
    try:
        record.save(directory)
    except OSError as error:
        reason = f"{directory / FILE_NAME} was not written: {error.strerror}"
        if record.status == "finished":
            record.status, record.reason = "failed", reason
        else:
            console.print(reason, highlight=False, markup=False, soft_wrap=True)


class ScriptRun:
    """One training after another in a script of one's own, each with a record.

    Args:
        strategies: As applied, in order.
        save: Whether the record is written into the folder that ``begin`` is given.
        verbose: Whether progress, the table and the verdict are printed.
    """

    def __init__(self, strategies: Sequence[Strategy], *, save: bool, verbose: bool) -> None:
        self._strategies, self._save, self._verbose = strategies, save, verbose
        self._console = Console(quiet=not verbose)
        self.directory: Path | None = None
        self._view = contextlib.ExitStack()
        self._open = False

    def prepare(self, print_line: Callable[[str], None] | None, telemetry: Callable[[], Telemetry]) -> None:
        """A training is being set up: from here on compiling is shown on the process that is given ``print_line``."""
        self._began_seconds = hardware.process_age_seconds()
        self._view.close()
        if print_line is not None and self._verbose:
            view = ProgressView(self._console, style="plain", total=None, telemetry=telemetry, print_line=print_line)
            self._view.enter_context(view)

    def begin(self, record: RunRecord, module: nn.Module, loop: Loop, logs: TrainingInfo) -> None:
        """The training of ``module`` begins in ``loop``: write what is known of it, and claim a folder for it."""
        self._open = True
        self._console.quiet = not (self._verbose and loop.is_first_process)
        script = main_script()
        root = Path.cwd() if script is None else script.parent
        for name, value in origin(self._strategies, sys.argv[1:], root=root).items():
            setattr(record, name, value)
        record.task, record.status = type(module).__name__, "running"
        record.script, record.entry = script_name(script), logs.entry
        record.seed, record.resumed_from = logs.seed, logs.resumed_from
        parameters = sum(one.numel() for one in module.parameters() if not is_lazy(one))
        record.config = {"task": {"parameters": parameters, "batch_size": logs.batch_size}, "trainer": logs.settings}
        record.versions = hardware.versions()
        note_machine(record, loop)
        self.directory = None
        given = os.environ.get(RECORDS_VARIABLE)  # of a command that has started this script, and reads them
        folder, shared = (Path(given), False) if given else (logs.folder if self._save else None, logs.shared)
        if folder is not None and loop.is_first_process:
            self.directory = claim_folder(record, folder, shared=shared)

    def end(self, record: RunRecord, close_pages: Callable[[dict[str, str]], None]) -> None:
        """The training is over, and ``record`` filled in."""
        self._view.close()
        if not self._open:
            return
        self._open = False
        if record.status == "running":
            record.status = "finished"
        finalize(record, self.directory, self._console, close_pages=close_pages, since_seconds=self._began_seconds)
        print_end(self._console, record, self.directory)

    def failed(self, record: RunRecord, error: BaseException) -> None:
        """The training ends by ``error``, in the middle or while it was set up."""
        if record.status not in (NOT_STARTED, "running"):
            return  # what failed came after it
        record.status, record.reason, record.failed_at = "failed", one_line(error), raised_at(error)
        if (signum := getattr(error, "signum", None)) is not None:
            record.status, record.signal = "interrupted", signum
        if type(error).__name__ == "SIGTERMException":  # of ``lightning`` or of ``pytorch_lightning``
            record.status, record.reason, record.signal = "interrupted", "SIGTERM", signal.SIGTERM
        if isinstance(error, KeyboardInterrupt):
            record.status, record.reason, record.signal = "interrupted", "Ctrl-C", signal.SIGINT
            stop_compiling()


def main_script() -> Path | None:
    """The script that this process runs; None in a notebook or a prompt."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return Path(script).resolve() if script else None


def script_name(script: Path | None) -> str:
    """What a record calls the script."""
    return "a notebook" if script is None else str(relative_path(script))


def claim_folder(record: RunRecord, folder: Path, *, shared: bool) -> Path | None:
    """Write the first ``record`` into ``folder``, or into the first of ``folder/run-1``, ``folder/run-2``, ... where
    there is none, if the folder is ``shared`` or holds one already; returns which, None when nothing can be written."""
    for number in itertools.count(1):
        place = folder if number == 1 and not shared else folder / f"run-{number}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / FILE_NAME).open("x").close()  # of two processes that get here at once, one succeeds
            record.save(place)
        except FileExistsError:
            continue
        except OSError as error:
            rank_zero_warn(f"compile: no record is saved: {error}")
            return None
        return place
    raise AssertionError
