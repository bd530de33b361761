"""A region checked at its own boundary: eager and compiled run on copies of the inputs of a real call.

Forward and backward, with the same random output gradients; outputs, gradients of inputs and parameters, buffers and
what is written to inputs are compared. Nothing outside of the region runs again, and what the forward changes within it
is put back. The tolerance comes from a more exact run: in double precision, in single precision where autocast lowers
it, or, where the region draws random numbers (which would be others), with weights and inputs one rounding off.

Where Inductor draws other random numbers than eager (dropout), eager draws them as Inductor does, see
``inductor_random``. Where that is not what it did, runs of both under several seeds are compared as samples: their
means may differ by what the spread between seeds explains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import error_on_graph_break
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from strategies.compile_errors import is_compile_error, is_out_of_memory
from strategies.inductor_random import InductorDraws
from strategies.proven_code import STANCE
from strategies.region_state import (
    Changed,
    Large,
    RegionState,
    attributes_of,
    drew_random_numbers,
    random_state,
    seed_all,
)
from strategies.tolerance import CONSTANTS, SINGLE, UNCALIBRATED, Difference, Tensors, Unlowered, compare, exceeding
from strategies.torch_patches import refused_elsewhere, without_inductors_graphs

SEED = 2**31 - 1
"""Of output gradients and perturbations; seeds of several runs count from here."""
SEEDS = (8, 24)
"""Runs of each arm whose random numbers differ: few are looked at first, more before a difference counts."""
HALF_SCALE = 1024.0
"""Gradient of a loss in 16-bit floats, as a ``GradScaler`` makes it: others would be below their smallest number."""
ROUNDED = 4
"""Runs of eager, under some of the same seeds, with weights and inputs a rounding off."""
NOISES = 6
"""Further runs of eager, each with weights and inputs a rounding off in another way, before a difference counts: where
few numbers decide (the one example with a loss), one run's noise may be small by chance."""
TRIES = 3
"""Seeds under each of which eager that draws as Inductor has to differ: numbers next to a rate may round either way."""
SLOPES, STEP = 6, 1e-2
"""Seeds under each of which a gradient has to be that of its own forward, and how far weights are moved for that."""
SLOPE_NOISE, SLOPE_LEAST = 8.0, 0.05
"""How many times eager's own distance that may be away, and what is never called one: relative to the change by each
weight alone."""
ERRORS = 7.0
"""Standard errors that two means may be apart: with 14 degrees of freedom or more, that is no chance."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a check found."""

    differences: list[Difference] = field(default_factory=list)
    error: Exception | None = None
    """What the compiled call raised where eager's did not: it does not compile."""
    skipped: str | None = None
    """Why nothing was compared."""
    unseen: list[Large] = field(default_factory=list)
    """What is too large to be copied, where nobody knows yet whether the forward writes to it: nothing has run."""
    how: str = ""
    """What the tolerance was made of: ``exact``, ``rounding``, ``draws`` (exact, by Inductor's random numbers) or
    ``seeds``; ``equal`` where none was needed."""
    reached: list[frozenset[str]] = field(default_factory=list)
    """For each tensor with a gradient among the outputs, the names of parameters that it reaches."""
    finite: bool = True
    """Whether eager's results were numbers: where they are not, nothing is shown by equal ones."""

    @property
    def wrong(self) -> list[Difference]:
        return exceeding(self.differences)


@dataclass(slots=True)
class _Run:
    """What one run of forward and backward left, by kind and name."""

    outputs: dict[str, Tensor]
    plain: list[Any]
    """What is no tensor among the outputs."""
    gradients: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    written: dict[str, Tensor]
    """Inputs that the run has written to."""
    reached: list[frozenset[str]]
    left: dict[str, Any]
    """What it has left behind in attributes and containers."""

    @property
    def finite(self) -> bool:
        """Whether none of it is NaN."""
        kinds = (self.outputs, self.gradients, self.input_gradients)
        return not any(bool(one.isnan().any()) for kind in kinds for one in kind.values() if one.is_floating_point())


def check_call(
    module: nn.Module,
    compiled: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    eager: Callable[..., Any] | None = None,
    unit: float = SINGLE,
    multiple: float = 6.0,
    whole: bool = False,
    draws_alike: bool = True,
    drew_as_inductor: bool | None = None,
    changed: list[Changed] | None = None,
    left_alone: Collection[str] | None = None,
) -> Outcome:
    """Compare ``compiled``, called as ``module`` is, with the module's own call. The state afterwards is as before.

    Args:
        args, kwargs: The arguments of a call that is about to happen; they are copied.
        eager: In the place of the module's own call.
        unit: Rounding of one operation, see ``compare.rounding_unit``.
        multiple: See ``compare.MULTIPLES``.
        whole: Whether the compiler takes a forward as a whole or not at all (``fullgraph``).
        changed: What the compiler has seen the forward change elsewhere so far; what it sees is added.
        left_alone: Names of what is too large to be copied and was left as it was by a forward of the training; None =
            all.
        draws_alike: Whether compiled code draws eager's random numbers where its generators end in eager's state.
        drew_as_inductor: Whether eager that draws as Inductor has agreed with this code before, so that it has to; None
            = nobody knows.

    Raises what eager raises on the copies.
    """
    state = RegionState(module, (args, kwargs), changed)
    if state.cannot_restore:
        return Outcome(skipped=f"its forward may use up {', '.join([*dict.fromkeys(state.cannot_restore)][:3])}")
    if left_alone is not None and any(one.name not in left_alone for one in state.large):
        return Outcome(unseen=state.large)
    runs = _Runs(module, args, kwargs, state, eager)

    def asked() -> Outcome:
        with without_inductors_graphs():
            return _compared(
                runs, compiled, unit, multiple, whole=whole, draws_alike=draws_alike, aligned=drew_as_inductor
            )

    def look() -> Outcome:
        outcome = asked()
        if not outcome.finite and outcome.error is None and not outcome.wrong:
            # What is no number in the weights hides whether compiled code brought it there.
            with runs.altering(finite=True), _finite_weights(module):
                again = asked()
            outcome.differences, outcome.finite = [*outcome.differences, *again.differences], again.finite
        if written := written_to(state.large):
            return Outcome(skipped=written)
        return outcome

    return _beside_the_step(state, look)


def _beside_the_step(state: RegionState, look: Callable[[], Outcome]) -> Outcome:
    """What ``look`` finds by further runs, of which nothing is left; skipped where memory does not suffice."""
    torch.clear_autocast_cache()  # casts made here belong to no graph of the step
    hooks = _take_saved_tensors_hooks()
    try:
        return look()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Outcome(skipped="there is too little memory to run it twice")
    finally:
        state.restore()
        torch.clear_autocast_cache()
        for pack, unpack in hooks:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


_WEIGHTS = threading.RLock()
LONGEST_WAIT_SECONDS = 10.0
"""For weights that another thread holds; it may itself wait for the one that asks."""


@contextlib.contextmanager
def weights_held() -> Iterator[None]:
    """A check alters weights inside, and another thread than the step's calls a module inside: one at a time."""
    held = _WEIGHTS.acquire(timeout=LONGEST_WAIT_SECONDS)
    try:
        yield
    finally:
        if held:
            _WEIGHTS.release()


def written_to(large: Iterable[Large]) -> str | None:
    """Why a forward that has run since cannot run once more; None where it left all of it alone."""
    names = [str(one) for one in large if one.changed()]
    return f"its forward changes {', '.join(names[:3])}, too large to be copied" if names else None


def same_call(
    module: nn.Module,
    call: Callable[..., Any],
    other: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    unit: float = SINGLE,
    multiple: float = 6.0,
) -> Outcome:
    """Compare ``other`` with ``call``, two ways to run the same kernels on ``module``'s inputs, as ``check_call`` does.

    Random numbers are the same. Where results are not equal to the last bit, the tolerance comes from ``call`` with
    weights and inputs one rounding off.
    """
    state = RegionState(module, (args, kwargs))
    if state.cannot_restore:
        return Outcome(skipped=f"its forward may use up {', '.join([*dict.fromkeys(state.cannot_restore)][:3])}")
    runs = _Runs(module, args, kwargs, state)

    def look() -> Outcome:
        expected, seen = runs.run(call), runs.run(other)
        outcome = Outcome(reached=expected.reached, finite=expected.finite, how="equal")
        if not _equal(expected, seen):
            exact, outcome.how = runs.rounded(unit, call=call)
            found = _differences(expected, seen, exact, unit, multiple)
            outcome.differences = runs.by_more_noise(found, expected, seen, unit, multiple, call=call)
        return outcome

    return _beside_the_step(state, look)


def _equal(first: _Run, second: _Run) -> bool:
    """Whether two runs left the same, to the last bit; NaN is equal to NaN."""
    alike = len(first.plain) == len(second.plain) and all(map(_alike, first.plain, second.plain))
    alike &= first.left == second.left
    flags: list[Tensor] = []
    for name in KINDS.values():
        left, right = getattr(first, name), getattr(second, name)
        if not alike or left.keys() != right.keys() or any(left[key].shape != right[key].shape for key in left):
            return False
        pairs = [(left[key], right[key]) for key in left]
        flags += [((one == two) | ((one != one) & (two != two))).all() for one, two in pairs]
    return not flags or bool(torch.stack([one.to(flags[0].device) for one in flags]).all())


def _compared(
    runs: _Runs,
    compiled: Callable[..., Any],
    unit: float,
    multiple: float,
    *,
    whole: bool,
    draws_alike: bool,
    aligned: bool | None,
) -> Outcome:
    seen: _Run | None = None
    error: Exception | None = None
    ended = b""
    of_one_graph = True

    def run_compiled(calls: int = 1, seed: int | None = None) -> None:
        nonlocal seen, error, ended
        try:
            graphs = counters["stats"]["unique_graphs"]
            seen = runs.run(compiled, calls=calls, seed=seed)
            if counters["stats"]["unique_graphs"] != graphs:  # tracing may have run what compiled code leaves out
                seen = runs.run(compiled, calls=calls, seed=seed)
            ended = runs.ended
        except Exception as caught:
            if is_out_of_memory(caught):
                raise
            error = caught

    with refused_elsewhere(runs.state.remember) as elsewhere, error_on_graph_break(True):
        run_compiled()
    if elsewhere:
        return Outcome(skipped=f"its forward changes {', '.join(elsewhere[:3])}, which cannot be put back")
    if error is not None and is_compile_error(error):
        if whole:
            return Outcome(error=error)
        if runs.state.may_change:  # what runs between its graphs is not seen
            return Outcome(skipped=f"its forward may change {', '.join([*dict.fromkeys(runs.state.may_change)][:3])}")
        seen, error, of_one_graph = None, None, False
    eager = runs.run(runs.eager)
    draws, draws_on_host, eager_ended = runs.drew, runs.drew_on_host, runs.ended
    if seen is None and error is None:
        run_compiled()
    outcome = Outcome(reached=eager.reached, error=error, finite=eager.finite)
    if seen is None:
        return outcome
    if not draws or (draws_alike and ended == eager_ended):
        exact, outcome.how = runs.exact(unit) if not draws else runs.rounded(unit)
        found = _differences(eager, seen, exact, unit, multiple)
        outcome.differences = runs.by_more_noise(found, eager, seen, unit, multiple)
        if draws_on_host and not outcome.wrong:  # what was drawn as it was compiled is the same in all calls
            expected = runs.run(runs.eager, seed=SEED)
            exact, _ = runs.rounded(unit, seed=SEED) if draws else runs.exact(unit, seed=SEED)
            run_compiled(seed=SEED)
            outcome.error = error
            if error is None:
                found = _differences(expected, seen, exact, unit, multiple)
                outcome.differences += runs.by_more_noise(found, expected, seen, unit, multiple, seed=SEED)
    else:
        found = None
        if not draws_alike and aligned is not False and of_one_graph:  # each graph draws seeds of its own
            found = runs.drawn_as_inductor(compiled, seen, unit, multiple)
        outcome.how, outcome.differences = "draws", found or []
        if found is None or (exceeding(found) and not aligned):
            outcome.how = "seeds"
            for seeds in SEEDS:
                outcome.differences = runs.across_seeds(compiled, seeds, unit, multiple)
                if not outcome.wrong:
                    break
            if not outcome.wrong and eager.gradients:
                outcome.differences += runs.slopes_apart(compiled)
            same = runs.independent_of_host_draws
            if draws_on_host and same(compiled) and not same(runs.eager):
                said = "compiled code repeats the numbers that Python or numpy drew as it was compiled"
                outcome.differences.append(
                    Difference(kind="output", name="random", difference=math.inf, tolerance=0.0, said=said)
                )
    if eager.left != runs.state.began:  # its next call may read what it has left; where that is a guard, all is well
        with torch.compiler.set_stance(STANCE):
            run_compiled(calls=2)
        if error is None:
            outcome.differences += _state_apart(runs.run(runs.eager, calls=2), seen)
    return outcome


def _take_saved_tensors_hooks() -> list[tuple[Any, Any]]:
    """Takes the hooks for saved tensors off and returns them in their order: activation checkpointing around a region
    counts what its forward saves, and a check saves more."""
    hooks: list[tuple[Any, Any]] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.insert(0, top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return hooks


KINDS = {
    "output": "outputs",
    "gradient": "gradients",
    "gradient of": "input_gradients",
    "buffer": "buffers",
    "written to": "written",
}
"""What is compared, in words, by the field of a run."""


def _differences(eager: _Run, seen: _Run, exact: _Run | None, unit: float, multiple: float) -> list[Difference]:
    found: list[Difference] = []
    for kind, name in KINDS.items():
        expected: Tensors = getattr(eager, name)
        others: Tensors = getattr(seen, name)
        floating = {key: one for key, one in expected.items() if one.is_floating_point() or one.is_complex()}
        integers = {key: one for key, one in expected.items() if key not in floating}
        precise = None if exact is None else getattr(exact, name)
        of_floats = {key: one for key, one in others.items() if key not in integers}
        found += compare(kind, floating, of_floats, precise, unit=unit, multiple=multiple)
        found += [_of_integers(kind, key, one, others.get(key), precise, multiple) for key, one in integers.items()]
    if len(eager.plain) != len(seen.plain) or not all(map(_alike, eager.plain, seen.plain)):
        found.append(Difference(kind="output", name="what is no tensor", difference=math.inf, tolerance=0.0))
    return found + _state_apart(eager, seen)


def _state_apart(eager: _Run, seen: _Run) -> list[Difference]:
    """Attributes and containers that one run has left other than the other."""
    names = eager.left.keys() | seen.left.keys()
    apart = [name for name in names if not _alike(eager.left.get(name), seen.left.get(name))]
    return [
        Difference(kind="state", name=name.partition(": ")[2], difference=math.inf, tolerance=0.0) for name in apart
    ]


def _of_integers(
    kind: str, name: str, expected: Tensor, seen: Tensor | None, exact: Tensors | None, multiple: float
) -> Difference:
    """Integers and truth values: the share of elements that differ. A router flips where a number is a rounding off."""

    def share(other: Tensor | None) -> float:
        if other is None or other.shape != expected.shape:
            return math.inf
        return float((other.to(expected.device) != expected).float().mean()) if expected.numel() else 0.0

    flips = share(exact[name]) if exact is not None and name in exact else 0.0
    tolerance = multiple * max(flips if flips < math.inf else 0.0, 0.002)
    return Difference(kind=kind, name=name, difference=share(seen), tolerance=tolerance)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, bool | str | bytes | type(None)) or isinstance(other, bool | str | bytes | type(None)):
        return type(one) is type(other) and one == other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-6) or (one != one and other != other)
    return type(one) is type(other)


class _Runs:
    """Runs of one call on copies of its inputs, each from the same state."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: RegionState,
        eager: Callable[..., Any] | None = None,
    ) -> None:
        self.module, self._given, self.state = module, (args, kwargs), state
        self.eager = module._call_impl if eager is None else eager
        self._altered = self._finite = False
        self._parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._of_loss = HALF_SCALE if _in_half_precision(module) else 1.0
        self.drew = self.drew_on_host = False
        """Whether the last run drew random numbers of torch's generators, and of Python's or numpy's."""
        self.ended = b""
        """The state of torch's generators at its end."""

    def run(
        self,
        call: Callable[..., Any],
        *,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        host_seed: int | None = None,
        off: float = 0.0,
        number: int = 0,
        calls: int = 1,
        draws: InductorDraws | None = None,
    ) -> _Run:
        """Forward and backward. Floating-point inputs are cast to ``dtype``; under ``seed`` other random numbers are
        drawn, by Python and numpy under ``host_seed`` if given, and as ``draws`` does; inputs are ``off`` by a
        rounding, relative, in the way of that ``number``. Of several ``calls``, the last is looked at."""
        self.state.restore(weights=not self._altered)
        torch.clear_autocast_cache()
        began = torch._C._autograd._get_sequence_nr()
        if seed is not None:
            seed_all(seed, seed if host_seed is None else host_seed)
        for _ in range(calls - 1):
            args, kwargs = _copied(self._given, self.state, dtype, off, finite=self._finite)[0]
            call(*args, **kwargs)
        before = random_state()
        (args, kwargs), inputs, versions = _copied(
            self._given, self.state, dtype, off, finite=self._finite, number=number
        )
        given = tensors_of((args, kwargs))
        with contextlib.nullcontext() if draws is None else draws:
            result = call(*args, **kwargs)
        tensors, plain = _taken_apart(result)
        known = {*map(id, given), *map(id, tensors.values())}
        into = [one for one in tensors_of((args, kwargs)) if id(one) not in known]  # written into a list, an object
        tensors |= {f"{place} in arguments": _values(one) for place, one in enumerate(into)}
        after = random_state()
        self.drew, self.drew_on_host = drew_random_numbers(before, after)
        self.ended = b"".join(one.numpy().tobytes() for one in (after[2], *after[3]))
        changed = {name: one for name, (one, version) in versions.items() if version_of(one) != version}
        written = {name: _values(one.detach()).clone() for name, one in changed.items()}
        outputs = {name: one.detach().clone() for name, one in tensors.items()}
        gradients, input_gradients, reached = self._backward(tensors, inputs, began)
        buffers = {name: one.detach().clone() for name, one in self.module.named_buffers()}
        return _Run(outputs, plain, gradients, input_gradients, buffers, written, reached, self.state.left())

    def _backward(
        self, tensors: dict[str, Tensor], inputs: dict[str, Tensor], began: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[frozenset[str]]]:
        roots = {name: one for name, one in tensors.items() if one.requires_grad and one.grad_fn is not None}
        wanted = {name: one for name, one in self._parameters.items() if one.requires_grad}
        of_inputs = {name: one for name, one in inputs.items() if one.is_leaf and one.requires_grad}
        graphs = [list(_nodes([one])) for one in tensors.values()]
        names = {id(one): name for name, one in self._parameters.items()}
        leaves = [{id(getattr(node, "variable", None)) for node in graph} for graph in graphs]
        reached = [
            frozenset(names[one] for one in found if one in names)
            for found, of in zip(leaves, tensors.values(), strict=True)
            if of.grad_fn is not None
        ]
        if not roots or not (wanted or of_inputs):
            return {}, {}, reached
        weights = self._output_gradients(roots.values())
        every = [*wanted.values(), *of_inputs.values()]
        # What an earlier call of the step has left in an attribute or a cache has a graph that the step still needs.
        nodes = itertools.chain.from_iterable(graphs)
        kept = any(node._sequence_nr() < began for node in nodes if hasattr(node, "_sequence_nr"))
        with without_hooks(self.module):
            found = torch.autograd.grad(list(roots.values()), every, weights, allow_unused=True, retain_graph=kept)
        named = dict(zip([*wanted, *of_inputs], found, strict=True))
        return (
            {name: named[name] for name in wanted if named[name] is not None},
            {name: _values(named[name]) for name in of_inputs if named[name] is not None},
            reached,
        )

    def _output_gradients(self, outputs: Iterable[Tensor]) -> list[Tensor]:
        generators: dict[torch.device, torch.Generator] = {}
        gradients = []
        for one in outputs:
            if one.device not in generators:
                generators[one.device] = torch.Generator(one.device).manual_seed(SEED)
            drawn = torch.randn(one.shape, generator=generators[one.device], device=one.device)
            gradients.append((drawn if one.dim() else torch.full_like(drawn, self._of_loss)).to(one.dtype))
        return gradients

    @contextlib.contextmanager
    def altering(self, *, finite: bool = False) -> Iterator[None]:
        """Inside, weights are others for a while, and stay so; ``finite``: inputs that are no numbers become some."""
        before = self._altered, self._finite
        self._altered, self._finite = True, finite or self._finite
        try:
            with weights_held():
                yield
        finally:
            self._altered, self._finite = before

    def exact(self, unit: float, drawn: list[Tensor] | None = None, seed: int | None = None) -> tuple[_Run | None, str]:
        """Eager once more in a higher precision, or a rounding off where that fails; with numbers ``drawn`` before."""
        draws = None if drawn is None else InductorDraws(drawn=drawn)
        lowered = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        low = any(one.dtype in (torch.bfloat16, torch.float16) for one in self.module.parameters())
        dtype = torch.float32 if lowered or low else torch.float64
        unlowered = Unlowered(dtype)
        try:
            with self.altering(), _in_precision(self.module, dtype), _without_autocast(), unlowered:
                return self.run(self.eager, dtype=dtype, draws=draws, seed=seed), "exact"
        except Exception:  # a kernel for one precision alone, or too little memory
            return self.rounded(max(unit, unlowered.unit), drawn, seed)

    def rounded(
        self,
        unit: float,
        drawn: list[Tensor] | None = None,
        seed: int | None = None,
        *,
        number: int = 0,
        call: Callable[..., Any] | None = None,
    ) -> tuple[_Run | None, str]:
        """Eager, or ``call``, once more with weights and inputs one rounding off, in the way of that ``number``; random
        numbers are the same."""
        draws = None if drawn is None else InductorDraws(drawn=drawn)
        call = call or self.eager
        try:
            with self.altering(), _perturbed(self.module, unit, number):
                return self.run(call, off=unit, number=number, draws=draws, seed=seed), "rounding"
        except Exception:
            return None, "none"

    def by_more_noise(
        self,
        found: list[Difference],
        eager: _Run,
        seen: _Run,
        unit: float,
        multiple: float,
        drawn: list[Tensor] | None = None,
        seed: int | None = None,
        call: Callable[..., Any] | None = None,
    ) -> list[Difference]:
        """``found``, and where some of it counts, each tensor by the largest noise that several runs of eager show."""
        for number in range(1, NOISES + 1):
            if not any(one.tolerance > 0 for one in exceeding(found)):
                break
            noisy, _ = self.rounded(unit, drawn, seed, number=number, call=call)
            if noisy is None:
                break
            others = {(one.kind, one.name): one for one in _differences(eager, seen, noisy, unit, multiple)}
            found = [min(one, others.get((one.kind, one.name), one), key=lambda each: each.share) for one in found]
        return found

    def drawn_as_inductor(
        self, compiled: Callable[..., Any], seen: _Run, unit: float, multiple: float
    ) -> list[Difference] | None:
        """Differences from eager that draws random numbers as Inductor does, under the first of some seeds where there
        are none beyond tolerance; ``seen``: compiled code under the present one. None where eager cannot."""
        eager, found = self.eager, None
        try:
            counting = InductorDraws()
            self.run(eager, draws=counting)
            # From the present state, what was drawn as it was compiled is what eager draws.
            for number in range(int(self.drew_on_host), TRIES + int(self.drew_on_host)):
                seed = SEED + number if number else None
                draws = InductorDraws(counting.counted)
                expected = self.run(eager, draws=draws, seed=seed)
                if seed is not None:
                    seen = self.run(compiled, seed=seed)
                if draws.passed:  # kernels of another precision would draw other numbers
                    exact, _ = self.rounded(unit, draws.drawn, seed)
                else:
                    exact, _ = self.exact(unit, draws.drawn, seed)
                found = _differences(expected, seen, exact, unit, multiple)
                found = self.by_more_noise(found, expected, seen, unit, multiple, draws.drawn, seed)
                if not exceeding(found):
                    break
        except Exception:  # numbers are kept in single precision: there may be too little memory for all of them
            return None
        return found

    def across_seeds(self, compiled: Callable[..., Any], seeds: int, unit: float, multiple: float) -> list[Difference]:
        """Both arms under as many seeds; differences of means over what the spread between seeds, and rounding under
        the same seed, explain."""
        first: dict[str, Tensor] = {}
        samples: dict[str, list[dict[str, Tensor]]] = {"eager": [], "compiled": [], "rounded": []}

        def sample(arm: str, call: Callable[..., Any], seed: int, off: float = 0.0) -> None:
            left = self.run(call, seed=seed, off=off)
            tensors = {f"output {name}": one for name, one in left.outputs.items()}
            tensors |= {f"gradient of {name}": one for name, one in left.gradients.items()}
            tensors |= {f"gradient of {name}": one for name, one in left.input_gradients.items()}
            tensors |= {f"buffer {name}": one for name, one in left.buffers.items()}
            floating = {name: one.float() for name, one in tensors.items() if one.is_floating_point() and one.numel()}
            first.update({name: one for name, one in floating.items() if name not in first})
            samples[arm].append(_threes(floating, first))

        eager = self.eager
        sample("eager", eager, SEED - 1)  # which only says along what the others are measured
        samples["eager"].clear()
        for number in range(seeds):
            sample("eager", eager, SEED + number)
            sample("compiled", compiled, SEED + number)
        with contextlib.suppress(Exception), self.altering(), _perturbed(self.module, unit):
            for number in range(ROUNDED):
                sample("rounded", eager, SEED + number, off=unit)
        _fill_in_left_out(samples, first)
        return _apart_in_means(samples, unit, multiple)

    def independent_of_host_draws(self, call: Callable[..., Any]) -> bool:
        """Whether ``call`` leaves the same under two seeds of Python and numpy, and one of torch."""
        return _equal(*(self.run(call, seed=SEED, host_seed=SEED + number) for number in (1, 2)))

    def slopes_apart(self, compiled: Callable[..., Any]) -> list[Difference]:
        """Whether the gradients of ``compiled`` are those of its own forward, to the numbers that were drawn in it.

        Means do not show that: a backward that draws another mask than its forward has used has the same ones. A jump
        of the forward (another expert is chosen) shows under some seeds, such a mask under nearly all.
        """
        found: list[Difference] = []
        with contextlib.suppress(Exception):  # too little memory, or no numbers: then nothing is shown
            seen = self._slopes(compiled)[SLOPES // 2 - 1]
            if seen > SLOPE_LEAST:
                tolerance = max(SLOPE_LEAST, SLOPE_NOISE * self._slopes(self.eager)[-1])
                found = [Difference(kind="gradient", name="by its own forward", difference=seen, tolerance=tolerance)]
        return found

    def _slopes(self, call: Callable[..., Any]) -> list[float]:
        """How far what ``call``'s outputs gain, when all weights are moved a little, is from what its gradients say;
        relative to the change by each weight alone, under each of several seeds, the least first."""
        found = []
        for seed in range(SEED, SEED + SLOPES):
            gradients = self.run(call, seed=seed).gradients
            gains = []
            for sign in (1.0, -1.0):
                with self.altering(), _moved(self._parameters, sign * STEP) as moves:
                    outputs = [one for one in self.run(call, seed=seed).outputs.values() if one.is_floating_point()]
                pairs = zip(outputs, self._output_gradients(outputs), strict=True)
                gains.append(float(sum((one.double() * by.double()).sum() for one, by in pairs)))
            each = torch.cat([(one.double() * moves[name].double()).flatten() for name, one in gradients.items()])
            found.append(abs((gains[0] - gains[1]) / 2 - float(each.sum())) / max(float(each.norm()), 1e-30))
        return sorted(found)


def _threes(tensors: Tensors, first: Tensors) -> dict[str, Tensor]:
    """Of each tensor ``(3,)``, on the host: length, length along the first run's tensor, and distance from that; not
    numbers where it has another shape than the first's."""
    found = {name: torch.full((3,), math.nan, dtype=torch.float64) for name in tensors}
    by_device: dict[torch.device, list[str]] = {}
    for name, one in tensors.items():
        if one.shape == first[name].shape:
            by_device.setdefault(one.device, []).append(name)
    for names in by_device.values():
        ones, of_first = [tensors[name].flatten() for name in names], [first[name].flatten() for name in names]
        lengths, firsts = (torch.stack(torch._foreach_norm(each)) for each in (ones, of_first))
        along = torch.stack([one.dot(other) for one, other in zip(ones, of_first, strict=True)])
        away = torch.stack(torch._foreach_norm(torch._foreach_sub(ones, of_first)))
        rows = torch.stack([lengths, along / firsts.clamp(min=1e-30), away], 1).double().cpu()  # one wait for all
        found.update(zip(names, rows, strict=True))
    return found


def _fill_in_left_out(samples: dict[str, list[dict[str, Tensor]]], first: Tensors) -> None:
    """A gradient that there is under some seeds alone, in both arms, is one of zeros under the others: layers are left
    out at random. Where one arm never has it, it stays away."""
    for name in [name for name in first if name.startswith("gradient of ")]:
        if all(any(name in one for one in samples[arm]) for arm in ("eager", "compiled")):
            none = torch.tensor([0.0, 0.0, float(first[name].norm())], dtype=torch.float64)
            for one in itertools.chain.from_iterable(samples.values()):
                one.setdefault(name, none)


def _apart_in_means(samples: dict[str, list[dict[str, Tensor]]], unit: float, multiple: float) -> list[Difference]:
    eager, compiled, rounded = samples["eager"], samples["compiled"], samples["rounded"]
    found = []
    for name in dict.fromkeys([*eager[0], *compiled[0]]):
        kind = "mean under several seeds of"
        if not all(name in one for one in (*eager, *compiled)):
            found.append(Difference(kind=kind, name=name, difference=math.inf, tolerance=0.0))
            continue
        one, two = (torch.stack([each[name] for each in arm]) for arm in (eager, compiled))
        scale = torch.maximum(one.abs().mean(0), two.abs().mean(0)).max().clamp(min=1e-30)
        error = (one.var(0) / len(one) + two.var(0) / len(two)).sqrt()
        pairs = [(each[name] - of[name]).abs() for each, of in zip(rounded, eager, strict=False) if name in each]
        rounding = torch.stack(pairs).amax(0).max() if pairs else UNCALIBRATED * unit * scale
        rounding = torch.maximum(torch.as_tensor(rounding), CONSTANTS / multiple * unit * scale)
        allowed = ERRORS * error + multiple * rounding + 64 * SINGLE * scale
        apart = (one.mean(0) - two.mean(0)).abs()
        # Where one arm never varies and the other does, random numbers are not drawn anew.
        stuck = bool((one.std(0) > 0).any()) != bool((two.std(0) > 0).any())
        if stuck and bool((apart > multiple * rounding).any()):
            apart = torch.full_like(apart, math.inf)
        worst = int((apart / allowed).nan_to_num(nan=math.inf).argmax())
        apart_by, most = float(apart[worst] / scale), float(allowed[worst] / scale)
        found.append(Difference(kind=kind, name=name, difference=apart_by, tolerance=most))
    return found


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside, hooks on the module's parameters do not see gradients: those of a check are none of the step's."""
    hooked = [(one, one._backward_hooks) for one in module.parameters() if one._backward_hooks]
    try:
        for parameter, _ in hooked:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


def _as_numbers(tensor: Tensor) -> Tensor:
    """``tensor`` with small random numbers where it holds none."""
    generator = torch.Generator(tensor.device).manual_seed(SEED)
    noise = torch.randn(tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype) * 0.1
    return torch.where(tensor.isfinite(), tensor, noise)


def _copied(
    given: Any,
    state: RegionState,
    dtype: torch.dtype | None,
    off: float,
    *,
    finite: bool = False,
    number: int = 0,
) -> tuple[Any, dict[str, Tensor], dict[str, tuple[Tensor, int]]]:
    """``given`` with copies of its tensors, which objects among it hold until the ``state`` is put back; by name, the
    leaves behind them, which want gradients where these did, and the copies with their versions."""
    copies: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    versions: dict[str, tuple[Tensor, int]] = {}
    shared = {id(one): group for group in overlapping(pytree.tree_leaves(given)) for one in group}
    bases: dict[int, Tensor] = {}

    def altered(made: Tensor) -> Tensor:
        if made.is_floating_point():
            if finite:
                made = _as_numbers(made)
            if off:
                generator = torch.Generator(made.device).manual_seed(SEED + 1000 * number)
                sign = torch.empty(made.shape, device=made.device).bernoulli_(0.5, generator=generator) * 2 - 1
                made = made * (1 + max(off, torch.finfo(made.dtype).eps) * sign).to(made.dtype)
            if dtype is not None:
                made = made.to(dtype)
        return made

    def within(tensor: Tensor, group: list[Tensor]) -> Tensor:
        """Its part of a copy of the memory that it shares with others."""
        spans = [_span(one) for one in group]
        began = min(first for first, _ in spans)
        if id(group) not in bases:
            flat = group[0].detach().as_strided((max(last for _, last in spans) - began,), (1,), began)
            bases[id(group)] = altered(flat.clone())
        return bases[id(group)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - began)

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            group = shared.get(id(tensor))
            # Guards look at whether it wants gradients, and was made in inference mode, however it is called now.
            with torch.inference_mode(tensor.is_inference()):
                made = altered(clone(tensor.detach())) if group is None else within(tensor, group)
                if tensor.requires_grad:
                    made.requires_grad_()
                # What was computed may be written to in place, and a leaf that wants gradients may not.
                copies[id(tensor)] = made if tensor.is_leaf or group is not None else clone(made)
            named[f"input {len(named)}"] = made
            vars(copies[id(tensor)]).update(_marks(tensor))
            versions[f"input {len(versions)}"] = copies[id(tensor)], version_of(copies[id(tensor)])
        return copies[id(tensor)]

    copied = pytree.tree_map_only(Tensor, copy, given)
    state.put_copies(copy)
    return copied, named, versions


def _span(tensor: Tensor) -> tuple[int, int]:
    """Places in its storage of its first element, and behind its last."""
    first = int(tensor.storage_offset())
    return first, first + 1 + sum((length - 1) * by for length, by in zip(tensor.shape, tensor.stride(), strict=True))


def overlapping(values: Iterable[Any]) -> list[list[Tensor]]:
    """Plain tensors without gradients that share memory, group by group: a write to one is one to the others."""
    by_storage: dict[Any, dict[int, Tensor]] = {}
    for one in values:
        if type(one) is Tensor and not one.requires_grad and one.layout is torch.strided and one.numel():
            by_storage.setdefault((one.untyped_storage().data_ptr(), one.dtype), {})[id(one)] = one
    groups = []
    for key, found in by_storage.items():
        spans = sorted(map(_span, found.values()))
        apart = all(last <= first for (_, last), (first, _) in itertools.pairwise(spans))
        if key[0] and not apart:
            groups.append([*found.values()])
    return groups


def _marks(tensor: Tensor) -> dict[str, Any]:
    """Which sizes were called dynamic or static (``torch._dynamo.mark_dynamic``), at which guards look; not that its
    address never changes."""
    marks = {name: one for name, one in vars(tensor).items() if name.startswith("_dynamo_")}
    marks.pop("_dynamo_static_input_type", None)
    return marks


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides: a compiler guards on them."""
    made = tensor.clone()
    if tensor.layout is torch.strided and made.stride() != tensor.stride() and type(tensor) is Tensor:
        size = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = tensor.as_strided((size,), (1,)).clone()
        made = flat.as_strided(tensor.shape, tensor.stride())
    return made


def _taken_apart(result: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """The tensors of an output by place, and what is none."""
    leaves = list(_leaves(result, {}))
    tensors = [_values(one) for one in leaves if isinstance(one, Tensor)]
    return {str(place): one for place, one in enumerate(tensors)}, [
        one for one in leaves if not isinstance(one, Tensor)
    ]


def tensors_of(result: Any) -> list[Tensor]:
    """Those of an output, in the order of ``Outcome.reached``."""
    return [result] if isinstance(result, Tensor) else [one for one in _leaves(result, {}) if isinstance(one, Tensor)]


MOST_OBJECTS = 1000
"""Objects of an output that are looked into."""


def _leaves(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Those of records (dataclasses, model outputs), too, and the tensors that other objects hold; ``seen`` are these
    objects. No closure that calls itself: that one would keep an output, with its graph, until garbage is collected."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, one.name) for one in dataclasses.fields(leaf)], seen)
        elif isinstance(leaf, dict):
            yield from _leaves(dict(leaf), seen)
        else:
            yield leaf
            if (held := attributes_of(leaf)) and id(leaf) not in seen and len(seen) < MOST_OBJECTS:
                seen[id(leaf)] = leaf
                yield from (
                    one for one in _leaves(held, seen) if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)
                )


def _values(tensor: Tensor) -> Tensor:
    """Those of a jagged tensor, of whose own shape no other tensor can be made; any other one as it is."""
    values: Tensor = tensor.values() if tensor.layout is torch.jagged else tensor
    return values


def leaves_of(results: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that the gradients of ``results`` get to, in the order of a walk."""
    found: dict[int, Tensor] = {}
    for node in _nodes(results):
        if (variable := getattr(node, "variable", None)) is not None:
            found.setdefault(id(variable), variable)
    return list(found.values())


def _nodes(results: Iterable[Tensor]) -> Iterator[Any]:
    """Those of the autograd graphs of ``results``, each once."""
    waiting: list[Any] = [one.grad_fn for one in results]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(one for one, _ in node.next_functions)


def _in_half_precision(module: nn.Module) -> bool:
    kinds = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.float16 in kinds or any(one.dtype == torch.float16 for one in module.parameters())


# ---- precision -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_precision(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, weights and buffers are in ``dtype``; afterwards they are the tensors that they were.

    What a parameter is made of is exchanged, not its ``data``: of another type that would drop the node that
    accumulates its gradient, on which DistributedDataParallel has its hooks.
    """
    with contextlib.ExitStack() as back:
        for weight in [one for one in module.parameters() if one.is_floating_point()]:
            other = torch.nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
            torch._C._swap_tensor_impl(weight, other)
            back.callback(torch._C._swap_tensor_impl, weight, other)
        for buffer in [one for one in module.buffers() if one.is_floating_point()]:
            back.callback(setattr, buffer, "data", buffer.data)
            buffer.data = buffer.data.to(dtype)
        yield


@contextlib.contextmanager
def _holding(tensors: Iterable[Tensor], data_of: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Inside, each of ``tensors`` holds what ``data_of`` makes of its place and its own data; afterwards its own."""
    kept = [(one, one.data) for one in tensors]
    try:
        for place, (tensor, data) in enumerate(kept):
            tensor.data = data_of(place, data)
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def _signs(data: Tensor, seed: int) -> Tensor:
    """1 or -1 for each element of ``data``, in float32."""
    generator = torch.Generator(data.device).manual_seed(seed)
    return torch.empty(data.shape, device=data.device).bernoulli_(0.5, generator=generator) * 2 - 1


def _perturbed(module: nn.Module, unit: float, number: int = 0) -> AbstractContextManager[None]:
    """Inside, every weight is about one rounding off, up or down, in the way of that ``number``."""

    def off(place: int, data: Tensor) -> Tensor:
        signs = _signs(data, SEED + 1000 * number + place)
        return data * (1 + max(unit, torch.finfo(data.dtype).eps) * signs).to(data.dtype)

    return _holding([one for one in module.parameters() if one.is_floating_point()], off)


@contextlib.contextmanager
def _moved(parameters: Tensors, step: float) -> Iterator[dict[str, Tensor]]:
    """Inside, every weight is moved by ``step`` of its tensor's size, up or down; what one step of 1 up would be."""
    names, moves = list(parameters), dict[str, Tensor]()

    def moved(place: int, data: Tensor) -> Tensor:
        size = data.float().square().mean().sqrt().clamp(min=STEP) * _signs(data, SEED + place)
        moves[names[place]] = abs(step) * size
        return data + (step * size).to(data.dtype)

    with _holding(parameters.values(), moved):
        yield moves


def _finite_weights(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, weights and buffers that are no numbers are small random ones."""
    held = [one for one in (*module.parameters(), *module.buffers()) if one.is_floating_point()]
    return _holding([one for one in held if not bool(one.isfinite().all())], lambda _, data: _as_numbers(data))


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Inside, autocast lowers no precision, whoever enters it."""
    with contextlib.ExitStack() as off:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                off.enter_context(torch.autocast(kind, enabled=False))
        entering: Any = {"__enter__": lambda autocast: autocast, "__exit__": lambda *_: None}
        off.enter_context(mock.patch.multiple(torch.autocast, **entering))
        yield
