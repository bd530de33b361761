"""All cases, or some, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.catch_rate import CASES
from tests.catch_rate.case import Case
from tests.catch_rate.page import rate, write_page
from tests.catch_rate.run import FAILED, as_json, quietly, started, tried

SECONDS = 300
FORK = multiprocessing.get_context("fork")


def _in_process(name: str, to: Any) -> None:
    quietly()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        to.send(as_json(tried(CASES[name])))


def line_of(case: Case) -> dict[str, Any]:
    """What became of it, in a process of its own that may not take longer than ``SECONDS``."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_in_process, args=(case.name, there))
    process.start()
    there.close()
    line = {**as_json(started(case)), "result": FAILED, "said": f"no answer in {SECONDS} s"}
    try:
        if here.poll(SECONDS):
            line = here.recv()
    except EOFError:
        line["said"] = "the process ended"
    process.kill()
    process.join()
    return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.catch_rate", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names, parts of the compiler, or `planted`")
    parser.add_argument(
        "--out", type=Path, help="the file for the lines; those of the same case and torch are replaced"
    )
    parser.add_argument("--page", type=Path, help="the page to make of that file, and of what was run before")
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        for one in CASES.values():
            names = (one.part, "planted" if one.planted is not None else "real")
            if given.names and not any(name in one.name or name in names for name in given.names):
                continue
            line = line_of(one)
            lines.append(line)
            alone, ours = line["differs"] or line["bare_ended"] or "as eager", line["left"] or "as eager"
            words = f"{line['result']:16} {one.part}: {one.name}: alone {alone}; under guards {ours}; {line['said']}"
            print(f"{words} ({line['seconds']} s)", flush=True)
            if given.out is not None:
                add(given.out, line)
    print(rate(lines))
    if given.page is not None:
        write_page(given.out, given.page)


def add(path: Path, line: dict[str, Any]) -> None:
    """Write a line to the file, in the place of an earlier one."""
    before = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
    kept = [one for one in before if (one["case"], one["torch"]) != (line["case"], line["torch"])]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in [*kept, line]))


if __name__ == "__main__":
    main()
