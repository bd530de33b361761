"""A sample of an optimizer's update, compared with what torch's own step makes of copies of it.

The step is elementwise, or a matter of one tensor, in every optimizer of ``torch.optim`` but LBFGS, so that a few
parameters can be stepped apart from the others.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from strategies.optimizer_plan import numbers_of
from strategies.optimizer_step import ATTRIBUTE, UNSCALES, installed
from strategies.optimizer_update import FunctionalUpdate
from trainer.parity.comparison import TENSOR_FLOOR, UNITS, perturb
from trainer.telemetry.record import AuditDifference

MOST_ELEMENTS = 1 << 20
"""Of one parameter of the sample."""
MOST_GROUPS = 8
"""Parameter groups that a sample is taken of, evenly spaced."""
SAMPLES = 4
"""Steps from copies one rounding off by which the tolerance is widened before a difference counts."""
LARGEST_TOLERANCE = 0.5
"""Relative to the update, beyond which a comparison says nothing: weights of few bits that hardly move."""
FORMS = ("foreach", "fused", "capturable", "differentiable")
SEED = 2**31 - 101

State = dict[str, Any]


class UpdateSample:
    """Of each parameter group the smallest parameter and one of middle size.

    Args:
        names: Name of each parameter, by its identity.
        multiple: How many times the noise of rounding a difference may be.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], *, multiple: float) -> None:
        self._optimizer, self._names, self._multiple = optimizer, names, multiple
        self.reason = _why_not(optimizer)
        """Why nothing is compared, or None."""
        self.parameters: list[nn.Parameter] = [] if self.reason else list(_chosen(optimizer))
        """The sample."""
        self._before: list[tuple[Tensor, State]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy weights and state, as they are before the step."""
        states = [self._optimizer.state.get(parameter, {}) for parameter in self.parameters]
        self._before = [
            (parameter.detach().clone(), _copied(state))
            for parameter, state in zip(self.parameters, states, strict=True)
        ]

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
        noise: list[list[tuple[Tensor, State]]] = []
        for place, parameter in enumerate(self.parameters):
            if used[place] is None:
                continue
            now = {"weight": parameter.detach(), **self._optimizer.state.get(parameter, {})}
            then, start = _named(expected[place]), _named(before[place])
            for name, reference in then.items():
                if not isinstance(reference, Tensor) or not isinstance(now.get(name), Tensor):
                    continue
                if not math.isfinite(_norm(reference)):
                    continue  # a training that has diverged under eager too
                began = start.get(name)
                scale, tolerance = self._allowed(reference, began if isinstance(began, Tensor) else None)
                difference = _norm(now[name].to(reference.device) - reference) / scale
                if not difference <= tolerance:
                    noise = noise or [self._one_rounding_off(before, used, seed) for seed in range(SAMPLES)]
                    widest = max(_norm(_named(one[place])[name] - reference) / scale for one in noise)
                    tolerance = max(tolerance, self._multiple * widest)
                if tolerance <= LARGEST_TOLERANCE:
                    what = self._names[id(parameter)] + ("" if name == "weight" else f" ({name})")
                    found.append(AuditDifference(what=what, difference=difference, tolerance=tolerance))
        return found

    def _scaled(self, gradient: Tensor) -> Tensor:
        update = installed(self._optimizer)
        # Clipping may have happened within the compiled update, which leaves the gradients as they were.
        return gradient * update.scale_on(gradient.device) if isinstance(update, FunctionalUpdate) else gradient.clone()

    def _stepped(self, before: list[tuple[Tensor, State]], gradients: Sequence[Tensor | None]) -> list[Any]:
        """Weights and states after a step of torch's own, tensor by tensor."""
        optimizer = self._optimizer
        copies = [weight.clone() for weight, _ in before]
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        groups: list[dict[str, Any]] = []
        state: defaultdict[Tensor, State] = defaultdict(dict)
        for mine, gradient, (_, held) in zip(copies, gradients, before, strict=True):
            mine.grad = gradient
            if held:
                state[mine] = _copied(held)
        for group in optimizer.param_groups:
            members = [copies[places[id(one)]] for one in group["params"] if id(one) in places]
            if members:
                plain = {form: False for form in FORMS if form in group}
                groups.append({**numbers_of(group), **plain, "params": members})
        twin = object.__new__(type(optimizer))
        hidden = ("step", ATTRIBUTE, UNSCALES, "grad_scale", "found_inf")
        vars(twin).update({name: value for name, value in vars(optimizer).items() if name not in hidden})
        twin.param_groups, twin.state = groups, state
        inspect.unwrap(type(optimizer).step)(twin)
        return [(mine, state[mine]) for mine in copies]

    def _one_rounding_off(
        self, before: list[tuple[Tensor, State]], gradients: Sequence[Tensor | None], seed: int
    ) -> list[Any]:
        moved = [(weight.clone(), _copied(state)) for weight, state in before]
        given = [None if gradient is None else gradient.clone() for gradient in gradients]
        for weight, state in moved:
            tensors = [value for name, value in state.items() if _is_floating(value) and name != "step"]
            perturb([weight, *tensors], self._unit(weight), SEED + seed)
        for gradient in given:
            if gradient is not None:
                perturb([gradient], max(self._unit(gradient), self._own_unit), SEED + 50 + seed)
        return self._stepped(moved, given)

    def _allowed(self, reference: Tensor, start: Tensor | None) -> tuple[float, float]:
        """What differences are relative to, and how large they may be at least: rounding, of the values that are
        stored and of the sums that lead to them."""
        size = _norm(reference)
        change = size if start is None else _norm(reference - start.to(reference.device))
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
    for group in groups[:: max(1, -(-len(groups) // MOST_GROUPS))]:
        made = [one for one in group["params"] if one.requires_grad and not is_lazy(one)]
        fitting = [one for one in made if 0 < one.numel() <= MOST_ELEMENTS]
        ordered = sorted((one for one in fitting if one.is_floating_point()), key=Tensor.numel)
        chosen = {id(one): one for one in (*ordered[:1], *ordered[len(ordered) // 2 :][:1])}
        yield from chosen.values()


def _copied(state: Mapping[str, Any]) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in state.items()}


def _named(kept: tuple[Tensor, State]) -> dict[str, Any]:
    weight, state = kept
    return {"weight": weight, **state}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double() if tensor.device.type != "mps" else tensor.float()))
