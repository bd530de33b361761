"""The function that updates one chunk of parameters, made anew for each kind of chunk."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from strategies.optimizer_formulas import Each, Formula, Group


def _update(
    formula: Formula,
    flags: Group,
    which: tuple[int, ...],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    scalars: list[list[Tensor]],
    scale: Tensor,
) -> None:
    """Update the tensors of one chunk; the i-th takes the scalars of clock ``which[i]``."""
    g = Each(grads) * Each([scale] * len(grads))
    if flags["maximize"]:
        g = -g
    parameters, old = Each(params), [Each(state) for state in states]
    each_scalar = [Each([scalars[clock][number] for clock in which]) for number in range(len(scalars[0]))]
    new_parameters, new = formula.update(flags, parameters, g, old, each_scalar)
    # What is computed from most comes first: Inductor gives a buffer of its own to what still has to read a tensor that
    # is overwritten, and copies it later.
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/graph.py (GraphLowering.mark_buffer_mutated)
    parameters.become(new_parameters)
    for before, after in zip(reversed(old), reversed(new), strict=True):
        before.become(after)


_serial = itertools.count()


def fresh_function(formula: Formula, flags: Group, which: tuple[int, ...], *, name: str) -> Callable[..., None]:
    """``_update`` for one kind of chunk, as a function with a code object of its own.

    Dynamo keeps compiled code by code object: the kinds of chunks would be recompiles of each other, count against its
    limit and be told apart by guards (``isolate_recompiles`` of torch 2.13 does the same for wrappers).
    """

    def update(*tensors: Any) -> None:
        _update(formula, flags, which, *tensors)

    code = update.__code__.replace(co_name=f"{name}_{next(_serial)}")
    return types.FunctionType(code, globals(), code.co_name, None, update.__closure__)
