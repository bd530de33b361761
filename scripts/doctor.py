"""Is this machine all right? ``crucible doctor``: for whoever is about to train on it, or asks why nothing compiles.

Works before anything else does: without torch, without a compiler, without a GPU, with a broken driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import exit_code, parser
from strategies.cached.store import distrust_of
from strategies.compile_options import (
    cache_directories,
    cpp_compiler,
    cudnn_attention_fails,
    missing_toolchain,
    switched_off,
    triton_lacks,
    unwritable,
)
from strategies.remedies import known

EXAMPLES = """\
examples:
  crucible doctor

Every line is ok, warning (it works, but worse than it could) or error (a run would fail), with the fix below it.
python -m torch.utils.collect_env says more of the machine, for a bug report.
Exit codes: 0 no error, 1 an error, 2 wrong arguments.
"""
OK, WARNING, ERROR = "ok", "warning", "error"
COMPILERS = "c++ compiler"
"""The finding after which a tiny function is compiled."""
PACKAGES = ("torch", "torchvision", "lightning", "hydra-core", "rich")
SECONDS = 360.0
"""Importing torch from a cold network disk takes a minute, compiling on a busy machine some."""
GIB = 1 << 30
LITTLE_DISK_GIB = 2.0
"""A cold compile of a model of ordinary size writes some hundred MiB."""
TOLERANCE = 1e-4
ROOT = Path(__file__).resolve().parents[1]
ANEW = "install torch anew: https://pytorch.org/get-started/locally"
REACH_THE_COMPILER = ("TORCH_COMPILE", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_", "CUDA_LAUNCH_", "NVIDIA_TF32_")
"""What the names of environment variables begin with that make compiled code other, slower or later."""


@dataclass
class Finding:
    status: str
    """``OK``, ``WARNING`` or ``ERROR``."""
    name: str
    message: str
    fix: str | None = None
    """What to do about it; every warning and error has one."""

    def __str__(self) -> str:
        """One line, and the fix on the next."""
        text = f"{self.status:<8} {self.name:<15} {self.message}"
        return text if self.fix is None else f"{text}\n{' ' * 25}-> {self.fix}"


def main(arguments: list[str] | None = None) -> int:
    parser("doctor", __doc__ or "", EXAMPLES).parse_args(arguments)
    return exit_code(lambda _: examined())


def examined() -> int:
    """Print every finding as it comes, the quick ones first; returns the exit code."""
    found: Counter[str] = Counter()
    for finding in itertools.chain(packages(), shared_names(), faults(), caches(), variables(), with_torch()):
        print(finding, flush=True)
        found[finding.status] += 1
    print(f"errors: {found[ERROR]}, warnings: {found[WARNING]}", flush=True)
    return int(found[ERROR] > 0)


# ---- without torch ---------------------------------------------------------------------------------------------------


def packages() -> Iterator[Finding]:
    """Python and the packages without which nothing runs; pip sees to their versions."""
    there = [f"python {platform.python_version()} ({sys.executable})"]
    for name in PACKAGES:
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                ERROR, name, "is not installed", "pip install crucible-train, or pip install -e . in a checkout"
            )
    yield Finding(OK, "packages", ", ".join(there))


def shared_names() -> Iterator[Finding]:
    """Other distributions that install a package of the name of one of ours."""
    with contextlib.suppress(ImportError):  # in a checkout that is not installed nothing of it can be overwritten
        crucible = importlib.import_module("crucible")
        if not hasattr(crucible, "other_owners"):
            where = crucible.__file__ or next(iter(crucible.__path__))
            fix = "rename that file or folder; where pip installed it, uninstall it and install crucible-train anew"
            yield Finding(ERROR, "package names", f"{where} hides crucible's own package 'crucible'", fix)
            return
        for other, package in crucible.other_owners():
            fix = f"keep them in two environments: pip uninstall {other}, then install {crucible.DISTRIBUTION} anew"
            message = f"{other} installs a package {package!r} too, as {crucible.DISTRIBUTION} does"
            yield Finding(ERROR, "package names", message, fix)


def faults() -> Iterator[Finding]:
    """Faults that the installed torch is known to have, each with what a run does about it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for each in known(importlib.metadata.version("torch")):
            yield Finding(OK, "known fault", f"{each.fault}; where a check finds it: {each}")


def caches() -> Iterator[Finding]:
    """Whether the compiler's caches can be written to, by nobody else, with room."""
    for variable, directory in cache_directories().items():
        name = "inductor cache" if "INDUCTOR" in variable else "triton cache"
        other = f"set {variable} to a folder on another disk"
        if why := unwritable(directory):
            yield Finding(ERROR, name, f"{directory} cannot be written to: {why}", other)
            continue
        free_gib = shutil.disk_usage(directory).free / GIB
        message = f"{directory}, {free_gib:.1f} GiB free"
        if why := distrust_of(os.path.realpath(directory)):
            message = f"{directory}: {why}, and compiled code in it is unpickled and loaded"
            yield Finding(WARNING, name, message, f"set {variable} to a folder that only you can write")
        elif free_gib < LITTLE_DISK_GIB:
            yield Finding(WARNING, name, message, other)
        else:
            yield Finding(OK, name, message)


def variables() -> Iterator[Finding]:
    """Whether the compiler is switched off, and the variables that are set for it."""
    if (off := switched_off()) is not None:
        message, _, fix = off.partition(": ")
        yield Finding(ERROR, "environment", message, fix)
    given = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(REACH_THE_COMPILER))
    yield Finding(OK, "environment", f"set for the compiler: {', '.join(given) or 'nothing'}")


# ---- with torch, in a process of its own: a driver may hang or crash who asks it -------------------------------------


def with_torch() -> Iterator[Finding]:
    """What ``tell`` says in a process of its own, and how that ended."""
    if sys.stderr.isatty():
        print(f"asking torch, {SECONDS:g} s at most ...", file=sys.stderr, flush=True)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        # Empty caches, so that something is really compiled.
        own = {variable: f"{folder}/{variable}" for variable in cache_directories()}
        command = [sys.executable, "-P", "-c", "from scripts import doctor; doctor.tell()"]
        environment = {**os.environ, **own, "PYTHONPATH": path}
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=environment, check=False)
            output, failed = done.stdout, reason(done.stderr.decode(errors="replace")) if done.returncode else None
            if done.returncode < 0:
                failed = f"it was killed by {signal.Signals(-done.returncode).name}"
        except subprocess.TimeoutExpired as late:
            output, failed = late.stdout or b"", f"it took longer than {SECONDS:g} s and was stopped"
    found = [Finding(**json.loads(line)) for line in output.splitlines() if line.startswith(b'{"status"')]
    yield from found
    if failed and not found:
        yield Finding(ERROR, "torch imports", f"no: {failed}", ANEW)
    elif failed and found[-1].name == COMPILERS:
        yield Finding(
            ERROR, "compile", f"a tiny function does not compile: {failed}", "fix what is reported above first"
        )
    elif failed:
        fix = "nvidia-smi says more; CUDA_VISIBLE_DEVICES= runs on the CPU"
        fix = f"this torch is not built for the device: {ANEW}" if "no kernel image" in failed else fix
        yield Finding(ERROR, "cuda", f"using the device failed: {failed}", fix)


def reason(errors: str) -> str:
    """The line of a traceback that tells most: the first of the error itself, before torch's advice."""
    lines = [line.rstrip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith((" ", "Traceback")) and ("Error" in line or "Exc" in line)]
    return (named or lines or ["no reason given"])[-1].strip()


def tell() -> None:
    """Print what torch says of the machine as lines of JSON, at once: what comes next may end the process."""
    import torch

    for finding in itertools.chain(machine(), compiler(needed=not torch.cuda.is_available()), tiny()):
        print(json.dumps(dataclasses.asdict(finding)), flush=True)


def machine() -> Iterator[Finding]:
    """Torch and its devices, each of which is used; what ``torch.utils.collect_env`` says of system and driver."""
    import torch

    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only"
    yield Finding(OK, "torch imports", f"{torch.__version__} ({build})")
    from torch.utils.collect_env import get_env_info

    facts = get_env_info()
    driver = f", NVIDIA driver {facts.nvidia_driver_version}" if facts.nvidia_driver_version else ""
    yield Finding(OK, "machine", f"{facts.os}, GCC {facts.gcc_version}{driver}")
    try:
        torch.cuda.init()
    except Exception as error:
        why = str(error).partition(". ")[0]
        boards = "" if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else facts.nvidia_gpu_models
        if boards:
            message = f"torch cannot use {', '.join(boards.splitlines())}: {why}"
            yield Finding(ERROR if cuda else WARNING, "cuda", message, f"update the driver, or {ANEW}")
        else:
            yield Finding(OK, "cuda", f"no NVIDIA device is to be seen: runs use the CPU ({why})")
        return
    has_triton = importlib.util.find_spec("triton") is not None
    for number in range(torch.cuda.device_count()):
        torch.ones(64, 64, device=f"cuda:{number}").sum().item()  # raises where this torch has no kernels for it
        name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        free, total = (size / GIB for size in torch.cuda.mem_get_info(number))
        message = f"{name}, compute capability {capability[0]}.{capability[1]}, {free:.1f} of {total:.1f} GiB free"
        lacks = triton_lacks(has_triton, name, capability)
        yield Finding(ERROR if lacks else OK, f"device {number}", message, lacks)
        if cudnn_attention_fails(torch.__version__, capability):
            yield Finding(
                WARNING,
                "attention",
                "where cuDNN runs it, its backward can give NaN at lengths of 64 modulo 128 (pytorch issue 196678)",
                "pad to other lengths, as buckets do; torch.backends.cuda.enable_cudnn_sdp(False); or torch 2.14",
            )


def compiler(*, needed: bool) -> Iterator[Finding]:
    """Whether there is a C++ compiler. With a device, whose kernels Triton writes, it is not ``needed``."""
    if missing := missing_toolchain():
        message, _, fix = missing.rpartition(": ")
        yield Finding(ERROR if needed else WARNING, COMPILERS, message, fix)
    else:
        yield Finding(OK, COMPILERS, cpp_compiler())


def tiny() -> Iterator[Finding]:
    """Compile a function for the device that a run would take, and compare its gradient with eager's."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x) * x.sin()).sum()

    gradients = []
    for run in (function, torch.compile(function)):
        x = torch.linspace(-2, 2, 256, device=device, requires_grad=True)
        run(x).backward()
        assert x.grad is not None
        gradients.append(x.grad)
    difference = float((gradients[0] - gradients[1]).abs().max())
    what, took = "a tiny function, forward and backward,", time.perf_counter() - began
    if not any(file.is_file() for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*")):
        yield Finding(
            ERROR, "compile", "nothing was compiled: the compiler is switched off", "see the environment above"
        )
    elif difference <= TOLERANCE:
        yield Finding(OK, "compile", f"{what} on {device} in {took:.1f} s")
    else:
        fix = "another torch, driver or compiler: do not trust what this one compiles"
        yield Finding(ERROR, "compile", f"{what} differs on {device} from eager by {difference:.1e}", fix)


if __name__ == "__main__":
    sys.exit(main())
