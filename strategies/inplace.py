"""Compile a submodule in place: same object, same state-dict keys, no wrapper."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import external_utils, trace_rules

from strategies.base import Program, Region
from strategies.compile_errors import is_compile_error

RECOMPILE_LIMIT = 64
"""Graphs one piece of code may hold. Torch's 8 is used up by a few widths x (train, eval) when blocks share code."""


def compile_in_place(program: Program, path: str, arguments: dict[str, Any], *, strict: bool = False) -> Region:
    """Hand ``program.module``'s submodule at ``path`` to the compiler and note it as a region.

    ``arguments`` are ``torch.compile``'s keyword arguments; where they leave ``dynamic`` open, a strategy of the SHAPES
    stage may have decided it. Compilation itself happens at the first call. A program that is ``outlined`` only lists
    its regions: torch imports Inductor as soon as it is handed anything. ``strict`` as in ``Region``. A module that is
    a region under another path already stays that one.
    """
    module = program.module.get_submodule(path)
    for other in program.regions:
        if program.module.get_submodule(other.path) is module:
            return other
    region = Region(path=path, kind=type(module).__name__, strict=strict)
    if not program.outlined:
        _hand_over(program, module, arguments)
        _guard(program, region, module)
    program.regions.append(region)
    program.settings.setdefault("recompile_limit", RECOMPILE_LIMIT)
    # Else a hook that is added within a region once it is compiled is left out without a word.
    program.settings.setdefault("skip_nnmodule_hook_guards", False)
    if strict:  # else torch runs code beyond the limit eager where graph breaks are allowed, and raises elsewhere
        program.settings["fail_on_recompile_limit_hit"] = True
    return region


def uncompile(program: Program, regions: Collection[Region] | None = None) -> None:
    """Undo ``compile_in_place`` for ``regions`` (None: for all), so that they run eager again."""
    gone = list(program.regions if regions is None else regions)
    for region in gone:
        program.module.get_submodule(region.path)._compiled_call_impl = None
    program.regions[:] = [region for region in program.regions if region not in gone]


def give_up(program: Program, regions: Collection[Region], reason: str) -> None:
    """Let ``regions`` run eager for the rest of the run, and note that they do."""
    program.eager_parts.update({region.path: reason for region in regions})
    uncompile(program, regions)


@contextlib.contextmanager
def compiled_only(program: Program, regions: Collection[Region]) -> Iterator[None]:
    """Inside, only ``regions`` run compiled and the others eager; nothing is lost or compiled again by it."""
    modules = [program.module.get_submodule(region.path) for region in program.regions if region not in regions]
    calls = [module._compiled_call_impl for module in modules]
    try:
        for module in modules:
            module._compiled_call_impl = None
        yield
    finally:
        for module, compiled in zip(modules, calls, strict=True):
            module._compiled_call_impl = compiled


class RegionCall:
    """The compiled call of one region: notes that it was called, and runs eager where its forward does not compile.

    ``failed(region, error)`` decides: it returns after it has rolled back what must be, or raises. None: all raise.
    """

    def __init__(self, region: Region, module: nn.Module) -> None:
        assert module._compiled_call_impl is not None
        self.compiled: Callable[..., Any] = module._compiled_call_impl
        self.failed: Callable[[Region, Exception], None] | None = None
        self._region, self._module = region, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled code, or what the module is without it."""
        self._region.called = True
        try:
            return self.compiled(*args, **kwargs)
        except Exception as error:
            if self.failed is None or not is_compile_error(error):
                raise
            self.failed(self._region, error)
        return self._module._call_impl(*args, **kwargs)


def guard_calls(program: Program, failed: Callable[[Region, Exception], None]) -> None:
    """Let ``failed`` decide about every region in whose forward the compiler fails."""
    for region in program.regions:
        call = program.module.get_submodule(region.path)._compiled_call_impl
        if isinstance(call, RegionCall):
            call.failed = failed


def outermost(program: Program) -> list[Region]:
    """The regions that lie in no other: inside one, the compiler sees no calls."""
    paths = [region.path for region in program.regions]
    return [one for one in program.regions if not any(one.path.startswith(f"{path}.") for path in paths)]


def _guard(program: Program, region: Region, module: nn.Module) -> None:
    """Only around regions that lie in no other: where an outer one has a graph break, the compiler would trace it."""
    if any(region.path.startswith(f"{other.path}.") for other in program.regions):
        return
    for other in program.regions:
        inner = program.module.get_submodule(other.path)
        if other.path.startswith(f"{region.path}.") and isinstance(inner._compiled_call_impl, RegionCall):
            inner._compiled_call_impl = inner._compiled_call_impl.compiled
    module._compiled_call_impl = RegionCall(region, module)


def _hand_over(program: Program, module: nn.Module, arguments: dict[str, Any]) -> None:
    if arguments.get("dynamic") is None:
        arguments = {**arguments, "dynamic": program.dynamic}
    if _forward_is_torchs_own(module):
        # In torch 2.11 Module.compile() is a silent no-op for a forward defined inside torch.nn (Sequential,
        # TransformerEncoderLayer): Dynamo skips the frame. wrap_inline gives it one that it compiles.
        module._compiled_call_impl = torch.compile(external_utils.wrap_inline(module._call_impl), **arguments)
    else:
        module.compile(**arguments)
    if program.around_region is not None:
        compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = program.around_region(compiled)


def _forward_is_torchs_own(module: nn.Module) -> bool:
    # Torch's question fails for a forward that was replaced by another kind of callable.
    return inspect.isroutine(module.forward) and bool(trace_rules.check(module.forward))
