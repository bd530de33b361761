"""The last question: does a tiny function compile here, in the folders and with the variables that a run would have?"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

from strategies.toolchain import cache_directories
from trainer.doctor.finding import Finding, error, ok, warning
from trainer.doctor.processes import call

TOLERANCE = 1e-4
SLOW_SECONDS = 90.0


def compiling(*, seconds: float) -> Finding:
    """Compile in a process of its own for at most ``seconds``, in empty folders inside the compiler's caches."""
    with contextlib.ExitStack() as stack:
        # Inside, so that the disk is the real one; empty, so that something is really compiled; gone afterwards.
        folders = {
            variable: stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor-", dir=directory))
            for variable, directory in cache_directories().items()
        }
        program = Path(__file__).with_name("tiny_program.py")
        # -P: as for the probe.
        outcome = call([sys.executable, "-P", str(program)], seconds=seconds, environment=folders)
        made = [file for folder in folders.values() for file in Path(folder).rglob("*") if file.is_file()]
    if outcome.exit_code is None:
        return error(
            "compile",
            f"a tiny function was not compiled after {seconds:g} s",
            "a slow disk or a busy machine? --compile-seconds waits longer, TORCHINDUCTOR_COMPILE_THREADS=1 may help",
        )
    if outcome.failed:
        return error(
            "compile", f"a tiny function does not compile: {reason(outcome.errors)}", "mend what is said above first"
        )
    told = json.loads(outcome.output.splitlines()[-1])
    if not made:
        return error("compile", "nothing was compiled: the compiler is switched off", "see the environment above")
    if not told["difference"] <= TOLERANCE:
        return error(
            "compile",
            f"a tiny function compiles on {told['device']}, but differs from eager by {told['difference']:.1e}",
            "another torch, driver or compiler: run the trainer with parity=strict before you trust it",
        )
    took = told["compile_seconds"]
    said = f"a tiny function, forward and backward, on {told['device']} in {took:.1f} s"
    said += f" (import {told['import_seconds']:.1f} s)"
    if took > SLOW_SECONDS:
        return warning("compile", said, "slow: a busy machine, or caches on a network disk?")
    return ok("compile", said)


def reason(errors: str) -> str:
    """The line of a traceback that says most: the first of the error itself, before torch's advice."""
    lines = [line.rstrip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith((" ", "Traceback")) and ("Error" in line or "Exc" in line)]
    return (named[-1] if named else lines[-1] if lines else "it says nothing").strip()
