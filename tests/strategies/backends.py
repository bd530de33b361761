"""Backends for ``compile.<strategy>.backend``: one that counts graphs and runs them as they are, two that fail, and one
whose numbers are wrong on demand."""

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
FAULTY = "tests_faulty"

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


class Fault:
    """What the backend ``FAULTY`` multiplies the results of its graphs by, and what it calls before each of them."""

    forward = backward = 1.0
    scale = 1
    """By which a test's own backend decides what is wrong."""

    @staticmethod
    def before() -> None: ...

    @classmethod
    def clear(cls) -> None:
        cls.forward = cls.backward = 1.0
        cls.before = lambda: None  # type: ignore[method-assign]


def _times(which: str) -> Callable[..., Any]:
    def compiled(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> list[Any]:
            Fault.before()
            factor = getattr(Fault, which)
            results = graph.forward(*inputs)
            floating = [isinstance(one, torch.Tensor) and one.is_floating_point() for one in results]
            return [
                one * factor if wrong and factor != 1 else one for one, wrong in zip(results, floating, strict=True)
            ]

        return make_boxed_func(call)

    return compiled


def register() -> None:
    """Make the backends known to torch; doing it twice does no harm."""
    if COUNTING in torch.compiler.list_backends(()):
        return
    torch._dynamo.register_backend(_count, name=COUNTING)
    torch._dynamo.register_backend(_refuse, name=BROKEN_FORWARD)
    torch._dynamo.register_backend(
        aot_autograd(fw_compiler=_as_it_is, bw_compiler=_refuse_backward), name=BROKEN_BACKWARD
    )
    torch._dynamo.register_backend(
        aot_autograd(fw_compiler=_times("forward"), bw_compiler=_times("backward")), name=FAULTY
    )
