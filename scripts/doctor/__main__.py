"""Check this machine before anything is trained on it: ``crucible doctor``.

Works before anything else does: without torch, without a compiler, without a GPU, with a broken driver.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.arguments import exit_code, parser
from scripts.doctor import ERROR, WARNING, Finding, call, error, limits, ok, packages, places, variables, warning
from strategies.options import cache_directories, cpp_compiler, missing_toolchain

EXAMPLES = """\
examples:
  crucible doctor
  crucible doctor --no-compile              # seconds, without compiling anything

Every line is ok, warning (it works, but worse than it could) or error (a run would fail), with the fix below it.
Exit codes: 0 no error, 1 an error, 2 wrong arguments.
"""
PROBE_SECONDS, COMPILE_SECONDS = 120.0, 240.0
"""Importing torch from a cold network disk takes a minute."""
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    made = parser("doctor", __doc__ or "", EXAMPLES)
    made.add_argument("--no-compile", action="store_true", help="compile nothing (default: a tiny function, last)")
    options = made.parse_args(arguments)
    return exit_code(lambda _: examined(options))


def examined(options: argparse.Namespace) -> int:
    """Print every finding as it comes; returns the exit code."""
    found = {ERROR: 0, WARNING: 0}
    for finding in diagnosis(compiles=not options.no_compile):
        print(finding, flush=True)
        if finding.status in found:
            found[finding.status] += 1
    print(f"errors: {found[ERROR]}, warnings: {found[WARNING]}", flush=True)
    return int(found[ERROR] > 0)


def diagnosis(*, compiles: bool) -> Iterator[Finding]:
    """Every finding, the quick ones first."""
    yield from packages()
    devices = list(with_torch())
    yield from devices
    failed = devices[0].status == ERROR
    for finding in (
        cpp(needed=not any(one.name.startswith("device") for one in devices)),
        *places(),
        *limits(),
        *variables(),
    ):
        failed |= finding.status == ERROR
        yield finding
    if compiles and failed:
        yield warning("compile", "not tried", "fix the errors above first")
    elif compiles:
        if sys.stderr.isatty():
            print(f"compiling a tiny function, {COMPILE_SECONDS:g} s at most ...", file=sys.stderr, flush=True)
        yield compiling()


def with_torch() -> Iterator[Finding]:
    """Lines for torch's import, which comes first, the driver, each device and what compiles for it."""
    found, failed = probed("devices", seconds=PROBE_SECONDS)
    anew = "install torch anew: https://pytorch.org/get-started/locally"
    if not found:
        yield error("torch imports", f"no: {failed}", anew)
        return
    yield from found
    if failed:
        fix = "nvidia-smi says more; CUDA_VISIBLE_DEVICES= runs on the CPU"
        fix = f"this torch is not built for the device: {anew}" if "no kernel image" in failed else fix
        yield error("cuda", f"using the device failed: {failed}", fix)


def probed(
    what: str, *, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[list[Finding], str | None]:
    """What a process of its own finds, and why it did not end well, or None: a driver may hang or crash who asks it."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    output, failed = call(
        [sys.executable, "-P", "-m", "scripts.doctor.probe", what],
        seconds=seconds,
        environment={**(environment or {}), "PYTHONPATH": path},
    )
    return [Finding(**json.loads(line)) for line in output.splitlines() if line.startswith('{"name"')], failed


def cpp(*, needed: bool) -> Finding:
    """Whether there is a compiler. On a machine whose kernels Triton writes it is not ``needed``."""
    if missing := missing_toolchain():
        message, _, fix = missing.rpartition(": ")
        return (error if needed else warning)("c++ compiler", message, fix)
    return ok("c++ compiler", cpp_compiler())


def compiling(*, seconds: float = COMPILE_SECONDS) -> Finding:
    """Compile in a process of its own for at most ``seconds``, in empty folders inside the compiler's caches."""
    with contextlib.ExitStack() as stack:
        # Inside, so that the disk is the real one; empty, so that something is really compiled; gone afterwards.
        folders = {
            variable: stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor-", dir=directory))
            for variable, directory in cache_directories().items()
        }
        found, failed = probed("compile", seconds=seconds, environment=folders)
        made = [file for folder in folders.values() for file in Path(folder).rglob("*") if file.is_file()]
    if failed:
        return error("compile", f"a tiny function does not compile: {failed}", "fix what is reported above first")
    if not made:
        return error("compile", "nothing was compiled: the compiler is switched off", "see the environment above")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
