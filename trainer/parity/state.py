"""State: what steps leave behind: weights and optimizer state, after the same gradients, and buffers.

Every arm's optimizers are given the gradients that the reference's took. Forward and backward round in the precision of
autocast; the update does in that of the weights, so that errors show here that would drown in the noise of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strategies.optimizer.formulas import formula_of
from strategies.optimizer.step import GenericUpdate, installed
from trainer.parity.comparison import TENSOR_FLOOR, gradient_of

EXACT, ROUGH = 5e-5, TENSOR_FLOOR
"""Relative tolerance of an update in single precision: by torch's formulas, or by unknown ones, which may work in a
lower precision inside. Where a beta of 0.999 is a tensor in single precision, 1 - beta alone is 1.3e-5 off."""
ROUNDINGS = 4
"""Roundings that the stored value itself may be off after each step."""

Differences = dict[str, Tensor]
"""``(tensors,)`` by kind: norms of the differences."""


@dataclass(slots=True)
class _Item:
    """A tensor that is compared."""

    name: str
    read: Callable[[], Tensor | None]
    kept: Tensor
    moved: float
    tolerance: float
    """Relative to ``moved``, how far the steps moved it."""
    rounding: float = field(init=False)

    def __post_init__(self) -> None:
        epsilon = torch.finfo(self.kept.dtype).eps if self.kept.dtype.is_floating_point else 0.0
        self.rounding = ROUNDINGS * epsilon * _size(self.kept)
        self.tolerance *= max(1.0, epsilon / 2.0**-23)
        if not self.moved:  # nothing but rounding
            self.moved, self.tolerance = _size(self.kept), 0.0


class StateComparison:
    """The state that the reference's steps left, and the distance of others from it.

    Args:
        copy: Copies a tensor to where there is room for it.
        unit: Rounding of forward and backward, relative, from which buffers are made.
        steps: How many steps are taken.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        copy: Callable[[Tensor], Tensor],
        unit: float,
        steps: int,
    ) -> None:
        self._optimizers, self._copy, self._unit, self._steps = optimizers, copy, unit, steps
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        self._buffers = dict(module.named_buffers())
        self._module = module
        self._starts = {name: buffer.clone() for name, buffer in self._buffers.items()}
        self._before: dict[Tensor, Tensor] = {}
        self._moved: dict[Tensor, float] = dict.fromkeys(self._names, 0.0)
        self._items: dict[str, list[_Item]] = {}
        self._taken: list[dict[Tensor, Tensor]] = []
        self._next = 0
        self.rough = any(_rough(optimizer) for optimizer in optimizers)
        """Whether an optimizer may work in a lower precision than that of the weights."""
        self.noise: list[Differences] = []

    @property
    def updated(self) -> int:
        """Parameters that the reference changed."""
        return sum(moved != 0 for moved in self._moved.values())

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Keep the gradients that the reference's optimizer is about to take; returns them."""
        found = {one: self._copy(gradient_of(one)) for one in parameters if one.grad is not None}
        self._taken.append(found)
        return found

    def begin(self) -> None:
        """Another arm begins."""
        self._next = 0

    @torch.no_grad()
    def give(self, changed: Callable[[list[Tensor]], None] | None = None) -> None:
        """Replace the gradients that an optimizer is about to take by those of the reference."""
        taken = self._taken[self._next] if self._next < len(self._taken) else {}
        self._next += 1
        given = []
        for parameter, gradient in taken.items():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad.layout is torch.strided:  # a sparse one is as it is, and its optimizer is not compiled
                parameter.grad.copy_(gradient)
                given.append(parameter.grad)
        if changed is not None:
            changed(given)

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """The reference's ``optimizer`` is about to step."""
        for parameter in _parameters(optimizer):
            if parameter in self._names:
                self._before[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """It has."""
        for parameter in _parameters(optimizer):
            if parameter in self._before:
                self._moved[parameter] += _size(parameter.detach() - self._before.pop(parameter))

    @torch.no_grad()
    def end_reference(self) -> None:
        """Keep what the reference's steps left."""
        update, rounding = ROUGH if self.rough else EXACT, max(TENSOR_FLOOR, 16 * self._unit)
        weights = [
            _Item(name, parameter.detach, self._copy(parameter), self._moved[parameter], update)
            for parameter, name in self._names.items()
        ]
        states = []
        for optimizer in self._optimizers:
            for parameter, state in list(optimizer.state.items()):
                for key, value in state.items() if parameter in self._names else ():
                    if isinstance(value, Tensor) and value.numel():
                        name, kept = f"{key} of {self._names[parameter]}", self._copy(value)
                        read = _reader(optimizer, parameter, key)
                        states.append(_Item(name, read, kept, _size(kept), update))
        buffers = []
        for name, buffer in self._module.named_buffers():
            before = self._starts.get(name)
            comparable = before is not None and before.shape == buffer.shape and buffer.numel()
            moved = _size(_apart(buffer, before)) if comparable and before is not None else _size(buffer)
            if buffer.numel():
                buffers.append(_Item(name, self._buffer(name), self._copy(buffer), moved, rounding))
        self._items = {"weights": weights, "optimizer_state": states, "buffers": buffers}

    @torch.no_grad()
    def end(self) -> Differences:
        """The distance of what another arm's steps left."""
        found = {}
        for kind, items in self._items.items():
            sizes = []
            for item in items:
                value = item.read()
                same = value is not None and value.shape == item.kept.shape
                sizes.append(_size(_apart(value, item.kept)) if same and value is not None else float("inf"))
            found[kind] = torch.tensor(sizes, dtype=torch.float64)
        return found

    def verdict(self, seen: Differences, multiple: float, kinds: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """What is beyond its tolerance, in words, and the figures, of ``kinds``; ``noise`` is what is allowed."""
        complaints, figures = [], {}
        for kind in kinds:
            items = self._items[kind]
            if not items:
                continue
            moved = torch.tensor([item.moved for item in items], dtype=torch.float64).clamp(min=1e-300)
            noise = torch.stack([one[kind] for one in self.noise]).amax(0) / moved
            noise = noise.clamp(min=float(noise.nanmedian()))
            own = torch.tensor(
                [item.tolerance + self._steps * item.rounding / max(item.moved, 1e-300) for item in items]
            )
            allowed, apart = torch.maximum(own, multiple * noise), seen[kind] / moved
            beyond = (apart / allowed).nan_to_num(nan=float("inf"), posinf=float("inf"))
            beyond[seen[kind] == 0] = 0.0
            worst = int(beyond.argmax())
            figures[kind] = {
                "worst": items[worst].name,
                "difference": float(apart[worst]),
                "tolerance": float(allowed[worst]),
                "tensors": len(items),
                "beyond": int((beyond > 1).sum()),
            }
            if beyond[worst] > 1:
                what = {"weights": "update of", "optimizer_state": "optimizer state", "buffers": "buffer"}[kind]
                complaints.append(
                    f"{what} {items[worst].name!r} {float(apart[worst]):.2e} of eager's away from it, tolerance "
                    f"{float(allowed[worst]):.2e} ({figures[kind]['beyond']} of {len(items)} are beyond theirs)"
                )
        return complaints, figures

    def _buffer(self, name: str) -> Callable[[], Tensor | None]:
        return lambda: dict(self._module.named_buffers()).get(name)


def _reader(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str) -> Callable[[], Tensor | None]:
    def read() -> Tensor | None:
        value = optimizer.state.get(parameter, {}).get(key)
        return value if isinstance(value, Tensor) else None

    return read


def _rough(optimizer: torch.optim.Optimizer) -> bool:
    on_device = any(group.get("capturable") for group in optimizer.param_groups)  # its bias corrections are single
    return formula_of(optimizer) is None or on_device or isinstance(installed(optimizer), GenericUpdate)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Their difference; none where both are the same infinity, or no number."""
    one, other = _wide(one), _wide(other).to(one.device)
    return torch.where((one == other) | (one.isnan() & other.isnan()), torch.zeros_like(one), one - other)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.double() if tensor.dtype.itemsize > 4 else tensor.float()


def _size(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor.detach())))
