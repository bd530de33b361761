"""Network graphs: the modules that a step calls, each as a CUDA graph of its forward and another of its backward.

They serve steps that cannot be captured as a whole. The step stays Python, with all that it does on the host; what runs
for a long time, the network, is replayed. Each kind of call (shapes, training flag, gradients on or off) has graphs of
its own. Before there are any, a real call is watched: one that changes something on the host has no graph, and runs
once. Then a call runs on copies of its inputs: observed with its backward, for what it reads on the host (compared
before each replay from then on), and captured; the graphs have to give the outputs, gradients and buffers of the call
without them. Audits look again later.

Outputs and gradients of a replay are copied out of the graphs' memory, so that what the user keeps stays what it was,
and gradients accumulate as in eager. Weights get theirs through autograd: their hooks, DistributedDataParallel's among
them, are called as ever.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from strategies.compile_errors import CannotCapture, first_line, is_out_of_memory
from strategies.cuda_graph.host_recorder import HostRecorder
from strategies.cuda_graph.host_state import EQUAL, HostState, backward_hooks
from strategies.cuda_graph.step_graphs import (
    MAX_CHANGES,
    MAX_DEFERRED,
    MAX_GRAPHS,
    MAX_OBSERVATIONS,
    MAX_VARIANTS,
    MIN_REPLAYS,
    CompiledParts,
    not_strided,
    why_not_captured,
)
from strategies.proven_code import not_compiled_yet
from strategies.region import Check, Checking, Region, StandIn, is_ancestor, is_looked_at, plain, submodules
from strategies.region_check import Outcome, clone, leaves_of, same_call, version_of, without_hooks
from strategies.region_state import RegionState
from strategies.tolerance import MULTIPLES
from strategies.torch_patches import as_capturing

if TYPE_CHECKING:
    from strategies.cuda_graph.step_graphs import Engine
    from strategies.loop_protocol import Loop

FIRST_CALLS = 2
"""Calls of one kind that run without a graph before one is captured: kernels are loaded, inner regions proven."""
MAX_LANES = 4
"""Calls of one module that may wait for their backwards at the same time."""
MAX_NOTES = 3
"""Modules with a graph, and without, that are told of; the record has all."""


@dataclass(slots=True, eq=False)
class CallGraph:
    """The graphs of one kind of call, with their static tensors."""

    replay_forward: Callable[[], None]
    inputs: list[Tensor]
    outputs: list[Any]
    """Leaves of what was returned: static tensors, plain values, or ``_Same`` for what is handed through."""
    tree: Any
    differentiable: list[int]
    """Places among ``outputs`` of which gradients are taken."""
    replay_backward: Callable[[], None] | None = None
    output_gradients: list[Tensor] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """Of ``differentiable``, the places whose gradients the backward was captured for."""
    of_inputs: list[int] = field(default_factory=list)
    """Places among ``inputs`` that get gradients."""
    weights: list[Tensor] = field(default_factory=list)
    """Leaves that do."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Static, of ``of_inputs`` and then of ``weights``."""
    reached: list[frozenset[int]] = field(default_factory=list)
    """For each of ``wanted``, the places among ``gradients`` that depend on it."""


@dataclass(frozen=True, slots=True)
class _Same:
    """An output that is an input of the call, or a tensor that was there before it."""

    place: int | None = None
    tensor: Tensor | None = None


class _Lane:
    """Memory of graphs of which no two wait for their backward at once: what a forward leaves in it is needed until
    then."""

    def __init__(self) -> None:
        self.pool = object()
        """Names the engine's memory pool."""
        self._holder: Callable[[], Any] = lambda: None

    @property
    def free(self) -> bool:
        return self._holder() is None

    def take(self, pending: Pending) -> None:
        self._holder = weakref.ref(pending)

    def release(self) -> None:
        self._holder = lambda: None


class Pending:
    """One replayed forward, until its backward is through or cannot come any more."""

    def __init__(self, of: Network, graph: CallGraph, lane: _Lane, args: Any, kwargs: Any, random: Any) -> None:
        self.of, self.graph, self.lane, self.args, self.kwargs, self.random = of, graph, lane, args, kwargs, random
        self.autocast = _autocast()
        self.done = False
        lane.take(self)


@dataclass(slots=True, eq=False)
class _Variant:
    """One state on the host for one kind of call, and a graph for each lane."""

    state: HostState
    graphs: dict[_Lane, CallGraph] = field(default_factory=dict)
    due: bool = False
    """Whether the next call is an audit."""

    def change(self) -> str | None:
        return next((one.how for one in self.state.changes()), None)


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of one kind."""

    name: str
    calls: int = 0
    """Without a graph."""
    watched: bool = False
    """Whether a real call, in the state on the host that is, was seen to change nothing there."""
    variants: list[_Variant] = field(default_factory=list)
    changes: int = 0
    replays: int = 0
    failures: int = 0
    rejected: bool = False
    with_gradient: set[int] = field(default_factory=set)
    """Places among the outputs that got gradients in calls without a graph."""


class Network(StandIn):
    """One module that steps call, in the place of its call: replays, or what the module is without."""

    def __init__(self, of: NetworkGraphs, path: str, module: nn.Module) -> None:
        super().__init__(module)
        self.of, self.path = of, path
        self.called = self.opened = False
        """Whether steps call it, not within another one; whether the modules in it have taken its place."""
        self.reason: str | None = None
        """Why it runs without graphs for good."""
        self.replays = 0
        self.announced = False
        self._kinds: dict[Any, _Kind] = {}
        self._lanes: list[_Lane] = [_Lane()]
        self._deferred = 0

    @property
    def kind(self) -> str:
        """For messages and the record."""
        return f"graph of {type(self.module).__name__}"

    @property
    def graphs(self) -> int:
        return sum(len(one.graphs) for kind in self._kinds.values() for one in kind.variants)

    def drop_graphs(self) -> None:
        """Let go of all graphs."""
        for kind in self._kinds.values():
            kind.variants.clear()

    def audit(self) -> None:
        self._deferred = 0
        for kind in self._kinds.values():
            for one in kind.variants:
                one.due = bool(one.graphs)

    # ---- a call ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of = self.of
        if (other := self.other_module_called()) is not None:
            return other._call_impl(*args, **kwargs)
        if self.is_called_beside_a_step:
            return self._run_without_graph(args, kwargs)
        if of.inside or not of.in_force or self.reason is not None or is_looked_at(args):
            self.called |= not of.inside
            return self._run_without_graph(args, kwargs)
        self.called = True
        of.inside += 1
        try:
            return self._run(args, kwargs)
        finally:
            of.inside -= 1

    def _run_without_graph(self, args: Any, kwargs: Any) -> Any:
        call = self.before if self.before is not None else self.module._call_impl
        return call(*args, **kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        of = self.of
        try:
            key, tensors = self._key(args, kwargs)
        except CannotCapture as error:
            self.reject(str(error))
            return self._run_without_graph(args, kwargs)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(" ".join("x".join(map(str, one.shape)) for one in tensors))
            kind.rejected = sum(1 for one in self._kinds.values() if one.variants) >= MAX_GRAPHS
        if kind.rejected or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return self._run_without_graph(args, kwargs)
        variant = next((each for each in reversed(kind.variants) if each.change() is None), None)
        if variant is None:
            ready = kind.calls >= FIRST_CALLS and of.ready
            if ready and not kind.watched:
                return self._run_watched(kind, args, kwargs)
            if ready:
                self._observe(kind, args, kwargs)
            return self._run_first(kind, args, kwargs)
        lane = self._free_lane()
        if lane is None:
            return self._run_without_graph(args, kwargs)
        graph = variant.graphs.get(lane)
        audit = graph is not None and variant.due and not of.checking.audited
        if audit and of.parts.due() and self._deferred < MAX_DEFERRED:  # regions within are looked at first
            self._deferred += 1
            return self._run_first(kind, args, kwargs)
        if graph is None or audit:
            if audit or of.ready:
                self._prove(kind, variant, lane, args, kwargs)
            return self._run_first(kind, args, kwargs)
        kind.replays += 1
        self.replays += 1
        return self.replayed(graph, lane, args, kwargs)

    def _key(self, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        others = tuple(one for one in leaves if not isinstance(one, Tensor))
        for one in others:
            if not isinstance(one, EQUAL):
                raise CannotCapture(f"it is called with {type(one).__name__}, which cannot be compared before a replay")
        for one in tensors:
            what = not_strided(one) if type(one) in (Tensor, nn.Parameter) else type(one).__name__
            if what is not None:
                raise CannotCapture(f"it is called with {what}")
            if torch._debug_has_internal_overlap(one) == 1:
                raise CannotCapture("it is called with an expanded tensor, which nothing can be copied into")
            if one.device != self.of.device:
                raise CannotCapture(f"it is called with a tensor on {one.device}")
        layouts = tuple((one.shape, one.dtype, one.stride(), one.requires_grad) for one in tensors)
        modes = (torch.is_grad_enabled(), self.module.training, torch.is_inference_mode_enabled(), *_autocast())
        return (tree, others, layouts, modes), tensors

    def _run_first(self, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """A call without a graph, of a kind that may get one; libraries take the path that they take in a capture."""
        self.of.waiting = True
        kind.calls += 1
        with as_capturing():
            result = self._run_without_graph(args, kwargs)
        for place, one in enumerate(pytree.tree_leaves(result)):
            if isinstance(one, Tensor) and one.grad_fn is not None and place not in kind.with_gradient:
                one.register_hook(_Noting(kind.with_gradient, place))
        return result

    def _free_lane(self) -> _Lane | None:
        lane = next((one for one in self._lanes if one.free), None)
        if lane is None and len(self._lanes) < MAX_LANES:
            self._lanes.append(lane := _Lane())
        return lane

    def reject(self, reason: str) -> None:
        """It runs without graphs for good."""
        if self.reason is None:
            self.reason = reason
            self.drop_graphs()
            self.of.rejected(self)

    # ---- a graph ---------------------------------------------------------------------------------------------------

    def _run_watched(self, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """The real call, in eager: what changes something on the host must not run on copies."""
        state = RegionState(self.module, (args, kwargs))
        if found := [*state.cannot_restore, *state.may_change, *map(str, state.large)]:
            self.reject(f"its forward may change {', '.join([*dict.fromkeys(found)][:3])}")
            return self._run_without_graph(args, kwargs)
        recorder = HostRecorder(self.of.device, self.of.unreadable_types())
        changes = dict[str, None]()

        def call() -> Any:
            return self._run_first(kind, args, kwargs)

        def of_weights() -> list[dict[str, int]]:
            return [{name: id(one) for name, one in vars(weight).items()} for weight in self.module.parameters()]

        def logs() -> None:
            changes["its forward logs, which a replay would not"] = None

        before = of_weights()
        with recorder.logs_unrecorded(self.module, logs), self._recording(recorder, call):
            result = call()
        if of_weights() != before:
            changes["changes an attribute of a parameter, which a replay would not"] = None
        if problems := [*recorder.problems, *changes]:
            self.reject("; ".join(problems[:3]))
        kind.watched = True
        return result

    @contextlib.contextmanager
    def _recording(self, recorder: HostRecorder, call: Callable[..., Any]) -> Iterator[None]:
        """Inside, what ``call`` reads on the host is recorded; nothing runs compiled."""
        name = f"{self.path}." if self.path else "self."
        with (
            self.of.without_regions(),
            torch.compiler.set_stance("force_eager"),
            as_capturing(),
            recorder.recording(self.module, entry=call.__code__, name=name),
        ):
            yield

    def _observe(self, kind: _Kind, args: Any, kwargs: Any) -> None:
        """Note what the call reads on the host; capture comes with the next one."""
        kind.watched = False  # of another state on the host
        kind.changes += 1
        if kind.changes > MAX_CHANGES and kind.replays < MIN_REPLAYS * kind.changes:
            change = kind.variants[-1].change() if kind.variants else None
            self.reject(f"what it reads on the host changes too often: {change}")
            return
        with self.of.looking(self):
            state = RegionState(self.module, (args, kwargs))
            try:
                host, problems = self._observed(kind, args, kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    self.reject(f"it fails on copies of its inputs: {first_line(error)}")
                return
            finally:
                state.restore()
        if problems:
            self.reject("; ".join(problems[:3]))
        else:
            kind.variants[:] = [*kind.variants[1 - MAX_VARIANTS :], _Variant(host)]

    def _observed(self, kind: _Kind, args: Any, kwargs: Any) -> tuple[HostState, list[str]]:
        module, of = self.module, self.of
        if problems := list(backward_hooks(module)):
            return HostState(), problems
        args, kwargs = pytree.tree_map_only(Tensor, _copy, (args, kwargs))
        recorder = HostRecorder(of.device, of.unreadable_types())

        def call() -> None:
            outputs = [one for one in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(one, Tensor)]
            wanted = [one for one in outputs if one.grad_fn is not None]
            inputs = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.is_leaf]
            of_grad = [one for one in (*inputs, *leaves_of(wanted)) if one.requires_grad]
            if wanted and of_grad:
                torch.autograd.grad(wanted, of_grad, [torch.ones_like(one) for one in wanted], allow_unused=True)

        multithreading = torch.autograd.set_multithreading_enabled(False)
        with multithreading, without_hooks(module), self._recording(recorder, call):
            call()
        return recorder.state(), list(recorder.problems)

    def _prove(self, kind: _Kind, variant: _Variant, lane: _Lane, args: Any, kwargs: Any) -> None:
        """Compare the graph for this call with the call without it, on copies; capture it first where there is none."""
        of, audit = self.of, lane in variant.graphs
        with of.looking(self) as began:
            if not audit:
                try:
                    variant.graphs[lane] = self._captured(kind, lane, args, kwargs)
                    if not self.announced:
                        self.announced = True
                        of.captured_first(self)
                except Exception as error:
                    self._capture_failed(kind, error)
                    return
            graph = variant.graphs[lane]
            variant.due = False
            if of.mode == "off":
                return
            try:
                outcome = self._compared(kind, graph, lane, args, kwargs)
            except Exception as error:
                outcome = Outcome(skipped=f"it fails on copies of its inputs: {first_line(error)}")
            of.checking.audited |= audit
            check = Check(
                path=self.path, kind=self.kind, outcome=outcome, seconds=of.checking.clock() - began, audit=audit
            )
            of.checking.report(check)
            of.compared.append(outcome)
        if outcome.skipped is not None and not audit:
            self.reject(f"its replay cannot be compared with it: {outcome.skipped}")
        elif outcome.wrong:
            del variant.graphs[lane]
            kind.failures += 1
            if audit or kind.failures > 1:
                line = f"its replay differs from it: {'; '.join(map(str, outcome.wrong[:2]))}"
                of.differs.append((self, line, outcome.wrong, audit))
                self.reject(line)

    def _capture_failed(self, kind: _Kind, error: Exception) -> None:
        of = self.of
        of.drop_graphs()  # the graphs of all, see ``CudaEngine.capture``
        kind.failures += 1
        if is_out_of_memory(error):
            kind.rejected = True
            of.notes.append(f"cuda_graph: {self.named}: there is too little memory to capture calls with {kind.name}")
        elif (missing := not_compiled_yet(error)) is not None and kind.failures < MAX_OBSERVATIONS:
            of.notes.append(f"cuda_graph: {self.named}: {missing}")
        else:
            self.reject(why_not_captured(error))

    @property
    def named(self) -> str:
        return f"{self.path or 'the module'} ({type(self.module).__name__})"

    def _captured(self, kind: _Kind, lane: _Lane, args: Any, kwargs: Any) -> CallGraph:
        """Raises what a capture raises; CannotCapture for results that no graph can stand for."""
        engine = self.of.engine
        leaves, tree = pytree.tree_flatten((args, kwargs))
        statics = [_copy(one) if isinstance(one, Tensor) else one for one in leaves]
        args, kwargs = pytree.tree_unflatten(statics, tree)
        inputs = [one for one in statics if isinstance(one, Tensor)]
        state = RegionState(self.module, (args, kwargs))

        def forward() -> Any:
            with without_hooks(self.module):
                return self._run_without_graph(args, kwargs)

        def backward(results: Sequence[Tensor], gradients: Sequence[Tensor], of: Sequence[Tensor]) -> Any:
            with without_hooks(self.module):
                return torch.autograd.grad(results, of, gradients, allow_unused=True)

        def both() -> None:
            results = [
                one for one in pytree.tree_leaves(forward()) if isinstance(one, Tensor) and one.grad_fn is not None
            ]
            of = [one for one in (*inputs, *leaves_of(results)) if one.requires_grad]
            if results and of:
                backward(results, [torch.ones_like(one) for one in results], of)

        torch.clear_autocast_cache()  # casts that were made outside are not the graph's
        try:
            with _nodes_of_their_own(self.module):
                engine.eager(both)  # on the stream of the capture
                state.restore()
                versions = [version_of(one) for one in inputs]
                replay_forward, results = engine.capture(forward, lane.pool)
                if [version_of(one) for one in inputs] != versions:
                    raise CannotCapture("its forward writes to its inputs")
                outputs, result_tree = pytree.tree_flatten(results)
                graph = CallGraph(replay_forward, inputs, [], result_tree, [])
                graph.outputs = [_output(one, inputs) for one in outputs]
                graph.differentiable = [
                    place
                    for place, one in enumerate(graph.outputs)
                    if isinstance(one, Tensor) and one.grad_fn is not None
                ]
                if graph.differentiable:
                    self._capture_backward(graph, kind, lane, backward)
            graph.outputs = [one.detach() if isinstance(one, Tensor) else one for one in graph.outputs]
            return graph
        finally:
            state.restore()
            torch.clear_autocast_cache()

    def _capture_backward(self, graph: CallGraph, kind: _Kind, lane: _Lane, backward: Callable[..., Any]) -> None:
        graph.wanted = [place for place in graph.differentiable if place in kind.with_gradient]
        every = [graph.outputs[place] for place in graph.differentiable]
        graph.of_inputs = [place for place, one in enumerate(graph.inputs) if one.requires_grad]
        known = {id(one) for one in graph.inputs}
        graph.weights = [one for one in leaves_of(every) if id(one) not in known]
        if not graph.wanted:
            return
        wanted = [graph.outputs[place] for place in graph.wanted]
        of = [*(graph.inputs[place] for place in graph.of_inputs), *graph.weights]
        graph.reached = [
            frozenset(place for place, one in enumerate(of) if id(one) in found)
            for found in ({id(leaf) for leaf in leaves_of([one])} for one in wanted)
        ]
        graph.output_gradients = [torch.zeros_like(one) for one in wanted]
        graph.replay_backward, gradients = self.of.engine.capture(
            lambda: backward(wanted, graph.output_gradients, of), lane.pool
        )
        graph.gradients = [None if one is None else one.detach() for one in gradients]

    def _compared(self, kind: _Kind, graph: CallGraph, lane: _Lane, args: Any, kwargs: Any) -> Outcome:
        wanted = set(graph.wanted)

        def as_used(call: Callable[..., Any]) -> Callable[..., Any]:
            """Of outputs that nobody takes gradients of, none are taken here."""

            def called(*args: Any, **kwargs: Any) -> Any:
                leaves, tree = pytree.tree_flatten(call(*args, **kwargs))
                kept = [
                    one.detach() if isinstance(one, Tensor) and place not in wanted else one
                    for place, one in enumerate(leaves)
                ]
                return pytree.tree_unflatten(kept, tree)

            return called

        return same_call(
            self.module,
            as_used(lambda *args, **kwargs: self._run_without_graph(args, kwargs)),
            as_used(lambda *args, **kwargs: self.replayed(graph, lane, args, kwargs)),
            args,
            kwargs,
            unit=self.of.checking.unit,
            multiple=MULTIPLES[self.of.mode],
        )

    # ---- a replay --------------------------------------------------------------------------------------------------

    def replayed(self, graph: CallGraph, lane: _Lane, args: Any, kwargs: Any) -> Any:
        """What the call returns, from its graph."""
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        with torch.no_grad():
            torch._foreach_copy_(graph.inputs, given)
        places = graph.differentiable if torch.is_grad_enabled() else []
        of_graph: tuple[Tensor, ...] = ()
        if places:
            pending = Pending(self, graph, lane, args, kwargs, self.of.engine.random_state())
            of = [*(given[place] for place in graph.of_inputs), *graph.weights]
            of_graph = _Replay.apply(pending, *of)
        else:
            graph.replay_forward()
        by_place = dict(zip(places, of_graph, strict=True))
        leaves: list[Any] = []
        for place, one in enumerate(graph.outputs):
            if place in by_place:
                leaves.append(by_place[place])
            elif isinstance(one, _Same):
                leaves.append(given[one.place] if one.place is not None else one.tensor)
            else:
                leaves.append(one.clone() if isinstance(one, Tensor) else one)
        return pytree.tree_unflatten(leaves, graph.tree)

    def gradients(self, pending: Pending, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the inputs and weights of ``pending``, where its outputs have the gradients ``given``."""
        graph = pending.graph
        by_place = {place: one for place, one in zip(graph.differentiable, given, strict=True) if one is not None}
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        foreign = not by_place.keys() <= set(graph.wanted)
        if pending.done or foreign or torch.is_grad_enabled():
            if torch.is_grad_enabled():
                self.reject(DOUBLE_BACKWARD)
            return self._eager_gradients(pending, by_place)
        pending.done = True  # what the forward has saved is written over
        pending.lane.release()
        if not keeps:
            pending.args = pending.kwargs = None
        assert graph.replay_backward is not None
        missing: list[Tensor] = []
        there: tuple[list[Tensor], list[Tensor]] = ([], [])
        reached: set[int] = set()
        for place, static, reaches in zip(graph.wanted, graph.output_gradients, graph.reached, strict=True):
            if place in by_place:
                there[0].append(static)
                there[1].append(by_place[place])
                reached |= reaches
            else:
                missing.append(static)
        if missing:
            torch._foreach_zero_(missing)
        if there[0]:
            torch._foreach_copy_(*there)
        graph.replay_backward()
        statics = [one if place in reached else None for place, one in enumerate(graph.gradients)]
        found = [None if one is None else torch.empty_like(one) for one in statics]
        pairs = [
            (one, other) for one, other in zip(found, statics, strict=True) if one is not None and other is not None
        ]
        if pairs:
            torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])
        return found

    def _eager_gradients(self, pending: Pending, given: dict[int, Tensor]) -> list[Tensor | None]:
        """The same from the call itself, once more on its inputs: a graph of which a gradient is taken, or a second
        backward of one forward, has to be autograd's own."""
        graph, engine = pending.graph, self.of.engine
        state, random = RegionState(self.module, (pending.args, pending.kwargs)), engine.random_state()
        inputs = [one for one in pytree.tree_leaves((pending.args, pending.kwargs)) if isinstance(one, Tensor)]
        of = [*(inputs[place] for place in graph.of_inputs), *graph.weights]
        self.of.inside += 1
        try:
            with contextlib.ExitStack() as entered:
                for device, enabled, dtype in pending.autocast:
                    entered.enter_context(torch.autocast(device, dtype, enabled=enabled))
                create = torch.is_grad_enabled()
                entered.enter_context(torch.enable_grad())
                engine.set_random_state(pending.random)
                leaves = pytree.tree_leaves(self._run_without_graph(pending.args, pending.kwargs))
                results = [leaves[place] for place in given]
                return list(
                    torch.autograd.grad(results, of, list(given.values()), create_graph=create, allow_unused=True)
                )
        finally:
            self.of.inside -= 1
            state.restore()
            engine.set_random_state(random)


DOUBLE_BACKWARD = "a gradient of its gradient is taken (create_graph=True), which no CUDA graph holds"


class _Replay(torch.autograd.Function):
    """One replay, as autograd sees it: from inputs and weights to the outputs that have gradients."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *of: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        ctx.save_for_backward(torch.empty(0))  # a second backward is autograd's own error, unless the graph is kept
        graph = pending.graph
        graph.replay_forward()
        return tuple(graph.outputs[place].clone() for place in graph.differentiable)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        pending: Pending = ctx.pending
        return None, *pending.of.gradients(pending, given)


class _Noting:
    """A hook on an output that notes that it got a gradient."""

    def __init__(self, found: set[int], place: int) -> None:
        self._found, self._place = found, place

    def __call__(self, gradient: Tensor) -> None:
        self._found.add(self._place)


# ---- all of a training -----------------------------------------------------------------------------------------------


class OfProgram(Protocol):
    """What is read here of the ``Program`` whose steps they are, whose module knows this one."""

    module: nn.Module
    device: torch.device | None
    sharded: bool
    loop: Loop | None
    regions: list[Region]
    checking: Checking
    notes: list[str]
    given_up: dict[str, str]


class NetworkGraphs:
    """The captured modules of one training.

    ``in_force``: whether the step under way is one in which they are replayed. Which modules: the outermost that steps
    call; in the place of one that is never called, or that no graph can stand for, the modules in it that have modules
    themselves. Of several processes each captures what is compiled region by region, so that gradients are reduced
    while the backward goes on.
    """

    def __init__(self, engine: Engine, program: OfProgram, *, wanted: bool) -> None:
        assert program.device is not None
        self.engine, self.device, self.checking = engine, program.device, program.checking
        self.wanted = wanted
        """Whether steps that run in Python for good use them."""
        self.in_force = False
        self.inside = 0
        """Of how many of them a call is under way."""
        self.waiting = False
        """Whether a call of the step under way ran without a graph and is going to have one."""
        self.networks: list[Network] = []
        self.notes = program.notes
        self.rejections: list[str] = []
        self.differs: list[tuple[Network, str, list[Any], bool]] = []
        """What was not repeated: module, line, differences and whether it was trusted before."""
        self.compared: list[Outcome] = []
        """Of graphs beside the calls that they stand for."""
        self.unreadable_types: Callable[[], Any] = dict
        self.mode = "on"
        self.steady = False
        self.parts = CompiledParts()
        self._program = program
        self._regions: tuple[str, ...] = ()
        self._reason = ""
        """Why no step is captured as a whole."""
        self._active = False

    def begin(self, parts: CompiledParts, unreadable: Callable[[], Any], mode: str) -> None:
        """Find the modules that may be captured."""
        self.parts, self.unreadable_types, self.mode = parts, unreadable, mode
        program, loop = self._program, self._program.loop
        together = loop is not None and loop.world_size > 1
        if program.sharded:
            self._reject("under fsdp2 the whole step is captured, or nothing")
        elif len(submodules(program.regions)) < len(program.regions):
            self._reject("methods are compiled (second_order), and the modules that they call with them")
        elif together:
            self.networks = [Network(self, one.path, one.module) for one in program.regions]
            if not self.networks:
                self._reject("with several processes compiled regions alone are captured, and nothing is compiled")
        else:
            self._add("", program.module)
            self._add_children("", program.module)
        for one in self.networks[:]:
            if together and any(isinstance(part, nn.SyncBatchNorm) for part in one.module.modules()):
                self.networks.remove(one)

    @property
    def ready(self) -> bool:
        """Whether regions run as they are going to: a graph holds what they run."""
        return self.steady and self.parts.ready() and not any(one.ran_eager for one in self._program.regions)

    def _add(self, path: str, module: nn.Module) -> None:
        if any(True for _ in module.parameters()) and not any(one.module is module for one in self.networks):
            self.networks.append(Network(self, path, module))

    def _add_children(self, path: str, module: nn.Module) -> None:
        """Those that are worth a graph of their own: a single layer takes no longer than a replay."""
        regions = {one.path: one.module for one in self._program.regions}
        for name, child in module.named_children():
            there = f"{path}.{name}" if path else name
            within = any(there != one and is_ancestor(one, there) for one in regions)
            if not within and (there in regions or any(True for _ in child.children())):
                self._add(there, child)

    def enable(self) -> None:
        """Steps that run in Python for good use them from the next one on."""
        self.wanted = True

    def enable_for_all_steps(self, reason: str = "") -> None:
        """All steps run in Python from now on, since none can be captured as a whole, for a ``reason``."""
        self.wanted = self.in_force = True
        self._reason = reason

    def close(self) -> None:
        """Let go of all graphs."""
        self.activate(False)
        self.drop_graphs()
        self.networks = []

    # ---- around a step ---------------------------------------------------------------------------------------------

    def activate(self, active: bool) -> None:
        """A step or an evaluation begins, or is over."""
        if active == self._active:
            return
        if active and not self.wanted:
            return
        self._active = active
        if active:
            self.waiting = False
            self._leave_regions()
        for one in self.networks if active else reversed(self.networks):
            one.replace_call(active and one.reason is None)
        if not active:
            self._replace_uncalled()

    def _leave_regions(self) -> None:
        """What lies within a region is the compiler's."""
        paths = tuple(one.path for one in self._program.regions)
        if paths != self._regions:
            self._regions = paths
            self.networks = [
                one
                for one in self.networks
                if not any(one.path != path and is_ancestor(path, one.path) for path in paths)
            ]

    def _replace_uncalled(self) -> None:
        """Between two steps: what is never called gives way to what is in it."""
        program = self._program
        self.steady = not any(one.ran_eager for one in program.regions)
        for one in self.networks[:]:
            if one.reason is None and not one.called:
                self.networks.remove(one)
                if any(
                    each.called and each.reason is None and is_ancestor(each.path, one.path) for each in self.networks
                ):
                    continue  # it is called within another one alone
            elif one.reason is None or one.opened:
                continue
            one.opened = True
            if not any(each.module is one.module for each in program.regions):
                self._add_children(one.path, one.module)
        if not self.alive:
            program.given_up.setdefault("step", self._reason or next(iter(self.rejections), "no module was called"))

    def rejected(self, network: Network) -> None:
        """``network`` cannot be captured: the modules in it may be, from the next step on."""
        self._reject(f"{network.named} runs without a graph: {network.reason}")

    def captured_first(self, network: Network) -> None:
        """Say so, of the first ones."""
        if len(self.captured) <= MAX_NOTES:
            self.notes.append(
                f"cuda_graph: {network.named} is replayed, forward and backward; the step around it stays Python"
            )

    def _reject(self, reason: str) -> None:
        self.rejections.append(reason)
        if len(self.rejections) <= MAX_NOTES:
            self.notes.append(f"cuda_graph: {reason}")
        elif len(self.rejections) == MAX_NOTES + 1:
            self.notes.append("cuda_graph: further modules run without a graph, see report.cuda_graph.without_a_graph")

    @contextlib.contextmanager
    def within(self, in_force: bool) -> Iterator[None]:
        """Inside, they are replayed or not."""
        before, self.in_force = self.in_force, in_force and self.wanted
        try:
            yield
        finally:
            self.in_force = before

    @contextlib.contextmanager
    def without_regions(self) -> Iterator[None]:
        """Inside, what is compiled runs as it was written."""
        with plain(self._program.regions):
            yield

    @contextlib.contextmanager
    def looking(self, network: Network) -> Iterator[float]:
        """Inside, a module runs for no step; yields when it began."""
        checking = self.checking
        began: float = checking.clock()
        checking.begin(network)
        with self.parts.alone():
            yield began

    def audit_next(self) -> None:
        """Compare each graph with the call that it stands for, one a step."""
        for one in self.networks:
            one.audit()

    def drop_graphs(self) -> None:
        for one in self.networks:
            one.drop_graphs()

    # ---- facts -----------------------------------------------------------------------------------------------------

    @property
    def done_capturing(self) -> bool:
        """Whether no call of the last step waits for a graph."""
        return not self.waiting

    @property
    def replays(self) -> int:
        return sum(one.replays for one in self.networks)

    @property
    def captured(self) -> list[Network]:
        return [one for one in self.networks if one.graphs]

    @property
    def alive(self) -> bool:
        """Whether something is, or may be, captured."""
        return any(one.reason is None for one in self.networks)

    def facts(self) -> dict[str, Any]:
        return {
            "networks": [
                {"path": one.path, "module": type(one.module).__name__, "graphs": one.graphs, "replays": one.replays}
                for one in self.networks
                if one.called
            ],
            "replayed_calls": self.replays,
            "compared_calls": len(self.compared),
            "equal_to_the_last_bit": sum(not one.differences for one in self.compared if one.skipped is None),
            "without_a_graph": list(self.rejections),
        }


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda"))


def _copy(tensor: Tensor) -> Tensor:
    """A leaf with the same numbers and strides."""
    return clone(tensor.detach()).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _nodes_of_their_own(module: nn.Module) -> Iterator[None]:
    """Inside, autograd has other nodes for the weights of ``module``; they are the same objects, with the same memory.

    The node that adds up the gradient of a weight lives as long as a graph of any forward that used it, such as that of
    the critic's own loss while a generator is trained on its judgement. A backward runs it on the stream of that
    forward, which is to wait for the capture then; of the default stream CUDA refuses that: "operation would make the
    legacy stream depend on a capturing blocking stream".
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/autograd/input_buffer.cpp
    """
    if not torch.is_grad_enabled():  # in inference mode they would be tensors of another kind, and be compiled anew for
        yield
        return
    weights = [one for one in module.parameters() if one.requires_grad and type(one) is nn.Parameter]
    pairs = [(one, nn.Parameter(one.detach())) for one in weights]
    swap: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
    with contextlib.ExitStack() as swapped:
        for pair in pairs:
            swap(*pair)
            swapped.callback(swap, *pair)
        yield


def _output(value: Any, inputs: Sequence[Tensor]) -> Any:
    """One leaf of what a captured call has returned. Raises CannotCapture."""
    if isinstance(value, EQUAL):
        return value
    if not isinstance(value, Tensor):
        raise CannotCapture(f"it returns {type(value).__name__}, and a replay cannot make a new one")
    place = next((place for place, one in enumerate(inputs) if one is value), None)
    if place is not None:
        return _Same(place=place)
    if value.requires_grad and value.grad_fn is None:  # a weight
        return _Same(tensor=value)
    if value.layout is not torch.strided or type(value) is not Tensor:
        raise CannotCapture(f"it returns {type(value).__name__} of layout {value.layout}")
    return value
