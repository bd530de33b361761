"""Compile a submodule in place: same object, same state-dict keys, no wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo import external_utils, trace_rules

from strategies.base import Program, Region

RECOMPILE_LIMIT = 64
"""Graphs one piece of code may hold. Torch's 8 is used up by a few widths x (train, eval) when blocks share code,
and what comes after it runs eager without a word."""


def compile_in_place(program: Program, path: str, arguments: dict[str, Any]) -> Region:
    """Hand ``program.module``'s submodule at ``path`` to the compiler and note it as a region.

    ``arguments`` are ``torch.compile``'s keyword arguments. Compilation itself happens at the first call.
    """
    module = program.module.get_submodule(path)
    if _forward_is_torchs_own(module):
        # In torch 2.11 Module.compile() is a silent no-op for a forward defined inside torch.nn (Sequential,
        # TransformerEncoderLayer): Dynamo skips the frame. wrap_inline gives it one that it compiles.
        module._compiled_call_impl = torch.compile(external_utils.wrap_inline(module._call_impl), **arguments)
        frame = (external_utils.__file__, 0)
    else:
        module.compile(**arguments)
        code = module.forward.__code__
        frame = (code.co_filename, code.co_firstlineno)
    region = Region(path=path, kind=type(module).__name__, frame=frame)
    program.regions.append(region)
    program.settings.setdefault("recompile_limit", RECOMPILE_LIMIT)
    return region


def uncompile(program: Program) -> None:
    """Undo ``compile_in_place`` for every region, so that the module runs eager again."""
    for region in program.regions:
        program.module.get_submodule(region.path)._compiled_call_impl = None
    program.regions.clear()


def _forward_is_torchs_own(module: nn.Module) -> bool:
    return bool(trace_rules.check(module.forward))
