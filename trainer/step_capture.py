"""Whole training steps in CUDA graphs under Lightning's Trainer: closures, logging and accumulation included.

One micro-batch is what Lightning's automatic optimization runs for it: training step, zeroing of gradients, backward,
and at the end of an accumulation clipping and the optimizer. All of it is captured where the optimizer can be;
otherwise forward and backward are, and the optimizer runs after each replay.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from strategies import Program
from strategies.graph_engine import CannotCapture, NotYet
from strategies.host_state import HostState, Value
from strategies.optimizer.graphs import GraphedStep, graphed
from strategies.step_graphs import Observation, StateChanges, StepGraphs
from trainer.host_effects import Logged, Unused, Used, observed, optimizer_state, reasons_against
from trainer.parity.replay import ReplayParity

MOST_CONSTANTS = 3
"""Sets of hyperparameters taken by value after which a schedule is taken to change them all the time."""


def capture_steps(trainer: L.Trainer, program: Program, *, parity: str) -> StepCapture:
    """Let ``trainer`` run its training steps through ``program.step`` until ``StepCapture.release``.

    ``parity`` says whether replays are compared with the steps that they were captured from.
    """
    assert program.step is not None
    if parity != "off":
        program.step.verifier = ReplayParity(parity, trainer, program)
    return StepCapture(trainer, program, program.step)


class Kept:
    """Tensors within a graph that every replay fills anew; opaque, so that nobody copies them at each step."""

    def __init__(self, gradients: list[Tensor] | None) -> None:
        self.gradients = gradients


class StepCapture:
    """Stands in for ``run`` of Lightning's automatic optimization; what it cannot capture goes to the original."""

    def __init__(self, trainer: L.Trainer, program: Program, graphs: StepGraphs) -> None:
        self._trainer, self._program, self._graphs = trainer, program, graphs
        self._module: L.LightningModule = trainer.lightning_module
        self._automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        self._original = self._automatic.run
        self._logged = Logged(self._module)
        self._gradients: dict[Tensor, Tensor | None] | None = None
        self._constants: set[Hashable] = set()
        self.sample: Sequence[nn.Parameter] = ()
        """Parameters whose clipped gradients every captured whole step keeps."""
        self.gradients: list[Tensor] | None = None
        """Those of the last step, valid until the next one; None where it was not replayed whole."""
        self._called = False
        self._index = self._reported = 0
        self._progress = self._automatic.optim_progress.optimizer
        self._optimizer: GraphedStep | None = None
        for reason in reasons_against(trainer):
            self._stop(reason)
        if not self._graphs.given_up:
            try:
                self._optimizer = graphed(trainer.optimizers[0])
                if getattr(trainer.precision_plugin, "scaler", None) is not None:
                    raise CannotCapture("a gradient scaler decides on the host whether to step")
            except CannotCapture as error:
                self._leave_optimizer_out(str(error))
        # An attribute of this one object, because Lightning offers no way to bring an optimization loop of one's own.
        self._automatic.run = self.run  # type: ignore[method-assign]

    @property
    def settled(self) -> bool:
        """Whether the last step was what later ones like it will be: a replay, or eager for good."""
        return self._graphs.given_up or self._graphs.settled

    def release(self) -> None:
        """Give the steps back to Lightning."""
        self._automatic.run = self._original  # type: ignore[method-assign]
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None
        if self._gradients is not None:
            self._module.zero_grad(set_to_none=True)

    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Run one micro-batch; returns what ``on_train_batch_end`` is given."""
        if self._graphs.given_up or "batch" not in kwargs:
            return self._original(optimizer, batch_idx, kwargs)
        begins = batch_idx % self._trainer.accumulate_grad_batches == 0
        ends = not self._trainer.fit_loop._should_accumulate()
        try:
            if ends and self._optimizer is not None:
                self._optimizer.prepare()
            constants = self._constants_of_step() if ends else None
            whole = ends and self._optimizer is not None
            outputs = self._graphed(optimizer, batch_idx, kwargs, begins=begins, whole=whole, constants=constants)
        except CannotCapture as error:
            if self._called:  # nothing was executed: only Lightning's counters have moved
                self._automatic.optim_progress.optimizer = self._progress
            if isinstance(error, NotYet):
                return self.run(optimizer, batch_idx, kwargs)
            self._graphs.refuse(str(error))
            if whole and not isinstance(error, StateChanges):
                self._leave_optimizer_out(str(error))
                return self.run(optimizer, batch_idx, kwargs)
            self._stop(str(error))
            return self._original(optimizer, batch_idx, kwargs)
        finally:
            self._report_refusals()
        if ends and not whole:
            self._automatic._optimizer_step(batch_idx, lambda: outputs["loss"])
        return outputs if outputs.get("loss") is not None else {}  # a step that returned None is skipped

    def _graphed(
        self,
        optimizer: torch.optim.Optimizer,
        batch_idx: int,
        kwargs: Any,
        *,
        begins: bool,
        whole: bool,
        constants: Hashable,
    ) -> dict[str, Any]:
        context = self._optimizer.capturable if whole and self._optimizer is not None else contextlib.nullcontext

        def step(batch: Any) -> tuple[dict[str, Any], list[Any], Kept]:
            self._called = True
            self._progress = copy.deepcopy(self._automatic.optim_progress.optimizer)
            given = type(kwargs)({**kwargs, "batch": batch})
            with self._logged.recording() as logged, context(), self._zeroing_in_place(optimizer):
                if whole:
                    return self._original(optimizer, batch_idx, given), logged, self._keep()
                closure = self._automatic._make_closure(given, optimizer, batch_idx)
                closure()
                return closure.consume_result().asdict(), logged, Kept(None)

        self._called, self._index = False, batch_idx
        self._attach_gradients()
        kind = self._kind(begins, whole, constants)
        captures, replays = self._graphs.captures, self._graphs.replays
        name = "whole step" if whole else "forward and backward"
        outputs, logged, kept = self._graphs.run(
            kind,
            kwargs["batch"],
            step,
            name=name,
            before_replay=self._optimizer.count if whole and self._optimizer is not None else _nothing,
            observe=lambda: self._observe(kwargs),
            after_capture=lambda: self._state_of_optimizer(optimizer, whole=whole),
        )
        if not self._called:
            self._advance(begins=begins, whole=whole)
        elif not (whole and begins):
            if self._gradients is None:  # from now on these tensors hold the gradients, zeroed in place
                self._gradients = {parameter: parameter.grad for parameter in self._module.parameters()}
        elif self._graphs.captures > captures:
            # They lie in the graphs' memory, which every graph uses for something else.
            self._module.zero_grad(set_to_none=True)
        self.gradients = kept.gradients if self._graphs.replays > replays else None
        self._logged.write(logged)
        results: dict[str, Any] = outputs
        return results

    def _kind(self, begins: bool, whole: bool, constants: Hashable) -> Hashable:
        # A graph stays as it was captured: what Lightning and the optimizer take by value is part of its key.
        trainer = self._trainer
        clipping = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        return begins, whole, constants, trainer.accumulate_grad_batches, clipping, torch.is_grad_enabled()

    def _keep(self) -> Kept:
        gradients = [parameter.grad.clone() for parameter in self.sample if parameter.grad is not None]
        return Kept(gradients if len(gradients) == len(self.sample) else None)

    def _observe(self, kwargs: Any) -> Observation:
        """What ``training_step`` reads on the host; its batch index only where it makes use of it."""
        self._index = kwargs.get("batch_idx")

        def observation(given: Any) -> Observation:
            def run() -> None:
                with self._logged.recording() as logged:
                    self._trainer.strategy.training_step(*given.values())
                if any(isinstance(value, Unused) for _, value in logged):
                    raise Used

            return observed(self._trainer, self._program, kwargs["batch"], run)

        try:
            return observation({**kwargs, "batch_idx": Unused()} if "batch_idx" in kwargs else kwargs)
        except Used:
            state, problems = observation(kwargs)
        state.add(Value("batch_idx", lambda: self._index, self._index, type(self._module).__name__ + ".training_step"))
        return Observation(state, problems)

    def _state_of_optimizer(self, optimizer: torch.optim.Optimizer, *, whole: bool) -> HostState:
        return optimizer_state(optimizer) if whole else HostState()

    def _constants_of_step(self) -> Hashable:
        """What the optimizer takes by value; one for which that changes all the time is left out of the graphs."""
        if self._optimizer is None:
            return None
        constants = self._optimizer.constants()
        self._constants.add(constants)
        if len(self._constants) > MOST_CONSTANTS:
            self._leave_optimizer_out("its hyperparameters change all the time, and its kernels take them by value")
            return None
        return constants

    def _leave_optimizer_out(self, reason: str) -> None:
        self._graphs.refuse(f"the optimizer runs after each graph: {reason}")
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None

    def _stop(self, reason: str) -> None:
        self._graphs.refuse(reason)
        self._program.eager_parts["step"] = reason
        self._graphs.give_up()

    def _report_refusals(self) -> None:
        for reason in self._graphs.refusals[self._reported :]:
            self._program.notes.append(f"cuda_graph: {reason}")
        self._reported = len(self._graphs.refusals)

    def _advance(self, *, begins: bool, whole: bool) -> None:
        # A replay calls no Python: the counters by which Lightning knows the step are advanced here.
        progress = self._automatic.optim_progress.optimizer
        if begins:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
            progress.zero_grad.increment_completed()
        if whole:
            progress.step.increment_ready()
            progress.step.increment_completed()

    def _attach_gradients(self) -> None:
        # A validation sets them to None; the graphs go on writing to the same tensors.
        for parameter, gradient in (self._gradients or {}).items():
            if parameter.grad is not gradient:
                parameter.grad = gradient

    @contextlib.contextmanager
    def _zeroing_in_place(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        if self._gradients is None:
            yield
            return
        gradients = [gradient for gradient in self._gradients.values() if gradient is not None]

        def zero_grad(set_to_none: bool = True) -> None:
            torch._foreach_zero_(gradients)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        try:
            yield
        finally:
            del optimizer.zero_grad


def _nothing() -> None:
    """What the host has to do for a replay without an optimizer."""
