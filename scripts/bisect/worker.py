"""Worker: a bench in a process of its own, which may crash or hang without ending the search. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from scripts.bisect.search import Outcome, Site, Trial
from trainer.sweep.environment import PR_SET_PDEATHSIG

START_SECONDS = 900.0
"""Building data and model and looking at the batches takes no longer than this."""
LEAVE_SECONDS = 10.0
"""A worker that has nothing to do ends within this."""
STACK = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
"""A line of what faulthandler prints when the process dies, innermost first."""
MAX_LINES = 400


class WorkerFailed(ValueError):
    """The worker could not be started; the message holds its last lines."""


def serve(pipe: Any, overrides: Sequence[str], config_dir: str | None, shapes: int) -> None:
    """Build what the overrides say, send its ``Site``, then do what is asked until the other side ends."""
    from scripts.bisect.bench import Bench, with_config
    from trainer.config import compose

    def answer(bench: Bench) -> None:
        pipe.send(bench.site)
        while True:
            pipe.send(bench.trial(pipe.recv()))

    with_config(compose(overrides, config_dir=config_dir), answer, shapes=shapes)


def work(pipe: Any, folder: str, serve: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What the process does."""
    with contextlib.suppress(OSError, AttributeError):  # on Linux: end with the other side, in whatever trial
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # a Ctrl-C is the other side's to handle
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    log = os.open(Path(folder, "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    from trainer import errors

    try:
        serve(pipe, *arguments)
    except EOFError:
        pass
    except errors.REFUSALS as error:
        pipe.send(ValueError("\n".join(line.removeprefix("error: ") for line in errors.explain(error))))


class RemoteBench:
    """Does trials in a worker process, and in a new one after it was lost.

    Args:
        arguments: Of ``serve`` after the pipe.
        trial_seconds: A trial that takes longer is ended, and counts as hung.
        serve: What the process does.
    """

    def __init__(self, *arguments: Any, trial_seconds: float, serve: Callable[..., None] = serve) -> None:
        self._serve, self._arguments, self._seconds = serve, arguments, trial_seconds
        self._process: Any = None
        self._pipe: Any = None
        # Whatever a killed worker leaves behind is in here, compiler caches included: nothing comes from older ones.
        self._folder = tempfile.TemporaryDirectory(prefix="bisect-", ignore_cleanup_errors=True)
        try:
            self.site = self._start()
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        self._end(LEAVE_SECONDS if error is None else 0.0)
        self._folder.cleanup()

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial; a worker that is lost on the way is its outcome."""
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(trial)
        outcome = self._answer(self._seconds)
        if outcome is None:
            outcome = self._lost(trial)
        assert isinstance(outcome, Outcome)
        if outcome.crashed:
            self._end()
        return outcome

    def _start(self) -> Site:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, self._folder.name, self._serve, self._arguments)
        self._process = context.Process(target=work, args=given)
        self._process.start()
        theirs.close()
        site = self._answer(START_SECONDS)
        if site is None:
            last = "".join(self._last_lines()[-15:]).rstrip()
            self._end()
            raise WorkerFailed(f"the process that does the trials ended before the first one:\n{last}")
        assert isinstance(site, Site)
        return site

    def _answer(self, seconds: float) -> object:
        """None when the process was lost, or is still at it when its time is over."""
        try:
            answer = self._pipe.recv() if self._pipe.poll(seconds) else None
        except (EOFError, ConnectionError):
            self._process.join()
            return None
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def _lost(self, trial: Trial) -> Outcome:
        code, lines = self._process.exitcode, self._last_lines()
        if code is None:
            reason = f"hangs: not through after {self._seconds:g} seconds"
        elif code < 0:
            more = ", out of memory perhaps" if -code == signal.SIGKILL else ""
            reason = f"kills the process: {signal.Signals(-code).name}{more}"
        else:
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no last line")
            reason = f"ends the process with exit code {code}: {last}"
        where = None  # the Python line at which the process died, if it could still print it
        for text, below in itertools.pairwise(lines):
            if text.startswith(("Current thread", "Stack")) and (found := STACK.match(below)):
                where = where or f"{found['file']}:{found['line']} in {found['function']}"
        return Outcome(shows=trial.symptom == "fails", reason=reason, where=where, crashed=True)

    def _last_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            text = Path(self._folder.name, "log.txt").read_text(encoding="utf-8", errors="replace")
            return text.splitlines(keepends=True)[-MAX_LINES:]
        return []

    def _end(self, seconds: float = 0.0) -> None:
        """End the worker, which has ``seconds`` to leave, and all that it has started: compile and data workers."""
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        process.join(seconds)  # by itself it also gives back what multiprocessing would report as leaked
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # before it had a group of its own
        process.join()
