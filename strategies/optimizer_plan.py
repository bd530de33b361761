"""The plan of a compiled optimizer step: which tensors are updated together, by which function, with which numbers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strategies.hyperparameters import DeviceScalar
from strategies.optimizer_formulas import Formula, Group
from strategies.optimizer_kernel import fresh_function

LARGEST_CHUNK = 32
"""Tensors of a chunk; a step launches about one kernel for each, and compiling it takes time in proportion."""

_dtype_of = operator.attrgetter("dtype")

Compiler = Callable[[Callable[..., None]], Callable[..., None]]


@dataclass(slots=True, eq=False)
class Clock:
    """Parameters of one group and device that have made the same number of steps, with the scalars of that step."""

    group: int
    steps: int
    scalars: list[DeviceScalar]


@dataclass(slots=True)
class Count:
    """The ``step`` tensors of many parameters as views of one, which is counted in their stead."""

    steps: Tensor
    version: int = 0

    def add(self) -> None:
        """Count one step."""
        self.steps.add_(1)
        self.version = self.steps._version

    @property
    def untouched(self) -> bool:
        """Whether nobody else has written to it, which is known without reading the device."""
        return self.steps._version == self.version


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Parameters that one call updates."""

    run: Callable[..., None]
    parameters: list[Tensor]
    names: tuple[str, ...]
    """Of the kinds of state."""
    states: list[list[Tensor]]
    """One list for each kind of state."""
    scalars: list[list[Tensor]]
    """One list for each clock among the parameters."""
    scale: Tensor
    """What gradients are multiplied by."""
    step: Any = None
    """The ``step`` tensor of the first parameter, where torch keeps one."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """Everything that stays the same from step to step."""

    parameters: list[Tensor]
    """Those that have a gradient, chunk by chunk."""
    idle: list[Tensor]
    """Those that have none."""
    layout: tuple[list[tuple[int, ...]], list[torch.dtype]]
    """Strides and types of the gradients."""
    groups: list[tuple[Any, ...]]
    """Of each parameter group: number of parameters and flags."""
    chunks: list[Chunk]
    clocks: list[Clock]
    counts: list[Count] = field(default_factory=list)


class Planner:
    """Makes plans for one optimizer and keeps from plan to plan what compiled code and CUDA graphs hold on to.

    Args:
        optimizer: One that ``formula`` stands for.
        formula: See ``optimizer_formulas.formula_of``.
        places: Path of the repeated block for parameters that lie in one.
        compiler: Compiles one function; called once for each kind of chunk.
        functions: What has been compiled already, by kind of chunk.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        formula: Formula,
        *,
        places: Mapping[Tensor, str],
        compiler: Compiler,
        functions: dict[tuple[Any, ...], Callable[..., None]],
    ) -> None:
        self.optimizer, self.formula, self.places, self.compiler = optimizer, formula, places, compiler
        self.functions = functions
        self.scales: dict[torch.device, Tensor] = {}
        """What gradients are multiplied by, on each device."""
        self._clock_of: dict[Tensor, Clock] = {}
        self._scalars: dict[tuple[Any, ...], list[DeviceScalar]] = {}

    def forget(self) -> None:
        """Believe the counts of steps in the optimizer's state, not those remembered."""
        self._clock_of.clear()

    def owns_state(self, plan: Plan) -> bool:
        """Whether the optimizer's state is still what the plan works on, and nobody else has counted steps."""
        for chunk in plan.chunks:
            state = self.optimizer.state.get(chunk.parameters[0], {})
            if any(state.get(name) is not kind[0] for name, kind in zip(chunk.names, chunk.states, strict=True)):
                return False
            if self.formula.counted and state.get("step") is not chunk.step:
                return False
        return all(count.untouched for count in plan.counts)

    def gradients_for(self, plan: Plan) -> list[Tensor] | None:
        """Gradients of the plan's parameters; None unless they and the groups are those that it was made for."""
        gradients: list[Any] = [parameter.grad for parameter in plan.parameters]
        try:
            # Of None: a gradient that was there is not.
            fits = _layout(gradients) == plan.layout
        except (AttributeError, TypeError):
            return None
        if (
            fits
            and all(parameter.grad is None for parameter in plan.idle)
            and [self._group(group) for group in self.optimizer.param_groups] == plan.groups
        ):
            return gradients
        return None

    def _group(self, group: Group) -> tuple[Any, ...]:
        return len(group["params"]), *_flags(self.formula, group).values()

    def make(self) -> Plan:
        """Plan for the gradients and groups as they are; creates the state that torch would create."""
        formula, groups = self.formula, self.optimizer.param_groups
        numbers = [numbers_of(group) for group in groups]
        clocks: dict[tuple[Any, ...], Clock] = {}
        chunks: dict[tuple[Any, ...], list[tuple[Tensor, Clock]]] = {}
        idle: list[Tensor] = []
        for index, group in enumerate(groups):
            flags = tuple(_flags(formula, group).items())
            for parameter in group["params"]:
                if parameter.grad is None:
                    idle.append(parameter)
                    continue
                steps = self._steps(parameter)
                self._create_state(parameter, group)
                precise = parameter.dtype == torch.float64
                key = (index, steps, parameter.device, precise)
                if key not in clocks:
                    values = formula.scalars(numbers[index], steps + 1)
                    clocks[key] = Clock(index, steps, self._device_scalars(key, values, list(clocks)))
                self._clock_of[parameter] = clocks[key]
                place = (self.places.get(parameter), parameter.device, parameter.dtype, flags, formula.states(group))
                chunks.setdefault(place, []).append((parameter, clocks[key]))
        made: list[Chunk] = []
        for (_, device, _, flags, states), members in chunks.items():
            for start in range(0, len(members), LARGEST_CHUNK):
                made.append(self._chunk(members[start : start + LARGEST_CHUNK], device, dict(flags), states))
        parameters = [parameter for chunk in made for parameter in chunk.parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        plan = Plan(
            parameters=parameters,
            idle=idle,
            layout=_layout(gradients),
            groups=[self._group(group) for group in groups],
            chunks=made,
            clocks=list(clocks.values()),
        )
        self._pack_steps(plan)
        return plan

    def _device_scalars(
        self, key: tuple[Any, ...], values: Sequence[float], others: list[tuple[Any, ...]]
    ) -> list[DeviceScalar]:
        """Scalars of a clock; the same tensors from plan to plan, because CUDA graphs hold on to them."""
        group, _, device, precise = key
        ordinal = sum((other[0], other[2], other[3]) == (group, device, precise) for other in others)
        place = (group, device, precise, ordinal)
        if place not in self._scalars:
            dtype = torch.float64 if precise else torch.float32
            self._scalars[place] = [DeviceScalar(value, device=device, dtype=dtype) for value in values]
        return self._scalars[place]

    def _chunk(
        self, members: Sequence[tuple[Tensor, Clock]], device: torch.device, flags: Group, names: tuple[str, ...]
    ) -> Chunk:
        parameters = [parameter for parameter, _ in members]
        clocks = list(dict.fromkeys(clock for _, clock in members))
        which = tuple(clocks.index(clock) for _, clock in members)
        states = [[self.optimizer.state[parameter][name] for parameter in parameters] for name in names]
        shapes = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype)
            for tensor in itertools.chain(parameters, *states, (parameter.grad for parameter in parameters))
        )
        kind = (device, which, tuple(flags.items()), names, shapes)
        if kind not in self.functions:
            function = fresh_function(self.formula, flags, which, name=f"{type(self.optimizer).__name__}_update")
            self.functions[kind] = self.compiler(function)
        if device not in self.scales:
            self.scales[device] = torch.ones((), device=device)
        return Chunk(
            run=self.functions[kind],
            parameters=parameters,
            names=names,
            states=states,
            scalars=[[scalar.tensor for scalar in clock.scalars] for clock in clocks],
            scale=self.scales[device],
        )

    def _steps(self, parameter: Tensor) -> int:
        if parameter in self._clock_of:
            return self._clock_of[parameter].steps
        state = self.optimizer.state.get(parameter, {})
        if self.formula.counted:
            return int(state["step"]) if "step" in state else 0
        return int(state.get("momentum_buffer") is not None)

    def _create_state(self, parameter: Tensor, group: Group) -> None:
        names = self.formula.states(group)
        if not names and not self.formula.counted:
            return  # torch makes no entry either
        state = self.optimizer.state[parameter]
        if self.formula.counted and "step" not in state:
            on_device = group.get("capturable") or group.get("fused")
            # As torch counts: in float32, unless the default type is float64 and the optimizer is not fused.
            precise = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            dtype = torch.float64 if precise else torch.float32
            state["step"] = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        for name in names:
            if state.get(name) is None:
                state[name] = torch.full_like(
                    parameter, self.formula.initial(name, group), memory_format=torch.preserve_format
                )

    def _pack_steps(self, plan: Plan) -> None:
        """Make the ``step`` tensors views of one, so that counting is one operation instead of one for each."""
        if not self.formula.counted:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in plan.parameters:
            step = self.optimizer.state[parameter]["step"]
            kinds.setdefault((step.device, step.dtype), []).append(parameter)
        for parameters in kinds.values():
            packed = torch.stack([self.optimizer.state[parameter]["step"] for parameter in parameters])
            for parameter, step in zip(parameters, packed.unbind(), strict=True):
                self.optimizer.state[parameter]["step"] = step
            plan.counts.append(Count(packed, packed._version))
        for chunk in plan.chunks:
            chunk.step = self.optimizer.state[chunk.parameters[0]]["step"]


def _layout(gradients: list[Tensor]) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    # By maps, which take half the time that a comprehension takes: this happens at every step.
    return list(map(Tensor.stride, gradients)), list(map(_dtype_of, gradients))


def _flags(formula: Formula, group: Group) -> Group:
    return {
        name: group["momentum"] != 0 if name == "has_momentum" else bool(group[name])
        for name in dict.fromkeys(("maximize", *formula.flags))
    }


def numbers_of(group: Group) -> Group:
    """The group with numbers for the tensors that live on the host."""
    # A learning rate may be a tensor on the host, which schedulers then fill.
    return {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items()}
