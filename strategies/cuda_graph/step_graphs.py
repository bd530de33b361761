"""Step graphs: training steps captured in CUDA graphs, one for each kind of batch, and replayed on its tensors.

What is captured reads its batch from static tensors, which every replay fills first, and leaves its results in static
tensors, of which every replay returns copies. Each step is called in Python once or replayed. Of the steps of one kind
that come before its graph, one is observed while it trains. What it reads on the host is part of the graph's key, and
is compared before each replay while the device still works on the step before. Another one is recorded: the new graph
has to repeat it before it may train.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies.compile_errors import CannotCapture, first_line, users_line
from strategies.cuda_graph.host_state import HostState
from strategies.cuda_graph.recorded_step import Left, RecordedStep, StepRecorder
from strategies.proven_code import capturing, not_compiled_yet
from strategies.tolerance import Difference, exceeding
from strategies.torch_patches import as_capturing

Step = Callable[[Any], Any]
"""Maps a batch to results, a tree whose tensors are results of the step."""


class Engine(Protocol):
    """What captures and replays."""

    def eager(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` as it is, where a later capture of it finds what its libraries have set up."""

    def capture(self, call: Callable[[], Any], pool: Hashable = None) -> tuple[Callable[[], None], Any]:
        """Call ``call`` once, and execute nothing on the device; returns what replays it, and its static results.
        Graphs of one ``pool`` use the same memory."""

    def watching(self) -> AbstractContextManager[list[str]]:
        """Inside, what no capture permits is put into the list."""

    def random_state(self) -> Any:
        """That of the device."""

    def set_random_state(self, state: Any) -> None: ...


_WAITS = "called a synchronizing CUDA operation"


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Inside, on ``stream``, between what the current one does before and after; None = on the current one."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class CudaEngine:
    """CUDA graphs on one device: captured on one side stream, ``stream`` if given, into one memory pool."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._generator = torch.cuda.default_generators[torch.cuda._utils._get_device_index(device, optional=True)]
        self._device = device
        self._stream = torch.cuda.Stream(device) if stream is None else stream
        self._pools: dict[Hashable, Any] = {}

    def eager(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` on the side stream, where its libraries set up what a capture may not."""
        with on_stream(self._stream), as_capturing():
            return call()

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[str]]:
        """Inside, each place at which the host waits for the device is put into the list: no capture permits that.
        https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html"""
        found: list[str] = []
        before, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_WAITS)
            show = warnings.showwarning

            def note(message: Any, *others: Any, **named: Any) -> None:
                if _WAITS not in str(message):
                    show(message, *others, **named)
                elif threading.get_ident() == thread:
                    found.append(f"the host waits for the device, not permitted in a capture ({users_line()})")

            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def random_state(self) -> Tensor:
        return self._generator.get_state()

    def set_random_state(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def capture(self, call: Callable[[], Any], pool: Hashable = None) -> tuple[Callable[[], None], Any]:
        """Record ``call`` without executing it on the device; returns what replays it, and its static results.

        When that fails, graphs captured before are not to be replayed any more: their random numbers are another
        generator's.
        """
        graph = torch.cuda.CUDAGraph()
        memory = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        random_state = self._generator.get_state()
        try:
            # The outer stream: a capture that fails at its end does not come back from the side stream by itself.
            # thread_local: the data loader's pinning thread goes on calling CUDA meanwhile.
            with (
                capturing(),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=memory, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = call()
        except BaseException:
            # A capture that fails leaves the generator waiting for its end: "Offset increment outside graph capture
            # encountered unexpectedly" at the next random number. It continues with a state of its own.
            fresh = torch.Generator(self._device)
            fresh.set_state(random_state)
            self._generator.graphsafe_set_state(fresh)
            del self._pools[pool]  # it counts as being recorded to, from now on
            raise
        # The capture's beginning writes an offset of random numbers on the side stream, where the GPU may be late with
        # it, and each replay writes it on the current one: they would race, and a replay draw other dropout masks.
        # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/cuda/CUDAGeneratorImpl.cpp (capture_prologue)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay, results


MAX_CHANGES = 6
"""Times that the state of a step may change before capture is given up, unless graphs were replayed in between:"""
MIN_REPLAYS = 16
"""replays for each change that make up for observing and capturing again."""
MAX_VARIANTS = 4
"""Graphs of one shape that are kept for states which may come back."""
MAX_GRAPHS = 64
"""Most graphs; batches of further shapes run without one."""
MAX_KEYS = 256
"""Kinds of batches of which none came twice after which capture is given up."""
MAX_OBSERVATIONS = 3
"""Observations in vain after which a shape runs without a graph: first steps often fill caches of their own."""
MAX_WAIT = 64
"""Steps after which a recorded one is dropped whose like has not come again."""
MAX_DEFERRED = 8
"""Steps that an audit runs in Python until what is compiled is compared with eager, before it is left out."""
MAX_RECORDS = 3
"""Recorded steps that were dropped, after which graphs are captured all the same, and compared at their next steps."""


class StateChanges(CannotCapture):
    """What the step reads on the host changes too often; the message says what."""


class NotRun(CannotCapture):
    """The step was called to be captured, and nothing of it executed: it has to be called again."""


class CaptureFailed(NotRun):
    """It could not be captured; the message says why."""


class Plan(IntEnum):
    """What a process can do with a step. Of several processes, all do what the least able one can: what is captured or
    repeated waits for the others in the middle."""

    GIVE_UP = 0
    EAGER = 1
    OBSERVE = 2
    """Without a graph, recording what it reads on the host."""
    RECORD = 3
    """Without a graph, keeping what it began with and left."""
    CAPTURE = 4
    AUDIT = 5
    """Without its graph, which repeats it then."""
    REPLAY = 6


class Observation(NamedTuple):
    state: HostState
    problems: list[str]
    """Why no graph can stand for it."""
    changed: tuple[tuple[str, Tensor], ...] = ()
    """Tensors that were read and then written to, with their names."""


class StepCalls(Protocol):
    """One step that is about to run, in pieces; its owner is the one who knows the loop."""

    def run(self, batch: Any) -> Any:
        """The step in Python."""

    def observe(self, batch: Any) -> tuple[Any, Observation]:
        """The same, in eager and with what it reads on the host recorded."""

    def before_replay(self) -> None:
        """The host's part of a replayed step; steps that run in Python do it themselves."""

    def after_capture(self) -> HostState:
        """State that exists once the step has been captured: the optimizer's."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that it works on, by kind and name, beside those that an observation finds."""

    def scalars(self) -> Sequence[Tensor]:
        """Numbers on the device that are written before each step: learning rates."""

    def left(self, results: Any) -> Left:
        """What it has just left beside its state, by kind and name: ``results``, and gradients that are there."""

    def is_plain(self) -> bool:
        """Whether nothing compiled is in force, so that an observed step runs what a captured one does."""


class CompiledParts:
    """What is compiled within the steps, and compared with eager in some that run in Python; here nothing."""

    def ready(self) -> bool:
        """Whether all of it that is called is proven, or has failed."""
        return True

    def due(self) -> bool:
        """Whether some of it is to be compared again when it is called next."""
        return False

    def alone(self) -> AbstractContextManager[Any]:
        """Inside, nothing is compared again."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """A step is about to run in Python."""

    def steady(self) -> bool:
        """Whether the next step like this one will run the same code: nothing of it was compiled anew, compared, or run
        eager because it is not proven yet."""
        return True


@dataclass(slots=True, eq=False)
class Variant:
    """One state on the host for one kind of batch, and the graph of it with its static tensors, once there is one."""

    states: list[HostState]
    """What was observed, and what has existed only since the capture: the optimizer's state."""
    changed: dict[str, Tensor] = field(default_factory=dict)
    """What the step has read and written to; parameters and buffers may be among them."""
    replay: Callable[[], None] | None = None
    inputs: list[Tensor] = field(default_factory=list)
    written: Sequence[int] = ()
    """Those of them that the step changes in place."""
    results: Any = None
    trusted: bool = True
    """Whether it may train. Else its next step runs without it, and it has to repeat that one."""
    failures: int = 0
    """Repetitions in a row that left something else."""
    audits: int = 0

    def change(self) -> str | None:
        """The first value that is not what it was, in words; None where the graph holds."""
        return next((change.how for state in self.states for change in state.changes()), None)


@dataclass(slots=True)
class Shape:
    """What is known about one kind of batch."""

    name: str
    """For messages: the shapes of its tensors."""
    seen: bool = False
    """Whether a step has run without a graph."""
    variants: list[Variant] = field(default_factory=list)
    """The last one used comes last."""
    steady: bool = False
    """Whether the last step that ran in Python as a captured one does has run compiled what there is."""
    waits: list[str] = field(default_factory=list)
    """What no capture permits, in the last step that was watched for it."""
    observations: int = 0
    """Steps in vain, of those that were observed or watched."""
    rejected: bool = False
    """Whether no capture will be tried."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """A step that ran without its graph, beside the graph that repeated it."""

    name: str
    """Of the graph."""
    differences: list[Difference]
    """One a tensor; none where all is equal to the last bit."""
    first: bool
    """Whether the graph was new, and gradients were compared."""
    passed: bool
    """Whether it left the same in all processes."""
    seconds: float
    """Of the repetition, without the step that it repeats."""

    @property
    def largest(self) -> Difference | None:
        """The one nearest to its tolerance, or farthest beyond it."""
        return max(self.differences, key=_share, default=None)


class StepGraphs:
    """Runs steps, from a graph where there is one for the batch and the state at hand."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shapes: dict[Hashable, Shape] = {}
        self.captures = self.replays = 0
        self.changes = 0
        """Times that a step's state on the host was a new one."""
        self.eager_count = 0
        """Steps run without a graph so far."""
        self.given_up = False
        """Whether nothing is, or will be, captured."""
        self.done_capturing = True
        self.holds_copies: Callable[[bool], Any] = lambda holds: None
        """Told before copies for a comparison are made, and once they are gone: their memory is not the training's."""
        self.audits: list[Audit] = []
        self.rejections: list[str] = []
        """Why steps were not captured, each reason once."""
        self.unfit: StateChanges | None = None
        """Why this process is to capture no more, from the next step on."""
        self.differs: tuple[str, bool] | None = None
        """Why a graph is not the step without it, the same on all processes; and whether it had passed before."""
        self._number = 0
        self._record: tuple[Variant, RecordedStep] | None = None
        """A recorded step that waits for its graph."""
        self._dropped = 0
        self._wants_audit = self._left_out = False
        self._waited = self._deferred = 0
        self._looks = False
        self.begin()

    def begin(
        self,
        *,
        parts: CompiledParts | None = None,
        notes: list[str] | None = None,
        repeating: StepRecorder | None = None,
        beside: Callable[[bool], AbstractContextManager[Any]] = contextlib.nullcontext,
        shape_rejected: Callable[[], Any] = lambda: None,
        min_over_ranks: Callable[[int], int] | None = None,
        warmup_steps: int = 0,
    ) -> None:
        """A training begins whose steps are captured.

        Args:
            parts: What runs compiled within a step: it has to be proven before a graph holds it. None = nothing.
            notes: Gets a line for the user for each refusal.
            repeating: Compares graphs with steps that ran without them; None with ``parity=off``.
            beside: Stands around a step that runs in Python, ``for_good`` or until it is captured.
            shape_rejected: Called when steps of one shape are not going to be captured.
            min_over_ranks: Returns the smallest of the processes' numbers; each of them calls it. None = one process.
            warmup_steps: Steps that run without a graph before the first capture, whatever their shapes.
        """
        self._parts, self._repeating = parts or CompiledParts(), repeating
        self._beside, self._shape_rejected = beside, shape_rejected
        self._notes: list[str] = [] if notes is None else notes
        self._several_ranks, self._min_over_ranks = min_over_ranks is not None, min_over_ranks or int
        self._warmup_steps = warmup_steps

    def run(self, kind: Hashable, batch: Any, calls: StepCalls, *, name: str) -> Any:
        """Run a step on ``batch`` and return its results.

        Args:
            kind: Whatever beside the batch's shapes tells graphs apart (which part of a step, micro-batches).
            batch: Tree with tensors on the device. What is no tensor is part of the graph's key, but for the fields
                that a NamedTuple's method ``host_only()`` lists.
            calls: The step. It is called in Python once, or replayed.
            name: What is being run, for the report.

        Raises StateChanges when capture is to be given up; NotRun where a capture was tried in vain, or its graph
        does not repeat a recorded step. Then the step has to be called again, and nothing else has been executed.
        """
        self._number += 1
        try:
            tensors, constants = _sorted_leaves(batch)
            layouts = tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors)
            shape = self._shapes.get(key := (kind, pytree.tree_structure(batch), constants, layouts))
        except (CannotCapture, TypeError) as error:
            self.reject(f"the batch: {error}")
            self._agreed_plan(Plan.EAGER)
            return self.eager(calls.run, batch)
        if shape is None:
            described = " ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
            shape = self._shapes[key] = Shape(name=f"{name} on {described}")
            if len(self._shapes) > MAX_KEYS and not self.replays:
                self.unfit = StateChanges(
                    f"{len(self._shapes)} batches of different shapes or contents, and none came twice: values of "
                    "a batch that are no tensors are part of a graph's key"
                )
        variant = next((each for each in reversed(shape.variants) if each.change() is None), None)
        if variant is not None:
            shape.variants.remove(variant)
            shape.variants.append(variant)
        own = self._own_plan(shape, variant)
        plan = self._agreed_plan(own, self.unfit)
        if plan is Plan.CAPTURE and not self._same_record():
            plan = Plan.RECORD
        self.done_capturing = plan is Plan.REPLAY or (plan is Plan.EAGER and shape.rejected)
        if plan is Plan.OBSERVE and own is Plan.OBSERVE:
            return self._run_observed(shape, batch, tensors, calls)
        if plan < Plan.RECORD:
            return self._run_without_graph(shape, batch, calls)
        assert variant is not None
        if plan is Plan.RECORD:
            return self._run_recorded(shape, variant, batch, tensors, calls)
        if plan is Plan.AUDIT:
            return self._run_audited(shape, variant, batch, tensors, calls)
        if plan is Plan.CAPTURE:
            needs_proof, fresh = self._needs_proof(), variant.replay is None
            self._capture(shape, variant, batch, calls)
            if needs_proof:
                self._prove(shape, variant, calls, fresh=fresh)
        self._waited += self._wants_audit
        assert variant.replay is not None
        with torch.no_grad():  # a step may ask for gradients by its batch
            torch._foreach_copy_(variant.inputs, tensors)
        calls.before_replay()
        variant.replay()
        with torch.no_grad():
            for place in variant.written:
                tensors[place].copy_(variant.inputs[place])
        self.replays += 1
        return pytree.tree_map_only(Tensor, torch.clone, variant.results)

    @property
    def random(self) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """Reads and sets the state of the device's random numbers."""
        return self._engine.random_state, self._engine.set_random_state

    def audit_next(self) -> None:
        """Take one of the next steps without its graph, and let the graph repeat it; all processes call it."""
        self._wants_audit = self._repeating is not None
        self._waited = self._deferred = 0
        self._looks = True

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Steps inside run in Python and are not looked at."""
        before, self._left_out = self._left_out, True
        try:
            yield
        finally:
            self._left_out = before

    def eager(self, step: Step, batch: Any, *, for_good: bool = True) -> Any:
        """Run ``step`` without a graph; unless ``for_good``, as it will run in one."""
        self.eager_count += 1
        with self._beside(for_good):
            return self._engine.eager(as_capturing(not for_good)(lambda: step(batch)))

    def _reject_shape(self, shape: Shape, reason: str) -> None:
        shape.rejected = True
        self.reject(reason)
        self._shape_rejected()

    def reject(self, reason: str) -> None:
        if reason not in self.rejections:
            self.rejections.append(reason)
            self._notes.append(f"cuda_graph: {reason}")

    def release(self) -> None:
        """Let go of all graphs and their memory, also where the traceback of an error still holds a shape."""
        self._drop_record()
        for shape in self._shapes.values():
            shape.variants.clear()

    def drop_graphs(self) -> None:
        """Let go of all graphs, and of what is known of batches."""
        self.release()
        self._shapes = {}

    def facts(self) -> dict[str, Any]:
        return {
            "graphs": self.captures,
            "captured": [shape.name for shape, _ in self._captured()],
            "replayed_steps": self.replays,
            "eager_steps": self.eager_count,
            "state_changes": self.changes,
            "refused": list(self.rejections),
            **({} if self._repeating is None else {"parity": self._parity(self._repeating)}),
        }

    def _parity(self, repeating: StepRecorder) -> dict[str, Any]:
        last: dict[str, Audit] = {one.name: one for one in self.audits}
        failed = not all(one.passed for one in last.values())
        largest = max((one.largest for one in self.audits if one.largest is not None), key=_share, default=None)
        return {
            "mode": repeating.mode,
            "verdict": "failed" if failed else "passed" if last else "none compared",
            "compared": list(last),
            "audits": sum(not one.first for one in self.audits),
            "equal_to_the_last_bit": sum(not one.differences for one in self.audits),
            "seconds": round(sum(one.seconds for one in self.audits), 4),
            "largest_difference": None if largest is None else str(largest),
            "largest_share_of_tolerance": None if largest is None or largest.share == float("inf") else largest.share,
            **({} if repeating.on_host is None else {"copies_on": "host" if repeating.on_host else "device"}),
            **({} if repeating.short is None else {"left_out": repeating.short}),
        }

    def _captured(self) -> Iterator[tuple[Shape, Variant]]:
        return ((shape, each) for shape in self._shapes.values() for each in shape.variants if each.replay is not None)

    # ---- what to do with a step ------------------------------------------------------------------------------------

    def _own_plan(self, shape: Shape, variant: Variant | None) -> Plan:
        """What this process can do with a step of ``shape``, in the state of ``variant``."""
        if shape.rejected or self._left_out:
            return Plan.EAGER
        waiting = self._waiting_variant()
        if variant is not None and variant.replay is not None:
            if waiting is not None and self._several_ranks:  # until all are at steps like those that they recorded
                return Plan.CAPTURE if waiting is variant else Plan.EAGER
            if variant.trusted and not (self._wants_audit and self._is_due(variant)):
                return Plan.REPLAY
            looks = variant.trusted and self._looks and self._parts.due()  # at regions first, which run in Python then
            if self._parts.ready() and not looks:
                return Plan.AUDIT
            self._deferred += 1
            self._wants_audit &= self._deferred <= MAX_DEFERRED
            return Plan.EAGER
        if not shape.seen:
            return Plan.EAGER
        if sum(1 for _ in self._captured()) >= MAX_GRAPHS:
            self._reject_shape(shape, f"there are {MAX_GRAPHS} graphs already")
            return Plan.EAGER
        if variant is None:
            if shape.variants:
                self.changes += 1
                if self.changes > MAX_CHANGES and self.replays < MIN_REPLAYS * self.changes:
                    change = shape.variants[-1].change()
                    reason = f"what the step reads on the host changes too often to capture it: {change}"
                    self.unfit = StateChanges(reason)
            return Plan.OBSERVE
        if shape.waits or self.eager_count < self._warmup_steps or not self._parts.ready():
            return Plan.EAGER
        if not self._needs_proof() or self._dropped >= MAX_RECORDS:
            return Plan.CAPTURE if shape.steady else Plan.EAGER
        if waiting is None:
            return Plan.RECORD
        return Plan.CAPTURE if waiting is variant else Plan.EAGER

    def _waiting_variant(self) -> Variant | None:
        """Whose graph a recorded step waits for."""
        if self._record is None:
            return None
        if self._number - self._record[1].number > MAX_WAIT:
            self._drop_record()
            self._dropped += 1
            return None
        return self._record[0]

    def _needs_proof(self) -> bool:
        """Whether the next graph has to repeat a step before it may train: each one with ``strict``, else the first."""
        if self._repeating is None:
            return False
        return self._repeating.mode == "strict" or not any(one.passed for one in self.audits)

    def _is_due(self, variant: Variant) -> bool:
        """Whether an audit is to take this graph: one that had no more than others, or the next one after a while."""
        audits = [each.audits for _, each in self._captured()]
        return variant.audits <= min(audits) or self._waited >= 2 * len(audits)

    def _agreed_plan(self, plan: Plan, changes: StateChanges | None = None) -> Plan:
        """What all processes do with this step. Raises StateChanges where one of them is to give up."""
        agreed = Plan(self._min_over_ranks(plan if changes is None else Plan.GIVE_UP))
        if agreed is Plan.GIVE_UP:
            raise changes or StateChanges("another process captures no steps any more")
        return agreed

    def _same_record(self) -> bool:
        """Whether all processes have recorded the same step: their gradients meet in it."""
        number = 0 if self._record is None else self._record[1].number
        return self._min_over_ranks(number) == -self._min_over_ranks(-number)

    # ---- steps in Python -------------------------------------------------------------------------------------------

    def _run_without_graph(self, shape: Shape, batch: Any, calls: StepCalls) -> Any:
        """Without a graph."""
        self._parts.begin()
        observed = bool(shape.variants) and all(one.replay is None for one in shape.variants)
        if shape.rejected or self._left_out or not (observed or shape.waits or calls.is_plain()):
            results = self.eager(calls.run, batch, for_good=shape.rejected and not self._left_out)
            if not self._left_out:
                shape.steady = self._parts.steady()
        else:
            results = self._run_watched(shape, batch, calls)
        if not self._left_out:
            shape.seen = True
            self._looks &= not shape.steady
        return results

    def _run_watched(self, shape: Shape, batch: Any, calls: StepCalls) -> Any:
        """Without a graph, looking for what no capture permits; again and again, for a first step may fill a cache."""
        with self._engine.watching() as waits:
            results = self.eager(calls.run, batch, for_good=False)
        shape.steady = self._parts.steady()
        shape.waits = waits if shape.steady else []  # checks and compilers wait, too, and are in no capture
        self._in_vain(shape, shape.waits)
        return results

    def _in_vain(self, shape: Shape, problems: list[str]) -> None:
        if problems:
            shape.observations += 1
            if shape.observations >= MAX_OBSERVATIONS:
                self._reject_shape(shape, "; ".join(list(dict.fromkeys(problems))[:3]))

    def _run_observed(self, shape: Shape, batch: Any, tensors: list[Tensor], calls: StepCalls) -> Any:
        """Observed; and recorded at once where it runs what a captured one does."""
        record = None
        wanted = self._needs_proof() and self._dropped < MAX_RECORDS
        if wanted and not self._several_ranks and self._record is None and calls.is_plain():
            record = self._begin_record(tensors, None, calls)
        self.eager_count += 1
        results, observation = self._engine.eager(lambda: calls.observe(batch))
        self._in_vain(shape, observation.problems)
        if observation.problems:
            if record is not None:
                self._free_record(record)
            return results
        variant = Variant([observation.state], dict(observation.changed))
        shape.variants[:] = [*shape.variants[1 - MAX_VARIANTS :], variant]
        if record is not None:
            self._end_record(variant, record, results, calls)
        return results

    def _run_recorded(self, shape: Shape, variant: Variant, batch: Any, tensors: list[Tensor], calls: StepCalls) -> Any:
        self._drop_record()
        record = self._begin_record(tensors, variant, calls)
        self._parts.begin()
        with self._parts.alone():
            results = self._run_watched(shape, batch, calls)
        if record is not None:
            self._end_record(variant, record, results, calls)
        as_captured = shape.steady and not shape.waits
        if not self._min_over_ranks(self._record is not None and as_captured):
            self._drop_record()
            self._dropped += bool(self._min_over_ranks(as_captured))
        return results

    def _begin_record(self, tensors: list[Tensor], variant: Variant | None, calls: StepCalls) -> RecordedStep | None:
        assert self._repeating is not None
        self.holds_copies(True)
        copies = [one.clone() for one in tensors]
        record = self._repeating.begin(self._number, copies, self._state(variant, calls), calls.scalars())
        if record is None:
            self._no_memory()
            self.holds_copies(False)
        return record

    def _end_record(self, variant: Variant, record: RecordedStep, results: Any, calls: StepCalls) -> None:
        assert self._repeating is not None
        done = self._repeating.end(record, self._state(variant, calls), calls.left(results), later=True)
        self._record = None if done is None else (variant, record)
        if done is None:
            self._free_record(record)

    def _free_record(self, record: RecordedStep) -> None:
        record.free()
        self.holds_copies(False)

    def _drop_record(self) -> None:
        """Forget the recorded step, if there is one."""
        if self._record is not None:
            self._free_record(self._record[1])
            self._record = None

    def _no_memory(self) -> None:
        """Proven, or without a graph."""
        assert self._repeating is not None
        if self._needs_proof():
            self.unfit = StateChanges(
                f"replays cannot be compared with steps: {self._repeating.short}; parity=off captures without comparing"
            )

    def _state(self, variant: Variant | None, calls: StepCalls) -> dict[str, dict[str, Tensor]]:
        state = calls.state()
        return {**state, "tensor": {} if variant is None else variant.changed}

    # ---- graphs ----------------------------------------------------------------------------------------------------

    def _capture(self, shape: Shape, variant: Variant, batch: Any, calls: StepCalls) -> None:
        """Capture what ``variant`` lacks. Raises NotRun in all processes where one of them cannot."""
        error: Exception | None = None
        made = None
        if variant.replay is None:
            leaves, tree = pytree.tree_flatten(batch)
            statics = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            batch = pytree.tree_unflatten(statics, tree)
            inputs = [static for static in statics if isinstance(static, Tensor)]
            versions = [static._version for static in inputs]
            try:
                with warnings.catch_warnings():
                    # torch warns that a graph without kernels is empty; an empty graph is an error of its own below.
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                    with self._parts.alone():
                        made = self._engine.capture(lambda: calls.run(batch))
            except Exception as failed:
                error = failed
            else:
                after = calls.after_capture()
        missing = not_compiled_yet(error)
        agreed = self._min_over_ranks(2 if error is None else int(missing is not None))
        if agreed < 2:
            self.release()  # the graphs of all, see ``CudaEngine.capture``
            reason = "another process could not capture it" if error is None else why_not_captured(error)
            if agreed:  # begin anew: this step runs in Python, which compiles what is missing and compares it
                shape.seen = shape.steady = False
                reason = reason if missing is None else str(missing)
                self._in_vain(shape, [reason])
                raise NotRun(f"{shape.name}: {reason}") from error
            shape.rejected = True
            raise CaptureFailed(f"{shape.name}: {reason}") from error
        if made is not None:
            variant.replay, results = made
            variant.results = pytree.tree_map_only(Tensor, Tensor.detach, results)
            variant.inputs = inputs
            variant.written = [place for place, static in enumerate(inputs) if static._version != versions[place]]
            variant.states.append(after)
            self.captures += 1

    def _prove(self, shape: Shape, variant: Variant, calls: StepCalls, *, fresh: bool) -> None:
        """Let a new graph repeat the recorded step. Raises NotRun in all processes where it does not in one, or where
        none was recorded: then it has to repeat this one."""
        if self._record is None:
            variant.trusted = False
            raise NotRun(
                f"{shape.name}: no step of this kind was recorded, so that its replay is compared with this one"
            )
        repeats = self._graph_repeats(shape, variant, self._record[1], calls, fresh=fresh)
        self._drop_record()
        if not repeats:
            raise NotRun(f"{shape.name}: the replay differs from a step that ran without it, and is compared again")

    def _run_audited(self, shape: Shape, variant: Variant, batch: Any, tensors: list[Tensor], calls: StepCalls) -> Any:
        """Without its graph, which repeats the step then; what the step has left in Python stays."""
        assert self._repeating is not None
        self._wants_audit = False
        record, done = self._begin_record(tensors, variant, calls), None
        self._parts.begin()
        with self._parts.alone():
            results = self.eager(calls.run, batch, for_good=False)
        steady = self._parts.steady()
        if record is not None and steady:
            done = self._repeating.end(record, self._state(variant, calls), calls.left(results), later=False)
        variant.audits += 1
        if self._min_over_ranks(record is not None and done is not None):
            assert record is not None
            self._graph_repeats(shape, variant, record, calls, fresh=False)
        elif not steady:  # once more
            self._deferred += 1
            self._wants_audit = self._deferred <= MAX_DEFERRED
        elif not variant.trusted:
            reason = self._repeating.short or "a step of it replaces some tensors by others"
            self.unfit = StateChanges(f"{shape.name}: its graph cannot be checked: {reason}")
        if record is not None:
            self._free_record(record)
        return results

    def _graph_repeats(
        self, shape: Shape, variant: Variant, record: RecordedStep, calls: StepCalls, *, fresh: bool
    ) -> bool:
        """Whether the graph of ``variant`` leaves what the recorded step has left, in all processes. ``fresh``: it has
        just been captured, and its gradients are where it has put them."""
        assert self._repeating is not None
        assert variant.replay is not None

        def left() -> Left:
            found = calls.left(variant.results)
            # Later, they lie in memory that other graphs use for something else.
            return found if fresh else {kind: found[kind] for kind in found if kind != "gradient"}

        began = time.perf_counter()
        found = self._repeating.repeat(record, variant.replay, variant.inputs, calls.scalars(), left)
        wrong = exceeding(found)
        passed = bool(self._min_over_ranks(not wrong))
        seconds = time.perf_counter() - began
        self.audits.append(Audit(name=shape.name, differences=found, first=fresh, passed=passed, seconds=seconds))
        if passed:
            variant.trusted, variant.failures = True, 0
            return True
        variant.failures += 1
        for _, other in self._captured():
            other.trusted = False
        if variant.failures > 1:
            found_here = "; ".join(map(str, wrong[:3])) or "on another process"
            reason = f"the replay of {shape.name} differs from the step without it: {found_here}"
            self.differs = reason, any(one.passed and one.name == shape.name for one in self.audits)
            self.unfit = StateChanges(reason)
        return False


def why_not_captured(error: BaseException) -> str:
    """In one line."""
    reason = first_line(error)
    if "legacy stream" in reason:
        reason += " (is the graph of an earlier step still held, by a loss that was kept without detach()?)"
    if "when stream is capturing" in reason:
        reason += ": the host reads something from the device there, such as the size of a boolean mask, or .item()"
    return reason


def _share(difference: Difference) -> float:
    return difference.share


def not_strided(tensor: Tensor) -> str | None:
    """What ``tensor`` is, in words, where no static tensor can be made for it; None for an ordinary one."""
    if tensor.is_nested:
        return "a nested tensor"
    return None if tensor.layout is torch.strided else f"a tensor of layout {tensor.layout}"


def _sorted_leaves(batch: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The batch's tensors, and what else it holds that a graph depends on. Raises CannotCapture."""
    if isinstance(batch, tuple) and hasattr(batch, "host_only"):
        batch = batch._replace(**dict.fromkeys(batch.host_only()))  # type: ignore[attr-defined]
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise CannotCapture(f"{type(batch).__name__} holds no tensor that could be found")
    for one in tensors:
        if (what := not_strided(one)) is not None:
            raise CannotCapture(f"it holds {what}")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise CannotCapture(f"its tensors lie on {', '.join(sorted(map(str, devices)))}")
    return tensors, tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
