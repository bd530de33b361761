"""The step of one of torch's optimizers as calls of torch's own function, compiled once a kind of chunk.

Parameters are cut into chunks, one for each repeated block of the module and some for the rest. Each is one call of a
compiled function, which calls ``torch.optim.adam.adam`` or its like for the chunk's parameters of each group. Chunks of
the same shapes share it, so that compile time does not grow with the number of blocks.

What a step works on is read anew at each step, as torch reads it (see ``Reader``). A ``Plan`` holds how that was cut
into chunks, and is gone by where parameters, state, shapes, strides and flags are what they were; where they are not,
there is another one, whose first step is checked. Dynamo's guards look at all of it once more.

Learning rates and counts of steps are 0-D tensors on the device. Other numbers are constants of the compiled code until
they change, and its inputs from then on; the betas of Adam are tensors then.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from strategies.compile_errors import CannotCapture, is_compile_error, one_line
from strategies.optimizer.calls import FORMS, WITH_TENSOR_BETAS, Call, Lists, Reader, layouts, overlapping
from strategies.optimizer.step import DeviceScalar, NotCompiled, OwnStep, Update, by_value, looked_into
from strategies.optimizer.update_check import NO_MEMORY, Sample, compared, fits_memory, sample_of
from strategies.region import State
from strategies.region_check import Outcome

MAX_CHUNK = 32
"""Tensors of a chunk; a step launches about one kernel for each, and compiling it takes time in proportion."""
MAX_PLANS = 4
"""Sets of parameters that take turns, as those do whose experts get no gradient in some steps."""
MAX_CHANGES, WINDOW = 8, 64
"""Plans within as many steps after which those are said to change all the time."""
MAX_KINDS = 64
"""Compiled functions beyond those of the first plan."""
UNCHECKED = f"some parameters are updated by what was not checked: {NO_MEMORY}"
OFTEN = "parameters, groups or state change all the time"

Where = tuple[str | None, torch.device, torch.dtype]
Compiler = Callable[[Callable[..., None]], Callable[..., None]]
_serial = itertools.count()  # of compiled functions, a part of their names


def fresh_function(
    function: Callable[..., None],
    steps: int | None,
    static: Sequence[tuple[tuple[str, ...], tuple[str, ...], Mapping[str, Any]]],
    *,
    name: str,
) -> Callable[..., None]:
    """What calls ``function`` once for each part of a chunk; ``static``: names of its tensors and numbers, and flags.

    It has a code object of its own, by which Dynamo keeps compiled code. Else kinds of chunks would be recompiles of
    each other, and count against its limit. (``isolate_recompiles`` of torch 2.13 does so for wrappers.)
    """

    def update(parts: Sequence[tuple[Lists, Tensor | None, Sequence[Tensor], Sequence[float]]]) -> None:
        if not torch.compiler.is_compiling():
            raise NotCompiled
        for (lists, count, tensors, numbers), (tensor_names, number_names, flags) in zip(parts, static, strict=True):
            given = [list(each) for each in lists]
            given[1] = [gradient.clone() for gradient in given[1]]  # Nesterov's momentum is added to them in place
            if count is not None:
                assert steps is not None
                given.insert(steps, [count.clone() for _ in given[0]])
            function(
                *given,
                **dict(zip(tensor_names, tensors, strict=True)),
                **dict(zip(number_names, numbers, strict=True)),
                **flags,
            )

    code = update.__code__.replace(co_name=f"{name}_{next(_serial)}")
    return types.FunctionType(code, globals(), code.co_name, None, update.__closure__)


class Clock:
    """Parameters of one device that have made the same number of steps, which torch counts on the host."""

    __slots__ = ("made", "scalar", "steps")

    def __init__(self, made: float, scalar: DeviceScalar) -> None:
        self.made, self.scalar = made, scalar
        """Steps made so far."""
        self.steps: list[Tensor] = []
        """Torch's counts, one of each parameter."""


class Part:
    """Those of a chunk that come from one call."""

    __slots__ = ("call", "clock", "indices", "numbers", "pick", "scalars")

    def __init__(self, call: int, indices: list[int], clock: Clock | None) -> None:
        self.call, self.indices, self.clock = call, indices, clock
        get = operator.itemgetter(*indices)
        self.pick: Callable[[list[Any]], Sequence[Any]] = get if len(indices) > 1 else lambda given: (get(given),)
        self.scalars: list[DeviceScalar] = []
        self.numbers: tuple[str, ...] = ()

    def lists(self, call: Call) -> Lists:
        return tuple(list(self.pick(each)) if each else [] for each in call.lists)


class Chunk:
    """What one call of a compiled function updates."""

    __slots__ = ("kind", "parts", "run")

    def __init__(self, kind: Hashable, parts: list[Part], run: Callable[..., None]) -> None:
        self.kind, self.parts, self.run = kind, parts, run

    def __call__(self, lists: Sequence[Sequence[Sequence[Any]]], calls: list[Call], steps: int | None) -> None:
        """Update what is in ``lists``, those of each part."""
        given = []
        for part, each in zip(self.parts, lists, strict=True):
            options = calls[part.call].options
            own = each if part.clock is None else [one for place, one in enumerate(each) if place != steps]
            given.append(
                (
                    tuple(own),
                    None if part.clock is None else part.clock.scalar.tensor,
                    tuple(scalar.tensor for scalar in part.scalars),
                    tuple(float(options[name]) for name in part.numbers),
                )
            )
        self.run(given)


class Plan:
    """How the parameters of some calls are cut into chunks."""

    def __init__(self, calls: list[Call], varying: set[str], number: int) -> None:
        self.number = number
        self.proven = False
        self.parameters = [one for call in calls for one in call.parameters]
        self.states = [one for call in calls for one in itertools.chain(*call.lists[2:])]
        self.lengths = [[len(each) for each in call.lists] for call in calls]
        self.layouts = layouts_of(calls)
        self.options = [options_of(call, varying) for call in calls]
        self.pointers = [one.data_ptr() for one in self.parameters]
        self.overlaps = overlapping(self.parameters)
        self.chunks: list[Chunk] = []
        self.left: dict[int, str] = {}
        """Calls that are left to torch's own function, with the reason."""
        self.clocks: list[Clock] = []
        self.scalars: list[tuple[int, str, DeviceScalar]] = []
        """Of each call, by the name of what they hold."""
        self._steps: list[Tensor] = []
        self._versions: list[int] = []
        self._one = torch.tensor(1.0)

    def fits(self, calls: list[Call], varying: set[str]) -> bool:
        """Whether ``calls`` are those it was made for, with other gradients and other numbers among ``varying``."""
        if [[len(each) for each in call.lists] for call in calls] != self.lengths:
            return False
        if not all(map(operator.is_, (p for call in calls for p in call.parameters), self.parameters)):
            return False
        states = itertools.chain.from_iterable(itertools.chain(*call.lists[2:]) for call in calls)
        if not all(map(operator.is_, states, self.states)):
            return False
        if layouts_of(calls) != self.layouts:
            return False
        if [options_of(call, varying) for call in calls] != self.options:
            return False
        if (pointers := [one.data_ptr() for one in self.parameters]) != self.pointers:
            self.pointers = pointers
            if overlapping(self.parameters) != self.overlaps:
                return False
        return self.in_time()

    # ---- counts and numbers of the host ------------------------------------------------------------------------------

    def begin_counting(self) -> None:
        self._steps = [one for clock in self.clocks for one in clock.steps]
        self._versions = [one._version for one in self._steps]

    def in_time(self) -> bool:
        """Whether the parameters of each clock have still made the same number of steps; somebody may have set them."""
        versions = [one._version for one in self._steps]
        if versions != self._versions:
            for clock in self.clocks:
                made = {float(one) for one in clock.steps}
                if len(made) > 1:
                    return False
                clock.made = made.pop()
            self._versions = versions
        return True

    def refresh(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Bring the device's scalars up to date; ``options`` of each call."""
        for place, name, scalar in self.scalars:
            scalar.write(options[place][name])
        for clock in self.clocks:
            clock.scalar.write(clock.made)

    def count(self, steps: list[Tensor] | None = None) -> None:
        """Count a step on the host, of all parameters or of those with these ``steps``, where others have done so."""
        if self._steps:
            if steps := self._steps if steps is None else steps:
                torch._foreach_add_(steps, self._one, alpha=1.0)
            for clock in self.clocks:
                clock.made += 1
            self._versions = [one._version for one in self._steps]


def layouts_of(calls: list[Call]) -> list[Any]:
    """Of parameters and gradients; torch sees to it that a gradient has its parameter's shape."""
    return [(layouts(call.lists[0]), [one.stride() for one in call.gradients]) for call in calls]


def options_of(call: Call, varying: set[str]) -> dict[str, Any]:
    """Flags and constants of ``call``, and of numbers that vary, whether they are zero."""
    return {
        name: value == 0 if name in varying else (id(value) if isinstance(value, Tensor) else value)
        for name, value in call.options.items()
        if name not in ("lr", *FORMS)
    }


class FunctionalUpdate(Update):
    """Updates ``optimizer``'s parameters and states in place, by torch's own function.

    Args:
        optimizer: Whose step ``reader`` reads.
        places: Path of the repeated block for parameters that lie in one.
        compiler: Compiles one function; called once for each kind of chunk.
        options: See ``Update``.
    """

    form = "functional"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reader: Reader,
        *,
        places: Mapping[Tensor, str],
        compiler: Compiler,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, **options)
        self._reader, self._places, self._compiler = reader, places, compiler
        self._functions: dict[Hashable, Callable[..., None]] = {}  # by kind of chunk
        betas = ("beta1", "beta2") if reader.name in WITH_TENSOR_BETAS else ()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._may_be_tensors = ("lr", *betas)
        # Numbers that are no constants of compiled code. On a GPU betas are until they change: their powers would be in
        # double precision there, see ``is_wide``.
        self._varying: set[str] = {"lr", *(betas if all(map(is_wide, parameters)) else ())}
        self._plans: dict[Hashable, Plan] = {}
        self._plan: Plan | None = None
        self._serial = self._steps = self._allowed = 0
        self._changes: deque[int] = deque(maxlen=MAX_CHANGES)
        self._noted: set[str] = set()
        self._own: OwnStep | None = None

    @property
    def proven(self) -> bool:
        return self._plan is not None and self._plan.proven

    def __call__(self) -> None:
        """One step; waits for the device only where it is checked."""
        if self.reason or looked_into():
            self.own_step()
            return
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        calls = self._reader.read()
        self._steps += not capturing
        if any(map(self._reader.lacks, calls)):  # torch's function creates it, and tells its step
            self.own_step()
            return
        plan = self._plan_of(calls)
        if self.reason:
            self.own_step()
        elif self.state is State.CHECKING:
            if capturing:
                raise CannotCapture("the optimizer's step is not checked yet")
            if self.check(lambda: self._compared(plan, calls)):
                self._prove(plan)
        else:
            self._compiled(plan, calls, capturing)

    def own_step(self) -> None:
        self._reader.raw(self.optimizer)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _compiled(self, plan: Plan, calls: list[Call], capturing: bool) -> None:
        steps, graphs = self._reader.steps, counters["stats"]["unique_graphs"]
        if not capturing:
            plan.refresh([call.options for call in calls])
        failure: Exception | None = None
        left: list[tuple[Call, Lists]] = [(calls[place], calls[place].lists) for place in plan.left]
        counted: list[Tensor] | None = None
        for chunk in plan.chunks:
            lists = [part.lists(calls[part.call]) for part in chunk.parts]
            if failure is None:
                try:
                    chunk(lists, calls, steps)
                    continue
                except Exception as error:
                    # The compiler's errors come before anything of this call has run.
                    if not isinstance(error, NotCompiled) and not is_compile_error(error):
                        raise
                    if capturing:
                        raise CannotCapture(f"the optimizer's step is not compiled: {one_line(error)}") from error
                    failure = error
                    before = itertools.takewhile(lambda one, this=chunk: one is not this, plan.chunks)  # type: ignore[misc]
                    parts = [part for one in before for part in one.parts if part.clock is not None]
                    counted = [one for part in parts for one in part.pick(calls[part.call].lists[steps])]  # type: ignore[index]
            left += [(calls[part.call], own) for part, own in zip(chunk.parts, lists, strict=True)]
        for call, own in left:
            self._reader.function(*own, **call.options)
        if not capturing:
            plan.count(counted)
        if failure is not None and not isinstance(failure, NotCompiled):
            self.fail(f"it does not compile once more: {one_line(failure)}", failure)
        elif counters["stats"]["unique_graphs"] != graphs and self._checks():
            self._asked = True  # a guard has let Dynamo compile anew, which nobody has checked
        if not plan.proven:
            self._prove(plan)

    def _prove(self, plan: Plan) -> None:
        plan.proven = True
        self._changed()

    def _compared(self, plan: Plan, calls: list[Call]) -> Outcome:
        """Run the compiled functions on copies, then torch's own step, and compare."""
        steps = self._reader.steps
        plan.refresh([call.options for call in calls])
        samples: list[tuple[Chunk, Sample]] = []
        failure: Exception | None = None
        try:
            for chunk in self._chosen(plan, calls):
                lists = [part.lists(calls[part.call]) for part in chunk.parts]
                if not fits_memory([one for each in lists for one in itertools.chain(*each)]):
                    self._note(UNCHECKED)
                    continue
                sample = sample_of(lists, counted=[None if part.clock is None else steps for part in chunk.parts])
                chunk(sample.seen, calls, steps)
                samples.append((chunk, sample))
        except torch.OutOfMemoryError:
            self._note(UNCHECKED)
        except Exception as error:  # on copies: nothing is lost
            failure = error
        self.own_step()
        if failure is not None:
            return Outcome(error=failure)
        if plan.chunks and not samples:
            return Outcome(skipped=NO_MEMORY)
        found, names = [], self.names()
        for chunk, sample in samples:
            owners = [calls[part.call] for part in chunk.parts]
            found += compared(sample, owners, self._reader, names, self.multiple)
        updated = (one for _, sample in samples for lists in sample.lists for one in lists[0])
        return Outcome(differences=found, how="exact", finite=all(bool(one.isfinite().all()) for one in updated))

    def _chosen(self, plan: Plan, calls: list[Call]) -> list[Chunk]:
        """A chunk of each kind, another one at each check, and those with the smallest parameter of each call."""
        kinds: defaultdict[Hashable, list[Chunk]] = defaultdict(list)
        for chunk in plan.chunks:
            kinds[chunk.kind].append(chunk)
        chosen = [alike[self.looked % len(alike)] for alike in kinds.values()]
        for place, call in enumerate(calls):
            if call.parameters and place not in plan.left:
                small = min(range(len(call.parameters)), key=lambda index: call.parameters[index].numel())
                chosen += [
                    chunk
                    for chunk in plan.chunks
                    if any(part.call == place and small in part.indices for part in chunk.parts)
                ]
        return list(dict.fromkeys(chosen))

    # ---- plans -------------------------------------------------------------------------------------------------------

    def _plan_of(self, calls: list[Call]) -> Plan:
        key = tuple(tuple(map(id, call.parameters)) for call in calls)
        plan = self._plans.get(key)
        if plan is not None and plan.fits(calls, self._varying):
            self._plan = plan
            return plan
        if plan is not None:
            self._note_varying(plan, calls)
        if self._plans:
            self._changes.append(self._steps)
            if len(self._changes) == MAX_CHANGES and self._steps - self._changes[0] < WINDOW:
                self.fail(OFTEN)
        groups = self.optimizer.param_groups
        present = {id(one) for group in groups for one in group["params"]}
        self._plans = {
            other: kept
            for other, kept in self._plans.items()
            if other != key and all(id(one) in present for one in kept.parameters)
        }
        while len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = self._plan = plan = self._cut(calls)
        if not self._allowed:
            self._allowed = len(self._functions) + MAX_KINDS
        if len(self._functions) > self._allowed:
            self.fail(OFTEN)
        return plan

    def _note_varying(self, plan: Plan, calls: list[Call]) -> None:
        for before, call in zip(plan.options, calls, strict=False):
            for name, value in call.options.items():
                known = before.get(name)
                if isinstance(value, float) and isinstance(known, float) and value != known:
                    self._varying.add(name)

    def _cut(self, calls: list[Call]) -> Plan:
        self._serial += 1
        plan = Plan(calls, self._varying, self._serial)
        reasons = {place: self._reader.not_covered(call) for place, call in enumerate(calls) if call.parameters}
        if plan.overlaps:
            reasons = dict.fromkeys(reasons, "parameters that share memory")
        plan.left = {place: reason for place, reason in reasons.items() if reason is not None}
        for reason in plan.left.values():
            self._note(f"some parameters are left to torch's own function: {reason}")
        clocks: dict[Hashable, Clock] = {}
        scalars: dict[tuple[int, str, torch.device, bool], DeviceScalar] = {}
        chunks: defaultdict[Where, list[tuple[int, int, Clock | None]]] = defaultdict(list)
        for place, call in enumerate(calls):
            if place in plan.left:
                continue
            counts = None if self._reader.steps is None else call.lists[self._reader.steps]
            for index, parameter in enumerate(call.parameters):
                clock = None
                if counts is not None and counts[index].is_cpu:
                    made = float(counts[index])
                    wide = is_wide(parameter)
                    kind = (parameter.device, wide, made)
                    if kind not in clocks:
                        clocks[kind] = Clock(made, scalar_on(parameter.device, made, wide=wide))
                    clock = clocks[kind]
                    clock.steps.append(counts[index])
                where = (self._places.get(parameter), parameter.device, parameter.dtype)
                chunks[where].append((place, index, clock))
        for (_, device, _), members in chunks.items():
            for start in range(0, len(members), MAX_CHUNK):
                parts: defaultdict[tuple[int, Clock | None], list[int]] = defaultdict(list)
                for place, index, clock in members[start : start + MAX_CHUNK]:
                    parts[place, clock].append(index)
                made_of = [Part(place, indices, clock) for (place, clock), indices in parts.items()]
                for part in made_of:
                    self._number(part, calls[part.call], scalars)
                plan.chunks.append(self._chunk(made_of, calls, device))
        plan.clocks = list(clocks.values())
        plan.scalars = [(place, name, scalar) for (place, name, _, _), scalar in scalars.items()]
        plan.begin_counting()
        return plan

    def _number(self, part: Part, call: Call, scalars: dict[tuple[int, str, torch.device, bool], DeviceScalar]) -> None:
        """Where ``part`` finds its numbers: some are tensors on the device, one of each call."""
        first, options = call.parameters[part.indices[0]], call.options
        for name in self._names_of_tensors(options):
            kind = (part.call, name, first.device, is_wide(first))
            if kind not in scalars:  # single precision would do for a beta, but not for one minus it
                wide = is_wide(first) or (name != "lr" and first.device.type == "cuda")
                scalars[kind] = scalar_on(first.device, options[name], wide=wide)
            part.scalars.append(scalars[kind])
        part.numbers = tuple(
            name
            for name, value in options.items()
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and name not in self._names_of_tensors(options)
        )

    def _names_of_tensors(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(name for name in self._may_be_tensors if name in options and name in self._varying)

    def _chunk(self, parts: list[Part], calls: list[Call], device: torch.device) -> Chunk:
        static, key = [], []
        for part in parts:
            call = calls[part.call]
            tensors = self._names_of_tensors(call.options)
            flags = {
                name: value for name, value in call.options.items() if name not in (*part.numbers, *tensors, *FORMS)
            }
            forms = {"foreach": True, "fused": False, "capturable": True}
            flags |= {name: value for name, value in forms.items() if name in self._reader.arguments}
            static.append((tensors, part.numbers, flags))
            zero = tuple(call.options[name] == 0 for name in part.numbers)
            constants = tuple(call.options[name] for name in part.numbers if name not in self._varying)
            lists = part.lists(call)
            counted = part.clock is not None
            own = [one for place, one in enumerate(lists) if not (counted and place == self._reader.steps)]
            layout = tuple(map(layouts, own))
            key.append((counted, (tensors, *flags.items()), zero, constants, device, layout))
        kind = tuple(key)
        # Other constants are no other kind: Dynamo makes inputs of them.
        function = tuple((*each[:3], *each[4:]) for each in key)
        if function not in self._functions:
            name = f"{type(self.optimizer).__name__}_update"
            fresh = fresh_function(self._reader.function, self._reader.steps, static, name=name)
            self._functions[function] = self._compiler(fresh)
        return Chunk(kind, parts, self._functions[function])

    def _note(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self.report(line)

    # ---- for graphs --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Bring the device's numbers up to date; a step that is recorded begins with them, and its graph repeats it."""
        if self.reason:
            self._torchs_own().prepare()
        elif self._plan is not None and self._plan.in_time():
            self._plan.refresh([numbers_of(group) for group in self.optimizer.param_groups])

    def count(self) -> None:
        if self.reason:
            self._torchs_own().count()
            return
        assert self._plan is not None, "a step was made"
        self._plan.count()

    def constants(self) -> Hashable:
        """What a graph has taken by value: the numbers of each group but those that are read from the device, and the
        plan, which works on other tensors than the next."""
        if self.reason:
            return self._torchs_own().constants()
        plan = self._plan
        number = self._serial + 1 if plan is None or not plan.in_time() else plan.number
        left_out = ("params", "betas", *(name for name in self._may_be_tensors if name in self._varying))
        return number, *(
            tuple((name, by_value(value)) for name, value in numbers_of(group).items() if name not in left_out)
            for group in self.optimizer.param_groups
        )

    def capturable(self) -> AbstractContextManager[None]:
        return self._torchs_own().capturable() if self.reason else super().capturable()

    def release(self) -> None:
        if self._own is not None:
            self._own.release()
            self._own = None

    def scalars(self) -> list[Tensor]:
        plan = self._plan
        if plan is None or self.reason:
            return [] if self._own is None else self._own.scalars()
        held = [scalar for _, _, scalar in plan.scalars] + [clock.scalar for clock in plan.clocks]
        return [scalar.tensor for scalar in held]

    def _torchs_own(self) -> OwnStep:
        if self._own is None:
            self._own = OwnStep(self.optimizer)
            self._own.prepare()
        return self._own

    # ---- what it is --------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        chunks = [] if self._plan is None else self._plan.chunks
        tensors = sum(len(part.indices) for chunk in chunks for part in chunk.parts)
        form = "eager" if self.reason else self.form
        return {"form": form, "tensors": tensors, "chunks": len(chunks), "graphs": len(self._functions)}


def scalar_on(device: torch.device, value: Any, *, wide: bool) -> DeviceScalar:
    return DeviceScalar(value, device=device, dtype=torch.float64 if wide else torch.float32)


def is_wide(parameter: Tensor) -> bool:
    """Whether numbers are in double precision on the device of ``parameter``, as torch computes with those of the host.

    GPUs are slow at it, and each thread computes anew the bias corrections of Adam. There they are in the precision of
    ``capturable=True``.
    """
    return parameter.dtype == torch.float64 or parameter.is_cpu


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group, by the names that the functions have for them."""
    betas: Iterator[Any] = iter(group.get("betas", ()))
    return {**group, **{f"beta{place}": value for place, value in enumerate(betas, start=1)}}
