"""Eager: everything that was handed to the compiler runs as it was written, for as long as a comparison takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from strategies import Program
from strategies.as_capturing import as_capturing
from strategies.optimizer.step import ATTRIBUTE


@contextlib.contextmanager
def eager(program: Program) -> Iterator[None]:
    """Inside, modules and loss run uncompiled and optimizers take torch's own step; nothing is compiled, or lost."""
    with torch.compiler.set_stance("force_eager"), as_capturing(False), contextlib.ExitStack() as aside:
        for optimizer in program.optimizers:
            aside.enter_context(own_step(optimizer))
        yield


@contextlib.contextmanager
def own_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``optimizer`` takes torch's own step, whatever was installed in its place."""
    attributes = vars(optimizer)
    if ATTRIBUTE not in attributes:
        yield
        return
    installed, step = attributes.pop(ATTRIBUTE), attributes.pop("step")
    _, before = installed
    if before is not None:
        attributes["step"] = before
    try:
        yield
    finally:
        attributes[ATTRIBUTE], attributes["step"] = installed, step
