"""Check this machine before anything is trained on it: ``crucible doctor``.

Works before anything else does: without torch, without a compiler, without a GPU, with a broken driver.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator

from scripts.arguments import exit_code, parser, seconds
from scripts.doctor import ERROR, WARNING, Finding, limits, packages, places, variables, warning
from scripts.doctor.devices import ask_torch, compiling, cpp, devices

EXAMPLES = """\
examples:
  crucible doctor
  crucible doctor --no-compile              # seconds, without compiling anything
  crucible doctor --json > machine.json     # for a ticket, or a job that checks its node

Every line is ok, warning (it works, but worse than it could) or error (a run would fail), with the fix below it.
Exit codes: 0 no error, 1 an error, 2 wrong arguments.
"""
COMPILE_SECONDS = 240.0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return exit_code(lambda _: examined(options))


def examined(options: argparse.Namespace) -> int:
    """Print every finding as it comes; returns the exit code."""
    findings: list[Finding] = []
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for finding in diagnosis(compiles=not options.no_compile, seconds=options.compile_seconds):
        findings.append(finding)
        if not options.json:
            print(finding.lines(colour=colour), flush=True)
    errors, warnings = (sum(finding.status == status for finding in findings) for status in (ERROR, WARNING))
    if options.json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"errors": errors, "warnings": warnings, "findings": listed}, indent=1), flush=True)
    else:
        print(f"errors: {errors}, warnings: {warnings}", flush=True)
    return int(errors > 0)


def diagnosis(*, compiles: bool, seconds: float) -> Iterator[Finding]:
    """Every finding, the quick ones first."""
    yield from packages()
    facts = ask_torch()
    yield from devices(facts)
    failed = False
    for finding in (cpp(needed=not facts.devices), *places(), *limits(), *variables()):
        failed |= finding.status == ERROR
        yield finding
    if not compiles:
        return
    if failed or "torch" not in facts.stages:
        yield warning("compile", "not tried", "fix the errors above first")
        return
    if sys.stderr.isatty():
        print(f"compiling a tiny function, {seconds:g} s at most ...", file=sys.stderr, flush=True)
    yield compiling(seconds=seconds)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser("doctor", __doc__ or "", EXAMPLES)
    made.add_argument("--json", action="store_true", help="print one JSON object (default: a line for each finding)")
    made.add_argument("--no-compile", action="store_true", help="compile nothing (default: a tiny function, last)")
    seconds_help = "longest time for the tiny compile (default: %(default)g)"
    made.add_argument("--compile-seconds", type=seconds, default=COMPILE_SECONDS, metavar="SECONDS", help=seconds_help)
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
