"""What ``torch.compile`` is asked for, checked once: the options that every module strategy shares; and what the
compiler needs of the machine, each lack a line with its fix.

Torch is imported only inside methods, so that the command line can read these options without it.
"""

from __future__ import annotations

import difflib
import getpass
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from strategies.base import Strategy, require_types, wrong

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
EMBEDDING_GRADIENTS = ("eager", "inductor")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(kw_only=True, slots=True)
class CompilerRequest:
    """Arguments for ``torch.compile``; see its documentation for mode, backend, fullgraph and dynamic."""

    one_graph: ClassVar[str] = ""
    """Why ``fullgraph`` may not be false; empty where it may."""

    mode: str = "default"
    """Inductor preset, one of ``MODES``."""
    backend: str = "inductor"
    """Any backend that ``torch.compiler.list_backends(())`` names."""
    fullgraph: bool = True
    """Stop with the reason at a graph break instead of splitting the graph."""
    dynamic: bool | None = None
    """Shapes: true = symbolic from the start, false = one graph a shape, null = static first, symbolic on change."""
    options: dict[str, Any] = field(default_factory=dict)
    """Inductor options by their dotted name, added to the preset of ``mode``: ``{combo_kernels: true}``."""

    def check_values(self, key: str) -> None:
        """Check what can be checked without torch; ``key`` is what is typed before ``.mode``. Raises ValueError."""
        if self.one_graph and not self.fullgraph:
            raise wrong(key, "fullgraph", self.fullgraph, self.one_graph)
        if self.mode not in MODES:
            raise wrong(key, "mode", self.mode, f"is not one of {MODES}")
        if not isinstance(self.backend, str):
            raise wrong(key, "backend", self.backend, "is not a name: torch._dynamo.register_backend gives it one")
        if self.backend != "inductor" and (self.options or self.mode != "default"):
            complaint = "takes neither mode nor options: they belong to 'inductor'"
            raise wrong(key, "backend", self.backend, complaint)

    def check_machine(self, key: str) -> None:
        """Check backend and options against this torch. Raises ValueError with near matches."""
        import torch

        if off := switched_off():
            raise ValueError(f"{key}: {off}")
        known = torch.compiler.list_backends(())
        if self.backend not in known:
            raise ValueError(
                f"{key}.backend={self.backend!r} is not one of {tuple(sorted(known))}{suggestion(self.backend, known)}"
            )
        if not self.needs_inductor:
            return
        if missing := missing_for_inductor():
            raise ValueError(f"{key}: {missing}")
        if options := self.options:
            from torch._inductor import config as inductor_config

            names = list(inductor_config.get_config_copy())
            for option in options:
                if option not in names:
                    raise ValueError(f"{key}.options: Inductor has no option {option!r}{suggestion(option, names)}")
            try:
                torch.compile(lambda: None, options=options)  # reads the options, compiles nothing yet
            except RuntimeError as error:  # a value of the wrong type
                raise ValueError(f"{key}.options: {str(error).splitlines()[0]}") from error

    @property
    def needs_inductor(self) -> bool:
        return self.backend == "inductor"

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether the preset or an option asks Inductor for CUDA graphs; an option wins over the preset."""
        return bool(self.options.get("triton.cudagraphs", self.mode in CUDA_GRAPH_MODES))

    def compile_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``torch.compile``, a fresh copy at each call (torch pops keys from ``options``)."""
        arguments: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        if self.needs_inductor:
            # torch refuses mode and options together, so the preset is spelt out as the options it stands for.
            from torch._inductor import list_mode_options

            preset = {} if self.mode == "default" else list_mode_options()[self.mode]
            arguments["options"] = {**eager_random_numbers(), **preset, **self.options}
        return arguments


@dataclass(kw_only=True, slots=True)
class ModuleRequest(CompilerRequest):
    """Arguments for modules, which have a forward and a backward."""

    embedding_gradient: str = "eager"
    """Who computes the gradient of an embedding: ``eager`` = eager's kernel, which adds in a fixed order, so that runs
    of one program repeat; ``inductor`` = Inductor's, which adds with atomics in any order. One part that asks for
    ``inductor`` decides for the whole run."""

    def check_values(self, key: str) -> None:
        CompilerRequest.check_values(self, key)
        if self.embedding_gradient not in EMBEDDING_GRADIENTS:
            raise wrong(key, "embedding_gradient", self.embedding_gradient, f"is not one of {EMBEDDING_GRADIENTS}")


@dataclass(kw_only=True, slots=True)
class CompileOptions(CompilerRequest, Strategy):
    """Base of the strategies that hand something to ``torch.compile`` with one set of options."""

    def __post_init__(self) -> None:
        self.check_values(f"compile.{self.name}")
        require_types(self)

    def check(self) -> None:
        self.check_machine(f"compile.{self.name}")


@dataclass(kw_only=True, slots=True)
class ModuleOptions(ModuleRequest, CompileOptions):
    """Base of the strategies that hand modules to ``torch.compile`` with one set of options."""


def eager_random_numbers() -> dict[str, Any]:
    """Inductor's option to draw eager's own random numbers on a CUDA device, where this torch has it: dropout is then
    compared with eager mask for mask."""
    import torch
    from torch._inductor import config

    return {"align_random_eager": True} if torch.cuda.is_available() and hasattr(config, "align_random_eager") else {}


def suggestion(given: str, known: list[str]) -> str:
    """What an error about ``given`` ends with: the names in ``known`` that resemble it."""
    matches = difflib.get_close_matches(given, known, n=3)
    return f"; near: {', '.join(matches)}" if matches else ""


# ---- what the compiler needs of the machine --------------------------------------------------------------------------

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
    try:  # as torch names its default directory: torch/_inductor/runtime/cache_dir_utils.py
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a container without a name for its user
        user = f"uid_{os.getuid()}"
    default = Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
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
