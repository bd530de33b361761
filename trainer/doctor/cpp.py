"""The C++ compiler that Inductor calls on a CPU: it compiles, links OpenMP and runs a three-line program."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from strategies.toolchain import cpp_compiler, missing_toolchain
from trainer.doctor.finding import Finding, error, ok, warning
from trainer.doctor.processes import call

PROGRAM = """\
#include <omp.h>
#include <cstdio>
int main() { std::printf("%d threads\\n", omp_get_max_threads()); }
"""
COMPILE_SECONDS = 60.0


def cpp(*, needed: bool) -> Iterator[Finding]:
    """One line; on a machine whose kernels Triton writes the compiler is not ``needed``, and its lack a warning."""
    report = error if needed else warning
    if missing := missing_toolchain():
        said, _, mend = missing.rpartition(": ")
        yield report("c++ compiler", said, mend)
        return
    compiler = shutil.which(cpp_compiler()) or cpp_compiler()
    with tempfile.TemporaryDirectory(prefix="crucible-doctor-") as folder:
        source, program = Path(folder) / "three_lines.cpp", Path(folder) / "three_lines"
        source.write_text(PROGRAM, encoding="utf-8")
        flags = ["-Xpreprocessor", "-fopenmp", "-lomp"] if sys.platform == "darwin" else ["-fopenmp"]
        command = [compiler, "-O2", *flags, str(source), "-o", str(program)]
        built = call(command, seconds=COMPILE_SECONDS)
        if built.failed:
            first = next((line for line in built.errors.splitlines() if "error" in line), built.failed)
            mend = "install libomp" if "omp" in first else f"try by hand: {shlex.join(command)}"
            yield report("c++ compiler", f"{compiler} does not compile three lines: {first.strip()}", mend)
            return
        ran = call([str(program)], seconds=COMPILE_SECONDS)
    if ran.failed:
        mend = f"is {tempfile.gettempdir()} mounted noexec? set TMPDIR to a folder whose files may be run"
        yield report("c++ compiler", f"what {compiler} compiles does not run: {ran.failed}", mend)
        return
    version = call([compiler, "--version"], seconds=COMPILE_SECONDS).output.splitlines()
    yield ok(
        "c++ compiler",
        f"{compiler} compiles and runs, OpenMP with {ran.output.strip()} ({version[0] if version else '?'})",
    )
