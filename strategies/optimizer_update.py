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


class FunctionalUpdate:
    """Updates ``optimizer``'s parameters and states in place, exactly where torch's own step would.

    Args:
        optimizer: One that ``formula`` stands for.
        formula: See ``optimizer_formulas.formula_of``.
        places: Path of the repeated block for parameters that lie in one.
        compiler: Compiles one function; called once for each kind of chunk.
    """

    form = "functional"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        formula: Formula,
        *,
        places: Mapping[Tensor, str],
        compiler: Compiler,
    ) -> None:
        self.optimizer = optimizer
        self.max_norm: float | None = None
        """Set before a step that is to clip: largest norm of all gradients together."""
        self._formula = formula
        self._planner = Planner(optimizer, formula, places=places, compiler=compiler, functions={})
        self._plan: Plan | None = None
        self._plans = 0
        self._scaled = False
        # Loading replaces every state tensor: plan anew, and believe the loaded counts.
        self._loaded = optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    # ---- a step ----------------------------------------------------------------------------------------------------

    def __call__(self) -> None:
        """One step; does not wait for the device, unless torch cannot know the count of loaded steps otherwise."""
        self.prepare()
        if not _capturing():
            self.refresh()
        self.launch()

    def prepare(self) -> None:
        """See that gradients and groups are those the plan was made for; make a new one where they are not."""
        if self._plan is not None and not self._planner.owns_state(self._plan):
            self.forget()
        if self._plan is None or not self._planner.fits(self._plan):
            self._plan = self._planner.make()
            self._plans += 1

    def refresh(self) -> None:
        """Count the step and bring the device's scalars up to date: the host's part, before each replay of a graph."""
        assert self._plan is not None
        groups = [numbers_of(group) for group in self.optimizer.param_groups]
        for clock in self._plan.clocks:
            clock.steps += 1
            values = self._formula.scalars(groups[clock.group], clock.steps)
            for scalar, value in zip(clock.scalars, values, strict=True):
                scalar.write(value)
        for count in self._plan.counts:
            if count.steps.is_cpu:
                count.add()

    def launch(self) -> None:
        """The device's part: gradients to parameters and states. May be captured in a CUDA graph."""
        plan = self._plan
        assert plan is not None
        gradients: list[Any] = [parameter.grad for parameter in plan.parameters]
        self._scale(gradients)
        for count in plan.counts:
            if not count.steps.is_cpu:
                count.add()
        begin = 0
        for chunk in plan.chunks:
            end = begin + len(chunk.parameters)
            chunk.run(chunk.parameters, gradients[begin:end], chunk.states, chunk.scalars, chunk.scale)
            begin = end

    def _scale(self, gradients: list[Tensor]) -> None:
        """Clipping, as ``torch.nn.utils.clip_grad_norm_`` does it, but for writing the gradients once more."""
        if self.max_norm is not None and gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            scale = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
            for own in self._planner.scales.values():
                own.copy_(scale, non_blocking=True)
            self._scaled = True
        elif self._scaled:
            for own in self._planner.scales.values():
                own.fill_(1.0)
            self._scaled = False
        self.max_norm = None

    # ---- between steps ---------------------------------------------------------------------------------------------

    @property
    def plan_number(self) -> int:
        """Number of the plan that the next step goes by: another one as soon as the state is not the one planned for.

        A CUDA graph captured under one plan must not be replayed under another.
        """
        stale = self._plan is None or not self._planner.owns_state(self._plan)
        return self._plans + int(stale)

    def forget(self) -> None:
        """Plan anew at the next step, from the optimizer's own state."""
        self._plan = None
        self._planner.forget()

    def release(self) -> None:
        """Take the hook off the optimizer; its state is already what torch's own step goes on from."""
        self._loaded.remove()

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
        sibling = FunctionalUpdate(optimizer, self._formula, places=places, compiler=self._planner.compiler)
        sibling._planner.functions = self._planner.functions
        return sibling


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
