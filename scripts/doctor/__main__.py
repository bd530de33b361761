"""Check this machine before anything is trained on it: ``crucible doctor``.

Works before anything else does: without torch, without a compiler, without a GPU, with a broken driver.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.arguments import exit_code, parser
from scripts.doctor.findings import (
    COMPILES,
    ERROR,
    WARNING,
    Finding,
    error,
    limits,
    ok,
    packages,
    places,
    reason,
    shared_names,
    variables,
)
from strategies.compile_options import cache_directories
from strategies.remedies import known

EXAMPLES = """\
examples:
  crucible doctor

Every line is ok, warning (it works, but worse than it could) or error (a run would fail), with the fix below it.
Exit codes: 0 no error, 1 an error, 2 wrong arguments.
"""
SECONDS = 360.0
"""Importing torch from a cold network disk takes a minute, compiling on a busy machine some."""
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    parser("doctor", __doc__ or "", EXAMPLES).parse_args(arguments)
    return exit_code(lambda _: examined())


def examined() -> int:
    """Print every finding as it comes, the quick ones first; returns the exit code."""
    found: Counter[str] = Counter()
    for finding in itertools.chain(packages(), shared_names(), faults(), places(), limits(), variables(), with_torch()):
        print(finding, flush=True)
        found[finding.status] += 1
    print(f"errors: {found[ERROR]}, warnings: {found[WARNING]}", flush=True)
    return int(found[ERROR] > 0)


def faults() -> Iterator[Finding]:
    """Faults that the installed torch is known to have, each with what a run does about it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for each in known(importlib.metadata.version("torch")):
            yield ok("known fault", f"{each.fault}; where a check finds it: {each}")


def with_torch() -> Iterator[Finding]:
    """What a process of its own finds: torch's import, the driver, each device, what compiles for it and whether a tiny
    function does. A driver may hang or crash who asks it."""
    if sys.stderr.isatty():
        print(f"asking torch, {SECONDS:g} s at most ...", file=sys.stderr, flush=True)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        # Empty caches, so that something is really compiled.
        caches = {variable: f"{folder}/{variable}" for variable in cache_directories()}
        command = [sys.executable, "-P", "-m", "scripts.doctor.probe"]
        environment = {**os.environ, **caches, "PYTHONPATH": path}
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=environment, check=False)
            output, failed = done.stdout, reason(done.stderr.decode(errors="replace")) if done.returncode else None
            if done.returncode < 0:
                failed = f"it was killed by {signal.Signals(-done.returncode).name}"
        except subprocess.TimeoutExpired as late:
            output, failed = late.stdout or b"", f"it took longer than {SECONDS:g} s and was stopped"
    found = [Finding(**json.loads(line)) for line in output.splitlines() if line.startswith(b'{"name"')]
    yield from found
    anew = "install torch anew: https://pytorch.org/get-started/locally"
    if failed and not found:
        yield error("torch imports", f"no: {failed}", anew)
    elif failed and found[-1].name == COMPILES:
        yield error("compile", f"a tiny function does not compile: {failed}", "fix what is reported above first")
    elif failed:
        fix = "nvidia-smi says more; CUDA_VISIBLE_DEVICES= runs on the CPU"
        fix = f"this torch is not built for the device: {anew}" if "no kernel image" in failed else fix
        yield error("cuda", f"using the device failed: {failed}", fix)


if __name__ == "__main__":
    sys.exit(main())
