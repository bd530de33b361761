"""All cases, or some, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.catch_rate import aot, dynamo, inductor  # noqa: F401
from tests.catch_rate.case import CASES
from tests.catch_rate.run import as_json, quietly, tried

SECONDS = 240


def _in_process(name: str, to: Any) -> None:
    quietly()
    sys.stdout.flush()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        to.send(as_json(tried(name)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.catch_rate", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of cases, or of the compiler")
    parser.add_argument("--out", type=Path, help="the file for the lines, which are added to it")
    given = parser.parse_args()
    chosen = [one for one in CASES.values() if not given.names or any(n in one.name or n == one.part for n in given.names)]
    with tempfile.TemporaryDirectory() as caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        for one in chosen:
            here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(target=_in_process, args=(one.name, there))
            process.start()
            there.close()
            line = None
            try:
                if here.poll(SECONDS):
                    line = here.recv()
            except EOFError:
                pass
            process.kill()
            process.join()
            if line is None:
                line = {"case": one.name, "result": "ended", "said": "no answer"}
            print(f"{line['result']:20} {one.part:12} {one.name}: bare {line.get('differs')} {line.get('bare_ended') or ''} | step {line.get('step')} left {line.get('left')} {line.get('said')[:230]} ({line.get('seconds')} s)", flush=True)
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
