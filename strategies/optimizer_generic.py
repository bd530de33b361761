"""The step of any other optimizer compiled as it is written, with its floats swapped for device tensors meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from strategies.hyperparameters import Mirror

Compiler = Callable[[Callable[[], None]], Callable[[], None]]


class GenericUpdate:
    """Compiles ``type(optimizer).step`` whole: one graph of all tensors, however many there are, and that takes long.

    A step that creates state differs from later ones, so that there may be a second graph. Every float is a tensor, so
    that no schedule recompiles. An optimizer that will not have tensors is
    compiled with its floats, which torch makes symbolic when they change for the first time: one recompile then.
    One that cannot be compiled at all runs eager. ``form`` says which of these it is.
    """

    max_norm: float | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, *, compiler: Compiler, tell: Callable[[str], None]) -> None:
        """``tell`` is given a line for the user when the form turns out to be another one."""
        self.optimizer = optimizer
        self.form = "generic"
        self._tell = tell
        self._mirror = Mirror(optimizer)
        self._raw: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
        self._tensors = True
        self._compiled: Callable[[], None] | None = None
        self._compiler = compiler

    def __call__(self) -> None:
        """One step."""
        if self.form == "eager":
            self._step()
            return
        if self._tensors:
            self._mirror.refresh()
        try:
            self._attempt()
        except BackendCompilerFailed:
            raise
        except TorchDynamoException as error:
            # Nothing has been executed: the whole step is one graph, and it is traced before it runs.
            self._next_form(error)
            self()

    def release(self) -> None:
        """There is nothing to take off."""

    def facts(self) -> dict[str, Any]:
        """Figures for the record."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return {"form": self.form, "tensors": count, "chunks": 1, "graphs": None}

    def _step(self) -> None:
        self._raw(self.optimizer)

    def _attempt(self) -> None:
        if self._compiled is None:
            self._compiled = self._compiler(self._step)
        groups = self.optimizer.param_groups
        before = [dict(group) for group in groups]
        if self._tensors:
            for index, group in enumerate(groups):
                group.update(self._mirror.group(index))
        try:
            self._compiled()
        finally:
            # Up to torch 2.13 compiling also sets capturable: https://github.com/pytorch/pytorch/issues/182706
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def _next_form(self, error: Exception) -> None:
        self._compiled = None
        if self._tensors:
            self._tensors = False
            self.form = "generic, floats"
            return
        self.form = "eager"
        reason = str(error).strip().splitlines()[0]
        self._tell(f"{type(self.optimizer).__name__} cannot be compiled and runs eager: {reason}")
