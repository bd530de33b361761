"""An optimizer's compiled step: what the helper compiles of it, and how it is tried before it takes over.

The helper gets the optimizer with the parameters of one repeated block of each kind and all others, described as
regions are, without state. Before the compiled step takes over, the same description is built once more beside the
training, function by function, one between two steps, and compared with torch's own step on the same numbers.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from strategies.base import Program, begin
from strategies.errors import one_line
from strategies.optimizer import Optimizer, installed, places_of, reason_for_eager
from strategies.optimizer.functional import FunctionalUpdate, formula_of
from trainer.background.wire import Call, dumps

LIKE_ROUNDING = 64
"""Roundings, of the larger numbers, that the compiled update may be from torch's own."""
OF_THE_UPDATE = 1e-3
"""Share of what the step changes, that it may be off beside."""


def describe(strategy: Optimizer, optimizer: torch.optim.Optimizer, places: Mapping[Tensor, str]) -> bytes:
    """The optimizer with one place of each kind, for ``Shadow``; its gradients are there."""
    kinds: dict[str, list[Any]] = defaultdict(list)
    for index, group in enumerate(optimizer.param_groups):
        for one in group["params"]:
            if (place := places.get(one)) is not None and one.grad is not None:
                kinds[place].append((index, one.shape, one.stride(), one.dtype, one.grad.stride(), one.grad.dtype))
    first = {tuple(kind): place for place, kind in reversed(kinds.items())}
    kept = {*first.values(), None}
    groups = [
        {**group, "params": [p for p in group["params"] if places.get(p) in kept]} for group in optimizer.param_groups
    ]
    small = copy.copy(optimizer)  # without hooks, and without what a scheduler did to its step
    small.param_groups, small.state = groups, defaultdict(dict)
    held = [one for group in groups for one in group["params"]]
    gradients = [(one, one.grad) for one in held if one.grad is not None]
    return dumps((strategy, small, {one: places[one] for one in held if one in places}, gradients))


class Shadow:
    """An optimizer of random numbers, described by ``describe``, with its compiled update."""

    def __init__(self, described: bytes) -> None:
        strategy, self._optimizer, places, gradients = pickle.loads(described)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._own, gradients = copy.deepcopy((self._optimizer, gradients))
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._before = [one.detach().clone() for one in self._parameters(self._optimizer)]
        update = strategy.update_for(self._optimizer, Program(module=nn.Module()), places)
        if not isinstance(update, FunctionalUpdate):
            raise ValueError(f"{type(self._optimizer).__name__} has no formula")
        self.update = update

    @torch.no_grad()
    def pieces(self) -> Iterator[None]:
        """The step, a call of one compiled function each."""
        for piece in self.update.pieces():
            piece()
            yield

    def complaint(self) -> str | None:
        """How its step, once made, is another than torch's own."""
        self._own.step()
        pairs = zip(self._parameters(self._optimizer), self._parameters(self._own), self._before, strict=True)
        for one, other, before in pairs:
            moved = (other - before).norm()
            states, others = self._optimizer.state[one], self._own.state[other]
            compared = [(one, other, OF_THE_UPDATE * moved)]
            compared += [(states[n], s, 0.0) for n, s in others.items() if n != "step" and isinstance(s, Tensor)]
            for mine, theirs, more in compared:
                allowed = LIKE_ROUNDING * torch.finfo(mine.dtype).eps * theirs.norm() + more
                if not (mine - theirs).norm() <= allowed:
                    return f"its update of {tuple(one.shape)} is another than torch's own"
        return None

    @staticmethod
    def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [one for group in optimizer.param_groups for one in group["params"]]


class UpdateTakeover:
    """Of the strategy ``optimizer`` in one training: ``advance`` after each step, until ``over``. What the helper is to
    compile of each optimizer is put into ``calls``, those of ``Background``."""

    def __init__(self, strategy: Optimizer, program: Program, calls: dict[tuple[str, int], Call], parity: str) -> None:
        self._strategy, self._program, self._calls, self._parity = strategy, program, calls, parity
        self._paths = {f"<optimizer {number}>": one for number, one in enumerate(program.optimizers)}
        """Under which the helper knows them."""
        self._hooks: dict[str, Any] = {}
        self._shadows: dict[str, Shadow] = {}
        self._pieces: Iterator[None] | None = None
        self.over = not self._paths
        """Whether it is in place, or stays eager."""
        places = places_of(program)
        for path, optimizer in self._paths.items():  # each is described after its first step, when gradients are there
            reason = reason_for_eager(optimizer, program)
            if reason is None and formula_of(optimizer) is None:
                reason = "only what is computed by formulas (Adam, AdamW, SGD) is compiled in the background"
            if reason is not None:
                self.leave(f"{type(optimizer).__name__}: {reason}")
                return
            self._hooks[path] = optimizer.register_step_post_hook(functools.partial(self._stepped, path, places))

    def _stepped(self, path: str, places: Mapping[Tensor, str], optimizer: Any, *_: Any) -> None:
        self._hooks.pop(path).remove()
        try:
            described = describe(self._strategy, optimizer, places)
            self._calls[path, 0] = Call(path=path, arguments={}, pickled=described, autocast={})
        except Exception as error:  # anything that a user's object raises when it is pickled
            self.leave(f"it cannot be described to the helper: {one_line(error)}")

    def advance(self, ready: set[str], refused: Mapping[str, str], failed: str | None) -> None:
        """Between two steps, regions have taken over: try the next piece."""
        reason = next((refused[path] for path in self._paths if path in refused), failed)
        if reason is not None and not self._paths.keys() <= ready:
            self.leave(reason)
        elif self._paths.keys() <= ready and not self.over:
            self._pieces = self._pieces or self._all_pieces()
            try:
                device = self._program.device
                with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
                    next(self._pieces, None)
            except Exception as error:  # whatever it is, torch's own step can do it
                self.leave(one_line(error))

    def _all_pieces(self) -> Iterator[None]:
        """Try every update, piece by piece; then put them in place."""
        for path in self._paths:
            self._shadows[path] = shadow = Shadow(self._calls[path, 0].pickled)
            yield
            yield from shadow.pieces()
            if self._parity != "off" and (complaint := shadow.complaint()):
                raise ValueError(complaint)
        begin([self._strategy], self._program)
        for path, optimizer in self._paths.items():
            update = installed(optimizer)
            if isinstance(update, FunctionalUpdate):
                update.adopt(self._shadows[path].update)
        self._shadows.clear()
        self.over = True

    def leave(self, reason: str) -> None:
        if not self.over:
            self.over, self._pieces = True, None
            while self._hooks:
                self._hooks.popitem()[1].remove()
            self._shadows.clear()
            self._program.eager_parts[self._strategy.name] = reason
            self._program.notes.append(f"{self._strategy.name}: runs eager: {reason}")
