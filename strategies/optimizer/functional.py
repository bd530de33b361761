"""The step of one of torch's optimizers as a few calls of compiled functions that are never compiled again.

Parameters are cut into chunks, one for each repeated block of the module and a few for the rest. Chunks of the same
shapes share one compiled function, so that compile time does not grow with the number of blocks. What may change from
step to step (learning rate, betas, weight decay, count of steps, clipping) is read from 0-D device tensors; what may
not (shapes, strides, flags) is compared on the host, which is why the compiled functions need no guards.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.optimizer.formulas import Formula, Group, fresh_function, numbers_of
from strategies.optimizer.step import DeviceScalar, Update

MAX_CHUNK = 32
"""Tensors of a chunk; a step launches about one kernel for each, and compiling it takes time in proportion."""

_dtype_of = operator.attrgetter("dtype")

Compiler = Callable[[Callable[..., None]], Callable[..., None]]


class FunctionalUpdate(Update):
    """Updates ``optimizer``'s parameters and states in place, exactly where torch's own step would.

    Args:
        optimizer: One that ``formula`` stands for.
        formula: See ``formulas.formula_of``.
        places: Path of the repeated block for parameters that lie in one.
        compiler: Compiles one function; called once for each kind of chunk.
    """

    form = "functional"
    clips = exact = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        formula: Formula,
        *,
        places: Mapping[Tensor, str],
        compiler: Compiler,
    ) -> None:
        self.optimizer = optimizer
        self._formula = formula
        self._planner = Planner(optimizer, formula, places, compiler)
        self._plan: Plan | None = None
        self._plans = 0
        self._scaled = False
        # Loading replaces every state tensor: plan anew, and believe the loaded counts.
        self._loaded = optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    # ---- a step ----------------------------------------------------------------------------------------------------

    def __call__(self) -> None:
        """One step; does not wait for the device, unless torch cannot know the count of loaded steps otherwise."""
        plan, gradients = self._prepare()
        max_norm, self.max_norm = self.max_norm, None
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self.refresh()
        if max_norm is None and self._scaled:  # by an earlier step that was clipped
            for own in self._planner.scales.values():
                own.fill_(1.0)
        self._scaled = max_norm is not None
        self._launch(plan, gradients, max_norm)

    def _prepare(self) -> tuple[Plan, list[Tensor]]:
        """The plan, a new one unless gradients and groups are those it was made for, and the gradients."""
        if self._plan is not None and not self._planner.owns_state(self._plan):
            self.forget()
        gradients = None if self._plan is None else self._planner.gradients_for(self._plan)
        if gradients is None:
            self._plan = self._planner.make()
            self._plans += 1
            gradients = [parameter.grad for parameter in self._plan.parameters if parameter.grad is not None]
        assert self._plan is not None
        return self._plan, gradients

    def refresh(self) -> None:
        """Count the step and bring the device's scalars up to date: the host's part, before each replay of a graph."""
        plan = self._plan
        assert plan is not None, "a step was made"
        groups = [numbers_of(group) for group in self.optimizer.param_groups]
        for clock in plan.clocks:
            clock.steps += 1
            for scalar, value in zip(
                clock.scalars, self._formula.scalars(groups[clock.group], clock.steps), strict=True
            ):
                scalar.write(value)
        for count in plan.counts:
            if count.steps.is_cpu:
                count.add()

    def _launch(self, plan: Plan, gradients: list[Tensor], max_norm: float | None) -> None:
        """The device's part: gradients to parameters and states. May be captured in a CUDA graph."""
        if max_norm is not None and gradients:
            # As torch.nn.utils.clip_grad_norm_ does it, but for writing the gradients once more.
            scale = torch.clamp(max_norm / (torch.nn.utils.get_total_norm(gradients) + 1e-6), max=1.0)
            for own in self._planner.scales.values():
                own.copy_(scale, non_blocking=True)
        for count in plan.counts:
            if not count.steps.is_cpu:
                count.add()
        begin = 0
        for chunk in plan.chunks:
            end = begin + len(chunk.parameters)
            chunk.run(chunk.parameters, gradients[begin:end], chunk.states, chunk.scalars, chunk.scale)
            begin = end

    # ---- between steps ---------------------------------------------------------------------------------------------

    @property
    def plan_number(self) -> int:
        """Number of the plan that the next step goes by: another one as soon as the state is not the one planned for.

        A CUDA graph captured under one plan must not be replayed under another.
        """
        stale = self._plan is None or not self._planner.owns_state(self._plan)
        return self._plans + int(stale)

    def take(self) -> Callable[[], None]:
        """Remember the counts of steps. Where the state tensors are then still those of the plan, it stays, and with it
        what was captured by it; else the next step plans anew."""
        plan = self._plan
        counted = [] if plan is None else [clock.steps for clock in plan.clocks]

        def put_back() -> None:
            if plan is None or plan is not self._plan or not self._planner.holds_state(plan):
                self.forget()
                return
            for clock, steps in zip(plan.clocks, counted, strict=True):
                clock.steps = steps
            for count in plan.counts:
                count.version = count.steps._version

        return put_back

    def forget(self) -> None:
        """Plan anew at the next step, from the optimizer's own state."""
        self._plan = None
        self._planner.clock_of.clear()

    def release(self) -> None:
        """Take the hook off the optimizer; torch's own step continues from its state as it is."""
        self._loaded.remove()

    def scale_on(self, device: torch.device) -> Tensor | float:
        return self._planner.scales.get(device, 1.0)

    def facts(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "form": self.form,
            "tensors": None if plan is None else len(plan.parameters),
            "chunks": None if plan is None else len(plan.chunks),
            "graphs": len(self._planner.functions),
        }


# ---- the plan: which tensors are updated together, by which function, with which numbers -----------------------------


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
    version: int
    """Of ``steps`` after the last count: another one means that somebody else has written to it."""

    def add(self) -> None:
        self.steps.add_(1)
        self.version = self.steps._version


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
    counts: list[Count]


class Planner:
    """Makes plans for one optimizer and keeps from plan to plan what compiled code and CUDA graphs hold on to."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, formula: Formula, places: Mapping[Tensor, str], compiler: Compiler
    ) -> None:
        self._optimizer, self._formula, self._places, self._compiler = optimizer, formula, places, compiler
        self.functions: dict[tuple[Any, ...], Callable[..., None]] = {}
        """What has been compiled, by kind of chunk."""
        self.scales: dict[torch.device, Tensor] = {}
        """What gradients are multiplied by, on each device."""
        self.clock_of: dict[Tensor, Clock] = {}
        """Empty: the counts of steps in the optimizer's state are believed."""
        self._scalars: dict[tuple[Any, ...], list[DeviceScalar]] = {}

    def owns_state(self, plan: Plan) -> bool:
        return self.holds_state(plan) and all(count.steps._version == count.version for count in plan.counts)

    def holds_state(self, plan: Plan) -> bool:
        """Whether the optimizer's state is still in the tensors that the plan works on."""
        for chunk in plan.chunks:
            state = self._optimizer.state.get(chunk.parameters[0], {})
            if any(state.get(name) is not kind[0] for name, kind in zip(chunk.names, chunk.states, strict=True)):
                return False
            if self._formula.counted and state.get("step") is not chunk.step:
                return False
        return True

    def gradients_for(self, plan: Plan) -> list[Tensor] | None:
        """Gradients of the plan's parameters; None unless they and the groups are those that it was made for."""
        gradients: list[Any] = [parameter.grad for parameter in plan.parameters]
        try:
            fits = _layout(gradients) == plan.layout
        except (AttributeError, TypeError):  # of None: a gradient that was there is not
            return None
        idle = all(parameter.grad is None for parameter in plan.idle)
        return gradients if fits and idle and self._groups() == plan.groups else None

    def _groups(self) -> list[tuple[Any, ...]]:
        groups = self._optimizer.param_groups
        return [(len(group["params"]), *self._formula.flags_of(group).values()) for group in groups]

    def make(self) -> Plan:
        """Plan for the gradients and groups as they are; creates the state that torch would create."""
        formula = self._formula
        clocks: dict[tuple[Any, ...], Clock] = {}
        chunks: defaultdict[tuple[Any, ...], list[tuple[Tensor, Clock]]] = defaultdict(list)
        idle: list[Tensor] = []
        for index, group in enumerate(self._optimizer.param_groups):
            flags, states = tuple(formula.flags_of(group).items()), formula.states(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    idle.append(parameter)
                    continue
                if parameter in self.clock_of:
                    steps = self.clock_of[parameter].steps
                else:
                    steps = formula.steps_in(self._optimizer.state.get(parameter, {}))
                if states or formula.counted:  # else torch makes no entry either
                    formula.create_state(self._optimizer.state[parameter], parameter, group)
                key = (index, parameter.device, parameter.dtype == torch.float64, steps)
                if key not in clocks:
                    values = formula.scalars(numbers_of(group), steps + 1)
                    clocks[key] = Clock(index, steps, self._device_scalars(key, values, clocks))
                self.clock_of[parameter] = clocks[key]
                place = (self._places.get(parameter), parameter.device, parameter.dtype, flags, states)
                chunks[place].append((parameter, clocks[key]))
        made = [
            self._chunk(members[start : start + MAX_CHUNK], device, dict(flags), states)
            for (_, device, _, flags, states), members in chunks.items()
            for start in range(0, len(members), MAX_CHUNK)
        ]
        parameters = [parameter for chunk in made for parameter in chunk.parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        return Plan(
            parameters=parameters,
            idle=idle,
            layout=_layout(gradients),
            groups=self._groups(),
            chunks=made,
            clocks=list(clocks.values()),
            counts=self._pack_steps(parameters, made) if formula.counted else [],
        )

    def _device_scalars(
        self, key: tuple[Any, ...], values: Sequence[float], others: Mapping[tuple[Any, ...], Clock]
    ) -> list[DeviceScalar]:
        """Scalars of a clock; the same tensors from plan to plan, because CUDA graphs hold on to them."""
        _, device, precise, _ = key
        place = (*key[:3], sum(other[:3] == key[:3] for other in others))
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
        states = [[self._optimizer.state[parameter][name] for parameter in parameters] for name in names]
        shapes = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype)
            for tensor in itertools.chain(parameters, *states, (parameter.grad for parameter in parameters))
        )
        kind = (device, which, tuple(flags.items()), names, shapes)
        if kind not in self.functions:
            name = f"{type(self._optimizer).__name__}_update"
            self.functions[kind] = self._compiler(fresh_function(self._formula, flags, which, name=name))
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

    def _pack_steps(self, parameters: list[Tensor], chunks: list[Chunk]) -> list[Count]:
        """Make the ``step`` tensors views of one, so that counting is one operation instead of one for each."""
        states = [self._optimizer.state[parameter] for parameter in parameters]
        kinds: defaultdict[tuple[torch.device, torch.dtype], list[dict[str, Any]]] = defaultdict(list)
        for state in states:
            kinds[state["step"].device, state["step"].dtype].append(state)
        counts = []
        for alike in kinds.values():
            packed = torch.stack([state["step"] for state in alike])
            for state, step in zip(alike, packed.unbind(), strict=True):
                state["step"] = step
            counts.append(Count(packed, packed._version))
        for chunk in chunks:
            chunk.step = self._optimizer.state[chunk.parameters[0]]["step"]
        return counts


def _layout(gradients: list[Tensor]) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    # By maps, which take half the time that a comprehension takes: this happens at every step.
    return list(map(Tensor.stride, gradients)), list(map(_dtype_of, gradients))
