"""Whole training steps of a ``Loop`` in CUDA graphs: logging and accumulation included.

One micro-batch is the training step, zeroing of gradients, backward, and at the end of an accumulation clipping and the
optimizer. All of it is captured where the optimizer can be; otherwise forward and backward are, and the optimizer runs
after each replay. A replay calls no Python. So what a step logs is written again after each replay; what it reads
is observed before it is captured, and compared before each replay. Whatever else it does on the host is a reason not to
capture it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from strategies.base import CannotCapture, Program, eager
from strategies.cuda_graph.capture import NotYet, Observation, StateChanges, StepGraphs
from strategies.cuda_graph.recorder import HostRecorder
from strategies.cuda_graph.state import HostState, Value, entries_of, named
from strategies.cuda_graph.values import Unrepeatable
from strategies.errors import one_line
from strategies.loop import Loop, MicroBatch
from strategies.optimizer.step import GraphedStep, graphed
from strategies.prepare import collected_later
from strategies.torch_patches import UnreducedGradients, as_capturing, settle_shards

MAX_CONSTANTS = 3
"""Sets of hyperparameters taken by value after which a schedule is taken to change them all the time."""
UNLIKE = "not every weight has a gradient in each micro-batch"
_TORCH = os.path.dirname(torch.__file__)


class StepCapture:
    """Runs the micro-batches of ``loop`` through ``graphs`` until ``release``; what it cannot capture runs as it is."""

    def __init__(self, loop: Loop, program: Program, graphs: StepGraphs) -> None:
        self._loop, self._program, self._graphs = loop, program, graphs
        self._module = loop.module
        self._gradients: dict[Tensor, Tensor | None] = {}
        """Of each parameter, once a step was captured: the tensor that graphs write to, and that is zeroed in place."""
        self._reached: set[Tensor] | None = None
        self._unreduced = UnreducedGradients(self._module) if program.sharded and loop.micro_batches > 1 else None
        self._constants: set[Hashable] = set()
        self.sample: Sequence[nn.Parameter] = ()
        """Parameters whose clipped gradients every captured whole step keeps."""
        self.gradients: list[Tensor] | None = None
        """Those of the last step, valid until the next one; None where it was not replayed whole."""
        self._called, self._index = False, 0
        self._optimizer: GraphedStep | None = None
        graphs.notes = program.notes
        for reason in loop.why_not_capture():
            self._stop(reason)
        if loop.world_size > 1:
            graphs.agree, graphs.warmup_steps = loop.least, loop.capture_warmup_steps
            if loop.anywhere(graphs.given_up) and not graphs.given_up:
                self._stop("another process captures no steps")
        self._of: Any = None
        self._take_optimizer()
        self._give_back = loop.take_over(self.run)

    def _take_optimizer(self) -> None:
        """Let graphs hold the step of the optimizer in force, which a training may replace."""
        if self._graphs.given_up or self._of is (optimizer := self._loop.optimizers[0]):
            return
        if self._of is not None:
            self._graphs.forget()
        self._release_optimizer()
        self._of = optimizer
        try:
            if self._loop.scaler is not None:
                raise CannotCapture("a gradient scaler decides on the host whether to step")
            self._optimizer = graphed(optimizer)
        except CannotCapture as error:
            self._leave_optimizer_out(str(error))

    @property
    def settled(self) -> bool:
        """Whether the last step was replayed, or none like it will be."""
        return self._graphs.given_up or self._graphs.settled

    def release(self) -> None:
        self._give_back()
        self._release_optimizer()
        if self._gradients:
            self._module.zero_grad(set_to_none=True)

    def _release_optimizer(self) -> None:
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None

    def run(self, micro: MicroBatch) -> dict[str, Any]:
        """Run one micro-batch; returns what ``MicroBatch.run`` does."""
        self._take_optimizer()
        if self._graphs.given_up:
            return micro.run(micro.batch)
        constants = None
        if micro.ends and self._optimizer is not None:
            self._optimizer.prepare()
            constants = self._optimizer.constants()
            self._constants.add(constants)
            if len(self._constants) > MAX_CONSTANTS:
                constants = None
                self._leave_optimizer_out("its hyperparameters change all the time, and its kernels take them by value")
        optimizer = self._optimizer if micro.ends else None
        try:
            outputs = self._graphed(micro, optimizer, constants)
        except CannotCapture as error:
            if self._called:  # nothing was executed: only the loop's counters have moved
                micro.uncount()
            # A capture may have ended in the middle of a forward.
            settle_shards(self._module, gradients=self._called or self._unreduced is None)
            if self._called and self._unreduced is not None:
                self._unreduced.attach(empty=micro.begins)
            if isinstance(error, NotYet):
                return self.run(micro)
            self._graphs.refuse(str(error))
            if optimizer is not None and not isinstance(error, StateChanges):
                self._leave_optimizer_out(str(error))
                return self.run(micro)
            self._stop(str(error))
            return micro.run(micro.batch)
        if micro.ends and optimizer is None:
            again: list[Any] = []
            with self._loop.around_training_step(again.append, lambda _: None):
                outputs = micro.optimize(outputs)
            if again:
                self._stop(f"{type(self._of).__name__} evaluates the loss several times in a step")
        return outputs if outputs.get("loss") is not None else {}  # a step that returned None is skipped

    def _graphed(self, micro: MicroBatch, optimizer: GraphedStep | None, constants: Hashable) -> dict[str, Any]:
        """Run ``micro``, with the step of ``optimizer`` where there is one, from a graph or without."""
        whole = optimizer is not None
        self._called, self._index = False, micro.index
        for parameter, gradient in self._gradients.items() if self._graphs.unfit is None else ():
            if parameter.grad is not gradient:  # a validation sets them to None
                parameter.grad = gradient
        captures, replays = self._graphs.captures, self._graphs.replays
        run = self._graphs.run if self._graphs.settled else collected_later()(self._graphs.run)
        outputs, logged, kept = run(
            # A graph stays as it was captured: what loop and optimizer take by value is part of its key.
            (micro.begins, whole, constants, self._loop.constants(), torch.is_grad_enabled()),
            micro.batch,
            lambda batch: self._step(micro, optimizer, batch),
            name="whole step" if whole else "forward and backward",
            before_replay=(lambda: None) if optimizer is None else optimizer.count,
            observe=lambda: self._observe(micro),
            after_capture=lambda: optimizer_state(self._loop.optimizers[0]) if whole else HostState(),
            held=() if self._unreduced is None or micro.begins else self._unreduced.kept,
        )
        if self._unreduced is not None and self._graphs.unfit is None:
            self._unreduced.attach(empty=micro.ends)
        if not self._called:
            micro.count(whole=whole)
        elif not (whole and micro.begins) and self._unreduced is None:
            if not self._gradients:
                self._gradients = {parameter: parameter.grad for parameter in self._module.parameters()}
                if any(one is not None and one.layout is not torch.strided for one in self._gradients.values()):
                    self._graphs.unfit, self._gradients = StateChanges("sparse gradients differ in size"), {}
        elif self._graphs.captures > captures:
            # They lie in the graphs' memory, which every graph uses for something else.
            self._module.zero_grad(set_to_none=True)
        self.gradients = kept() if kept is not None and self._graphs.replays > replays else None
        self._loop.write_logs(logged)
        return outputs

    def _step(
        self, micro: MicroBatch, optimizer: GraphedStep | None, batch: Any
    ) -> tuple[dict[str, Any], list[Any], Callable[[], list[Tensor]] | None]:
        """What a graph holds: the results of ``micro`` on ``batch``, what it logged, and sampled gradients, which every
        replay fills anew; as a function, so that nobody copies them at each step."""
        self._called = True
        if self._unreduced is not None:  # each time: what runs for a comparison uses them up
            self._unreduced.attach(empty=micro.begins)
            self._module.zero_grad(set_to_none=True)  # shards get theirs from the last micro-batch alone
        gradients = [gradient for gradient in self._gradients.values() if gradient is not None]

        def zero_grad(set_to_none: bool = True) -> None:
            torch._foreach_zero_(gradients)

        nothing = contextlib.nullcontext()
        capturable = nothing if optimizer is None else optimizer.capturable()
        zeroing = mock.patch.object(self._of, "zero_grad", zero_grad) if gradients else nothing
        all_reached = self._unreduced is not None or (optimizer is not None and micro.begins)
        reaching = nothing if all_reached else self._reaching(micro)
        with self._loop.recording_logs() as logged, capturable, zeroing, reaching:
            if optimizer is None:
                outputs = micro.forward_backward(batch)
                if self._unreduced is not None and not micro.ends and not self._unreduced.keep():
                    self._graphs.unfit = StateChanges(UNLIKE)
                return outputs, logged, None
            if self._of._optimizer_step_pre_hooks or self._of._optimizer_step_post_hooks:
                raise CannotCapture("a hook on its step runs on the host")
            outputs = micro.run(batch)
            sample = [parameter.grad.clone() for parameter in self.sample if parameter.grad is not None]
            return outputs, logged, (lambda: sample) if len(sample) == len(self.sample) else None

    def _observe(self, micro: MicroBatch) -> Observation:
        """What ``training_step`` reads on the host; its batch index only where it makes use of it."""
        try:
            return self._observed(micro, Unused())
        except Used:
            state, problems = self._observed(micro, micro.index)
        state.add(Value("batch_idx", lambda: self._index, self._index, type(self._module).__name__ + ".training_step"))
        return Observation(state, problems)

    def _observed(self, micro: MicroBatch, index: Any) -> Observation:
        """What the forward of ``micro`` reads on the host: it runs once in eager, and all is put back.

        Compiled code calls no Python either, so that eager code tells what it depends on. Where memory is short, the
        forward runs without gradients. Raises Used where it makes use of ``index``.
        """
        loop = self._loop
        if problems := list(_hooks(self._module)):
            return Observation(HostState(), problems)
        for gradients in (contextlib.nullcontext(), torch.no_grad())[: 2 if loop.world_size == 1 else 1]:
            recorder = HostRecorder(loop.device, loop.unreadable())
            try:
                snapshot = loop.snapshot(micro.batch)
            except torch.OutOfMemoryError:
                loop.anywhere(True)  # the others ask what is lost
                return Observation(HostState(), ["could not be observed: no memory for a copy of the weights"])
            if (lost := snapshot.lost) is not None:
                return Observation(HostState(), [lost])
            try:
                with eager(self._program), as_capturing(), gradients, recorder.recording(self._module):
                    with loop.recording_logs() as logged:
                        returned = micro.forward(micro.batch, index)
                    values = pytree.tree_leaves((returned, [value for _, value in logged]))
                    if any(type(one) is Unused for one in values):
                        raise Used
            except torch.OutOfMemoryError:
                problems = ["could not be observed: out of memory"]
                continue
            except Unrepeatable:  # held by a class, before the forward began: a problem by then
                pass
            except Exception as error:
                return Observation(recorder.state(), [f"could not be observed: {one_line(error)}"])
            finally:
                snapshot.restore()
            return Observation(recorder.state(), list(recorder.problems))
        return Observation(HostState(), problems)

    def _leave_optimizer_out(self, reason: str) -> None:
        self._graphs.refuse(f"the optimizer runs after each graph: {reason}")
        self._release_optimizer()
        if self._unreduced is not None:
            self._stop("under fsdp2 accumulated gradients are captured with the optimizer alone")

    def _stop(self, reason: str) -> None:
        self._graphs.refuse(reason)
        self._program.eager_parts["step"] = reason
        self._graphs.given_up = True
        self._graphs.forget()

    @contextlib.contextmanager
    def _reaching(self, micro: MicroBatch) -> Iterator[None]:
        """Gradients lie in the same tensors in all steps, and are zeroed there. Eager has none where no batch of a
        step reaches a weight, and leaves it out of the update: capture is given up where they reach others."""
        reached: set[Tensor] = set()
        weights = [one for one in self._module.parameters() if one.requires_grad]
        hooks = [weight.register_post_accumulate_grad_hook(reached.add) for weight in weights]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self._reached is None:
            self._reached = reached
        elif reached != self._reached:
            self._graphs.unfit = StateChanges(UNLIKE)
            for weight in self._reached - reached if micro.begins else ():
                weight.grad = None  # what was zeroed, no batch of this step has added to


def optimizer_state(optimizer: torch.optim.Optimizer) -> HostState:
    """The tensors that a captured step of ``optimizer`` works on, its hooks and its parameters."""
    states = [
        named(state, name, value, "optimizer.state.")
        for state in optimizer.state.values()
        for name, value in state.items()
    ]
    held = [optimizer.state, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    held += [group["params"] for group in optimizer.param_groups]
    return HostState(states, [(each, "the optimizer's state", entries_of(each)) for each in held])


def _hooks(module: nn.Module) -> Iterator[str]:
    """Hooks that run on the host in a backward, where nothing observes them."""
    for path, submodule in module.named_modules():
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            yield f"a backward hook on {path or 'the module'} runs on the host"
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"a hook on the parameter {path} runs on the host"


class Used(BaseException):
    """A step made use of what ``Unused`` stands for. No Exception: a step may catch those."""


class Unused:
    """Stands for a number that a step is given; any use of it raises ``Used``."""

    def __getattribute__(self, name: str) -> Any:
        """Nothing is there, not even a class for ``isinstance``; but FSDP2 looks for tensors in what it hands on."""
        if name == "__class__":
            asking: Any = sys._getframe(1)
            if asking.f_code is dataclasses.is_dataclass.__code__:  # as torch asks from 2.15 on
                asking = asking.f_back
            if asking.f_code.co_filename.startswith(_TORCH):
                return Unused
        raise Used


def _use(*_: Any) -> Any:
    raise Used


_DUNDERS = """bool index int float complex eq ne lt le gt ge hash repr str format len iter contains getitem call add
radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow neg pos abs and rand or ror
xor rxor lshift rlshift rshift rrshift invert round trunc floor ceil reduce_ex"""
for _name in _DUNDERS.split():
    setattr(Unused, f"__{_name}__", _use)
