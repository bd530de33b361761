"""Remote: a bench in a worker process, which may crash or hang without ending the search. Needs no torch.

The worker is ``python -m scripts.bisect.remote``: a request and an answer a line. The first request tells what to
build; the answers are {"site": ...}, {"outcome": ...}, {"reproducer": ...} or, without one, {"refused": reason}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from scripts.bisect.trial import Outcome, Site, Trial

START_SECONDS = 900.0
"""Building data and model and looking at the batches takes no longer than this."""
STACK = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
"""A line of what faulthandler prints when the process dies, innermost first."""
MAX_LINES = 400
WORKER = (sys.executable, "-m", "scripts.bisect.remote")


class WorkerFailed(RuntimeError):
    """The worker could not be started; the message holds its last lines."""


class RemoteBench:
    """Does trials in a worker process, and in a new one after it was lost.

    Args:
        overrides: As for ``python -m trainer``.
        trial_seconds: A trial that takes longer is ended, and counts as hung.
        isolate: A fresh process for every trial.
        worker: Its command line.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        *,
        config_dir: str | None = None,
        batches: int,
        shapes: int,
        trial_seconds: float,
        isolate: bool = False,
        worker: Sequence[str] = WORKER,
    ) -> None:
        self._first = {"overrides": list(overrides), "config_dir": config_dir, "batches": batches, "shapes": shapes}
        self._seconds, self._isolate, self._worker = trial_seconds, isolate, list(worker)
        self._process: subprocess.Popen[str] | None = None
        self._timed_out = False
        self._answers: queue.Queue[str | None] = queue.Queue()
        # Whatever a killed worker leaves behind is in here, compiler caches included: nothing comes from older ones.
        self._folder = tempfile.TemporaryDirectory(prefix="bisect-", ignore_cleanup_errors=True)
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self.site = self._start()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.close()
        self._folder.cleanup()

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial; a worker that is lost on the way is its outcome."""
        if self._process is None:
            self._start()
        answer = self._ask({"trial": dataclasses.asdict(trial)}, self._seconds)
        if answer is None:
            return self._lost(trial)
        outcome = Outcome(**answer["outcome"])
        if outcome.crashed or self._isolate:
            self._end()
        return outcome

    def reproducer(self, **wanted: Any) -> Path:
        """Write a reproducer. Raises ValueError where none can be made."""
        if self._process is None:
            self._start()
        answer = self._ask({"reproducer": wanted}, self._seconds)
        if answer is None:
            self._end()
            raise ValueError("the process was lost while it was written")
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return Path(answer["reproducer"])

    def _start(self) -> Site:
        self._log.truncate(0)
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            self._worker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # a Ctrl-C is ours to handle
            # What `python -m` finds in the working directory, the worker finds as well.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "TMPDIR": self._folder.name,
            },
        )
        threading.Thread(target=_read_answers, args=(self._process, self._answers), daemon=True).start()
        answer = self._ask(self._first, START_SECONDS)
        if answer is None:
            last = "".join(self._last_lines()[-15:])
            self._end()
            raise WorkerFailed(f"the process that does the trials ended before the first one:\n{last.rstrip()}")
        if "refused" in answer:
            self._end()
            raise ValueError(answer["refused"])
        return Site.read(answer["site"])

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer; None when the process was lost, or is still at it after ``seconds``."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._timed_out = False
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=seconds)
        except BrokenPipeError:
            return None
        except queue.Empty:
            self._timed_out = True
            return None
        return None if line is None else json.loads(line)

    def _lost(self, trial: Trial) -> Outcome:
        process, hangs = self._process, self._timed_out
        assert process is not None
        if not hangs:
            process.wait()
        code = process.returncode
        if hangs:
            reason = f"hangs: not through after {self._seconds:g} seconds"
        elif code < 0:
            name = signal.Signals(-code).name
            more = ", out of memory perhaps" if -code == signal.SIGKILL else ""
            reason = f"kills the process: {name}{more}"
        else:
            last = next((line.strip() for line in reversed(self._last_lines()) if line.strip()), "no last line")
            reason = f"ends the process with exit code {code}: {last}"
        where = self._innermost()
        self._end()
        return Outcome(
            shows=trial.symptom == "fails", reason=reason, where=where, batch=trial.batches[-1], crashed=True
        )

    def _innermost(self) -> str | None:
        """The Python line at which the process died, if it could still print it."""
        for text, below in itertools.pairwise(self._last_lines()):
            if text.startswith(("Current thread", "Stack")) and (found := STACK.match(below)):
                return f"{found['file']}:{found['line']} in {found['function']}"
        return None

    def _last_lines(self) -> list[str]:
        self._log.seek(0)
        return self._log.readlines()[-MAX_LINES:]

    def _end(self) -> None:
        """End the worker and all that it has started: compile workers, data workers."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _read_answers(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):  # closed under our hands
        for line in process.stdout:
            answers.put(line)
    answers.put(None)


def main() -> None:
    """Be the worker, until the other side closes the pipe."""
    # Whatever the user's code prints belongs on stderr: this pipe is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    from trainer import errors

    code = 0
    try:
        first = requests.get()
        from scripts.bisect.build import with_config
        from trainer.config import compose

        config = compose(first["overrides"], config_dir=first["config_dir"])
        with_config(
            config,
            lambda bench: _serve(bench, requests, answers),
            batches=first["batches"],
            shapes=first["shapes"],
        )
    except errors.REFUSALS as error:
        _answer(answers, {"refused": "\n".join(line.removeprefix("error: ") for line in errors.explain(error))})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # at once: the thread still reads, which Python's end does not wait for in peace


def _serve(bench: Any, requests: queue.Queue[dict[str, Any]], answers: TextIO) -> None:
    _answer(answers, {"site": dataclasses.asdict(bench.site)})
    while True:
        request = requests.get()
        if "trial" in request:
            _answer(answers, {"outcome": dataclasses.asdict(bench.trial(Trial(**request["trial"])))})
            continue
        wanted = request["reproducer"]
        try:
            folder = Path(wanted.pop("folder"))
            _answer(answers, {"reproducer": str(bench.reproducer(folder=folder, **wanted))})
        except ValueError as error:
            _answer(answers, {"refused": str(error)})


def _read_requests(requests: queue.Queue[dict[str, Any]]) -> None:
    """Hand on what is asked; the other side's end is ours, in whatever trial."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def _answer(answers: TextIO, facts: dict[str, Any]) -> None:
    answers.write(json.dumps(facts) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
