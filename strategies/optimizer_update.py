"""The step of one of torch's optimizers as a few calls of compiled functions that are never compiled again.

Parameters are cut into chunks, one for each repeated block of the module and a few for the rest. Chunks of the same
shapes share one compiled function, so that compile time does not grow with the number of blocks. What may change from
step to step (learning rate, betas, weight decay, count of steps, clipping) is read from 0-D device tensors; what may
not (shapes, strides, flags) is compared on the host, which is why the compiled functions need no guards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strategies.optimizer_formulas import Formula
from strategies.optimizer_plan import Compiler, Plan, Planner, numbers_of
from strategies.optimizer_replay import Replays


class FunctionalUpdate:
    """Updates ``optimizer``'s parameters and states in place, exactly where torch's own step would.

    Args:
        optimizer: One that ``formula`` stands for.
        formula: See ``optimizer_formulas.formula_of``.
        places: Path of the repeated block for parameters that lie in one.
        compiler: Compiles one function; called once for each kind of chunk.
        replays: Runs the launches of later steps from CUDA graphs; None = every step is launched.
    """

    form = "functional"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        formula: Formula,
        *,
        places: Mapping[Tensor, str],
        compiler: Compiler,
        replays: Replays | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.replays = replays
        self.max_norm: float | None = None
        """Set before a step that is to clip: largest norm of all gradients together."""
        self._formula = formula
        self._planner = Planner(optimizer, formula, places=places, compiler=compiler, functions={})
        self._plan: Plan | None = None
        self._plans = 0
        self._launched = 0
        self._scaled = False
        # Loading replaces every state tensor: plan anew, and believe the loaded counts.
        self._loaded = optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    # ---- a step ----------------------------------------------------------------------------------------------------

    def __call__(self) -> None:
        """One step; does not wait for the device, unless torch cannot know the count of loaded steps otherwise."""
        gradients = self.prepare()
        max_norm, self.max_norm = self.max_norm, None
        capturing = _capturing()
        if not capturing:
            self.refresh()
        self._unscale(max_norm)

        def launch() -> None:
            self._launch(gradients, max_norm)

        replays = self.replays
        if replays is not None and not capturing and replays.active:
            parameters = self._made.parameters
            if replays.run((self._plans, max_norm, _addresses(gradients), _addresses(parameters)), launch):
                # For autograd, which would miss that saved weights were overwritten.
                torch.autograd.graph.increment_version(parameters)
                return
        launch()
        self._launched += not capturing

    def prepare(self) -> list[Tensor]:
        """See that gradients and groups are those the plan was made for, else make a new one; returns the gradients."""
        if self._plan is not None and not self._planner.owns_state(self._plan):
            self.forget()
        gradients = None if self._plan is None else self._planner.gradients_for(self._plan)
        if gradients is None:
            self._free_graphs()  # they work on the tensors of the plan that goes
            self._plan = self._planner.make()
            self._plans += 1
            gradients = [parameter.grad for parameter in self._plan.parameters if parameter.grad is not None]
        return gradients

    def refresh(self) -> None:
        """Count the step and bring the device's scalars up to date: the host's part, before each replay of a graph."""
        plan = self._made
        groups = [numbers_of(group) for group in self.optimizer.param_groups]
        for clock in plan.clocks:
            clock.steps += 1
            values = self._formula.scalars(groups[clock.group], clock.steps)
            for scalar, value in zip(clock.scalars, values, strict=True):
                scalar.write(value)
        for count in plan.counts:
            if count.steps.is_cpu:
                count.add()

    def _launch(self, gradients: list[Tensor], max_norm: float | None) -> None:
        """The device's part: gradients to parameters and states. May be captured in a CUDA graph."""
        plan = self._made
        if max_norm is not None:
            self._scale(gradients, max_norm)
        for count in plan.counts:
            if not count.steps.is_cpu:
                count.add()
        begin = 0
        for chunk in plan.chunks:
            end = begin + len(chunk.parameters)
            chunk.run(chunk.parameters, gradients[begin:end], chunk.states, chunk.scalars, chunk.scale)
            begin = end

    def _scale(self, gradients: list[Tensor], max_norm: float) -> None:
        """Clipping, as ``torch.nn.utils.clip_grad_norm_`` does it, but for writing the gradients once more."""
        if gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for own in self._planner.scales.values():
                own.copy_(scale, non_blocking=True)

    def _unscale(self, max_norm: float | None) -> None:
        """Before a step that is not clipped: undo the scale of an earlier one that was."""
        if max_norm is None and self._scaled:
            for own in self._planner.scales.values():
                own.fill_(1.0)
        self._scaled = max_norm is not None

    # ---- between steps ---------------------------------------------------------------------------------------------

    @property
    def plan_number(self) -> int:
        """Number of the plan that the next step goes by: another one as soon as the state is not the one planned for.

        A CUDA graph captured under one plan must not be replayed under another.
        """
        stale = self._plan is None or not self._planner.owns_state(self._plan)
        return self._plans + int(stale)

    def counted(self) -> list[int]:
        """Steps counted on the host so far, for ``recount``."""
        return [] if self._plan is None else [clock.steps for clock in self._plan.clocks]

    def recount(self, counted: list[int]) -> None:
        """Go back to ``counted``, as all state tensors have; the plan stays, and with it what was captured by it."""
        if not counted:
            return
        for clock, steps in zip(self._made.clocks, counted, strict=True):
            clock.steps = steps
        for count in self._made.counts:
            count.version = count.steps._version

    def forget(self) -> None:
        """Plan anew at the next step, from the optimizer's own state."""
        self._plan = None
        self._free_graphs()
        self._planner.forget()

    def release(self) -> None:
        """Free the graphs and take the hook off the optimizer; torch's own step goes on from its state as it is."""
        self._free_graphs()
        self._loaded.remove()

    def counts(self) -> dict[str, int]:
        """Steps so far, by how the device was given its work; those within a captured training step not among them."""
        replayed = 0 if self.replays is None else self.replays.replayed
        return {"replayed_steps": replayed, "launched_steps": self._launched}

    def scale_on(self, device: torch.device) -> Tensor | float:
        """What the last step multiplied gradients by to clip them, ``()``; 1 where it did not."""
        return self._planner.scales.get(device, 1.0)

    def facts(self) -> dict[str, Any]:
        """Figures for the record; None before the first step."""
        plan = self._plan
        return {
            "form": self.form,
            "tensors": None if plan is None else len(plan.parameters),
            "chunks": None if plan is None else len(plan.chunks),
            "graphs": len(self._planner.functions),
        }

    @property
    def places(self) -> Mapping[Tensor, str]:
        """Path of the repeated block for parameters that lie in one."""
        return self._planner.places

    def sibling(self, optimizer: torch.optim.Optimizer, places: Mapping[Tensor, str]) -> FunctionalUpdate:
        """The same update for a copy of the optimizer, with the functions that this one has compiled."""
        replays = None if self.replays is None else self.replays.another()
        sibling = FunctionalUpdate(
            optimizer, self._formula, places=places, compiler=self._planner.compiler, replays=replays
        )
        sibling._planner.functions = self._planner.functions
        return sibling

    @property
    def _made(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _free_graphs(self) -> None:
        if self.replays is not None:
            self.replays.free()


def _addresses(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, tensors))


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
