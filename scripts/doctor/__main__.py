"""Check this machine before anything is trained on it: ``crucible doctor``.

Works before anything else does: without torch, without a compiler, without a GPU, with a broken driver.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.arguments import exit_code, parser, seconds
from scripts.doctor import ERROR, WARNING, Finding, call, error, limits, ok, packages, places, variables, warning
from strategies.options import (
    cache_directories,
    cpp_compiler,
    cudnn_attention_fails,
    missing_toolchain,
    triton_lacks,
)

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


# ---- torch, driver, devices, Triton, the C++ compiler ----------------------------------------------------------------
PROBE = (sys.executable, "-P", str(Path(__file__).with_name("probe.py")))
"""-P: its folder holds modules of ours, which would be found before the standard library's."""
PROBE_SECONDS = 120.0
"""Importing torch from a cold network disk takes a minute."""
LITTLE_DEVICE_GIB = 1.0
TOLERANCE = 1e-4
SLOW_SECONDS = 90.0
REINSTALL = "install torch anew: https://pytorch.org/get-started/locally"


@dataclass(kw_only=True)
class TorchFacts:
    """What the probe's stages reported; without the stage ``torch``, it cannot be imported."""

    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    failed: str | None = None
    """Why it did not come to its end."""


def ask_torch() -> TorchFacts:
    output, _, failed = call(PROBE, seconds=PROBE_SECONDS)
    facts = TorchFacts(failed=failed)
    for line in output.splitlines():
        if line.startswith('{"stage"'):
            stage = json.loads(line)
            if stage["stage"] == "device":
                facts.devices.append(stage)
            facts.stages[stage["stage"]] = stage
    return facts


def devices(facts: TorchFacts) -> Iterator[Finding]:
    """Lines for torch's import, the driver, each device and what compiles for it."""
    if "torch" not in facts.stages:
        yield error("torch imports", f"no: {facts.failed}", REINSTALL)
        return
    torch = facts.stages["torch"]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
    yield ok("torch imports", f"{torch['version']} ({build})")
    if "cuda" not in facts.stages or (facts.failed and facts.stages["cuda"]["available"]):
        yield error(
            "cuda",
            f"using the device failed: {facts.failed}",
            f"this torch is not built for the device: {REINSTALL}"
            if "no kernel image" in str(facts.failed)
            else "nvidia-smi says more; CUDA_VISIBLE_DEVICES= runs on the CPU",
        )
    if facts.stages.get("cuda", {}).get("available"):
        yield from _with_cuda(facts)
    elif "cuda" in facts.stages:
        yield _without_cuda(torch, facts.stages["cuda"]["reasons"])


def _without_cuda(torch: dict[str, Any], reasons: list[str]) -> Finding:
    boards = nvidia_boards()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not boards and not reasons:
        return ok("cuda", "no NVIDIA device: runs use the CPU")
    if hidden is not None and hidden in ("", "-1"):
        return ok("cuda", f"{boards} boards, hidden by CUDA_VISIBLE_DEVICES={hidden!r}: runs use the CPU")
    if torch["cuda"] is None:
        return warning("cuda", f"{boards} boards, but this torch is built without CUDA", REINSTALL)
    if not boards:
        return ok("cuda", f"no NVIDIA device: runs use the CPU ({reasons[0]})")
    reason = reasons[0] if reasons else "torch does not say why"
    return error(
        "cuda",
        f"{boards} boards, but torch cannot use them: {reason}",
        f"update the driver to one for CUDA {torch['cuda']}, or install a torch for an older CUDA",
    )


def _with_cuda(facts: TorchFacts) -> Iterator[Finding]:
    driver = facts.stages.get("driver")
    if driver is not None:
        version = f"for CUDA {driver['version']}" if driver["version"] else "its version is not known"
        yield ok("cuda driver", f"{version}, torch is built with {facts.stages['torch']['cuda']}")
    triton = version_of("triton")
    for device in facts.devices:
        name, capability = f"device {device['number']}", tuple(device["capability"])
        message = (
            f"{device['name']}, compute capability {capability[0]}.{capability[1]}, "
            f"{device['free_gib']:.1f} of {device['total_gib']:.1f} GiB free"
        )
        if not device["works"]:
            yield error(name, f"{message}: a product of matrices of ones is wrong", "nvidia-smi -q shows memory errors")
        elif lacks := triton_lacks(triton is not None, device["name"], (capability[0], capability[1])):
            yield error(name, message, lacks)
        elif device["free_gib"] < LITTLE_DEVICE_GIB:
            fix = "another process has the memory: nvidia-smi, or choose with CUDA_VISIBLE_DEVICES"
            yield warning(name, message, fix)
        else:
            yield ok(name, message + ("" if device["bf16"] else ", no bf16: precision=auto uses 32 bits"))
        if cudnn_attention_fails(facts.stages["torch"]["version"], (capability[0], capability[1])):
            message = (
                "where cuDNN runs it, its backward can give NaN at lengths of 64 modulo 128 (pytorch issue 196678)"
            )
            fix = "pad to other lengths, as buckets do; torch.backends.cuda.enable_cudnn_sdp(False); or torch 2.14"
            yield warning("attention", message, fix)
    if triton is not None:
        yield ok("triton", triton)


def nvidia_boards() -> int:
    """Boards that the kernel's driver knows, whatever torch says."""
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpp(*, needed: bool) -> Finding:
    """Whether there is a compiler. On a machine whose kernels Triton writes it is not ``needed``."""
    if missing := missing_toolchain():
        message, _, fix = missing.rpartition(": ")
        return (error if needed else warning)("c++ compiler", message, fix)
    return ok("c++ compiler", cpp_compiler())


def compiling(*, seconds: float) -> Finding:
    """Compile in a process of its own for at most ``seconds``, in empty folders inside the compiler's caches."""
    with contextlib.ExitStack() as stack:
        # Inside, so that the disk is the real one; empty, so that something is really compiled; gone afterwards.
        folders = {
            variable: stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor-", dir=directory))
            for variable, directory in cache_directories().items()
        }
        output, errors, failed = call([*PROBE, "compile"], seconds=seconds, environment=folders)
        made = [file for folder in folders.values() for file in Path(folder).rglob("*") if file.is_file()]
    if failed:
        if errors.strip():
            failed = reason(errors)
        fix = "fix what is reported above first; --compile-seconds waits longer for a slow disk or a busy machine"
        return error("compile", f"a tiny function does not compile: {failed}", fix)
    facts = json.loads(output.splitlines()[-1])
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


if __name__ == "__main__":
    sys.exit(main())
