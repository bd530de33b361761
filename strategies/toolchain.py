"""What the compiler needs of the machine, looked for before any work starts: each lack is one line with its fix.

A C++ compiler and Python's headers on a CPU, Triton on a CUDA device, a cache directory that can be written to, and
that nobody has switched the compiler off.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Environment variables that switch the compiler off when they are 1, at each call or when torch is imported."""
OLDEST_FOR_TRITON = (7, 0)
"""Compute capability: https://github.com/triton-lang/triton#compatibility, as Inductor checks it."""


def switched_off() -> str | None:
    """What switches the compiler off, and the fix, or None when nothing does."""
    for switch in SWITCHES:
        if os.environ.get(switch) == "1":
            return f"{switch}=1 switches the compiler off: unset it, or use compile=eager"
    return None


def missing_for_inductor() -> str | None:
    """What Inductor lacks on this machine and how to get it, or None when nothing is missing."""
    import torch

    if not torch.cuda.is_available():
        return missing_toolchain() or unwritable_cache()
    installed = importlib.util.find_spec("triton") is not None
    return (
        triton_lacks(installed, torch.cuda.get_device_name(), torch.cuda.get_device_capability()) or unwritable_cache()
    )


def triton_lacks(installed: bool, device: str, capability: tuple[int, int]) -> str | None:
    """What keeps Triton from serving a CUDA device, and the fix, or None when nothing does."""
    if not installed:
        return "Inductor needs Triton on a CUDA device, it is not installed: pip install triton, or use compile=eager"
    if capability < OLDEST_FOR_TRITON:
        return (
            f"Inductor needs compute capability {'.'.join(map(str, OLDEST_FOR_TRITON))}, "
            f"{device} has {'.'.join(map(str, capability))}: use compile=eager"
        )
    return None


def cudnn_attention_fails(torch_version: str, capability: tuple[int, int]) -> bool:
    """Whether the backward of cuDNN's attention gives NaN at lengths of 64 modulo 128 where all logits of a query are
    far below zero: torch 2.11 to 2.13 on Hopper, https://github.com/pytorch/pytorch/issues/196678."""
    release = tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2])
    return (2, 11) <= release <= (2, 13) and capability[0] == 9


def cache_directories() -> dict[str, Path]:
    """The compiler's cache directories by the environment variable that names each one."""
    default = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    directories = {"TORCHINDUCTOR_CACHE_DIR": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default)}
    if triton := os.environ.get("TRITON_CACHE_DIR"):  # else within the other one
        directories["TRITON_CACHE_DIR"] = Path(triton)
    return directories


def unwritable_cache() -> str | None:
    """Which of the compiler's cache directories cannot be written to, or None. Creates them, as the compiler would."""
    for variable, directory in cache_directories().items():
        if reason := unwritable(directory):
            return f"the compiler's cache {directory} cannot be written to ({reason}): set {variable} to one that can"
    return None


def unwritable(directory: Path) -> str | None:
    """Why no file can be made in ``directory``, which is created, or None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def cpp_compiler() -> str:
    """The C++ compiler that Inductor calls, and no other: ``config.cpp.cxx`` in torch/_inductor/config.py."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def missing_toolchain() -> str | None:
    """What is missing and how to get it, or None when nothing is."""
    compiler = cpp_compiler()
    if shutil.which(compiler) is None:
        named = f"CXX={compiler}" if "CXX" in os.environ else compiler
        other = "set CXX=clang++, " if "CXX" not in os.environ and shutil.which("clang++") else ""
        return f"Inductor needs a C++ compiler on a CPU, {named} is not there: {other}install g++ or use compile=eager"
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


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, ``values`` are in the process's environment; afterwards it holds what it held of them before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
