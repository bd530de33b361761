"""What the compiler needs of the machine, looked for before any work starts: each lack is one line with its mend.

A C++ compiler and Python's headers on a CPU, Triton on a CUDA device, a cache directory that can be written to, and
that nobody has switched the compiler off.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path

COMPILERS = ("g++", "clang++", "c++")
SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Environment variables that switch the compiler off when they are 1, at each call or when torch is imported."""
OLDEST_FOR_TRITON = (7, 0)
"""Compute capability: https://github.com/triton-lang/triton#compatibility, as Inductor checks it."""


def switched_off() -> str | None:
    """What switches the compiler off, and the mend, or None when nothing does."""
    for switch in SWITCHES:
        if os.environ.get(switch) == "1":
            return f"{switch}=1 switches the compiler off: unset it, or use compile=eager"
    return None


def missing_for_inductor() -> str | None:
    """What Inductor lacks on this machine and how to get it, or None when nothing is missing."""
    import torch

    missing = missing_triton() if torch.cuda.is_available() else missing_toolchain()
    return missing or unwritable_cache()


def missing_triton() -> str | None:
    """Whether Triton, which writes Inductor's kernels for a CUDA device, is missing or cannot serve this device."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return "Inductor needs Triton on a CUDA device, it is not installed: pip install triton, or use compile=eager"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_FOR_TRITON:
        return (
            f"Inductor needs compute capability {'.'.join(map(str, OLDEST_FOR_TRITON))}, "
            f"{torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}: use compile=eager"
        )
    return None


def unwritable_cache() -> str | None:
    """Which of the compiler's cache directories cannot be written to, or None. Creates them, as the compiler would."""
    for variable, default in (
        ("TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"),
        ("TRITON_CACHE_DIR", None),
    ):
        given = os.environ.get(variable)
        directory = Path(given) if given else default
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            reason = error.strerror or type(error).__name__
            return f"the compiler's cache {directory} cannot be written to ({reason}): set {variable} to one that can"
    return None


def missing_toolchain() -> str | None:
    """What is missing and how to get it, or None when nothing is."""
    wanted = os.environ.get("CXX")
    if shutil.which(wanted.split()[0]) is None if wanted else not any(map(shutil.which, COMPILERS)):
        named = f"CXX={wanted} is not there" if wanted else f"none of {', '.join(COMPILERS)} is there"
        return f"Inductor needs a C++ compiler on a CPU, {named}: install g++ or use compile=eager"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        return f"Inductor needs Python's headers on a CPU, {headers} is not there: install python3-dev"
    return None


def _user() -> str:
    # As torch names its default directory: torch/_inductor/runtime/cache_dir_utils.py
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a container without a name for its user
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", user)
