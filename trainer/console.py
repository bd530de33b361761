"""What a person sees while a run goes on: a live line that also says when it is compiling, and a summary at the end.

The view polls the telemetry from a thread of its own twice a second, so that the training loop never draws anything.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from trainer.checkpoints import DIRECTORY, LAST
from trainer.rows import summary
from trainer.telemetry.inference import InferenceTelemetry
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry

AnyTelemetry = Telemetry | InferenceTelemetry

ERROR_LOG = "error.log"
"""Where a run that failed leaves its traceback."""
REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0
"""Between two lines where nothing live can be drawn (a file, a CI log)."""


class ProgressView:
    """Live bar on a terminal, a line every ten seconds elsewhere, nothing for ``none``.

    Args:
        console: Where to draw.
        style: ``auto`` (live on a terminal, else plain), ``live``, ``plain`` or ``none``.
        total: Optimizer steps, or timed batches, at which the run ends.
        telemetry: Gives the run's telemetry at the moment of asking.
    """

    def __init__(self, console: Console, *, style: str, total: int, telemetry: Callable[[], AnyTelemetry]) -> None:
        self._console = console
        self._style = ("live" if console.is_terminal else "plain") if style == "auto" else style
        self._total = total
        self._telemetry = telemetry
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._style != "none":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        if self._style == "plain":
            self._plain()
            return
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self._console, auto_refresh=False, transient=True) as progress:
            bar = progress.add_task("starting", total=self._total, figures="")
            while True:
                over = self._over.wait(REFRESH_SECONDS)
                telemetry = self._telemetry()
                progress.update(
                    bar,
                    completed=telemetry.steps_done,
                    description=activity(telemetry),
                    figures=figures_line(telemetry),
                )
                progress.refresh()
                if over:
                    return

    def _plain(self) -> None:
        said_at, phase_before = time.monotonic(), ""
        while not self._over.wait(REFRESH_SECONDS):
            telemetry = self._telemetry()
            phase = telemetry.phase if telemetry.compiler.compiling_seconds is None else "compiling"
            now = time.monotonic()
            if phase != phase_before or now - said_at >= PLAIN_SECONDS:
                said_at, phase_before = now, phase
                done = f"{telemetry.units[0]} {telemetry.steps_done}/{self._total}"
                line = f"{activity(telemetry)}: {done} {figures_line(telemetry)}"
                self._console.print(line.rstrip(), highlight=False, soft_wrap=True)


def activity(telemetry: AnyTelemetry) -> str:
    """What the run is doing: compiling, and for how long, or a phase of the loop."""
    compiling = telemetry.compiler.compiling_seconds
    if compiling is not None:
        total = telemetry.compiler.compile_seconds + compiling
        return f"compiling graph {telemetry.compiler.compilations} · {compiling:.0f} s of {total:.0f} s"
    return telemetry.phase


def figures_line(telemetry: AnyTelemetry) -> str:
    """Speed and loss, as far as they are known."""
    parts = []
    if telemetry.steps_per_second is not None:
        parts.append(f"{telemetry.steps_per_second:.2f} {telemetry.units[1]}/s")
    if telemetry.last_loss is not None:
        parts.append(f"loss {telemetry.last_loss:.3f}")
    return " · ".join(parts)


def print_summary(console: Console, record: RunRecord) -> None:
    """Print the summary as a table."""
    title = f"{record.task} · {record.label} · {record.status}"
    table = Table(title=title, show_header=False, title_justify="left", min_width=len(title))  # or it would be wrapped
    table.add_column(style="bold")
    table.add_column()
    for name, value in summary(record).items():
        table.add_row(name, Text(value))  # a reason may hold what rich would take for markup
    console.print(table)


def tell(console: Console, record: RunRecord, run_dir: Path, command: list[str], *, kept: bool = True) -> None:
    """Summary, reason, and the lines that open TensorBoard or go on, unless ``run_dir`` is not ``kept``."""
    print_summary(console, record)
    for note in record.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if record.status == "failed":
        console.print(f"failed: {record.reason}", style="red", highlight=False, markup=False, soft_wrap=True)
    if not kept:
        return
    if record.status == "failed" and (run_dir / ERROR_LOG).is_file():
        console.print(f"traceback: {shown(run_dir / ERROR_LOG)}", highlight=False, soft_wrap=True)
    if record.status != "finished" and (run_dir / DIRECTORY / LAST).is_file():
        given = [part for part in command if not part.lstrip("+").startswith(("resume=", "hydra."))]
        go_on = shlex.join(["python", "-m", "trainer", *given, f"resume={shown(run_dir)}"])
        console.print(f"go on with: {go_on}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"tensorboard --logdir {shlex.quote(str(shown(run_dir)))}", highlight=False, markup=False, soft_wrap=True
    )


def announce(console: Console, record: RunRecord, run_dir: Path) -> None:
    """Print the heading of a run: what runs, how, on what and where it leaves its files."""
    console.print(
        f"[bold]{record.task}[/] · {record.label} · {record.device} · {record.precision} · {shown(run_dir)}",
        highlight=False,
        soft_wrap=True,
    )


def shown(path: Path) -> Path:
    """``path`` as a person would type it: relative to the working directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
