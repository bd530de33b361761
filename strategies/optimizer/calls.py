"""What a step of torch's hands to its function: parameters, gradients, state and numbers of each group.

``torch.optim.AdamW.step`` reads groups, gradients and state, creates state that is not there yet, and calls
``torch.optim.adam.adam`` once for each group. ``Reader`` runs that very code with another function in the place of
``adam``: whatever a training does to its groups, parameters and state, it is read as torch reads it.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FUNCTIONS = ("adam", "adamw", "sgd", "radam", "rmsprop", "adadelta", "adamax", "rprop")
"""Functions of ``torch.optim.<name>`` that work on each element of each parameter apart from all others."""
WITH_TENSOR_BETAS = ("adam", "adamw")
FORMS = ("foreach", "fused", "capturable")
"""Which of its forms a function takes; they compute the same."""
PLAIN = (Tensor, nn.Parameter)

Lists = tuple[list[Any], ...]


class Call:
    """One call of the function: of the parameters of one group that have a gradient."""

    __slots__ = ("lists", "options")

    def __init__(self, lists: Lists, options: dict[str, Any]) -> None:
        self.lists, self.options = lists, options
        """Parameters, gradients, lists of state; and numbers and flags by name."""

    @property
    def parameters(self) -> list[Tensor]:
        return self.lists[0]

    @property
    def gradients(self) -> list[Tensor]:
        return self.lists[1]


class Reader:
    """Reads the next step of ``optimizer``. ``function`` is torch's; ``steps`` is the place of its list of counts."""

    def __init__(self, optimizer: torch.optim.Optimizer, function: str) -> None:
        self.raw: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
        self.name = function
        self.function: Callable[..., None] = self.raw.__globals__[function]
        self.arguments = list(inspect.signature(self.function).parameters)
        self.steps = self.arguments.index("state_steps") if "state_steps" in self.arguments else None
        self._optimizer = optimizer
        self._calls: list[Call] = []
        names = {**self.raw.__globals__, function: self._take}
        self._read = types.FunctionType(
            self.raw.__code__, names, self.raw.__name__, self.raw.__defaults__, self.raw.__closure__
        )

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Reader | None:
        """None where the step of ``optimizer`` calls none of ``FUNCTIONS``."""
        raw = inspect.unwrap(type(optimizer).step)
        name = raw.__module__.rpartition(".")[2]
        own = raw.__module__ == f"torch.optim.{name}" and name in FUNCTIONS and name in raw.__code__.co_names
        return cls(optimizer, name) if own else None

    def read(self) -> list[Call]:
        """The calls of the next step, of which none is made. Creates the state that torch would create."""
        self._calls = []
        self._read(_Unwatched(self._optimizer))
        calls, self._calls = self._calls, []
        return calls

    def _take(self, *lists: Any, **options: Any) -> None:
        # From 2.15 on some are handed over by name.
        named = tuple(options.pop(name) for name in self.arguments[len(lists) :] if isinstance(options.get(name), list))
        self._calls.append(Call((*lists, *named), options))

    def lacks(self, call: Call) -> bool:
        """Whether torch creates some of the state within the function, as SGD does its buffers of momentum."""
        return self.name == "sgd" and call.options["momentum"] != 0 and any(one is None for one in call.lists[2])

    def not_covered(self, call: Call) -> str | None:
        """Why the parameters of ``call`` are left to torch's own function."""
        options, parameters = call.options, call.parameters
        if options.get("differentiable"):
            return "differentiable=True keeps a graph of each step"
        if options.get("has_complex") or any(one.is_complex() for one in parameters):
            return "complex parameters"
        if any(one.layout is not torch.strided for one in call.gradients):
            return "sparse gradients"
        if options.get("grad_scale") is not None or options.get("found_inf") is not None:
            return "it unscales gradients itself"
        tensors = {name for name, value in options.items() if isinstance(value, Tensor)}
        if tensors - {"lr"} or (tensors and options["lr"].numel() != 1):
            return f"hyperparameters that are tensors ({', '.join(sorted(tensors))})"
        if any(type(one) not in PLAIN for one in itertools.chain(*call.lists) if one is not None):
            return "parameters or gradients of a class of their own"
        if self.steps is not None and len({one.is_cpu for one in call.lists[self.steps]}) > 1:
            return "step counts on several devices"
        return None


class _Unwatched:
    """An optimizer whose step may be read while a CUDA graph is captured; torch asks for ``capturable`` there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def _cuda_graph_capture_health_check(self) -> None:
        pass

    def _accelerator_graph_capture_health_check(self) -> None:
        pass


def overlapping(parameters: list[Tensor]) -> bool:
    """Whether two of ``parameters`` are one, or lie in the same memory: what is written for one, the other reads."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for one in parameters:
        if one.numel():
            reach = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            start = one.data_ptr()
            span = (start, start + (reach + 1) * one.element_size())
            spans.setdefault(one.untyped_storage().data_ptr(), []).append(span)
    return any(first[1] > second[0] for each in spans.values() for first, second in itertools.pairwise(sorted(each)))


def layouts(tensors: list[Tensor | None]) -> tuple[Any, ...]:
    return tuple(None if one is None else (one.shape, one.stride(), one.dtype) for one in tensors)
