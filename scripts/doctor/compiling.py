"""Compiling: whether the C++ compiler that Inductor calls works, and whether a tiny function compiles as in a run."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from scripts.doctor.finding import Finding, call, error, ok, warning
from strategies.toolchain import cache_directories, cpp_compiler, missing_toolchain

PROGRAM = """\
#include <omp.h>
#include <cstdio>
int main() { std::printf("%d threads\\n", omp_get_max_threads()); }
"""
CPP_SECONDS = 60.0
TOLERANCE = 1e-4
SLOW_SECONDS = 90.0


def cpp(*, needed: bool) -> Finding:
    """Whether the compiler compiles, links OpenMP and makes a program that runs.

    On a machine whose kernels Triton writes it is not ``needed``, and its lack a warning.
    """
    report = error if needed else warning
    if missing := missing_toolchain():
        message, _, fix = missing.rpartition(": ")
        return report("c++ compiler", message, fix)
    compiler = shutil.which(cpp_compiler()) or cpp_compiler()
    with tempfile.TemporaryDirectory(prefix="crucible-doctor-") as folder:
        source, program = Path(folder) / "three_lines.cpp", Path(folder) / "three_lines"
        source.write_text(PROGRAM, encoding="utf-8")
        flags = ["-Xpreprocessor", "-fopenmp", "-lomp"] if sys.platform == "darwin" else ["-fopenmp"]
        command = [compiler, "-O2", *flags, str(source), "-o", str(program)]
        built = call(command, seconds=CPP_SECONDS)
        if built.failed:
            first = next((line for line in built.errors.splitlines() if "error" in line), built.failed)
            fix = "install libomp" if "omp" in first else f"run this yourself: {shlex.join(command)}"
            return report("c++ compiler", f"{compiler} does not compile three lines: {first.strip()}", fix)
        ran = call([str(program)], seconds=CPP_SECONDS)
    if ran.failed:
        fix = f"is {tempfile.gettempdir()} mounted noexec? set TMPDIR to a folder whose files may be run"
        return report("c++ compiler", f"what {compiler} compiles does not run: {ran.failed}", fix)
    version = call([compiler, "--version"], seconds=CPP_SECONDS).output.splitlines()
    threads = f"OpenMP with {ran.output.strip()} ({version[0] if version else '?'})"
    return ok("c++ compiler", f"{compiler} compiles and runs, {threads}")


def compiling(*, seconds: float) -> Finding:
    """Compile in a process of its own for at most ``seconds``, in empty folders inside the compiler's caches."""
    with contextlib.ExitStack() as stack:
        # Inside, so that the disk is the real one; empty, so that something is really compiled; gone afterwards.
        folders = {
            variable: stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor-", dir=directory))
            for variable, directory in cache_directories().items()
        }
        # -P: its folder holds modules of ours, which would be found before the standard library's.
        command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py")), "compile"]
        outcome = call(command, seconds=seconds, environment=folders)
        made = [file for folder in folders.values() for file in Path(folder).rglob("*") if file.is_file()]
    if outcome.exit_code is None:
        return error(
            "compile",
            f"a tiny function was not compiled after {seconds:g} s",
            "a slow disk or a busy machine? --compile-seconds waits longer, TORCHINDUCTOR_COMPILE_THREADS=1 may help",
        )
    if outcome.failed:
        message = f"a tiny function does not compile: {reason(outcome.errors)}"
        return error("compile", message, "fix what is reported above first")
    facts = json.loads(outcome.output.splitlines()[-1])
    if not made:
        return error("compile", "nothing was compiled: the compiler is switched off", "see the environment above")
    if not facts["difference"] <= TOLERANCE:
        return error(
            "compile",
            f"a tiny function compiles on {facts['device']}, but differs from eager by {facts['difference']:.1e}",
            "another torch, driver or compiler: run the trainer with parity=strict before you trust it",
        )
    took = facts["compile_seconds"]
    message = f"a tiny function, forward and backward, on {facts['device']} in {took:.1f} s"
    message += f" (import {facts['import_seconds']:.1f} s)"
    if took > SLOW_SECONDS:
        return warning("compile", message, "slow: a busy machine, or caches on a network disk?")
    return ok("compile", message)


def reason(errors: str) -> str:
    """The line of a traceback that tells most: the first of the error itself, before torch's advice."""
    lines = [line.rstrip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith((" ", "Traceback")) and ("Error" in line or "Exc" in line)]
    return (named or lines or ["no reason given"])[-1].strip()
