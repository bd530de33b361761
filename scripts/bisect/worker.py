"""Worker: a bench in a process of its own, which may crash or hang without ending the search. Imports no torch.

The process is ``python -m scripts.bisect.worker FD``; what it is asked and answers are objects on that pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from scripts.bisect.search import Outcome, Site, Trial
from trainer.sweep.environment import PR_SET_PDEATHSIG

START_SECONDS = 900.0
"""Building data and model and looking at the batches takes no longer than this."""
STACK = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
"""A line of what faulthandler prints when the process dies, innermost first."""
MAX_LINES = 400


class WorkerFailed(ValueError):
    """The worker could not be started; the message holds its last lines."""


def serve(pipe: Connection, overrides: Sequence[str], config_dir: str | None, shapes: int) -> None:
    """Build what the overrides say, send its ``Site``, then do what is asked until the other side ends."""
    from scripts.bisect.bench import Bench, with_config
    from trainer.config import compose

    def answer(bench: Bench) -> None:
        pipe.send(bench.site)
        while True:
            pipe.send(bench.trial(pipe.recv()))

    with_config(compose(overrides, config_dir=config_dir), answer, shapes=shapes)


class RemoteBench:
    """Does trials in a worker process, and in a new one after it was lost.

    Args:
        overrides: As for ``python -m trainer``.
        trial_seconds: A trial that takes longer is ended, and counts as hung.
        serve: What the process does.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        *,
        config_dir: str | None = None,
        shapes: int,
        trial_seconds: float,
        serve: Callable[..., None] = serve,
    ) -> None:
        self._serve, self._arguments = serve, (list(overrides), config_dir, shapes)
        self._seconds = trial_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        # Whatever a killed worker leaves behind is in here, compiler caches included: nothing comes from older ones.
        self._folder = tempfile.TemporaryDirectory(prefix="bisect-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log.txt")
        try:
            self.site = self._start()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial; a worker that is lost on the way is its outcome."""
        outcome = self._ask(trial)
        if outcome is None:
            return self._lost(trial)
        assert isinstance(outcome, Outcome)
        if outcome.crashed:
            self._end()
        return outcome

    def _start(self) -> Site:
        self._pipe, theirs = multiprocessing.Pipe()
        # What `python -m` finds in the working directory, the worker finds as well.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.bisect.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths, "TMPDIR": self._folder.name},
                start_new_session=True,  # a Ctrl-C is ours to handle
            )
        theirs.close()
        self._pipe.send((self._serve, self._arguments))
        site = self._answer(START_SECONDS)
        if site is None:
            self._end()
            last = "".join(self._last_lines()[-15:])
            raise WorkerFailed(f"the process that does the trials ended before the first one:\n{last.rstrip()}")
        assert isinstance(site, Site)
        return site

    def _ask(self, request: Trial) -> object:
        """The answer; None when the process was lost, or is still at it when its time is over."""
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(request)
        return self._answer(self._seconds)

    def _answer(self, seconds: float) -> object:
        try:
            answer = self._pipe.recv() if self._pipe.poll(seconds) else None
        except (EOFError, ConnectionError):
            assert self._process is not None
            self._process.wait()
            return None
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def _lost(self, trial: Trial) -> Outcome:
        assert self._process is not None
        code, lines = self._process.returncode, self._last_lines()
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
        self._end()
        return Outcome(shows=trial.symptom == "fails", reason=reason, where=where, crashed=True)

    def _last_lines(self) -> list[str]:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return text.splitlines(keepends=True)[-MAX_LINES:]

    def _end(self) -> None:
        """End the worker and all that it has started: compile workers, data workers."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._pipe.close()


def main() -> None:
    """Be the worker, until the other side closes the pipe."""
    with contextlib.suppress(OSError, AttributeError):  # on Linux: end with the other side, in whatever trial
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    pipe = Connection(int(sys.argv[1]))
    from trainer import errors

    code = 0
    try:
        serve, arguments = pipe.recv()
        serve(pipe, *arguments)
    except EOFError:
        pass
    except errors.REFUSALS as error:
        pipe.send(ValueError("\n".join(line.removeprefix("error: ") for line in errors.explain(error))))
    except BaseException as error:
        print(error) if isinstance(error, SystemExit) else traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # at once, whatever threads the compiler has left


if __name__ == "__main__":
    main()
