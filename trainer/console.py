"""What a person sees while a run goes on: a live line that also says when it is compiling, and a summary at the end.

The view polls the telemetry from a thread of its own twice a second, so that the training loop never draws anything.
"""

from __future__ import annotations

import os
import shlex
import sys
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
from trainer.telemetry.facts import headlines
from trainer.telemetry.record import RunRecord
from trainer.telemetry.telemetry import Telemetry

ERROR_LOG = "error.log"
"""Where a run that failed leaves its traceback."""
REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0
"""Between two lines where nothing live can be drawn (a file, a CI log)."""


class RunConsole(Console):
    """A console whose reader may leave: ``python -m trainer | tee log`` loses its tee at a Ctrl-C, and the run should
    still write its checkpoint and record instead of ending where it prints."""

    def on_broken_pipe(self) -> None:
        """Go on without output; rich would exit."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ProgressView:
    """Live bar on a terminal, a line every ten seconds elsewhere, nothing for ``none``.

    Args:
        console: Where to draw.
        style: ``auto`` (live on a terminal, else plain), ``live``, ``plain`` or ``none``.
        total: Optimizer steps at which the run ends.
        telemetry: Gives the run's telemetry at the moment of asking.
    """

    def __init__(self, console: Console, *, style: str, total: int, telemetry: Callable[[], Telemetry]) -> None:
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
                line = f"{activity(telemetry)}: step {telemetry.steps_done}/{self._total} {figures_line(telemetry)}"
                self._console.print(line.rstrip(), highlight=False, soft_wrap=True)


def activity(telemetry: Telemetry) -> str:
    """What the run is doing: compiling, and for how long, or a phase of the loop."""
    compiling = telemetry.compiler.compiling_seconds
    if compiling is not None:
        total = telemetry.compiler.compile_seconds + compiling
        return f"compiling graph {telemetry.compiler.compilations} · {compiling:.0f} s of {total:.0f} s"
    return telemetry.phase


def figures_line(telemetry: Telemetry) -> str:
    """Speed and loss, as far as they are known."""
    parts = []
    if telemetry.steps_per_second is not None:
        parts.append(f"{telemetry.steps_per_second:.2f} steps/s")
    if telemetry.last_loss is not None:
        parts.append(f"loss {telemetry.last_loss:.3f}")
    return " · ".join(parts)


def summary(record: RunRecord) -> dict[str, str]:
    """The summary's rows by name; a figure that does not exist is ``n/a``."""
    eager = not record.strategies
    skipped = ", ".join(f"{count} {reason}" for reason, count in record.skipped_items.items() if count)
    rows = {
        "strategies": record.label,
        "device": f"{record.device} · {record.precision}" if record.device else "n/a",
        "optimizer steps": _number(record.steps, "{:.0f}"),
        "compile": "nothing to compile" if eager else _number(record.compile_seconds, "{:.1f} s") + _cache(record),
        "regions compiled": "" if eager else f"{_number(record.regions_compiled)} of {_number(record.regions)}",
        "graphs / breaks / recompiles": ""
        if eager
        else f"{_number(record.graphs)} / {_number(record.graph_breaks)} / {_recompiles(record)}",
        "ran eager instead": _fallbacks(record),
        "parity with eager": _parity(record),
        **headlines({name: facts for name, facts in record.report.items() if name != "parity"}),
        "CUDA graphs skipped": str(record.cudagraph_skips) if record.cudagraph_skips else "",
        "first step": _number(record.first_step_seconds, "{:.2f} s"),
        "warm-up": f"{_number(record.warmup_seconds, '{:.2f} s')} in {_number(record.warmup_steps)} steps"
        + (f", rehearsal {record.rehearsal_seconds:.2f} s of it" if record.rehearsal_seconds is not None else ""),
        "steady steps": _number(record.steady_steps_per_second, "{:.2f} /s")
        + f" (median of {_number(record.steady_steps)}: {_milliseconds(record.steady_step_seconds_median)})",
        "p95 step": _milliseconds(record.steady_step_seconds_p95),
        "samples": _number(record.samples_per_second, "{:.1f} /s"),
        "useful tokens": _number(record.useful_tokens_per_second, "{:,.0f} /s")
        + f" (padding {_number(record.padded_share, '{:.1%}')})",
        "TFLOP/s": _number(record.teraflops_per_second, "{:.2f}")
        + f" (utilisation {_number(record.model_flops_utilization, '{:.1%}')})",
        "peak memory": f"device {_number(record.peak_device_memory_gib, '{:.2f} GiB')}, "
        f"process {_number(record.peak_process_memory_gib, '{:.2f} GiB')}",
        "energy": _number(record.joules_per_sample, "{:.3f} J/sample"),
        "final loss": _number(record.final_loss, "{:.4f}"),
        **{name: _number(value, "{:.4f}") for name, value in sorted(record.final_metrics.items())},
        "skipped items": skipped,
    }
    return {name: value for name, value in rows.items() if value and not value.startswith("n/a (")}


def print_summary(console: Console, record: RunRecord) -> None:
    """Print the summary as a table."""
    table = Table(title=f"{record.task} · {record.label} · {record.status}", show_header=False, title_justify="left")
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
    if record.status == "failed":
        console.print(f"traceback: {shown(run_dir / ERROR_LOG)}", highlight=False, soft_wrap=True)
    if record.status != "finished" and (run_dir / DIRECTORY / LAST).is_file():
        given = [part for part in command if not part.lstrip("+").startswith(("resume=", "hydra."))]
        go_on = shlex.join(["python", "-m", "trainer", *given, f"resume={shown(run_dir)}"])
        console.print(f"go on with: {go_on}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"tensorboard --logdir {shlex.quote(str(shown(run_dir)))}", highlight=False, markup=False, soft_wrap=True
    )


def shown(path: Path) -> Path:
    """``path`` as a person would type it: relative to the working directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _number(value: float | None, form: str = "{:.4g}") -> str:
    return "n/a" if value is None else form.format(value)


def _milliseconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _recompiles(record: RunRecord) -> str:
    validating = sum(event.kind == "recompile" and event.phase == "validating" for event in record.events)
    return _number(record.recompiles) + (f" ({validating} of them validation's own graphs)" if validating else "")


def _fallbacks(record: RunRecord) -> str:
    fallbacks = [event for event in record.events if event.kind == "fallback"]
    return f"{len(fallbacks)} times; first: {fallbacks[0].reason.splitlines()[0]}" if fallbacks else ""


def _parity(record: RunRecord) -> str:
    facts = record.report.get("parity")
    if facts is None or facts["verdict"] == "skipped":
        return "" if facts is None else f"not compared: {facts['reason']}"
    loss = facts["loss"]
    return f"{facts['verdict']} (loss {loss['difference']:.1e} apart, tolerance {loss['tolerance']:.1e})"


def _cache(record: RunRecord) -> str:
    return f" ({record.cache} start: {record.cache_hits} hits, {record.cache_misses} misses)" if record.cache else ""
