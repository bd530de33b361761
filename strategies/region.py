"""Region: one submodule compiled as one callable. It alone decides what runs when the submodule is called.

    eager      not in force: the module is what its author wrote
    checking   its next calls of a kind not seen before are checked; the step goes on with eager's results
    compiled   calls of proven kinds run compiled
    failed     it did not compile, or was not eager's: eager for good, for a reason

States change between steps, in ``Region.set_state``. ``StandIn.replace_call`` is the only writer of torch's
``_compiled_call_impl``. Outside of a step or an evaluation the module is plain, and so it is where tracers, dispatch
modes or transforms look at it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config, eval_frame, trace_rules
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from strategies.compile_errors import REPLACED, helped, is_compile_error, is_out_of_memory, one_line, raised_by_signal
from strategies.proven_code import STANCE, NoCode, NotCompiledYet, in_capture, without_compiling
from strategies.region_check import Outcome, check_call, overlapping, tensors_of, weights_held, written_to
from strategies.region_state import Changed, Large, RegionState
from strategies.remedies import Remedy, functions_behind, known
from strategies.tolerance import MULTIPLES, SINGLE, Difference, autocast_unit
from strategies.torch_patches import allow

MAX_CHECKED = 8
"""Signatures of one kind of region that are checked at their first call whatever code is there; all of them with
``dynamic=False``, where each has code of its own. Further ones run by code that others have proven where it lets them
in, as code for all lengths does, and are left to audits."""

MAX_RECOMPILED = 16
"""Calls of one region, with arguments of the same shapes, for which code may be missing: who goes on never settles."""


class State(StrEnum):
    """See the module."""

    EAGER = "eager"
    CHECKING = "checking"
    COMPILED = "compiled"
    FAILED = "failed"


def is_ancestor(outer: str, path: str) -> bool:
    """Whether the submodule at ``path`` is the one at ``outer`` or lies in it; paths as in ``named_modules``."""
    return not outer or path == outer or path.startswith(f"{outer}.")


_SERIAL = itertools.count()


_MODULE_CALL = nn.Module._wrapped_call_impl.__code__


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self._call_impl(*args, **kwargs)


@dataclass(slots=True)
class Proof:
    """What is known about one signature of a kind: what it was called with, but for the numbers."""

    with_gradients: bool = True
    """Whether it was called where gradients are recorded."""
    looks: int = 0
    ran: bool = False
    """Whether a call of it ran compiled, in a step or an evaluation."""
    clean_step: int | None = None
    """Optimizer step in which it was found equal to eager last; filled in by who knows the step."""
    drew_as_inductor: bool | None = None
    """Whether eager that draws random numbers as Inductor does agreed once; None where nobody knows."""
    clean: bool = False
    """Whether the last look found eager's results: proven from the next step on."""
    proven: bool = False
    """Whether its calls run compiled."""
    suspected: list[Difference] = field(default_factory=list)
    """Differences of the last look, which count once they show again."""
    suspect: Region | None = None
    """The region that showed them; it is looked at again, and the next that is called."""
    suspected_at: int = 0
    """``looks`` when it did."""
    trained: bool = False
    """Whether calls had run compiled by the code that showed them."""
    callers: list[Region] = field(default_factory=list)
    """Regions that were called so."""
    due: bool = False
    """Whether a later call is checked again."""
    must: bool = False
    """Whether that does not wait until there is time: code was compiled for it since."""
    turn: int = 0
    """Which caller's: audits go from one to the next."""
    recompiled: Counter[str] = field(default_factory=Counter)
    """By path of the caller, its calls for which code was missing."""
    missed: set[Region] = field(default_factory=set)
    """Callers of which a call ran eager in part, for want of code: the next one is checked, which compiles it."""
    compiling: set[Region] = field(default_factory=set)
    """Callers for which such a check found no code missing, since copies of their arguments need other code, or the
    call took another branch: the next call for which code is missing compiles it, and is audited."""
    reached: list[frozenset[str]] | None = None
    """For each tensor among the outputs, the parameters that its gradient reaches; None = all reach all. An encoder's
    blocks and a decoder's are of one kind, and reach others."""

    def is_for(self, region: Region) -> bool:
        return not self.callers or self.callers[self.turn % len(self.callers)] is region

    def is_suspected(self, region: Region) -> bool:
        return self.suspect is region or (self.suspect is not None and self.looks == self.suspected_at)


@dataclass(slots=True, kw_only=True)
class Check:
    """One check of a region, or of an optimizer's step (then both names are its class), for the record."""

    path: str
    kind: str
    outcome: Outcome
    seconds: float
    audit: bool
    """Whether the kind was proven before."""
    proof: Proof | None = None
    """Of the call's signature; None for an optimizer's step."""


class Kind:
    """Regions of one class that are compiled with the same arguments: they share code, and fall back together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.regions: list[Region] = []
        self.proofs: dict[Any, Proof] = {}
        self.failure: str | None = None
        """Why all of them are to run eager from the next step on."""
        self.error: Exception | None = None
        """What the compiler raised."""
        self.differs: list[Difference] = []
        """What is not eager's, where that is the reason."""
        self.culprit: Proof | None = None
        """Of the signature that showed it, where that was in this process."""
        self.eager_evaluations = ""
        """Why its calls in evaluations run eager for good, and those of the training compiled."""
        self.evaluations_differ: list[Difference] = []
        """What is not eager's in them, where that is the reason."""
        self.evaluations_trusted = False
        """Whether some of them ran compiled before."""
        self.changed: list[Changed] = []
        """What its forward changes elsewhere, as Dynamo has seen it."""
        self.left_alone: set[str] = set()
        """What its forward reaches, and has left as it was, of that which is too large to be copied."""
        self.owed: set[bool] = set()
        """Audits that are due whatever they cost: of a call with gradients, and of one without."""
        self.functions: set[type[torch.autograd.Function]] = set()
        """Custom ones that its forward applies, where it is not eager's or does not compile."""
        self.remedies: list[Remedy] = []
        """What it was compiled with after it had failed; the last is in force."""
        self.first_failure = ""
        """Why that was."""
        self._codes: dict[Any, types.FunctionType] = {}

    def code(self, module: nn.Module, layout: Any) -> types.FunctionType:
        """What is compiled of ``module``: of its own for each class and shapes of weights.

        Dynamo keeps compiled code by code object, and takes a size that differs between two calls of one for a size
        that changes. All modules share torch's ``_call_impl``: the widths of one block would make those of the next
        symbolic, or batches of varying size would have to be compiled one by one. Torch 2.11 moreover skips a forward
        that is defined within torch.nn without a word, and this frame is not.
        """
        if layout not in self._codes:
            forward = getattr(type(module).forward, "__code__", None)
            changes: dict[str, Any] = {"co_name": f"{type(module).__name__}_{next(_SERIAL)}"}
            if forward is not None and not trace_rules.check(type(module).forward):
                changes |= {"co_filename": forward.co_filename, "co_firstlineno": forward.co_firstlineno}
            code = _call.__code__.replace(**changes)
            self._codes[layout] = types.FunctionType(code, _call.__globals__, code.co_name)
        return self._codes[layout]

    @property
    def codes(self) -> list[types.FunctionType]:
        """All that ``code`` has returned."""
        return list(self._codes.values())

    def update_states(self) -> list[Region]:
        """Between two steps: take what its checks have found; returns the regions that have another state by it."""
        for proof in self.proofs.values():
            proof.proven |= proof.clean
        return [one for one in self.regions if one.update_state()]

    def request_checks(self, *, of_all: bool = True) -> None:
        """Check the next call of each signature once more; unless ``of_all``, other signatures than the next that is
        called wait until there is time."""
        self.owed = {True, False}
        for proof in self.proofs.values():
            proof.due, proof.must, proof.turn = True, proof.must or of_all, proof.turn + 1

    @property
    def is_proven(self) -> bool:
        """Whether calls of some signature are."""
        return any(one.proven or one.clean for one in self.proofs.values())

    def may_audit(self, proof: Proof, checking: Checking) -> bool:
        """Whether ``proof``, which is due, is checked again at its next call, or waits until there is time."""
        return proof.must or proof.with_gradients in self.owed or checking.may_spend()

    def fail(self, reason: str, error: Exception | None = None, *, differs: Iterable[Difference] = ()) -> None:
        """Let all its regions run eager from the next step on."""
        if self.failure is None:
            self.failure, self.error, self.differs = reason, error, list(differs)

    def run_evaluations_eager(self, reason: str, *, differs: Iterable[Difference] = (), trusted: bool = False) -> None:
        """From its next call on: what an evaluation returns trains nothing, and what trains is checked by itself."""
        if not self.eager_evaluations:
            self.eager_evaluations, self.evaluations_differ, self.evaluations_trusted = reason, list(differs), trusted

    @property
    def evaluations_line(self) -> str:
        """The same for the user; empty where evaluations run compiled."""
        if not self.eager_evaluations:
            return ""
        return f"{self.name}: {paths_in_words(self.regions)} eager in evaluations: {self.eager_evaluations}"

    def apply_remedy(self) -> None:
        """Where its first check has failed and something is known to help: compile with that, and check anew."""
        if not (self.differs or self.error) or self.is_proven:
            return
        if any(one.state is State.FAILED or one.is_sharded for one in self.regions):  # nothing was left to try before
            return
        remedy = next(
            (one for one in known(torch.__version__) if one not in self.remedies and self._may_help(one)), None
        )
        if remedy is None:
            return
        self.first_failure = self.first_failure or str(self.failure)
        self.remedies.append(remedy)
        self.failure, self.error, self.differs = None, None, []
        self.proofs.clear()
        self._codes.clear()  # by which Dynamo keeps what it has compiled
        if remedy.functions:
            allow(self.functions)
        for region in self.regions:
            region.recompile_with(remedy.options)

    def _may_help(self, remedy: Remedy) -> bool:
        if remedy.functions:
            return bool(self.functions) and (self.error is None or "autograd.Function" in str(self.error))
        weights = (one for region in self.regions for one in region.module.parameters())
        on = {one.device.type for one in weights} or {"cpu"}
        inductor = all(one.arguments.get("backend", "inductor") == "inductor" for one in self.regions)
        return self.error is None and inductor and (remedy.device is None or remedy.device in on)


def paths_in_words(regions: Sequence[Region]) -> str:
    """Who runs: the first paths, the number of others, and the verb."""
    named = ", ".join(one.path for one in regions[:3])
    more = f" and {len(regions) - 3} more" if len(regions) > 3 else ""
    return f"{named}{more} {'runs' if len(regions) == 1 else 'run'}"


@dataclass(slots=True)
class Checking:
    """How regions are checked; one object for all regions of a program."""

    mode: str = "on"
    """The option ``parity``: ``off`` checks nothing."""
    unit: float = SINGLE
    begin: Callable[[Any], Any] = lambda checked: None
    """Called before a check, with the region or the optimizer's update that is checked."""
    report: Callable[[Check], Any] = lambda check: None
    """Called after one."""
    clock: Callable[[], float] = lambda: 0.0
    may_spend: Callable[[], bool] = lambda: True
    """Whether there is time for an audit that nothing is lost without."""
    derives: bool = False
    """Whether forwards take gradients by their arguments (``second_order``); a region's first call shows by which."""
    one_kind_a_step: bool = False
    """Whether a step compiles, and checks, one kind that is new at most: a shorter wait, and a later start."""
    checked: Kind | None = None
    """The kind that the step under way has checked for the first time."""
    audited: bool = False
    """Whether it has checked one again: no step does so twice."""
    ran_eager: bool = False
    """Whether a call of it that records gradients ran eager, beside others that run compiled."""

    def step_begins(self) -> None:
        self.checked, self.audited, self.ran_eager = None, False, False


class RequiringGrad(TorchFunctionMode):
    """Inside, ``tensors`` takes those on which ``requires_grad_`` is called, or whose ``requires_grad`` is set."""

    calls = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.calls:
            self.tensors.append(args[0])
        return func(*args, **kwargs or {})


class StandIn:
    """Called in the place of ``module`` while it stands, with what stood there before in ``before``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = None
        self._thread = 0
        """Which runs the steps."""

    def other_module_called(self) -> nn.Module | None:
        """Asked by ``__call__``: the module that is called where it is not this one, but a copy made of this one's
        ``__dict__``, in which this object stands as well: a replica of ``DataParallel``, a clone of a meta-learner."""
        caller = sys._getframe(2)
        called: nn.Module | None = caller.f_locals["self"] if caller.f_code is _MODULE_CALL else None
        return None if called is self.module else called

    @property
    def is_called_beside_a_step(self) -> bool:
        """Whether another thread than the step's calls it, and not for a backward, which may compute it again."""
        return threading.get_ident() != self._thread and torch._C._current_graph_task_id() == -1

    def replace_call(self, standing: bool) -> None:
        """Take the module's call, or give it back."""
        attributes = vars(self.module)
        now = attributes.get("_compiled_call_impl")
        self._thread = threading.get_ident()
        if standing and now is not self:
            self.before = now
            attributes["_compiled_call_impl"] = self
        elif not standing and now is self:
            if self.before is None:
                # Removed, not set to None: torch.jit.script looks at what a module has of its own.
                del attributes["_compiled_call_impl"]
            else:
                attributes["_compiled_call_impl"] = self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call."""
        raise NotImplementedError


def drawing_by_numpy(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``; what it compiles breaks the graph where numpy draws, since Dynamo would draw from torch, and so
    other numbers. For these calls alone: a function that the user compiles with ``fullgraph`` would not compile.

    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_numpy/random.py
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        before, config.use_numpy_random_stream = config.use_numpy_random_stream, True
        try:
            return compiled(*args, **kwargs)
        finally:
            config.use_numpy_random_stream = before

    return called


class Region(StandIn):
    """A submodule that was handed to the compiler.

    Args:
        path: As in ``module.get_submodule(path)``, at that moment: a training may put another module into its place.
        arguments: ``torch.compile``'s keyword arguments.
    """

    def __init__(self, path: str, module: nn.Module, kind: Kind, arguments: dict[str, Any], checking: Checking) -> None:
        super().__init__(module)
        self.path, self.arguments = path, arguments
        self.of, self._checking = kind, checking
        kind.regions.append(self)
        self.state, self.reason = State.CHECKING if checking.mode != "off" else State.COMPILED, ""
        self.called = False
        """Whether it was called within a step or an evaluation."""
        self.called_beside_a_step = False
        """The same by another thread."""
        self.called_under_a_mode = False
        """The same where somebody traces, counts or transforms what runs."""
        self.copy_called = False
        """Whether a copy of its module was, see ``other_module_called``."""
        self._compiled: Callable[..., Any] | None = None
        self._proven: Callable[..., Any] | None = None
        """The same without compiling."""
        self._of_forward: Callable[..., Any] | None = None
        """Compiled of the forward alone, of what is sharded."""
        self._code_missing = False
        """Whether code was missing for a part of the call under way, which ran eager."""
        self._fell_back = False
        """Whether all of its forward did, within the hooks of what is sharded."""
        self._active = self._inside = False
        self._called_as: Any = None
        """Signature of the call under way."""
        self._ran_compiled: dict[Any, bool] = {}
        """Of each signature that was called in the step under way, whether that ran compiled: what is computed again in
        its backward has to run as it did."""
        self._derived: dict[int, bool] | None = None
        """Places among the tensors of the arguments that the forward calls ``requires_grad_`` on, and whether it leaves
        them so."""
        self._unchecked: str | None = None
        """What eager raised on copies of the inputs."""
        self._watched: list[Large] = []
        """What is too large to be copied, and is looked at after the call under way."""
        self._layout: tuple[Any, ...] | None = None
        self._names: dict[int, str] | None = None

    @property
    def kind(self) -> str:
        """Class name of the module."""
        return type(self.module).__name__

    @property
    def ran_eager(self) -> bool:
        """Whether it was called in the step under way, in force, and ran eager."""
        return not all(self._ran_compiled.values())

    @property
    def is_evaluated(self) -> bool:
        """Whether a call now trains nothing; an evaluation of what takes a gradient itself records gradients, too."""
        return not torch.is_grad_enabled() or (self._checking.derives and not self.module.training)

    # ---- the state -------------------------------------------------------------------------------------------------

    def set_state(self, state: State, reason: str = "", *, active: bool | None = None) -> None:
        """Change the state, and whether a step or an evaluation is under way (None: as it is)."""
        self.state, self.reason = state, reason or self.reason
        if active is not None:
            self._active = active
        self.replace_call(self._active and state in (State.CHECKING, State.COMPILED))

    def activate(self, active: bool) -> None:
        """A step or an evaluation begins, or is over."""
        if active != self._active:
            self.set_state(self.state, active=active)
        self._ran_compiled.clear()

    def update_state(self) -> bool:
        """Between two steps: take the state that the step's checks call for; returns whether it is a new one."""
        before = self.state
        if self.of.failure is not None:
            if before is not State.FAILED:
                self.set_state(State.FAILED, self.of.failure)
        elif before is State.CHECKING and self.called and any(one.proven for one in self.of.proofs.values()):
            self.set_state(State.COMPILED)
        return self.state is not before

    def recompile_with(self, options: dict[str, Any]) -> None:
        """Compile it anew, with Inductor's ``options`` beside its own."""
        self._compiled = self._proven = self._of_forward = None
        if options:
            self.arguments = {**self.arguments, "options": {**(self.arguments.get("options") or {}), **options}}

    # ---- a call ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call compiled, check it, or run what the module is without us."""
        module = self.module
        if torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        if (other := self.other_module_called()) is not None:
            self.copy_called = True
            return other._call_impl(*args, **kwargs)
        if self.is_called_beside_a_step:  # a check would alter weights that the step is about to use
            self.called_beside_a_step = True
            with weights_held():
                return module._call_impl(*args, **kwargs)
        if self._inside:
            return module._call_impl(*args, **kwargs)
        if is_looked_at(args):
            self.called_under_a_mode = True
            return module._call_impl(*args, **kwargs)
        if self._layout is None and any(map(is_lazy, module.parameters())):
            return module._call_impl(*args, **kwargs)
        self.called = True
        kind, checks = self.of, self._checking.mode != "off"
        try:
            key = self._called_as = self._signature(args, kwargs)
        except NoShape:
            return module._call_impl(*args, **kwargs)
        before = self._ran_compiled.get(key)
        if before is None and torch._C._current_graph_task_id() != -1:  # its forward may have been without gradients
            before = self._ran_compiled.get((key[0], False, *key[2:]))
        if before is None:
            if kind.failure is not None or (kind.eager_evaluations and self.is_evaluated):
                before = self._ran_compiled[key] = False
            elif self._checking.derives and self._derived is None:
                self._ran_compiled[key] = False
                return self._seen_deriving(args, kwargs)
        if before is False:
            if in_capture() and kind.failure is None and not kind.eager_evaluations:  # compared in this very step
                self._end_capture()
            return self._eager(args, kwargs)
        proof, may_be_covered = kind.proofs.get(key), False
        if proof is None:
            proof = kind.proofs[key] = Proof(with_gradients=torch.is_grad_enabled())
            proof.proven = not checks
            many = len(kind.proofs) > MAX_CHECKED
            may_be_covered = checks and many and self.arguments.get("dynamic") is not False
        if self not in proof.callers:
            proof.callers.append(self)
        checking = self._checking
        missed = self in proof.missed and not before
        audit = (
            proof.proven
            and proof.due
            and not (missed or before or checking.audited)
            and proof.is_for(self)
            and kind.may_audit(proof, checking)
        )
        if (proof.proven or may_be_covered) and not (audit or missed):
            try:
                return self._run(key, proof, args, kwargs)
            except NoCode:  # nothing has run
                missed = True
        waits = checking.one_kind_a_step and checking.checked not in (None, kind)
        checked = checks and not waits and (audit or missed or proof.looks == 0 or proof.is_suspected(self))
        if checked and in_capture():
            self._end_capture(proof)
        self._ran_compiled[key] = False
        if checked:
            result = self._checked(proof, args, kwargs, audit=audit, missed=missed)
            if kind.differs or kind.error or proof.suspected:
                kind.functions |= functions_behind(result, (args, kwargs))
        else:
            result = self._eager(args, kwargs)
        watched, self._watched = self._watched, []
        if self._unchecked is not None:
            kind.fail(f"it cannot be checked, eager fails on copies of its inputs: {self._unchecked}")
            self._unchecked = None
        if (written := written_to(watched)) is not None:  # by the training's own call: nothing has to be put back
            kind.fail(cannot_check(written))
        else:
            kind.left_alone |= {one.name for one in watched}
        return result

    def _checked(
        self, proof: Proof, args: tuple[Any, ...], kwargs: dict[str, Any], *, audit: bool, missed: bool
    ) -> Any:
        """Check the call; returns eager's result. What FSDP2 shards is checked where its parameters are gathered, which
        is within its hooks, without a collective."""
        if not self.is_sharded:
            self._check(proof, args, kwargs, audit=audit, missed=missed)
            return self._eager(args, kwargs)
        forward = self.module.forward

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check(proof, args, kwargs, audit=audit, missed=missed, forward=forward)
            return forward(*args, **kwargs)

        with self._forward_being(checked):
            return self._eager(args, kwargs)

    def _check(
        self,
        proof: Proof,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        audit: bool,
        missed: bool,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        if any(hasattr(one, "to_local") for one in self.module.parameters()):  # of another mesh: collectives are within
            proof.looks, proof.clean = proof.looks + 1, True
            proof.due = proof.must = False
            self._checking.report(
                Check(path=self.path, kind=self.of.name, outcome=Outcome(skipped=SHARDED), seconds=0.0, audit=audit)
            )
            return
        kind, checking = self.of, self._checking
        audit = audit or (bool(proof.suspected) and proof.trained)  # a second look at what an audit found
        began = checking.clock()
        checking.begin(self)
        owed, due, must = set(kind.owed), proof.due, proof.must
        if audit and not proof.must:
            kind.owed.discard(proof.with_gradients)
        proof.due = proof.must = False
        if audit:
            checking.audited = True
        else:
            checking.checked = kind
        graphs = counters["stats"]["unique_graphs"]
        self._inside = True
        try:
            outcome = check_call(
                self.module,
                self.compiled if forward is None else self._compiled_forward(forward),
                args,
                kwargs,
                eager=forward,
                unit=max(checking.unit, autocast_unit(self.module)),
                multiple=MULTIPLES[checking.mode],
                whole=bool(self.arguments.get("fullgraph")),
                draws_alike=draws_alike(self.arguments),
                drew_as_inductor=proof.drew_as_inductor,
                changed=kind.changed,
                left_alone=kind.left_alone,
            )
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # eager's own, which the step is about to raise itself, or one of copies alone
            if raised_by_signal(error):
                raise
            self._unchecked = one_line(error)
            return
        finally:
            self._inside = False
        compiled = self._note_compiled(proof, graphs)
        again, wrong = bool(proof.suspected), outcome.wrong
        proof.looks += not outcome.unseen
        if outcome.unseen:  # this call shows whether the next one can be checked
            self._watched = outcome.unseen
            kind.owed, proof.due, proof.must = owed, due, must
            missed = False
        elif outcome.error is not None:
            self._refuse(proof, outcome.error)
        elif outcome.skipped is not None:
            # Proven, or eager: what cannot be looked at is not taken for granted.
            kind.fail(cannot_check(outcome.skipped))
        elif wrong and again:
            reason = f"it is not eager's: {'; '.join(map(str, wrong[:2]))}"
            if self.is_evaluated:
                kind.run_evaluations_eager(reason, differs=wrong, trusted=audit)
            else:
                kind.culprit = proof if proof.trained else replace(proof, ran=False)
                kind.fail(reason, differs=wrong)
        elif wrong:
            proof.suspected, proof.suspect, proof.suspected_at, proof.trained = wrong, self, proof.looks, audit
            proof.proven = proof.clean = False
        else:
            if outcome.how in ("draws", "seeds"):
                proof.drew_as_inductor = outcome.how == "draws"
            if proof.suspect in (None, self):  # another region's clean look clears nobody
                proof.suspected, proof.suspect, proof.clean = [], None, True
            if missed and not compiled:
                self._count_missing(proof)
                proof.compiling.add(self)
            if any(one != outcome.reached[0] for one in outcome.reached):
                proof.reached = outcome.reached
        if missed:
            proof.missed.discard(self)
        checking.report(
            Check(
                path=self.path,
                kind=kind.name,
                outcome=outcome,
                seconds=checking.clock() - began,
                audit=audit,
                proof=proof,
            )
        )

    def _refuse(self, proof: Proof, error: Exception) -> None:
        """Calls like this one do not compile, and so none of the kind run compiled; but an evaluation of what takes a
        gradient itself runs eager alone: it frees the graph of what it returns, which no compiled code does."""
        if self._checking.derives and self.is_evaluated and self.of.is_proven:
            self.of.run_evaluations_eager(one_line(error))
        else:
            self.of.fail(one_line(error), error)

    def _run(self, key: Any, proof: Proof, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call compiled, by code that was compared with eager before. Raises NoCode where there is none."""
        graphs = counters["stats"]["unique_graphs"]
        compiles = self._checking.mode == "off" or self in proof.compiling
        self._code_missing = self._fell_back = False
        kept = None
        try:
            if compiles and not self.arguments.get("fullgraph", False) and self._compiled is None:
                kept = RegionState(self.module, (args, kwargs))  # a part may run before another does not compile
            with contextlib.nullcontext() if not self._checking.ran_eager else self._versions_kept(args, kwargs):
                result = self.compiled(*args, **kwargs) if compiles else self._by_proven_code(args, kwargs)
        except NoCode:
            raise
        except Exception as error:
            # Recomputation of a checkpoint ends by an exception of its own, once it has what the backward needs.
            if is_out_of_memory(error) or type(error).__module__ == "torch.utils.checkpoint":
                raise
            if in_capture() and STANCE in str(error):
                self._end_capture(proof)
            self._ran_compiled[key] = False
            if kept is not None:
                kept.restore()
            result = self._eager(args, kwargs)  # which raises itself what is the user's own error
            self._refuse(proof, error)
            return result
        if self._code_missing:
            proof.missed.add(self)
        self._ran_compiled[key] = not self._fell_back
        if not self._fell_back:
            proof.ran = proof.proven = True
        if self._note_compiled(proof, graphs) and self._checking.mode != "off":
            proof.compiling.discard(self)
            proof.due = proof.must = True
            proof.turn = proof.callers.index(self)
        if torch.is_grad_enabled():
            self._watch_backward(proof, result, args, kwargs)
        return result

    def _versions_kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Inside, what is written to buffers does not count as a change. Eager's batch norm saves its running
        statistics for a backward that does not read them, and does not count what it writes to them; compiled code
        does, so that the backward of an eager call would refuse."""
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, nn.Module)]
        buffers = dict.fromkeys(itertools.chain.from_iterable(one.buffers() for one in (self.module, *given)))
        return torch.autograd.grad_mode._unsafe_preserve_version_counter(
            tuple(one for one in buffers if not one.is_inference())
        )

    def _end_capture(self, proof: Proof | None = None) -> None:
        """Code is missing where none can be compiled: a later call of ``proof``'s is checked, which compiles it."""
        if proof is not None and self._checking.mode != "off":
            proof.missed.add(self)
        raise NotCompiledYet(f"code was missing for {self.path}: that is compiled first, then captured again")

    def _note_compiled(self, proof: Proof, graphs: int) -> bool:
        """Whether there are more graphs than ``graphs``; code that is compiled again and again runs eager."""
        if counters["stats"]["unique_graphs"] == graphs:
            return False
        self._count_missing(proof)
        return True

    def _count_missing(self, proof: Proof) -> None:
        proof.recompiled[self.path] += 1
        if proof.recompiled[self.path] > MAX_RECOMPILED:
            self.of.fail(NEVER_SETTLES)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._checking.ran_eager |= torch.is_grad_enabled()
        result = self.module._call_impl(*args, **kwargs)
        if torch.is_grad_enabled() and self.of.failure is None:
            for one in tensors_of(result):
                if one.grad_fn is not None:
                    one.grad_fn.register_prehook(self._notice_double_backward)
                    break
        return result

    @property
    def compiled(self) -> Callable[..., Any]:
        """The compiled call; made at the first use, compiled at its first call."""
        if self._compiled is None:
            self._make()
            assert self._compiled is not None
        return self._compiled

    def _make(self) -> None:
        """Make the compiled call, and the same without compiling."""
        if self.is_sharded:
            self._compiled, self._proven = self._within_hooks(), self._within_hooks(compiles=False)
        else:
            function = types.MethodType(self.of.code(self.module, self.layout), self.module)
            compiled = torch.compile(function, **self.arguments)
            self._compiled, self._proven = drawing_by_numpy(compiled), self._without_compiling(compiled, function)
        if self._derived:
            self._compiled, self._proven = self._deriving(self._compiled), self._deriving(self._proven)

    def _without_compiling(self, compiled: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        whole = bool(self.arguments.get("fullgraph"))
        return without_compiling(compiled, function, self._note_missing_code, fullgraph=whole)

    def _note_missing_code(self) -> None:
        self._code_missing = True

    def _by_proven_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._proven is None:
            self._make()
            assert self._proven is not None
        try:
            return self._proven(*args, **kwargs)
        except NoCode:
            if not self._must_run_compiled:
                raise
            return self.compiled(*args, **kwargs)

    @property
    def _must_run_compiled(self) -> bool:
        """Whether a call may not run eager: what an earlier call of this step has computed by compiled code is computed
        again for its backward, which takes what the same code saves. Such a call compiles, and is audited."""
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        computed = self._ran_compiled.get(self._called_as, False)
        return computed and (hooked or torch._C._current_graph_task_id() != -1)

    @property
    def has_code(self) -> bool:
        """Whether Dynamo holds what was compiled of its own call, in this training or an earlier one."""
        functions = [self.module.forward] if self.is_sharded else self.of.codes
        codes = [one.__code__ for one in functions if hasattr(one, "__code__")]
        return any(eval_frame._debug_get_cache_entry_list(code) for code in codes)

    def _seen_deriving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The real call, in eager, which shows by which of its arguments the forward takes gradients."""
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        asked = {id(one) for one in given if one.requires_grad}
        with RequiringGrad() as seen:
            result = self._eager(args, kwargs)
        by = {id(one) for one in seen.tensors} - asked
        self._derived = {place: one.requires_grad for place, one in enumerate(given) if id(one) in by}
        return result

    def _deriving(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` of arguments that require gradients already: no graph can ask for that, and eager's forward does.
        Afterwards they require one where eager leaves them so."""
        derived = self._derived or {}

        def called(*args: Any, **kwargs: Any) -> Any:
            given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            asking = [(one, left) for place, one in enumerate(given) if (left := derived.get(place)) is not None]
            asking = [(one, left) for one, left in asking if not one.requires_grad]
            for one, _ in asking:
                one.requires_grad_(True)
            try:
                return call(*args, **kwargs)
            finally:
                for one, left in asking:
                    one.requires_grad_(left)

        return called

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 gathers its parameters as it is called, and shards them again."""
        return hasattr(self.module, "_get_fsdp_state")

    def _compiled_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if self._of_forward is None:
            self._of_forward = torch.compile(forward, **self.arguments)
        return drawing_by_numpy(self._of_forward)

    @contextlib.contextmanager
    def _forward_being(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Inside, the module has this ``forward``."""
        attributes = vars(self.module)
        before = attributes.get("forward")
        attributes["forward"] = forward
        try:
            yield
        finally:
            del attributes["forward"]
            if before is not None:
                attributes["forward"] = before

    def _within_hooks(self, *, compiles: bool = True) -> Callable[..., Any]:
        """The compiled call of a module that FSDP2 shards. Its parameters are gathered by hooks, which Dynamo does not
        trace and which run once a call: the forward alone is compiled, and eager's takes its place within; where it
        ``compiles`` nothing and code is missing, too."""
        module, eager = self.module, self.module.forward
        compiled = self._compiled_forward(eager)
        assert self._of_forward is not None
        used = compiled if compiles else self._without_compiling(self._of_forward, eager)

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return used(*args, **kwargs)
            except NoCode:
                if self._must_run_compiled:
                    return compiled(*args, **kwargs)
                self._fell_back = self._code_missing = True
                return eager(*args, **kwargs)
            except Exception as error:
                if not is_compile_error(error):
                    raise
                self._fell_back = True
                self.of.fail(one_line(error), error)
                return eager(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._forward_being(forward):
                return module._call_impl(*args, **kwargs)

        return call

    @property
    def layout(self) -> tuple[Any, ...]:
        """Shapes of its weights."""
        if self._layout is None:
            self._layout = self.shapes_of_weights()
        return self._layout

    def shapes_of_weights(self) -> tuple[Any, ...]:
        """The same now; without those that the first call will make."""
        return tuple(one.shape for one in self.module.parameters() if not is_lazy(one))

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What tells graphs apart, as far as it costs little to know. Raises NoShape."""
        shapes = *map(_shape_of, args), *((name, _shape_of(one)) for name, one in kwargs.items())
        return self.layout, torch.is_grad_enabled(), self.module.training, _shared_memory(args), shapes

    # ---- its backward ----------------------------------------------------------------------------------------------

    def _notice_double_backward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.of.fail(helped(DOUBLE_BACKWARD))

    def _watch_backward(self, proof: Proof, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compiled code has no gradient of its gradient, and gives zeros where eager gives none. Both are put right as
        the backward's results come."""
        leaves = tensors_of(result)
        if proof.reached is not None or not leaves:  # what is written into an argument is an output, too
            known = set(map(id, leaves))
            leaves += [one for one in tensors_of((args, kwargs)) if id(one) not in known]
        node = next((found for one in leaves if (found := _compiled_node(one.grad_fn)) is not None), None)
        if node is None:
            return
        functions = node.next_functions  # not the node, which holds the hook
        leaves = [one for one in leaves if _compiled_node(one.grad_fn) is node]
        places = [(place, one.output_nr) for place, one in enumerate(leaves) if one.grad_fn is node]
        autocast = [
            (name, torch.get_autocast_dtype(name)) for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)
        ]

        def hook(gradients: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if torch.is_grad_enabled():
                self.of.fail(helped(DOUBLE_BACKWARD))
                return self._eager_gradients(functions, places, given, gradients, args, kwargs, autocast)
            placed = {nr for _, nr in places}
            beside = any(one is not None and nr not in placed for nr, one in enumerate(given))
            if proof.reached is None or beside or all(one is not None for one in given):
                return None
            return self._params_without_grad(proof.reached, functions, places, given, gradients)

        node.register_hook(hook)

    def _params_without_grad(
        self,
        of_outputs: list[frozenset[str]],
        functions: tuple[tuple[Any, int], ...],
        places: list[tuple[int, int]],
        given: tuple[Any, ...],
        gradients: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """``gradients``, undefined for parameters that no output with a gradient depends on: weight decay would move
        them otherwise (BERT's pooler)."""
        if len(places) != len(of_outputs):
            return gradients
        reached = frozenset().union(*(of_outputs[place] for place, nr in places if given[nr] is not None))
        if self._names is None:
            self._names = {id(one): name for name, one in self.module.named_parameters()}
        names = [self._names.get(id(getattr(one, "variable", None))) for one, _ in functions]
        pairs = zip(gradients, names, strict=True)
        return tuple(None if name is not None and name not in reached else one for one, name in pairs)

    def _eager_gradients(
        self,
        functions: tuple[tuple[Any, int], ...],
        places: list[tuple[int, int]],
        given: tuple[Any, ...],
        gradients: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: list[tuple[str, torch.dtype]],
    ) -> tuple[Any, ...]:
        """The same gradients from eager, of which a gradient can be taken: this once, since later steps run eager."""
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad]
        by_node = {(one.grad_fn, one.output_nr): one for one in tensors if one.grad_fn is not None}
        wanted = [getattr(node, "variable", None) if node is not None else None for node, _ in functions]
        wanted = [by_node.get(pair) if one is None else one for one, pair in zip(wanted, functions, strict=True)]
        state = RegionState(self.module, (args, kwargs))
        with contextlib.ExitStack() as entered:
            entered.callback(state.restore)
            for name, dtype in autocast:
                entered.enter_context(torch.autocast(name, dtype))
            entered.enter_context(torch.enable_grad())
            self._inside = True
            entered.callback(setattr, self, "_inside", False)
            leaves = tensors_of(self.module._call_impl(*args, **kwargs))
            pairs = [(leaves[place], given[nr]) for place, nr in places if given[nr] is not None]
            known = [one for one in wanted if one is not None]
            found = torch.autograd.grad(
                [one for one, _ in pairs], known, [one for _, one in pairs], create_graph=True, allow_unused=True
            )
        of = {id(one): gradient for one, gradient in zip(known, found, strict=True)}
        return tuple(gradient if one is None else of[id(one)] for gradient, one in zip(gradients, wanted, strict=True))


def draws_alike(arguments: dict[str, Any]) -> bool:
    """Whether what is compiled with these arguments of ``torch.compile`` draws eager's random numbers. Inductor's own
    differ, and may leave a device's generator where eager's leave it."""
    options = arguments.get("options") or {}
    asked = options.get("fallback_random") or options.get("align_random_eager")
    return arguments.get("backend", "inductor") != "inductor" or bool(asked)


def cannot_check(reason: str) -> str:
    return f"it cannot be checked, {reason}; parity=off compiles it unchecked"


SHARDED = "its parameters are sharded over a mesh of processes: it is compiled unchecked"
NEVER_SETTLES = (
    f"{MAX_RECOMPILED + 1} calls with arguments of the same shapes compiled it anew: a value that it reads in Python "
    "is another one each time; make it a tensor, or compile the parts that do not read it"
)
DOUBLE_BACKWARD = REPLACED["does not currently support double backward"]


def _compiled_node(node: Any) -> Any:
    """The backward of a compiled graph at ``node``, or right behind the view that an output may be."""
    for _ in range(3):
        if node is None or type(node).__name__ == "CompiledFunctionBackward":
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _shared_memory(args: tuple[Any, ...]) -> Any:
    """Which of the arguments are the same memory in part. No graph is guarded by that, and one that writes to an
    argument depends on it: https://github.com/pytorch/pytorch/issues/139789."""
    given = [one for one in args if type(one) is Tensor and not one.requires_grad and one.layout is torch.strided]
    if len(given) < 2 or len({one.untyped_storage().data_ptr() for one in given}) == len(given):
        return ()
    groups = overlapping(given)
    places = {id(one): place for place, one in enumerate(args)}
    return tuple(tuple(places[id(one)] for one in group) for group in groups)


class NoShape(Exception):
    """A call gets a nested tensor of the strided layout, which no graph takes: torch's transformer makes one of each
    padded batch that it evaluates."""


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_nested:
            return value.shape, value.dtype, value.requires_grad
        if value.layout is torch.strided:
            raise NoShape
        # Jagged: its lengths are a number of their own in every batch, and dynamic.
        return tuple(one if isinstance(one, int) else None for one in value.shape), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape_of, value))
    if isinstance(value, dict):
        return tuple((name, _shape_of(one)) for name, one in value.items())
    return value if isinstance(value, bool | str | type(None)) else type(value)


def is_looked_at(args: tuple[Any, ...]) -> bool:
    """Whether somebody traces, counts or transforms what runs, which compiled code cannot serve."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or eval_frame._stance.stance == "force_eager"
        or (bool(args) and isinstance(args[0], torch.fx.Proxy))
    )


# ---- all regions of a program ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def plain(regions: Iterable[Region]) -> Iterator[None]:
    """Inside, ``regions`` run as they were written."""
    before = [(region, region._inside) for region in regions]
    try:
        for region, _ in before:
            region._inside = True
        yield
    finally:
        for region, inside in before:
            region._inside = inside


# ---- methods as regions ----------------------------------------------------------------------------------------------


class Method(nn.Module):
    """A method of ``owner`` as a module of its own, with the owner's weights. It is no part of the owner."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner = owner
        self.function = getattr(type(owner), name)

    @property
    def training(self) -> bool:
        return self.owner.training

    @training.setter
    def training(self, value: bool) -> None:
        """The owner's counts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.owner, *args, **kwargs)


class MethodRegion(Region):
    """While it stands, the owner's attribute of the method's name is what is compiled."""

    module: Method

    def replace_call(self, standing: bool) -> None:
        """The method is an attribute of the owner's own meanwhile, found before that of its class."""
        super().replace_call(standing)
        attributes, name = vars(self.module.owner), self.path.rpartition(".")[2]
        if standing:
            attributes[name] = self.module
        elif attributes.get(name) is self.module:
            del attributes[name]


def submodules(regions: Iterable[Region]) -> list[Region]:
    """Those of ``regions`` that are submodules, not methods."""
    return [one for one in regions if not isinstance(one, MethodRegion)]
