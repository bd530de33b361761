"""Whole training steps of a ``Loop`` in CUDA graphs: logging and accumulation included.

One micro-batch is the training step, zeroing of gradients, backward, and at the end of an accumulation clipping and the
optimizer. All of it is captured where the optimizer can be; otherwise forward and backward are, and the optimizer runs
after each replay. A replay calls no Python. So what a step logs is written again after each replay; what it reads
is recorded in a step before, which trains as ever, and compared before each replay. Whatever else it does on the host
is a reason not to capture it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from strategies.base import Program, eager
from strategies.compile_errors import CannotCapture, root_of
from strategies.cuda_graph.batch_index import IndexWatch
from strategies.cuda_graph.host_recorder import HostRecorder
from strategies.cuda_graph.host_state import HostState, Value, backward_hooks, named
from strategies.cuda_graph.recorded_step import Left, StepRecorder, tensors_of
from strategies.cuda_graph.step_graphs import (
    Audit,
    CaptureFailed,
    CompiledParts,
    NotRun,
    Observation,
    StateChanges,
    StepGraphs,
    on_stream,
)
from strategies.loop_protocol import Loop, MicroBatch, StepHook
from strategies.optimizer.step import GraphedStep, graphed
from strategies.region_state import entries_of
from strategies.tolerance import rounding_unit
from strategies.torch_patches import UnreducedGradients, as_capturing, reset_fsdp_state

MAX_CONSTANTS = 3
"""Sets of hyperparameters taken by value after which a schedule is taken to change them all the time."""
UNLIKE = "not every weight has a gradient in each micro-batch"
BATCH_INDEX = "batch_idx"
"""What a training step calls the number of its batch."""


class StepCapture(StepHook):
    """Runs the micro-batches of ``loop`` through ``graphs`` until ``close``; what it cannot capture runs as it is. It
    is the innermost hook around a step, and the one to which the loop hands its steps.

    ``parity``: ``off`` compares no graph with steps that ran without it, see ``StepGraphs``.
    """

    def __init__(self, loop: Loop, program: Program, graphs: StepGraphs, *, parity: str = "on") -> None:
        self._loop, self._program, self._graphs = loop, program, graphs
        self._module = loop.module
        self._gradients: dict[Tensor, Tensor | None] = {}
        """Of each parameter, once a step was captured: the tensor that graphs write to, and that is zeroed in place."""
        self._reached: set[Tensor] | None = None
        self._unreduced = UnreducedGradients(self._module) if program.sharded and loop.micro_batches > 1 else None
        self._constants: set[Hashable] = set()
        self._index = 0
        self._left_over = False
        """Whether gradients of a step without a graph are still there."""
        self._optimizer: GraphedStep | None = None
        parts, several = _Parts(self), loop.world_size > 1
        unit = rounding_unit(program.precision, loop.device, self._module)
        self._network = network = program.network
        graphs.begin(
            parts=parts,
            notes=program.notes,
            repeating=None if parity == "off" else StepRecorder(loop.device, parity, unit, random=graphs.random),
            beside=contextlib.nullcontext if network is None else network.within,
            shape_rejected=(lambda: None) if network is None else network.enable,
            min_over_ranks=loop.min_over_ranks if several else None,
            warmup_steps=loop.capture_warmup_steps if several else 0,
        )
        if network is not None:
            network.begin(parts, loop.unreadable_types, parity)
            if graphs.given_up:
                network.enable_for_all_steps()
        for reason in () if graphs.given_up else loop.capture_obstacles():
            self._stop(reason)
        if several and loop.any_rank(graphs.given_up) and not graphs.given_up:
            self._stop("another process captures no steps")
        self._of: Any = None
        self._take_optimizer()

    def _take_optimizer(self) -> None:
        """Let graphs hold the step of the optimizer in force, which a training may replace."""
        if self._graphs.given_up or self._of is (optimizer := self._loop.optimizers[0]):
            return
        if self._of is not None:
            self._graphs.drop_graphs()
        self._release_optimizer()
        self._of = optimizer
        try:
            if self._loop.scaler is not None:
                raise CannotCapture("a gradient scaler decides on the host whether to step")
            if _needs_closure(optimizer):
                self._stop(f"{type(optimizer).__name__} evaluates the loss several times in a step")
                return
            self._optimizer = graphed(optimizer)
        except CannotCapture as error:
            self._leave_optimizer_out(str(error))

    @property
    def done_capturing(self) -> bool:
        """Whether the last step was replayed, or none like it will be."""
        return self._program.done_capturing

    @property
    def audits(self) -> list[Audit]:
        """Every graph that has repeated a step, in order."""
        return self._graphs.audits

    @property
    def differs(self) -> tuple[str, bool] | None:
        """Why captured steps run in Python again, where a graph was not the step without it twice in a row, the same on
        all processes; and whether it had passed before."""
        return self._graphs.differs

    def audit_next(self) -> None:
        """Take one of the next micro-batches without its graph, which repeats it and has to leave the same. Which one:
        graphs take turns. All processes call it at the same step."""
        self._graphs.audit_next()
        if self._network is not None:
            self._network.audit_next()

    def facts(self) -> dict[str, Any]:
        of_networks = {} if self._network is None or not self._network.wanted else self._network.facts()
        return self._graphs.facts() | of_networks

    def close(self) -> None:
        self._release_optimizer()
        if self._gradients:
            self._module.zero_grad(set_to_none=True)
            self._gradients = {}

    def _release_optimizer(self) -> None:
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None

    def run(self, micro: MicroBatch) -> dict[str, Any]:
        """Run one micro-batch; returns what ``MicroBatch.run`` does."""
        self._take_optimizer()
        if self._graphs.given_up:
            with on_stream(self._loop.stream):
                return micro.run(micro.batch)
        constants = None
        if micro.ends and self._optimizer is not None:
            if self._of._optimizer_step_pre_hooks or self._of._optimizer_step_post_hooks:
                self._leave_optimizer_out("a hook on its step runs on the host")
            else:
                self._optimizer.prepare()
                constants = self._optimizer.constants()
                self._constants.add(constants)
                if len(self._constants) > MAX_CONSTANTS:
                    constants = None
                    self._leave_optimizer_out(
                        "its hyperparameters change all the time, and its kernels take them by value"
                    )
            if self._graphs.given_up:
                return self.run(micro)
        optimizer = self._optimizer if micro.ends else None
        calls = _Calls(self, micro, optimizer)
        try:
            outputs = self._graphed(calls, constants)
        except NotRun as error:  # nothing was executed: only the loop's counters have moved
            micro.uncount()
            self._clear_after_capture(micro)
            self._program.notes.append(f"cuda_graph: {error}; training_step was called a second time on this batch")
            if isinstance(error, CaptureFailed):
                self._give_up_after(error, optimizer)
            return self.run(micro)
        except StateChanges as error:
            reset_fsdp_state(self._module, gradients=self._unreduced is None)
            self._stop(str(error))
            return self.run(micro)
        if micro.ends and optimizer is None:
            given = outputs
            outputs = micro.optimize(outputs)
            if outputs.get("loss") is not given.get("loss"):
                self._stop(f"{type(self._of).__name__} evaluates the loss several times in a step")
        return outputs if outputs.get("loss") is not None else {}  # a step that returned None is skipped

    def _clear_after_capture(self, micro: MicroBatch) -> None:
        """A capture may have ended in the middle of a forward, and its gradients lie in a graph's memory."""
        reset_fsdp_state(self._module, gradients=True)
        if self._unreduced is not None:
            self._unreduced.attach(empty=micro.begins)
        elif not self._gradients:
            self._module.zero_grad(set_to_none=True)

    def _give_up_after(self, error: NotRun, optimizer: GraphedStep | None) -> None:
        """What becomes of capturing once it has failed: without the optimizer it may do, unless it failed before."""
        self._graphs.reject(str(error))
        before = {"training_step", "forward_loss", "backward"} & {frame.f_code.co_name for frame in _frames(error)}
        if self._loop.any_rank(optimizer is None or bool(before)):
            self._stop(str(error))
        else:
            self._leave_optimizer_out(str(error))

    def _graphed(self, calls: _Calls, constants: Hashable) -> dict[str, Any]:
        """Run a micro-batch, with the step of the optimizer where there is one, from a graph or without."""
        graphs, micro, whole = self._graphs, calls.micro, calls.optimizer is not None
        self._index = micro.index
        for parameter, gradient in self._gradients.items() if graphs.unfit is None else ():
            if parameter.grad is not gradient:  # a validation sets them to None
                parameter.grad = gradient
        run = graphs.run if graphs.done_capturing else collected_later()(graphs.run)
        captures = graphs.captures
        outputs, logged = run(
            # A graph stays as it was captured: what loop and optimizer take by value is part of its key.
            (micro.begins, whole, constants, self._loop.constants(), torch.is_grad_enabled()),
            micro.batch,
            calls,
            name="whole step" if whole else "forward and backward",
        )
        if self._unreduced is not None and graphs.unfit is None:
            self._unreduced.attach(empty=micro.ends)
        alone = whole and micro.begins
        if not calls.called:
            if self._left_over and alone:
                self._module.zero_grad(set_to_none=True)
            self._left_over = False
            micro.count(whole=whole)
        elif not alone and self._unreduced is None:
            if not self._gradients:
                self._gradients = {parameter: parameter.grad for parameter in self._module.parameters()}
                if any(one is not None and one.layout is not torch.strided for one in self._gradients.values()):
                    graphs.unfit, self._gradients = StateChanges("sparse gradients differ in size"), {}
        elif graphs.captures > captures:
            # They lie in the graphs' memory, which every graph uses for something else.
            self._module.zero_grad(set_to_none=True)
        else:
            self._left_over = alone
        self._loop.write_logs(logged)
        return outputs

    def _leave_optimizer_out(self, reason: str) -> None:
        self._graphs.reject(f"the optimizer runs after each graph: {reason}")
        self._release_optimizer()
        if self._unreduced is not None:
            self._stop("under fsdp2 accumulated gradients are captured with the optimizer alone")

    def _stop(self, reason: str) -> None:
        self._graphs.reject(reason)
        self._graphs.given_up = True
        self._graphs.drop_graphs()
        if self._network is None or not self._network.networks:
            self._program.given_up["step"] = reason
        else:
            self._network.enable_for_all_steps(reason)

    @contextlib.contextmanager
    def reaching(self, micro: MicroBatch) -> Iterator[None]:
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


class _Calls:
    """One micro-batch, with the step of ``optimizer`` where there is one; see ``StepCalls``."""

    def __init__(self, of: StepCapture, micro: MicroBatch, optimizer: GraphedStep | None) -> None:
        self._of, self.micro, self.optimizer = of, micro, optimizer
        self.called = False
        """Whether the step was called in Python."""

    def run(self, batch: Any) -> tuple[dict[str, Any], list[Any]]:
        """The results of the micro-batch; and what it logged where nothing of it is executed now."""
        capturing = batch is not self.micro.batch
        logging = self._of._loop.recording_logs() if capturing else contextlib.nullcontext([])
        with self._prepared(), logging as logged:
            outputs = self._optimized(self.micro.forward_backward(batch))
        return outputs, logged

    def observe(self, batch: Any) -> tuple[Any, Observation]:
        """Forward and backward are recorded, in eager: what is compiled calls no Python either. The batch index counts
        only where the step makes use of it."""
        of, module = self._of, self._of._module
        if problems := list(_hooks(module)):
            return self.run(batch), Observation(HostState(), problems)
        recorder = HostRecorder(of._loop.device, of._loop.unreadable_types())
        arguments: Any = self.micro.arguments
        watch = IndexWatch(self.micro.index) if BATCH_INDEX in arguments else None
        outputs: dict[str, Any] = {}
        try:
            if watch is not None:
                arguments[BATCH_INDEX] = watch.index
            with (
                self._prepared(),
                eager(of._program),
                torch.compiler.set_stance("force_eager"),
                as_capturing(),
                # Else a backward runs on a thread of its own, where nobody sees what its functions read.
                torch.autograd.set_multithreading_enabled(False),
            ):
                with recorder.logs_unrecorded(module), recorder.recording(module, watch, of._loop.step_function):
                    outputs = self.micro.forward_backward(batch)
                outputs = self._optimized(outputs)
        finally:
            if watch is not None:
                arguments[BATCH_INDEX] = self.micro.index
                watch.close()
        state = recorder.state()
        if watch is not None and watch.used is not None:
            state.add(Value(BATCH_INDEX, lambda: of._index, self.micro.index, watch.used))
        return (outputs, []), Observation(state, list(recorder.problems), recorder.changed())

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """What the step finds, however it runs."""
        of, micro = self._of, self.micro
        self.called = True
        if of._unreduced is not None:
            of._unreduced.attach(empty=micro.begins)
            of._module.zero_grad(set_to_none=True)  # shards get theirs from the last micro-batch alone
        gradients = [gradient for gradient in of._gradients.values() if gradient is not None]

        def zero_grad(set_to_none: bool = True) -> None:
            torch._foreach_zero_(gradients)

        nothing = contextlib.nullcontext()
        zeroing = mock.patch.object(of._of, "zero_grad", zero_grad) if gradients else nothing
        all_reached = of._unreduced is not None or (self.optimizer is not None and micro.begins)
        with zeroing, nothing if all_reached else of.reaching(micro):
            yield

    def _optimized(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """After forward and backward: clipping and the optimizer, where they are part of the step."""
        unreduced = self._of._unreduced
        if self.optimizer is not None:
            with self.optimizer.capturable():  # the user's code sees the optimizer as it is without
                return self.micro.optimize(outputs)
        if unreduced is not None and not self.micro.ends and not unreduced.keep():
            self._of._graphs.unfit = StateChanges(UNLIKE)
        return outputs

    def before_replay(self) -> None:
        if self.optimizer is not None:
            self.optimizer.count()

    def after_capture(self) -> HostState:
        return HostState() if self.optimizer is None else optimizer_state(self._of._of)

    def state(self) -> dict[str, dict[str, Tensor]]:
        of, module = self._of, self._of._module
        named_weights = dict(module.named_parameters())
        names = {id(one): name for name, one in named_weights.items()}
        kept = {} if of._unreduced is None else dict(enumerate(of._unreduced.kept))
        return {
            "weight": dict(named_weights),
            "buffer": dict(module.named_buffers()),
            "optimizer": {}
            if self.optimizer is None
            else {
                f"{names.get(id(parameter), '?')}.{name}": value
                for parameter, state in of._of.state.items()
                for name, value in state.items()
                if isinstance(value, Tensor) and value.device == of._loop.device
            },
            "accumulated gradient": {
                **{names.get(id(one), "?"): value for one, value in of._gradients.items() if value is not None},
                **{str(place): value for place, value in kept.items()},
            },
        }

    def scalars(self) -> Sequence[Tensor]:
        return [] if self.optimizer is None else self.optimizer.scalars()

    def left(self, results: Any) -> Left:
        outputs, _ = results
        gradients: Mapping[str, Tensor] = {}
        if self.optimizer is not None and self.micro.begins and not self._of._gradients:
            named_weights = self._of._module.named_parameters()
            gradients = {name: one.grad for name, one in named_weights if one.grad is not None}
        return {**tensors_of(outputs), "gradient": gradients}

    def is_plain(self) -> bool:
        program = self._of._program
        return not program.compiled_beside_regions and all(one.state == "failed" for one in program.regions)


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


class _Parts(CompiledParts):
    """The regions of a program whose steps are captured, and the step of the optimizer that graphs hold."""

    def __init__(self, of: StepCapture) -> None:
        self._of, self._program = of, of._program
        self._before: set[int] = set()
        self._optimizer_was_ready = True

    def ready(self) -> bool:
        if self._program.found is not None:
            return False
        regions = (one for one in self._program.regions if one.called)
        return self._optimizer_is_ready() and all(one.state in ("compiled", "failed") for one in regions)

    def _optimizer_is_ready(self) -> bool:
        return self._of._optimizer is None or self._of._optimizer.ready

    def due(self) -> bool:
        return bool(self._due())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        checking = self._program.checking
        before, checking.audited = checking.audited, True  # no step compares twice
        try:
            yield
        finally:
            checking.audited = before

    def begin(self) -> None:
        self._before, self._optimizer_was_ready = self._due(), self._optimizer_is_ready()

    def steady(self) -> bool:
        ran_eager = any(one.ran_eager for one in self._program.regions)
        return self._optimizer_was_ready and not ran_eager and self._due() <= self._before

    def _due(self) -> set[int]:
        checking = self._program.checking
        kinds = [one for one in self._program.kinds.values() if one.failure is None]
        return {
            id(proof)
            for kind in kinds
            for proof in kind.proofs.values()
            if proof.missed or (proof.due and kind.may_audit(proof, checking))
        }


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Inside, Python collects no garbage, of which a full collection takes up to half a second: a step that does much
    more than train meets one more often than others. What is due comes in a later step."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step evaluates the loss itself, as often as it likes (LBFGS)."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _hooks(module: nn.Module) -> Iterator[str]:
    """Hooks that run on the host in a backward, as often as a step runs in Python."""
    yield from backward_hooks(module)
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"a hook on the parameter {path} runs on the host"


def _frames(error: BaseException) -> Iterator[Any]:
    trace = root_of(error).__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
