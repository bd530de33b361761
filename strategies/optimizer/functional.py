"""The step of one of torch's optimizers as a few calls of compiled functions that are never compiled again.

Parameters are cut into chunks, one for each repeated block of the module and a few for the rest. Chunks of the same
shapes share one compiled function, so that compile time does not grow with the number of blocks. What may change from
step to step (learning rate, betas, weight decay, count of steps, clipping) is read from 0-D device tensors. The host
computes it in double precision, as torch's own uncompiled optimizers do. What may not (shapes, strides, flags) is
compared on the host, which is why the compiled functions need no guards.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from strategies.optimizer.step import DeviceScalar, Update

MAX_CHUNK = 32
"""Tensors of a chunk; a step launches about one kernel for each, and compiling it takes time in proportion."""

Compiler = Callable[[Callable[..., None]], Callable[..., None]]
Group = dict[str, Any]

# Lists of tensors that one operator works on together: Inductor makes one kernel of a chain of such operators.
# https://docs.pytorch.org/tutorials/recipes/compiling_optimizer.html
Each = list[Tensor] | tuple[Tensor, ...]
add, sub, mul, div = torch._foreach_add, torch._foreach_sub, torch._foreach_mul, torch._foreach_div
sqrt, maximum = torch._foreach_sqrt, torch._foreach_maximum
_serial = itertools.count()  # of compiled functions, a part of their names


class Formula:
    """One optimizer. A subclass has ``flags`` and three methods.

    ``states(group)``: names of the state tensors that have their parameter's shape; all begin as zeros.
    ``scalars(group, step)``: numbers of the step with this number (1 is the first), in double precision.
    ``update(flags, p, g, states, s)``: new parameters and states; ``g`` is the gradient, ``s`` the scalars.
    """

    flags: ClassVar[tuple[str, ...]]
    """Entries of a parameter group that decide which operators there are; whoever changes one recompiles."""
    counted: ClassVar[bool] = True
    """Whether torch keeps a ``step`` tensor in the state of each parameter."""
    states: Callable[[Group], tuple[str, ...]]
    scalars: Callable[[Group, int], tuple[float, ...]]
    update: Callable[..., tuple[Each, list[Each]]]

    def steps_in(self, state: Group) -> int:
        """Steps made with the ``state`` of a parameter; of SGD, whether one was, which is all that matters."""
        return int(state.get("step", 0) if self.counted else state.get("momentum_buffer") is not None)

    def create_state(self, state: Group, parameter: Tensor, group: Group) -> None:
        """Fill in what torch would create in the first step."""
        if self.counted and "step" not in state:
            on_device = group.get("capturable") or group.get("fused")
            # As torch counts: in float32, unless the default type is float64 and the optimizer is not fused.
            precise = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            dtype = torch.float64 if precise else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        for name in self.states(group):
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def flags_of(self, group: Group) -> Group:
        return {name: group["momentum"] != 0 if name == "has_momentum" else bool(group[name]) for name in self.flags}


class Adam(Formula):
    """Adam and AdamW: https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html."""

    flags = ("maximize", "amsgrad", "decoupled_weight_decay")

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        if group["decoupled_weight_decay"]:
            decay = 1 - lr * decay  # the share of the parameter that is kept
        size, correction = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        return decay, 1 - beta1, beta2, 1 - beta2, size, correction, group["eps"]

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        decay, grown1, kept2, grown2, size, correction, eps = s
        if flags["decoupled_weight_decay"]:
            p = mul(p, decay)
        else:
            g = add(g, mul(p, decay))
        mean = add(states[0], mul(sub(g, states[0]), grown1))
        square = add(mul(states[1], kept2), mul(mul(g, g), grown2))
        new: list[Each] = [mean, square]
        if flags["amsgrad"]:
            square = maximum(states[2], square)
            new.append(square)
        return sub(p, mul(div(mean, add(div(sqrt(square), correction), eps)), size)), new


class SGD(Formula):
    """Stochastic gradient descent with momentum: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html."""

    flags = ("maximize", "nesterov", "has_momentum")
    counted = False

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, group: Group, step: int) -> tuple[float, ...]:
        grown = 1.0 if step == 1 else 1 - group["dampening"]  # dampening leaves the first gradient alone
        return group["weight_decay"], group["lr"], group["momentum"], grown

    def update(self, flags: Group, p: Each, g: Each, states: list[Each], s: list[Each]) -> tuple[Each, list[Each]]:
        decay, lr, momentum, grown = s
        g = add(g, mul(p, decay))
        if not flags["has_momentum"]:
            return sub(p, mul(g, lr)), []
        buffer = add(mul(states[0], momentum), mul(g, grown))
        return sub(p, mul(add(g, mul(buffer, momentum)) if flags["nesterov"] else buffer, lr)), [buffer]


def formula_of(optimizer: torch.optim.Optimizer) -> Formula | None:
    """The formula of one of torch's optimizers, or None; a subclass with a step of its own has none."""
    # unwrap: each class's step is decorated anew, the function inside tells whose mathematics it is.
    step = inspect.unwrap(type(optimizer).step)
    formulas = ((torch.optim.Adam, Adam), (torch.optim.AdamW, Adam), (torch.optim.SGD, SGD))
    return next((formula() for kind, formula in formulas if inspect.unwrap(kind.step) is step), None)


def fresh_function(formula: Formula, flags: Group, which: tuple[int, ...], *, name: str) -> Callable[..., None]:
    """What updates the tensors of one kind of chunk, the i-th with the scalars of clock ``which[i]``.

    It has a code object of its own, by which Dynamo keeps compiled code. Else kinds of chunks would be recompiles of
    each other, and count against its limit. (``isolate_recompiles`` of torch 2.13 does so for wrappers.)
    """

    def update(params: Each, grads: Each, states: list[Each], scalars: list[list[Tensor]], scale: Tensor) -> None:
        g: Each = mul(grads, [scale] * len(grads))
        if flags["maximize"]:
            g = torch._foreach_neg(g)
        each_scalar = [[scalars[clock][number] for clock in which] for number in range(len(scalars[0]))]
        new_parameters, new = formula.update(flags, params, g, states, each_scalar)
        # What is computed from most comes first: Inductor gives a buffer of its own to what still has to read a tensor
        # that is overwritten, and copies it later.
        # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/graph.py (GraphLowering.mark_buffer_mutated)
        torch._foreach_copy_(params, new_parameters)
        for before, after in zip(reversed(states), reversed(new), strict=True):
            torch._foreach_copy_(before, after)

    code = update.__code__.replace(co_name=f"{name}_{next(_serial)}")
    return types.FunctionType(code, globals(), code.co_name, None, update.__closure__)


@dataclass(slots=True, eq=False)
class Clock:
    """Parameters of one group and device that have made the same number of steps, with the scalars of that step."""

    group: int
    steps: int
    scalars: list[DeviceScalar]


@dataclass(slots=True, kw_only=True)
class Plan:
    """Everything that stays the same from step to step."""

    chunks: list[tuple[Callable[..., None], list[Tensor], tuple[Any, ...]]]
    """What updates the parameters of a chunk in one call, these, and what it takes beside them and their gradients."""
    signature: list[Any]
    """Gradients and flags that it was made for, see ``FunctionalUpdate._signature``."""
    clocks: list[Clock]
    entries: list[Any]
    """The optimizer's state of each parameter."""
    held: list[tuple[dict[str, Any], str, Tensor]]
    """State tensors, by entry and name: a training may reset a single parameter's."""
    counts: list[Tensor]
    """The ``step`` tensors of many parameters are views of one, which is counted in their stead."""
    versions: list[int]
    """Of ``counts`` after the last count: another one means that somebody else has written to it."""

    def count(self, *, on_host: bool) -> None:
        for place, steps in enumerate(self.counts):
            if steps.is_cpu is on_host:
                steps.add_(1)
                self.versions[place] = steps._version


class FunctionalUpdate(Update):
    """Updates ``optimizer``'s parameters and states in place, exactly where torch's own step would.

    Args:
        optimizer: One that ``formula`` stands for.
        formula: See ``formula_of``.
        places: Path of the repeated block for parameters that lie in one.
        compiler: Compiles one function; called once for each kind of chunk.
    """

    form = "functional"
    clips = exact = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, formula: Formula, *, places: Mapping[Tensor, str], compiler: Compiler
    ) -> None:
        self.optimizer = optimizer
        self._formula, self._places, self._compiler = formula, places, compiler
        self._plan: Plan | None = None
        self._plans = 0
        self._scaled = False
        # From plan to plan:
        self._functions: dict[tuple[Any, ...], Callable[..., None]] = {}  # by kind of chunk
        self._scales: dict[torch.device, Tensor] = {}  # what gradients are multiplied by
        self._clock_of: dict[Tensor, Clock] = {}  # empty: the counts in the optimizer's state are believed

    def __call__(self) -> None:
        """One step; does not wait for the device, unless torch cannot know the count of loaded steps otherwise."""
        if self._plan is not None and not self._owns_state(self._plan):
            self.forget()
        plan = self._plan
        if plan is None or self._signature() != plan.signature:
            self._plan = plan = self._make()
            self._plans += 1
        max_norm, self.max_norm = self.max_norm, None
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self.count()
        if max_norm is None and self._scaled:  # by an earlier step that was clipped
            for own in self._scales.values():
                own.fill_(1.0)
        self._scaled = max_norm is not None
        # The device's part, from gradients to parameters and states; may be captured in a CUDA graph.
        gradients: list[list[Any]] = [[parameter.grad for parameter in members] for _, members, _ in plan.chunks]
        if max_norm is not None and gradients:
            # As torch.nn.utils.clip_grad_norm_ does it, but for writing the gradients once more.
            norm = torch.nn.utils.get_total_norm(list(itertools.chain(*gradients)))
            for own in self._scales.values():
                own.copy_(torch.clamp(max_norm / (norm + 1e-6), max=1.0), non_blocking=True)
        plan.count(on_host=False)
        for (run, parameters, others), each in zip(plan.chunks, gradients, strict=True):
            run(parameters, each, *others)

    def pieces(self) -> list[Callable[[], None]]:
        """The next step as calls of one compiled function each, without clipping."""
        self._plan = plan = self._make()
        self.count()
        return [
            functools.partial(run, members, [one.grad for one in members], *others)
            for run, members, others in plan.chunks
        ]

    def adopt(self, other: FunctionalUpdate) -> None:
        """Go by what ``other``, of parameters of the same shapes, has compiled."""
        self._functions |= other._functions
        self.adopted = True

    def count(self) -> None:
        """Count the step and bring the device's scalars up to date: the host's part, before each replay of a graph."""
        plan = self._plan
        assert plan is not None, "a step was made"
        groups = [_numbers_of(group) for group in self.optimizer.param_groups]
        for clock in plan.clocks:
            clock.steps += 1
            values = self._formula.scalars(groups[clock.group], clock.steps)
            for scalar, value in zip(clock.scalars, values, strict=True):
                scalar.write(value)
        plan.count(on_host=True)

    def constants(self) -> int:
        """Number of the plan that the next step goes by: another one as soon as the state is not the one planned for.
        A CUDA graph captured under one plan works on other tensors than the next."""
        return self._plans + int(self._plan is None or not self._owns_state(self._plan))

    def take(self) -> Callable[[], None]:
        """Remember the counts of steps. Where the state tensors are then still those of the plan, it stays, and with it
        what was captured by it; else the next step plans anew."""
        plan = self._plan
        counted = [] if plan is None else [clock.steps for clock in plan.clocks]

        def put_back() -> None:
            if plan is None or plan is not self._plan or not self._holds_state(plan):
                self.forget()
                return
            for clock, steps in zip(plan.clocks, counted, strict=True):
                clock.steps = steps
            plan.versions = [steps._version for steps in plan.counts]

        return put_back

    def forget(self) -> None:
        """Plan anew at the next step, from the optimizer's own state."""
        self._plan = None
        self._clock_of.clear()

    def scale_on(self, device: torch.device) -> Tensor | float:
        return self._scales.get(device, 1.0)

    def facts(self) -> dict[str, Any]:
        chunks = [] if self._plan is None else self._plan.chunks
        tensors = sum(len(members) for _, members, _ in chunks)
        return {"form": self.form, "tensors": tensors, "chunks": len(chunks), "graphs": len(self._functions)}

    def _owns_state(self, plan: Plan) -> bool:
        return self._holds_state(plan) and [steps._version for steps in plan.counts] == plan.versions

    def _holds_state(self, plan: Plan) -> bool:
        """Whether the optimizer's state is still in the tensors that the plan works on: loading one makes others."""
        now = list(self.optimizer.state.values())
        same = len(now) == len(plan.entries) and all(map(operator.is_, now, plan.entries))
        return same and all(entry.get(name) is tensor for entry, name, tensor in plan.held)

    def _signature(self) -> list[Any]:
        """Of each group: its flags, and strides and type of each gradient, or None. Another one needs another plan."""
        return [
            (
                self._formula.flags_of(group),
                [None if (g := parameter.grad) is None else (g.stride(), g.dtype) for parameter in group["params"]],
            )
            for group in self.optimizer.param_groups
        ]

    def _make(self) -> Plan:
        """Plan for the gradients and groups as they are; creates the state that torch would create."""
        formula, state = self._formula, self.optimizer.state
        clocks: dict[tuple[Any, ...], Clock] = {}
        places: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for index, group in enumerate(self.optimizer.param_groups):
            flags, names = tuple(formula.flags_of(group).items()), formula.states(group)
            for parameter in (each for each in group["params"] if each.grad is not None):
                known = self._clock_of.get(parameter)
                steps = formula.steps_in(state.get(parameter, {})) if known is None else known.steps
                if names or formula.counted:  # else torch makes no entry either
                    formula.create_state(state[parameter], parameter, group)
                device = parameter.device
                precision = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                kind = (index, device, precision, steps)
                if kind not in clocks:
                    values = formula.scalars(_numbers_of(group), steps + 1)
                    scalars = [DeviceScalar(one, device=device, dtype=precision) for one in values]
                    clocks[kind] = Clock(index, steps, scalars)
                self._clock_of[parameter] = clocks[kind]
                places[self._places.get(parameter), device, parameter.dtype, flags, names].append(parameter)
        cut = [
            (members[start : start + MAX_CHUNK], dict(flags), names)
            for (_, _, _, flags, names), members in places.items()
            for start in range(0, len(members), MAX_CHUNK)
        ]
        counts = self._pack_steps([parameter for members, _, _ in cut for parameter in members])
        return Plan(
            chunks=[self._chunk(*each) for each in cut],
            signature=self._signature(),
            clocks=list(clocks.values()),
            entries=list(state.values()),
            held=[
                (state[member], name, state[member][name])
                for members, _, names in cut
                for member in members
                for name in (*names, *(["step"] if formula.counted else []))
            ],
            counts=counts,
            versions=[steps._version for steps in counts],
        )

    def _chunk(self, parameters: list[Tensor], flags: Group, names: tuple[str, ...]) -> tuple[Any, ...]:
        device = parameters[0].device
        own = [self._clock_of[parameter] for parameter in parameters]
        clocks = list(dict.fromkeys(own))
        which = tuple(map(clocks.index, own))
        states = [[self.optimizer.state[parameter][name] for parameter in parameters] for name in names]
        shapes = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype)
            for tensor in itertools.chain(parameters, *states, (parameter.grad for parameter in parameters))
        )
        kind = (device, which, tuple(flags.items()), names, shapes)
        if kind not in self._functions:
            name = f"{type(self.optimizer).__name__}_update"
            self._functions[kind] = self._compiler(fresh_function(self._formula, flags, which, name=name))
        if device not in self._scales:
            self._scales[device] = torch.ones((), device=device)
        scalars = [[scalar.tensor for scalar in clock.scalars] for clock in clocks]
        return self._functions[kind], parameters, (states, scalars, self._scales[device])

    def _pack_steps(self, parameters: list[Tensor]) -> list[Tensor]:
        """Make the ``step`` tensors views of one, so that counting is one operation instead of one for each."""
        kinds: defaultdict[tuple[torch.device, torch.dtype], list[dict[str, Any]]] = defaultdict(list)
        for state in (self.optimizer.state[parameter] for parameter in parameters if self._formula.counted):
            kinds[state["step"].device, state["step"].dtype].append(state)
        packed = [torch.stack([state["step"] for state in alike]) for alike in kinds.values()]
        for alike, steps in zip(kinds.values(), packed, strict=True):
            for state, step in zip(alike, steps.unbind(), strict=True):
                state["step"] = step
        return packed


def _numbers_of(group: Group) -> Group:
    """The group with numbers for tensors on the host: a learning rate may be one, which schedulers then fill."""
    return {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items()}
