"""Step graphs: training steps captured in CUDA graphs, one for each kind of batch, and replayed on its tensors.

What is captured reads its batch from static tensors, which every replay fills first, and leaves its results in static
tensors, of which every replay returns copies. Before a step is captured it is observed. What it reads on the host is
part of the graph's key, and is compared before each replay while the device still works on the step before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies.base import CannotCapture, Program
from strategies.cuda_graph.state import HostState
from strategies.errors import first_line
from strategies.loop import Loop
from strategies.torch_patches import as_capturing

if TYPE_CHECKING:
    from strategies.cuda_graph.steps import StepCapture

Step = Callable[[Any], Any]
"""Maps a batch to results, a tree whose tensors are results of the step."""


class CudaEngine:
    """CUDA graphs on one device: captured on one side stream, into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.cuda.default_generators[torch.cuda._utils._get_device_index(device, optional=True)]
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def eager(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` on the side stream, where its libraries set up what a capture may not."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), as_capturing():
            results = call()
        current.wait_stream(self._stream)
        return results

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record ``call`` without executing it on the device; returns what replays it, and its static results.

        When that fails, graphs captured before are not to be replayed any more: their random numbers are another
        generator's.
        """
        graph = torch.cuda.CUDAGraph()
        random_state = self._generator.get_state()
        try:
            # The outer stream: a capture that fails at its end does not come back from the side stream by itself.
            # thread_local: the data loader's pinning thread goes on calling CUDA meanwhile.
            # fail_on_recompile: a compile within a capture breaks it on 2.11 with an error that names nothing.
            with (
                torch.compiler.set_stance("fail_on_recompile"),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = call()
        except BaseException:
            # A capture that fails leaves the generator waiting for its end: "Offset increment outside graph capture
            # encountered unexpectedly" at the next random number. It continues with a state of its own.
            fresh = torch.Generator(self._device)
            fresh.set_state(random_state)
            self._generator.graphsafe_set_state(fresh)
            self._pool = torch.cuda.graph_pool_handle()  # the other one counts as being recorded to, from now on
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


class NotYet(CannotCapture):
    """A step that could not be captured before one like it has run; asked again, it runs."""


class StateChanges(CannotCapture):
    """What the step reads on the host changes too often; the message says what."""


class Plan(IntEnum):
    """What a process can do with a step. Of several processes, all do what the least able one can: a capture runs the
    step more than once, and each run waits for the others."""

    GIVE_UP = 0
    EAGER = 1
    CAPTURE = 2
    REPLAY = 3


class Observation(NamedTuple):
    state: HostState
    problems: list[str]
    """Why no graph can stand for it."""


@dataclass(slots=True, eq=False)
class Variant:
    """One state on the host for one kind of batch, and the graph of it with its static tensors, once there is one."""

    states: list[HostState]
    """What was observed, and what has existed only since the capture: the optimizer's state."""
    replay: Callable[[], None] | None = None
    inputs: list[Tensor] = field(default_factory=list)
    written: Sequence[int] = ()
    """Those of them that the step changes in place."""
    results: Any = None

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
    observations: int = 0
    """Observations in vain."""
    failed: bool = False
    """Whether a capture was tried in vain."""
    refused: bool = False
    """Whether no further one will be tried."""


class Verifier(Protocol):
    """Compares the first replay of a graph with the step that it was captured from."""

    facts: dict[str, Any]
    """Verdict and figures, for the record."""

    def wants(self, name: str) -> bool:
        """Whether the graph about to be captured is to be compared."""

    def reference(self, run: Callable[[], Any], batch: Any) -> None:
        """Run the step without a graph, keep what it did, and take all of it back."""

    def compare(self, results: Any) -> None:
        """Compare the replay that has just happened. Raises what should end the run."""


class StepGraphs:
    """Runs steps, from a graph where there is one for the batch and the state at hand.

    Of each kind of batch one runs before its capture, of every shape of it until it is ``warmed``: what it needs is
    compiled and tuned then.
    """

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._shapes: dict[Hashable, Shape] = {}
        self._kinds: set[Hashable] = set()
        self.warmed = False
        """Then only the first shape of a kind runs before its capture: others may find no memory beside the graphs."""
        self.captures = self.replays = 0
        self.changes = 0
        """Times that a step's state on the host was a new one."""
        self.eager_count = 0
        """Steps run without a graph so far."""
        self.given_up = False
        """Whether nothing is, or will be, captured."""
        self.settled = True
        self.warmup_steps = 0
        """Steps that run without a graph before the first capture, whatever their shapes."""
        self.agree: Callable[[int], int] = int
        """Returns the smallest of the processes' numbers; each of them calls it."""
        self.verifier: Verifier | None = None
        self.refusals: list[str] = []
        """Why steps were not captured, each reason once."""
        self.notes: list[str] = []
        """Lines for the user, one for each refusal; a program's own where its steps are captured."""
        self.unfit: StateChanges | None = None
        """Why this process is to capture no more, from the next step on."""

    def run(
        self,
        kind: Hashable,
        batch: Any,
        step: Step,
        *,
        name: str,
        before_replay: Callable[[], None],
        observe: Callable[[], Observation],
        after_capture: Callable[[], HostState] = HostState,
        held: Sequence[Tensor] = (),
    ) -> Any:
        """Run ``step`` on ``batch`` and return its results.

        Args:
            kind: Whatever beside the batch's shapes tells graphs apart (which part of a step, micro-batches).
            batch: Tree with tensors on the device. What is no tensor is part of the graph's key, but for the fields
                that a NamedTuple's method ``host_only()`` lists.
            step: The step; it is called in Python when it runs without a graph and once when it is captured.
            name: What is being run, for the report.
            before_replay: The host's part of a replayed step; steps that run without a graph do it themselves.
            observe: Runs the step once for what it reads on the host, and takes everything back.
            after_capture: State that exists once the step has been captured: the optimizer's.
            held: Tensors that the step changes beside what the verifier puts back.

        Raises StateChanges when capture is to be given up, CannotCapture when the step cannot be captured.
        """
        try:
            tensors, constants = _sorted_leaves(batch)
            layouts = tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors)
            shape = self._shapes.get(key := (kind, pytree.tree_structure(batch), constants, layouts))
        except (CannotCapture, TypeError) as error:
            self.refuse(f"the batch: {error}")
            self._agreed(Plan.EAGER)
            return self.eager(step, batch)
        if shape is None:
            described = " ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
            shape = self._shapes[key] = Shape(name=f"{name} on {described}")
            if len(self._shapes) > MAX_KEYS and not self.replays:
                self.unfit = StateChanges(
                    f"{len(self._shapes)} batches of different shapes or contents, and none came twice: what a batch "
                    "holds beside tensors tells graphs apart"
                )
        variant = next((each for each in reversed(shape.variants) if each.change() is None), None)
        if variant is not None:
            shape.variants.remove(variant)
            shape.variants.append(variant)
        captured = variant is not None and variant.replay is not None
        self.settled = captured or shape.refused
        ready = shape.seen or (self.warmed and kind in self._kinds and not shape.failed)
        able = ready and not shape.refused and self.eager_count >= self.warmup_steps
        verifier = None
        plan = Plan.REPLAY if captured else Plan.CAPTURE if able else Plan.EAGER
        plan = self._agreed(plan, self.unfit)
        if plan is Plan.CAPTURE and (plan := self._looked_at(shape, variant, observe)) is Plan.CAPTURE:
            variant = shape.variants[-1]
            wants = self.verifier is not None and not captured and self.verifier.wants(shape.name)
            if self.verifier is not None and not self.agree(not wants):
                verifier = self.verifier
                before = [one.clone() for one in held]

                def again() -> Any:
                    for one, value in zip(held, before, strict=True):
                        one.copy_(value)
                    return self._engine.eager(lambda: step(batch))

                verifier.reference(again, batch)
                for one, value in zip(held, before, strict=True):
                    one.copy_(value)
            self._capture(shape, variant, step, batch, after_capture)
        if plan is Plan.EAGER and not captured:
            shape.seen = True
            results = self.eager(step, batch, for_good=shape.refused)
            self._kinds.add(kind)
            return results
        assert variant is not None
        assert variant.replay is not None
        if captured:  # else they have just been copied
            torch._foreach_copy_(variant.inputs, tensors)
        before_replay()
        variant.replay()
        for place in variant.written:
            tensors[place].copy_(variant.inputs[place])
        self.replays += 1
        if verifier is not None:
            verifier.compare(variant.results)
        return pytree.tree_map_only(Tensor, torch.clone, variant.results)

    def take_over(self, loop: Loop, program: Program) -> StepCapture:
        """Run the micro-batches of ``loop`` from now on."""
        from strategies.cuda_graph.steps import StepCapture

        return StepCapture(loop, program, self)

    def eager(self, step: Step, batch: Any, *, for_good: bool = True) -> Any:
        """Run ``step`` without a graph; unless ``for_good``, as it will run in one."""
        self.eager_count += 1
        return self._engine.eager(as_capturing(not for_good)(lambda: step(batch)))

    def refuse(self, reason: str) -> None:
        if reason not in self.refusals:
            self.refusals.append(reason)
            self.notes.append(f"cuda_graph: {reason}")

    def release(self) -> None:
        """Let go of all graphs and their memory, also where the traceback of an error still holds a shape."""
        for shape in self._shapes.values():
            shape.variants.clear()

    def forget(self) -> None:
        """Let go of all graphs, and of what is known of batches."""
        self.release()
        self._shapes, self._kinds = {}, set()

    def facts(self) -> dict[str, Any]:
        return {
            "graphs": self.captures,
            "captured": self._captured(),
            "replayed_steps": self.replays,
            "eager_steps": self.eager_count,
            "state_changes": self.changes,
            "refused": list(self.refusals),
            **({} if self.verifier is None else {"parity": self.verifier.facts}),
        }

    def _captured(self) -> list[str]:
        return [shape.name for shape in self._shapes.values() for each in shape.variants if each.replay is not None]

    def _looked_at(self, shape: Shape, variant: Variant | None, observe: Callable[[], Observation]) -> Plan:
        """What all processes do with a step that may be captured; the last variant of ``shape`` is the one."""
        may, changes, observe = False, None, functools.cache(observe)
        try:
            if not self.agree(variant is not None):
                observe()  # also where that is needless: its forward may wait for the other processes
            captured = variant is not None and variant.replay is not None
            may = captured or self._may_capture(shape, variant, observe)
        except StateChanges as error:
            changes = error
        return self._agreed(Plan.CAPTURE if may else Plan.EAGER, changes)

    def _may_capture(self, shape: Shape, variant: Variant | None, observe: Callable[[], Observation]) -> bool:
        if len(self._captured()) >= MAX_GRAPHS:
            shape.refused = True
            self.refuse(f"there are {MAX_GRAPHS} graphs already")
            return False
        if variant is not None:  # a state that was seen before, and is here again
            return True
        if changed := bool(shape.variants):
            self.changes += 1
            change = shape.variants[-1].change()
            if self.changes > MAX_CHANGES and self.replays < MIN_REPLAYS * self.changes:
                raise StateChanges(f"what the step reads on the host changes too often to capture it: {change}")
        observation = observe()
        if observation.problems:
            shape.observations += 1
            if shape.observations >= MAX_OBSERVATIONS:
                shape.refused = True
                self.refuse("; ".join(observation.problems[:3]))
            return False
        shape.variants[:] = [*shape.variants[1 - MAX_VARIANTS :], Variant([observation.state])]
        # Captured in a later step in which it still holds: no step takes both, and a state that changes at every step
        # is never captured. Once shapes are warmed, a step without a graph might find no memory beside the graphs.
        return self.warmed and not changed

    def _agreed(self, plan: Plan, changes: StateChanges | None = None) -> Plan:
        """What all processes do with this step. Raises StateChanges where one of them is to give up."""
        agreed = Plan(self.agree(plan if changes is None else Plan.GIVE_UP))
        if agreed is Plan.GIVE_UP:
            raise changes or StateChanges("another process captures no steps any more")
        return agreed

    def _capture(
        self, shape: Shape, variant: Variant, step: Step, batch: Any, after_capture: Callable[[], HostState]
    ) -> None:
        """Capture what ``variant`` lacks. Raises CannotCapture in all processes where one of them cannot."""
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
                    made = self._engine.capture(lambda: step(batch))
            except Exception as failed:
                error = failed
            else:
                after = after_capture()
        if not self.agree(error is None):
            self.release()  # the graphs of all, see ``CudaEngine.capture``
            shape.failed = True
            shape.refused = bool(self.agree(shape.seen))
            reason = "another process could not capture it" if error is None else first_line(error)
            if "legacy stream" in reason:
                reason += " (is the graph of an earlier step still held, by a loss that was kept without detach()?)"
            raise (CannotCapture if shape.refused else NotYet)(f"{shape.name}: {reason}") from error
        if made is not None:
            variant.replay, results = made
            variant.results = pytree.tree_map_only(Tensor, Tensor.detach, results)
            variant.inputs = inputs
            variant.written = [place for place, static in enumerate(inputs) if static._version != versions[place]]
            variant.states.append(after)
            self.captures += 1


def _sorted_leaves(batch: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The batch's tensors, and what else it holds that a graph depends on. Raises CannotCapture."""
    if isinstance(batch, tuple) and hasattr(batch, "host_only"):
        batch = batch._replace(**dict.fromkeys(batch.host_only()))  # type: ignore[attr-defined]
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise CannotCapture(f"{type(batch).__name__} holds no tensor that could be found")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise CannotCapture(f"its tensors lie on {', '.join(sorted(map(str, devices)))}")
    return tensors, tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
