"""State: what steps leave behind: weights and optimizer state, after the same gradients, and buffers.

In the comparison before the first step, every arm's optimizers are given the gradients that the reference's took.
Forward and backward round in the precision of autocast; the update does in that of the weights, so that errors show
here that would drown in the noise of gradients. While training, a few parameters are stepped apart from the others.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from strategies import Program
from strategies.compose import eager
from trainer.guards.compare import TENSOR_FLOOR, UNITS, gradient_of, norms, perturb, worst_of
from trainer.telemetry.record import AuditDifference

EXACT, ROUGH = 5e-5, TENSOR_FLOOR
"""Relative tolerance of an update in single precision: by torch's formulas, or by unknown ones, which may work in a
lower precision inside. Where a beta of 0.999 is a tensor in single precision, 1 - beta alone is 1.3e-5 off."""
ROUNDINGS = 4
"""Roundings that the stored value itself may be off after each step."""

MAX_ELEMENTS = 1 << 20
"""Of one parameter of the sample."""
MAX_GROUPS = 8
"""Parameter groups that a sample is taken of, evenly spaced."""
SAMPLES = 4
"""Steps from copies one rounding off by which the tolerance is widened before a difference counts."""
MAX_TOLERANCE = 0.5
"""Relative to the update, beyond which a comparison says nothing: weights of few bits that hardly move."""
FORMS = ("foreach", "fused", "capturable", "differentiable")
SEED = 2**31 - 101

KINDS = {"weights": "update of", "optimizer_state": "optimizer state", "buffers": "buffer"}

Distances = dict[str, Tensor]
"""``(tensors,)`` by kind: norms of the differences."""
State = dict[str, Any]
"""What the optimizer keeps for one parameter, and its ``weight``."""


@dataclass(slots=True)
class _Item:
    """A tensor that is compared."""

    key: tuple[int, str]
    kept: Tensor
    moved: float
    tolerance: float
    """Relative to ``moved``, how far the steps moved it."""


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
        program: Program,
        copy: Callable[[Tensor], Tensor],
        unit: float,
        steps: int,
    ) -> None:
        self._optimizers, self._copy, self._unit, self._steps = optimizers, copy, unit, steps
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        self._module = module
        self._starts = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._before: dict[Tensor, Tensor] = {}
        self._moved: dict[str, float] = dict.fromkeys(self._names.values(), 0.0)
        self._items: dict[str, list[_Item]] = {}
        self._taken: list[dict[Tensor, Tensor]] = []
        self._next = 0
        exact = all(strategy.is_exact(program) for strategy in program.strategies)
        self.rough = not exact or any(map(_rough, optimizers))
        """Whether an optimizer may work in a lower precision than that of the weights."""
        self.noise: list[Distances] = []

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
    def give(self, changed: Callable[[list[Tensor]], None] | None = None) -> dict[Tensor, Tensor]:
        """Replace the gradients that an optimizer is about to take by those of the reference; returns these."""
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
        return taken

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """The reference's ``optimizer`` is about to step."""
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._before |= {parameter: parameter.detach().clone() for parameter in given if parameter in self._names}

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """The reference's ``optimizer`` has stepped."""
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        changed = [parameter for parameter in given if parameter in self._before]
        moved = _sizes([parameter.detach() - self._before.pop(parameter) for parameter in changed])
        for parameter, size in zip(changed, moved, strict=True):
            self._moved[self._names[parameter]] += size

    def _current(self) -> dict[str, dict[tuple[int, str], Tensor]]:
        """By kind, the tensors that are compared, by the number of their optimizer and their name."""
        return {
            "weights": {(0, name): parameter.detach() for parameter, name in self._names.items()},
            "optimizer_state": {
                (number, f"{key} of {self._names[parameter]}"): value
                for number, optimizer in enumerate(self._optimizers)
                for parameter, state in optimizer.state.items()
                if parameter in self._names
                for key, value in state.items()
                if isinstance(value, Tensor) and value.numel()
            },
            "buffers": {(0, name): buffer for name, buffer in self._module.named_buffers() if buffer.numel()},
        }

    @torch.no_grad()
    def end_reference(self) -> None:
        """Keep what the reference's steps left."""
        for kind, tensors in self._current().items():
            starts = [self._starts.get(name) if kind == "buffers" else None for _, name in tensors]
            changes = _sizes(
                tensor if start is None or start.shape != tensor.shape else _apart(tensor, start)
                for start, tensor in zip(starts, tensors.values(), strict=True)
            )
            found = zip(tensors.items(), changes, _sizes(tensors.values()), strict=True)
            self._items[kind] = [self._item(kind, key, tensor, *sizes) for (key, tensor), *sizes in found]

    def _item(self, kind: str, key: tuple[int, str], tensor: Tensor, change: float, size: float) -> _Item:
        moved = self._moved[key[1]] if kind == "weights" else change
        tolerance = max(TENSOR_FLOOR, 16 * self._unit) if kind == "buffers" else ROUGH if self.rough else EXACT
        epsilon = torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0
        tolerance *= max(1.0, epsilon / 2.0**-23)
        if not moved:  # nothing but rounding
            moved, tolerance = size, 0.0
        tolerance += self._steps * ROUNDINGS * epsilon * size / max(moved, 1e-300)
        return _Item(key, self._copy(tensor), moved, tolerance)

    @torch.no_grad()
    def end(self) -> Distances:
        """The distance of what another arm's steps left."""
        found, current = {}, self._current()
        for kind, items in self._items.items():
            values = [current[kind].get(item.key) for item in items]
            pairs = list(zip(values, (item.kept for item in items), strict=True))
            alike = [value is not None and value.shape == kept.shape for value, kept in pairs]
            sizes = iter(
                _sizes([_apart(one, kept) for one, kept in pairs if one is not None and one.shape == kept.shape])
            )
            found[kind] = torch.tensor([next(sizes) if same else math.inf for same in alike], dtype=torch.float64)
        return found

    def verdict(self, seen: Distances, multiple: float, kinds: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """What is beyond its tolerance, in words, and the figures, of ``kinds``; ``noise`` is what is allowed."""
        complaints: list[str] = []
        figures: dict[str, Any] = {}
        for kind in kinds:
            items = self._items[kind]
            if not items:
                continue
            moved = torch.tensor([item.moved for item in items], dtype=torch.float64).clamp(min=1e-300)
            noise = torch.stack([one[kind] for one in self.noise]).amax(0) / moved
            noise = noise.clamp(min=float(noise.nanmedian()))
            own = torch.tensor([item.tolerance for item in items])
            allowed, apart = torch.maximum(own, multiple * noise), seen[kind] / moved
            complaint, figures[kind] = worst_of(KINDS[kind], [item.key[1] for item in items], apart, allowed)
            complaints += complaint
        return complaints, figures


def _rough(optimizer: torch.optim.Optimizer) -> bool:
    on_device = any(group.get("capturable") for group in optimizer.param_groups)  # its bias corrections are single
    # unwrap: each class's step is decorated anew, the function inside tells whose mathematics it is.
    step = inspect.unwrap(type(optimizer).step)
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return on_device or step not in [inspect.unwrap(kind.step) for kind in known]


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Their difference; none where both are the same infinity, or no number."""
    one, other = _wide(one), _wide(other).to(one.device)
    return torch.where((one == other) | (one.isnan() & other.isnan()), torch.zeros_like(one), one - other)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else tensor.double() if tensor.dtype.itemsize > 4 else tensor.float()


def _sizes(tensors: Iterable[Tensor]) -> list[float]:
    return norms([_wide(tensor.detach()) for tensor in tensors]).tolist()


class UpdateSample:
    """Of each parameter group the smallest parameter and one of middle size.

    Args:
        names: Name of each parameter, by its identity.
        multiple: How many times the noise of rounding a difference may be.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], program: Program, *, multiple: float) -> None:
        self._optimizer, self._names, self._program, self._multiple = optimizer, names, program, multiple
        with eager(program):
            self.reason = _why_not(optimizer)
        """Why nothing is compared, or None."""
        self.parameters: list[nn.Parameter] = [] if self.reason else list(_chosen(optimizer))
        """The sample."""
        self._before: list[State] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy weights and state, as they are before the step."""
        self._before = [_copied(self._now(parameter)) for parameter in self.parameters]

    def _now(self, parameter: nn.Parameter) -> State:
        return {"weight": parameter.detach(), **self._optimizer.state.get(parameter, {})}

    @torch.no_grad()
    def compare(self, gradients: Sequence[Tensor | None]) -> list[AuditDifference]:
        """Compare weights and state after the step; ``gradients`` are the unscaled ones that it was given. Nothing is
        left where a comparison would say nothing. Raises what torch's own step raises."""
        before, self._before = self._before, []
        used = [
            None if gradient is None or gradient.layout is not torch.strided else self._scaled(gradient)
            for gradient in gradients
        ]
        expected = self._stepped(before, used)
        found = []
        noise: list[list[State]] = []
        for place, parameter in enumerate(self.parameters):
            now = self._now(parameter)
            for name, reference in {} if used[place] is None else expected[place].items():
                if not isinstance(reference, Tensor) or not isinstance(now.get(name), Tensor):
                    continue
                if not math.isfinite(_norm(reference)):
                    continue  # a training that has diverged under eager too
                scale, tolerance = self._allowed(reference, before[place].get(name))
                difference = _norm(now[name].to(reference.device) - reference) / scale
                if not difference <= tolerance:
                    noise = noise or [self._one_rounding_off(before, used, seed) for seed in range(SAMPLES)]
                    widest = max(_norm(one[place][name] - reference) / scale for one in noise)
                    tolerance = max(tolerance, self._multiple * widest)
                if tolerance <= MAX_TOLERANCE:
                    what = self._names[id(parameter)] + ("" if name == "weight" else f" ({name})")
                    found.append(AuditDifference(what=what, difference=difference, tolerance=tolerance))
        return found

    def _scaled(self, gradient: Tensor) -> Tensor:
        # Clipping may have happened within the compiled update, which leaves the gradients as they were.
        by = [strategy.gradient_scale(self._optimizer, gradient.device) for strategy in self._program.strategies]
        return gradient * math.prod(by)

    def _stepped(self, before: list[State], gradients: Sequence[Tensor | None]) -> list[State]:
        """Weights and states after a step of torch's own, tensor by tensor."""
        optimizer = self._optimizer
        states = [_copied(held) for held in before]
        weights: list[Tensor] = [held.pop("weight") for held in states]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            members = [weights[places[id(one)]] for one in group["params"] if id(one) in places]
            if members:
                plain = {form: False for form in FORMS if form in group}
                numbers = {name: float(one) if isinstance(one, Tensor) else one for name, one in group.items()}
                groups.append({**numbers, **plain, "params": members})
        other = object.__new__(type(optimizer))
        hidden = ("step", "grad_scale", "found_inf")
        vars(other).update({name: value for name, value in vars(optimizer).items() if name not in hidden})
        other.param_groups = groups
        kept = {weight: held for weight, held in zip(weights, states, strict=True) if held}
        other.state = state = defaultdict(dict, kept)
        inspect.unwrap(type(optimizer).step)(other)
        return [{"weight": weight, **state[weight]} for weight in weights]

    def _one_rounding_off(self, before: list[State], gradients: Sequence[Tensor | None], seed: int) -> list[State]:
        moved = [_copied(held) for held in before]
        given = [None if gradient is None else gradient.clone() for gradient in gradients]
        for held in moved:
            tensors = [value for name, value in held.items() if _is_floating(value) and name != "step"]
            perturb(tensors, self._unit(held["weight"]), SEED + seed)
        for gradient in given:
            if gradient is not None:
                perturb([gradient], max(self._unit(gradient), self._own_unit), SEED + 50 + seed)
        return self._stepped(moved, given)

    def _allowed(self, reference: Tensor, start: Any) -> tuple[float, float]:
        """What differences are relative to, and how large they may be at least: rounding, of the values that are
        stored and of the sums that lead to them."""
        size = _norm(reference)
        change = _norm(reference - start.to(reference.device)) if isinstance(start, Tensor) else size
        stored = 8 * self._unit(reference)
        if not change:
            return size or 1.0, stored
        return change, max(TENSOR_FLOOR, 16 * max(self._unit(reference), self._own_unit)) + stored * size / change

    @property
    def _own_unit(self) -> float:
        # Muon computes in bfloat16 whatever the weights are.
        return UNITS["bf16-true"] if isinstance(self._optimizer, getattr(torch.optim, "Muon", ())) else 0.0

    @staticmethod
    def _unit(tensor: Tensor) -> float:
        return torch.finfo(tensor.dtype).eps / 2 if tensor.is_floating_point() else 0.0


def _why_not(optimizer: Any) -> str | None:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is not an optimizer of torch.optim, it may look at all parameters at once"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS looks at all parameters at once"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"the step of {kind.__name__} was replaced"
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    ):
        return f"hooks run within the step of {kind.__name__}"
    return None


def _chosen(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    groups = optimizer.param_groups
    for group in groups[:: max(1, -(-len(groups) // MAX_GROUPS))]:
        made = [one for one in group["params"] if one.requires_grad and not is_lazy(one)]
        fitting = [one for one in made if 0 < one.numel() <= MAX_ELEMENTS]
        ordered = sorted((one for one in fitting if one.is_floating_point()), key=Tensor.numel)
        chosen = {id(one): one for one in (*ordered[:1], *ordered[len(ordered) // 2 :][:1])}
        yield from chosen.values()


def _copied(state: Mapping[str, Any]) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in state.items()}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _norm(tensor: Tensor) -> float:
    return float(norms([tensor.double() if tensor.device.type != "mps" else tensor.float()]))
