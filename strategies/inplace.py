"""Compile a submodule in place: same object, same state-dict keys, no wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import external_utils, trace_rules

from strategies.base import Program, Region
from strategies.compile_errors import is_compile_error

RECOMPILE_LIMIT = 64
"""Graphs one piece of code may hold. Torch's 8 is used up by a few widths x (train, eval) when blocks share code."""


def compile_in_place(program: Program, path: str, arguments: dict[str, Any]) -> Region:
    """Hand ``program.module``'s submodule at ``path`` to the compiler and note it as a region.

    ``arguments`` are ``torch.compile``'s keyword arguments; where they leave ``dynamic`` open, a strategy of the SHAPES
    stage may have decided it. Compilation itself happens at the first call. A program that is ``outlined`` is told its
    regions and no more: torch imports Inductor as soon as it is handed anything.
    """
    module = program.module.get_submodule(path)
    wrapped = _forward_is_torchs_own(module)
    if not program.outlined:
        _hand_over(program, module, arguments, wrapped=wrapped)
    region = Region(path=path, kind=type(module).__name__, frame=_frame(module, wrapped=wrapped))
    program.regions.append(region)
    program.settings.setdefault("recompile_limit", RECOMPILE_LIMIT)
    # Without it, code beyond the limit runs eager for the rest of the run and nobody is told.
    program.settings.setdefault("fail_on_recompile_limit_hit", True)
    return region


def uncompile(program: Program, regions: Collection[Region] | None = None) -> None:
    """Undo ``compile_in_place`` for ``regions`` (None: for all), so that they run eager again."""
    gone = list(program.regions if regions is None else regions)
    for region in gone:
        program.module.get_submodule(region.path)._compiled_call_impl = None
    program.regions[:] = [region for region in program.regions if region not in gone]


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


class GuardedCall:
    """The compiled call of one region, told to go on eager when the compiler fails in its forward.

    ``failed(region, error)`` decides: it returns after it has rolled back what must be, or raises.
    """

    def __init__(self, region: Region, module: nn.Module, failed: Callable[[Region, Exception], None]) -> None:
        assert module._compiled_call_impl is not None
        self.compiled: Callable[..., Any] = module._compiled_call_impl
        self._region, self._module, self._failed = region, module, failed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled code, or what the module is without it."""
        try:
            return self.compiled(*args, **kwargs)
        except Exception as error:
            if not is_compile_error(error):
                raise
            self._failed(self._region, error)
        return self._module._call_impl(*args, **kwargs)


def guard_calls(program: Program, failed: Callable[[Region, Exception], None]) -> None:
    """Put a ``GuardedCall`` around every region that lies in no other: inside one, the compiler sees no calls."""
    paths = [region.path for region in program.regions]
    for region in program.regions:
        module = program.module.get_submodule(region.path)
        inside = any(region.path.startswith(f"{path}.") for path in paths)
        if not inside and not isinstance(module._compiled_call_impl, GuardedCall):
            module._compiled_call_impl = GuardedCall(region, module, failed)


def _hand_over(program: Program, module: nn.Module, arguments: dict[str, Any], *, wrapped: bool) -> None:
    if arguments.get("dynamic") is None:
        arguments = {**arguments, "dynamic": program.dynamic}
    if wrapped:
        # In torch 2.11 Module.compile() is a silent no-op for a forward defined inside torch.nn (Sequential,
        # TransformerEncoderLayer): Dynamo skips the frame. wrap_inline gives it one that it compiles.
        module._compiled_call_impl = torch.compile(external_utils.wrap_inline(module._call_impl), **arguments)
    else:
        module.compile(**arguments)
    if program.around_region is not None:
        compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = program.around_region(compiled)


def _frame(module: nn.Module, *, wrapped: bool) -> tuple[str, int]:
    if wrapped:
        return external_utils.__file__, 0
    code = module.forward.__code__
    return code.co_filename, code.co_firstlineno


def _forward_is_torchs_own(module: nn.Module) -> bool:
    return bool(trace_rules.check(module.forward))
