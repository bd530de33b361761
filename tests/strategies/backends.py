"""Backends for ``compile.<strategy>.backend``: one that counts graphs and runs them as they are, two that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule

COUNTING = "tests_counting"
BROKEN_FORWARD = "tests_broken_forward"
BROKEN_BACKWARD = "tests_broken_backward"

graphs: list[GraphModule] = []
"""Graphs that the counting backend was given since the fixture cleared it."""


def _count(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    graphs.append(graph)
    return graph.forward


def _refuse(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    raise RuntimeError("this backend compiles no forward\nand says so in two lines")


def _refuse_backward(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    raise RuntimeError("this backend compiles no backward")


def _as_it_is(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


def register() -> None:
    """Make the backends known to torch; doing it twice does no harm."""
    if COUNTING in torch.compiler.list_backends(()):
        return
    torch._dynamo.register_backend(_count, name=COUNTING)
    torch._dynamo.register_backend(_refuse, name=BROKEN_FORWARD)
    torch._dynamo.register_backend(
        aot_autograd(fw_compiler=_as_it_is, bw_compiler=_refuse_backward), name=BROKEN_BACKWARD
    )
