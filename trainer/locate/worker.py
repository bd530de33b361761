"""Worker: does trials in a process of its own: ``python -m trainer.locate.worker``, a request and an answer a line.

The first line says what to build; the answers are {"site": ...}, {"outcome": ...}, {"reproducer": ...} or, where there
is none of these, {"refused": reason}.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

from trainer.locate.trial import Trial, plain


def main() -> None:
    """Serve until the other side closes the pipe."""
    # Whatever the user's code prints belongs on stderr: this pipe is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, requests), daemon=True).start()
    from trainer import errors

    code = 0
    try:
        first = requests.get()
        from trainer.config import compose
        from trainer.locate.opening import Looking, with_config

        config = compose(first["overrides"], config_dir=first["config_dir"])
        looking = Looking(batches=first["batches"], shapes=first["shapes"])
        with_config(config, looking, lambda bench: _serve(bench, requests, answers))
    except errors.REFUSALS as error:
        _answer(answers, {"refused": "\n".join(line.removeprefix("error: ") for line in errors.explain(error))})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # at once: the thread below still reads, which Python's end does not wait for in peace


def _serve(bench: Any, requests: queue.Queue[dict[str, Any]], answers: TextIO) -> None:
    from trainer.locate.reproducer import write

    _answer(answers, {"site": plain(bench.site)})
    while True:
        request = requests.get()
        if "trial" in request:
            _answer(answers, {"outcome": plain(bench.trial(Trial(**request["trial"])))})
            continue
        wanted = request["reproducer"]
        try:
            captured = bench.capture(wanted["path"], wanted["batch"], wanted["changes"])
            file = write(captured, Path(wanted["folder"]), symptom=wanted["symptom"], reason=wanted["reason"])
            _answer(answers, {"reproducer": str(file)})
        except ValueError as error:
            _answer(answers, {"refused": str(error)})


def _read(pipe: TextIO, requests: queue.Queue[dict[str, Any]]) -> None:
    """Hand on what is asked; the other side's end is ours, in whatever trial."""
    for line in pipe:
        requests.put(json.loads(line))
    os._exit(0)


def _answer(answers: TextIO, facts: dict[str, Any]) -> None:
    answers.write(json.dumps(facts) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
