"""A region: where it is in force, how its first call is checked, and what becomes of it where that finds something."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from strategies import Program, region_check
from strategies.base import compiler_settings, eager
from strategies.region import MAX_CHECKED, NEVER_SETTLES, Check, Region, State
from strategies.regions import compile_in_place
from tests.strategies import backends
from tests.strategies.backends import Fault
from tests.strategies.conftest import one_step
from tests.strategies.modules import Block


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    backends.register()
    with compiler_settings({}):  # as in a training
        yield
    Fault.clear()


class Counted(Block):
    """A block that knows how often its forward ran eager."""

    eager_calls = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            Counted.eager_calls += 1
        return super().forward(x_BD)


@pytest.fixture(autouse=True)
def count_anew() -> None:
    Counted.eager_calls = 0


def compiled(*blocks: nn.Module, backend: Any = "aot_eager", **arguments: Any) -> Program:
    """Each of ``blocks`` as a region of one program."""
    program = Program(module=nn.ModuleList(blocks))
    for place in range(len(blocks)):
        compile_in_place(program, str(place), {"backend": backend, "fullgraph": True, **arguments})
    return program


def checks_of(program: Program) -> list[Check]:
    """Checks from now on."""
    found: list[Check] = []
    program.checking.report = found.append
    return found


def plain_gradients(block: nn.Module, x_BD: Tensor) -> tuple[Tensor, list[Tensor]]:
    twin = copy.deepcopy(block)
    result = twin(x_BD)
    result.square().sum().backward()
    return result.detach(), [one.grad for one in twin.parameters() if one.grad is not None]


def region(program: Program, place: int = 0) -> Region:
    return program.regions[place]


def ran_eager(program: Program, call: Callable[[], Any]) -> bool:
    """Whether a step of this call, with its backward where it has one, ran the user's code."""
    Counted.eager_calls = 0
    with one_step(program):
        result = call()
        if result.requires_grad:
            result.sum().backward()
    return bool(Counted.eager_calls)


# ---- states and steps ------------------------------------------------------------------------------------------------


def test_the_first_call_is_checked_and_runs_eager_the_next_step_is_compiled() -> None:
    block = Counted()
    program, x_BD = compiled(block), torch.randn(3, 8)
    found = checks_of(program)
    result, gradients = plain_gradients(block, x_BD)
    Counted.eager_calls = 0
    assert region(program).state is State.CHECKING
    with one_step(program):
        seen = block(x_BD)
        seen.square().sum().backward()
        assert torch.equal(seen, result), "the step goes on with eager's result"
        for one, other in zip(block.parameters(), gradients, strict=True):
            assert torch.equal(one.grad, other), "and with its gradients, once"
        assert region(program).state is State.CHECKING, "states change between steps"
    assert [(one.path, one.outcome.error, one.outcome.wrong) for one in found] == [("0", None, [])]
    assert region(program).state is State.COMPILED
    assert Counted.eager_calls == 1, "what the check's own runs count is put back"
    with one_step(program):
        torch.testing.assert_close(block(x_BD), result)
    assert Counted.eager_calls == 1
    with eager(program):
        block(x_BD)
    assert Counted.eager_calls == 2
    assert len(found) == 1
    assert program.eager_parts == {}


def test_training_evaluation_and_no_gradients_are_each_checked() -> None:
    program, x_BD = compiled(block := Counted()), torch.randn(3, 8)
    found = checks_of(program)
    for training, gradients in ((True, True), (False, False), (True, False), (True, True)):
        block.train(training)
        with one_step(program), torch.set_grad_enabled(gradients):
            block(x_BD)
    assert len(found) == 3


@torch._dynamo.config.patch(recompile_limit=64)  # as in a run
@pytest.mark.parametrize("dynamic", [False, True])
def test_signatures_beyond_the_first_ones_that_need_code_of_their_own_are_checked(dynamic: bool) -> None:
    program = compiled(block := Counted(), dynamic=dynamic)
    found = checks_of(program)
    for rows in range(2, 2 + MAX_CHECKED):
        ran_eager(program, lambda rows=rows: block(torch.randn(rows, 8)))
    block.double()
    x_BD = torch.randn(2, 8, dtype=torch.float64)
    assert [ran_eager(program, lambda: block(x_BD)) for _ in range(3)] == [True, False, False]
    assert len(found) == MAX_CHECKED + 1


# ---- code that is missing for a call of a proven shape ---------------------------------------------------------------


class Scaled(Counted):
    """A block that computes by a number, or by what lies behind a break of its graph."""

    scale = 1
    breaks = False

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.breaks:
            x_BD = x_BD.sin()
            torch._dynamo.graph_break()
        return super().forward(x_BD) * self.scale


def wrong_from(number: int) -> Callable[..., Any]:
    """A compiler whose graphs for a scale of ``number`` and more give results that are 1.5 times eager's."""

    def compiler(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        factor = 1.5 if Fault.scale >= number else 1.0
        return lambda *inputs: [one * factor if one.is_floating_point() else one for one in graph.forward(*inputs)]

    return compiler


@pytest.mark.parametrize("breaks", [False, True])
def test_code_for_another_number_is_compared_with_eager_before_it_trains(breaks: bool) -> None:
    block, x_BD = Scaled(breaks=breaks), torch.randn(3, 8)
    program = compiled(block, backend=wrong_from(2), fullgraph=not breaks)
    found = checks_of(program)
    for step, scale in enumerate([1, 1, 1, 2, 2, 2, 2]):
        block.scale = Fault.scale = scale
        result, gradients = plain_gradients(block, x_BD)
        block.zero_grad()
        Counted.eager_calls = 0
        with one_step(program):
            seen = block(x_BD)
            seen.square().sum().backward()
        torch.testing.assert_close(seen, result, msg=f"step {step}")
        for one, other in zip(block.parameters(), gradients, strict=True):
            torch.testing.assert_close(one.grad, other)
        assert Counted.eager_calls == (step not in (1, 2)), "the user's code runs once, or as a graph"
    assert region(program).state is State.FAILED
    assert [one.audit for one in found] == [False] * 3, "it never trained"
    (kind,) = program.kinds.values()
    assert kind.culprit is not None
    assert not kind.culprit.ran


@pytest.mark.parametrize("breaks", [False, True])
def test_right_code_for_another_number_runs_from_the_next_step_on(breaks: bool) -> None:
    block, x_BD = Scaled(breaks=breaks), torch.randn(3, 8)
    program = compiled(block, fullgraph=not breaks)
    found, seen = checks_of(program), []
    for block.scale in (1, 1, 2, 2, 2, 1, 2):
        seen.append(ran_eager(program, lambda: block(x_BD)))
    # Behind a break the first part of the call has run when code is missing: the next call is the one to be checked.
    assert seen == [True, False, True, breaks, False, False, False]
    assert [one.audit for one in found] == [False, False]
    assert region(program).state is State.COMPILED


@pytest.mark.parametrize("breaks", [False, True])
def test_a_number_that_never_settles_is_checked_a_few_times_and_runs_eager_with_a_reason(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.region.MAX_RECOMPILED", 4)
    block, x_BD = Scaled(breaks=breaks), torch.randn(3, 8)
    program = compiled(block, fullgraph=not breaks, dynamic=False)
    found = checks_of(program)
    for block.scale in range(2, 30):
        ran_eager(program, lambda: block(x_BD))
    assert len(found) == 5
    assert program.eager_parts["0"] == NEVER_SETTLES


class ReadsGradient(Counted):
    """What it reads of its argument has a guard, and copies have none of it."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return super().forward(x_BD) + (0 if x_BD.grad is None else 1)


def test_code_that_copies_of_the_arguments_do_not_need_is_compiled_and_audited() -> None:
    block, x_BD = ReadsGradient(), torch.randn(3, 8, requires_grad=True)
    program = compiled(block)
    found = checks_of(program)
    seen = [ran_eager(program, lambda: block(x_BD)) for _ in range(6)]
    assert seen == [True, True, False, True, False, False]
    assert [one.audit for one in found] == [False, False, True]


class Branches(Counted):
    """Which of two graphs comes after a break is chosen by the data."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return super().forward(x_BD) if x_BD.sum() > 0 else super().forward(x_BD) * 2


def test_a_branch_that_the_next_call_does_not_take_is_compiled_when_it_comes_again() -> None:
    block, up = Branches(), torch.ones(3, 8)
    program = compiled(block, fullgraph=False)
    found, seen = checks_of(program), []
    for sign in (1, 1, -1, 1, 1, -1, 1, -1, 1, -1):
        expected, _ = plain_gradients(block, up * sign)
        Counted.eager_calls = 0
        with one_step(program):
            torch.testing.assert_close(block(up * sign), expected)
        seen.append(bool(Counted.eager_calls))
    assert seen == [True, False, True, True, False, False, True, False, False, False]
    assert [one.audit for one in found] == [False, False, True]


def without_gradients(block: nn.Module) -> Any:
    computed = torch.randn(3, 8, requires_grad=True) * 2
    with torch.no_grad():
        return block(computed)


def in_inference_mode(block: nn.Module) -> Any:
    made_before = torch.randn(3, 8)
    with torch.inference_mode():
        return block(made_before)


@pytest.mark.parametrize("call", [without_gradients, in_inference_mode])
def test_copies_are_of_the_kind_that_the_arguments_are(call: Callable[[nn.Module], Any]) -> None:
    """Else code is compiled for copies, and the call needs other code."""
    program, before = compiled(block := Counted()), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert [ran_eager(program, lambda: call(block)) for _ in range(3)] == [True, False, False]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_sizes_that_are_marked_are_so_in_a_check() -> None:
    program, before = compiled(block := Counted()), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (3, 5, 7):
        x_BD = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x_BD, 0)
        assert [ran_eager(program, lambda x_BD=x_BD: block(x_BD)) for _ in range(2)] == [True, False]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_code_that_is_missing_where_a_forward_is_computed_again_is_compiled_there(reentrant: bool) -> None:
    block, x_BD = Scaled(), torch.randn(3, 8, requires_grad=True)
    program = compiled(block)
    for number in range(6):
        block.scale = 1
        with one_step(program):
            result = checkpoint(block, x_BD, use_reentrant=reentrant)
            block.scale = 2 if number == 3 else 1
            result.sum().backward()
    assert region(program).state is State.COMPILED


# ---- what a check finds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_difference_counts_when_it_shows_twice(which: str) -> None:
    block = Counted()
    program, x_BD = compiled(block, backend=backends.FAULTY), torch.randn(3, 8)
    found = checks_of(program)
    result, _ = plain_gradients(block, x_BD)
    setattr(Fault, which, 1.01)
    for look in range(3):
        with one_step(program):
            assert torch.equal(block(x_BD), result), "eager's result goes on"
        assert region(program).state is (State.CHECKING if look == 0 else State.FAILED)
    assert len(found) == 2
    assert program.eager_parts["0"].startswith("it is not eager's: ")
    assert next(iter(program.kinds.values())).differs


def test_a_difference_that_shows_once_is_forgotten() -> None:
    block = Counted()
    program, x_BD = compiled(block, backend=backends.FAULTY), torch.randn(3, 8)
    Fault.forward = 1.01
    with one_step(program):
        block(x_BD)
    Fault.forward = 1.0
    with one_step(program):
        block(x_BD)
    assert region(program).state is State.COMPILED
    assert program.eager_parts == {}


# ---- where a module is plain -----------------------------------------------------------------------------------------


def test_a_block_within_the_forward_of_another_region_is_its_part() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counted()

        def forward(self, x_BD: Tensor) -> Tensor:
            return self.inner(x_BD) * 2

    program = Program(module=nn.Sequential(Outer()))
    arguments = {"backend": "aot_eager", "fullgraph": True}
    compile_in_place(program, "0.inner", arguments)
    compile_in_place(program, "0", arguments)
    assert [one.path for one in program.regions] == ["0"], "of regions within regions the outer one is left"
    for _ in range(2):
        with one_step(program):
            program.module(torch.randn(3, 8)).sum().backward()
    assert region(program).state is State.COMPILED


def test_a_region_called_by_another_one_that_is_no_part_of_it_is_plain_there() -> None:
    class Calls(Counted):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.others = (other,)  # no submodule

        def forward(self, x_BD: Tensor) -> Tensor:
            return self.others[0](x_BD) + super().forward(x_BD)

    inner = Block()
    outer = Calls(inner)
    program, x_BD = compiled(inner, outer), torch.randn(3, 8)
    expected = copy.deepcopy(outer)(x_BD)
    for _ in range(3):
        with one_step(program):
            torch.testing.assert_close(outer(x_BD), expected)
    assert program.eager_parts == {}


# ---- its backward ----------------------------------------------------------------------------------------------------


class Smooth(nn.Module):
    """Its second derivatives are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD).tanh().square()


class Bridged(nn.Module):
    """A block of an encoder, or of a decoder, which looks at the encoder's results, too (T5)."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.own, self.table = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.cross = nn.Linear(8, 8) if decodes else None

    def forward(self, x_BD: Tensor, context_BD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden_BD = self.own(x_BD) + self.table
        if self.cross is not None and context_BD is not None:
            hidden_BD = hidden_BD + self.cross(context_BD).tanh()
        return hidden_BD, self.table * 2


def test_blocks_of_one_class_may_reach_other_parameters_each() -> None:
    """What an output of the encoder's block reaches says nothing of the decoder's, of which the cross-attention stayed
    untrained where it was checked first."""
    torch.manual_seed(0)
    decoder, encoder = Bridged(decodes=True), Bridged(decodes=False)
    twin = copy.deepcopy(nn.ModuleList([decoder, encoder]))
    program, x_BD = compiled(decoder, encoder), torch.randn(3, 8)
    assert len(program.kinds) == 1

    def train(encode: nn.Module, decode: nn.Module) -> None:
        hidden_BD, _ = decode(x_BD, x_BD)
        encode(hidden_BD)[0].square().sum().backward()

    for _ in range(3):
        with one_step(program):
            train(encoder, decoder)
        train(twin[1], twin[0])
    assert all(one.state is State.COMPILED for one in program.regions)
    expected = {name: one.grad for name, one in twin.named_parameters()}
    for name, parameter in program.module.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_computed_again_in_the_backward_a_region_does_what_it_did(reentrant: bool) -> None:
    block = Smooth()
    program, x_BD = compiled(block), torch.randn(3, 8, requires_grad=True)
    found = checks_of(program)
    (kind,) = program.kinds.values()
    twin = copy.deepcopy(block)
    twin(x_BD).sum().backward()
    expected = [one.grad for one in twin.parameters()]
    for number in range(8):
        block.zero_grad()
        if number == 4:
            kind.request_checks()
        with one_step(program):
            result = checkpoint(block, x_BD, use_reentrant=reentrant)
            if number == 5:
                kind.request_checks()  # within a step: what ran compiled is computed again by the same code
            if number == 7:
                kind.fail("from the next step on")
            result.sum().backward()
        for one, other in zip(block.parameters(), expected, strict=True):
            torch.testing.assert_close(one.grad, other)
    assert [one.audit for one in found] == ([False, False] if reentrant else [False]) + [True, True]
    assert region(program).state is State.FAILED


# ---- other threads than the step's ----------------------------------------------------------------------------------


def test_another_thread_never_meets_the_weights_of_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    altered, answered = threading.Event(), threading.Event()
    own = region_check._in_precision

    @contextlib.contextmanager
    def in_precision(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        with own(module, dtype):
            altered.set()
            answered.wait(0.5)
            yield

    monkeypatch.setattr(region_check, "_in_precision", in_precision)
    block, x_BD, seen = Block(), torch.randn(3, 8), []
    program, expected = compiled(block), block(x_BD)

    def beside() -> None:
        altered.wait()
        try:
            seen.append(torch.equal(block(x_BD), expected))
        except RuntimeError as error:
            seen.append(error)
        answered.set()

    thread = threading.Thread(target=beside)
    thread.start()
    with one_step(program):
        block(x_BD)
        thread.join()
    assert seen == [True]


# ---- what is compiled around a break of its graph --------------------------------------------------------------------


class Breaks(Counted):
    """A counter and a buffer before a graph break; what comes after that does not compile."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        torch._dynamo.graph_break()
        return super().forward(x_BD).tanh()


@pytest.mark.parametrize("parity", ["on", "off"])
def test_half_a_region_is_never_run_twice(parity: str) -> None:
    def refuses_tanh(graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if "tanh" in graph.code:
            raise RuntimeError("no tanh here")
        return graph.forward

    block = Breaks()
    program, x_BD = compiled(block, backend=refuses_tanh, fullgraph=False), torch.randn(3, 8)
    program.checking.mode = parity
    for number in range(1, 4):
        with one_step(program):
            block(x_BD).sum().backward()
        assert (block.calls, float(block.seen)) == (number, number)
    assert "no tanh here" in program.eager_parts["0"]
