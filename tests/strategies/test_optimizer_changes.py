"""``compile=optimizer`` while a training changes what is optimized; and how its steps are checked, always against
torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Optimizer, Program
from strategies.optimizer.step import OwnStep, graphed, install, installed
from strategies.region import Checking
from tests.strategies import backends
from tests.strategies.modules import Block, Stack
from tests.strategies.test_optimizer import OPTIMIZERS, OTHERS, Both, Made, adamw
from tests.sweep import some

STATEFUL = {name: OPTIMIZERS[name] for name in ("AdamW", "AdamW fused", "SGD", "SGD nesterov")}


def on_both(both: Both, change: Callable[[Any, Made], Any]) -> None:
    for module, optimizer in both:
        change(module, optimizer)


class Scaled(Stack):
    """With a scalar and a parameter that is not contiguous."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.ModuleList([Block() for _ in range(2)]))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.mixed = nn.Parameter(torch.randn(8, 8).t())

    def forward(self, x_BD: Tensor) -> Tensor:
        return super().forward(x_BD @ self.mixed) * self.scale


def without_state(module: Any, optimizer: Made) -> None:
    for parameter in module.head.parameters():
        optimizer.state.pop(parameter, None)


def exchanged(module: Any, optimizer: Made) -> None:
    """Layers take the rates of other groups."""
    first, second = optimizer.param_groups
    first["params"][2], second["params"][1] = second["params"][1], first["params"][2]
    first["params"][4:8], second["params"][2:6] = second["params"][2:6], first["params"][4:8]


def replaced(module: Any, optimizer: Made) -> None:
    torch.manual_seed(5)
    old, module.head = module.head, nn.Linear(8, 3)
    gone = set(map(id, old.parameters()))
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if id(one) not in gone]
    optimizer.param_groups[0]["params"] += module.head.parameters()
    for parameter in old.parameters():
        optimizer.state.pop(parameter, None)


def added(module: Any, optimizer: Made) -> None:
    torch.manual_seed(6)
    module.extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(module.extra.parameters())})


def resized(module: Any, optimizer: Made) -> None:
    """As for new classes."""
    head, rows = module.head, len(module.head.bias)
    head.weight.grad = head.bias.grad = None
    weight, bias = torch.zeros(rows + 2, 8), torch.zeros(rows + 2)
    weight[:rows], bias[:rows] = head.weight.data, head.bias.data
    head.weight.data, head.bias.data = weight, bias
    without_state(module, optimizer)


def moved(module: Any, optimizer: Made) -> None:
    """Weights lie elsewhere, two of them in one place."""
    module.stem.weight.data = module.stem.weight.data.t().clone().t()
    module.stem.bias.data = module.stem.bias.data * 0.5
    module.layers[1].linear.weight.data = module.layers[0].linear.weight.data


def zeroed(module: Any, optimizer: Made) -> None:
    """In place, as a loop restores a state that keeps tensors by identity."""
    for entry in optimizer.state.values():
        for value in entry.values():
            if isinstance(value, Tensor):
                value.zero_()


def set_back(module: Any, optimizer: Made) -> None:
    """The count of one."""
    if "step" in optimizer.state.get(module.head.bias, {}):
        optimizer.state[module.head.bias]["step"].zero_()


def scheduled(module: Any, optimizer: Made) -> None:
    group = optimizer.param_groups[-1]
    group.update({"lr": 0.5 * group["lr"], **({"betas": (0.8, 0.99)} if "betas" in group else {})})
    group.update({"weight_decay": 0.01} if group.get("weight_decay") else {})


KEPT: dict[int, dict[str, Any]] = {}
"""States by optimizer."""
CHANGES: list[Callable[[Any, Made], Any]] = [
    lambda module, optimizer: optimizer.load_state_dict(KEPT[id(optimizer)]),
    without_state,
    lambda module, optimizer: optimizer.state.clear(),
    set_back,
    scheduled,
    exchanged,
    lambda module, optimizer: optimizer.param_groups[0]["params"].reverse(),
    lambda module, optimizer: module.layers[0].requires_grad_(False),
    replaced,
    added,
    lambda module, optimizer: module.requires_grad_(True),
    resized,
    moved,
    zeroed,
]
EVERY = {**STATEFUL, **{name: make for name, (make, form, _) in OTHERS.items() if form != "eager"}}
SLOW = some([pytest.param(name, marks=pytest.mark.slow) for name in EVERY if name not in STATEFUL], every=3)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", [*STATEFUL, *SLOW])
def test_whatever_changes_between_two_steps_is_followed(name: str, part: int) -> None:
    def two_rates(given: Iterable[Any]) -> Made:
        given = list(given)
        return EVERY[name]([{"params": given[:8]}, {"params": given[8:], "lr": 1e-4}])

    both = Both(two_rates, Scaled)
    both.train(2)
    KEPT.update({id(optimizer): copy.deepcopy(optimizer.state_dict()) for optimizer in both.optimizers})
    for change in CHANGES[part::3]:
        both.train(2)
        on_both(both, change)
        looked = both.update.looked
        both.train(3)
        both.are_alike(rtol=1e-4, atol=1e-5)
        assert both.update.state == "compiled"
        assert change is not exchanged or both.update.looked == looked + 1
    assert installed(both.optimizers[1]) is both.update


@pytest.mark.usefixtures("graphs")
def test_sets_of_parameters_may_take_turns() -> None:
    both = Both(adamw)
    for step in range(16):
        for module in both.modules:
            module.layers[step % 2].requires_grad_(False)
            module.layers[1 - step % 2].requires_grad_(True)
        both.train(1, seed=step)
    both.are_alike()
    assert both.update.state == "compiled"
    assert both.update.looked == 3, "each of them once, and the first again: some of its parameters have missed a step"


@pytest.mark.usefixtures("graphs")
def test_what_changes_all_the_time_is_left_to_torch() -> None:
    both = Both(adamw)
    for step in range(16):
        on_both(both, lambda module, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
        both.train(1, seed=step)
    both.are_alike()
    assert both.update.state == "failed"
    assert "change all the time" in both.program.given_up["optimizer"]


@pytest.mark.usefixtures("graphs")
def test_complex_and_sparse_groups_are_left_to_torch_and_the_others_compiled() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(8, 8)
            self.rows = nn.Embedding(4, 8)
            self.rows.sparse = True

        def forward(self, x_BD: Tensor) -> Tensor:
            return self.net(x_BD) + self.rows(torch.tensor([1, 3])).sum()

    def grouped(given: Iterable[Any]) -> Made:
        given = list(given)
        return torch.optim.SGD([{"params": given[:2]}, {"params": given[2:]}], lr=0.1)

    both = Both.__new__(Both)
    both.modules = [Mixed(), Mixed()]
    both.optimizers = [grouped(module.parameters()) for module in both.modules]
    both.program = Program(module=both.modules[1], optimizers=(both.optimizers[1],))
    both.update = Optimizer(backend=backends.COUNTING).update_for(both.optimizers[1], both.program)
    install(both.optimizers[1], both.update)
    both.train(4)
    both.are_alike()
    assert any("sparse gradients" in note for note in both.program.notes)
    assert both.update.state == "compiled"
    assert both.update.facts()["tensors"] == 2


@pytest.mark.usefixtures("graphs")
def test_a_stance_that_forces_eager_lets_torchs_own_step_run_meanwhile() -> None:
    both = Both(adamw)
    both.train(2)
    with torch.compiler.set_stance("force_eager"):
        both.train(2)
    both.train(2)
    both.are_alike()
    assert both.update.state == "compiled"


# ---- checks ----------------------------------------------------------------------------------------------------------


class Faulty:
    """Compiles right; what it compiled does something else as soon as ``wrong`` is set."""

    def __init__(self) -> None:
        self.wrong: Callable[[Any], None] | None = None
        self.error: Exception | None = None

    def __call__(self, function: Callable[..., None]) -> Callable[..., None]:
        compiled = torch.compile(function, backend="eager", fullgraph=True)

        def run(parts: Any) -> None:
            if self.error is not None:
                raise self.error
            compiled(parts)
            if self.wrong is not None:
                with torch.no_grad():
                    self.wrong(parts[0][0])

        return run


def faulty(make: Callable[[Iterable[Any]], Made] = adamw, mode: str = "on") -> tuple[Both, Faulty]:
    both = Both(make)
    compiler = Faulty()
    both.update._compiler = compiler
    both.update._checking = Checking(mode=mode)
    return both, compiler


FAULTS: dict[str, Callable[[Any], None]] = {
    "one weight a thousandth off": lambda lists: lists[0][0].add_(1e-5),
    "weights not updated in a row": lambda lists: lists[0][0].view(-1)[:1].add_(1e-3),
    "a state that is not written": lambda lists: lists[3][0].mul_(0.999),
    "no number": lambda lists: lists[0][-1].view(-1)[:1].fill_(float("nan")),
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_update_is_found_before_it_is_ever_in_force(fault: Callable[[Any], None]) -> None:
    both, compiler = faulty()
    compiler.wrong = fault
    both.train(1)
    assert both.update.state == "checking", "a difference counts when it shows twice"
    both.train(3)
    both.are_alike()
    assert (both.update.state, bool(both.update.differs), both.update.looked) == ("failed", True, 2)
    assert any(one.share > 1 for one in both.update.checks)
    assert "differs from torch's" in both.program.given_up["optimizer"]


@pytest.mark.usefixtures("graphs")
def test_a_difference_that_shows_once_does_not_count() -> None:
    both, compiler = faulty()
    compiler.wrong = FAULTS["no number"]
    both.train(1)
    compiler.wrong = None
    both.train(3)
    both.are_alike()
    assert both.update.state == "compiled"


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_compile_that_fails_in_mid_training_loses_nothing(at: int) -> None:
    """At the chunk ``at`` of a step of four: what was done before it stays, the rest is torch's own."""
    both, compiler = faulty()
    both.train(3)
    calls = iter(range(100))

    def wrong(lists: Any) -> None:
        if next(calls) == at - 1:
            compiler.error = torch._dynamo.exc.BackendCompilerFailed(backends._refuse, RuntimeError("no memory"), None)

    compiler.wrong = wrong
    if not at:
        compiler.error = torch._dynamo.exc.BackendCompilerFailed(backends._refuse, RuntimeError("no memory"), None)
    both.train(1)
    both.are_alike()
    assert both.update.state == "failed"
    assert "does not compile once more" in both.program.given_up["optimizer"]
    both.train(3)
    both.are_alike()


@pytest.mark.usefixtures("graphs")
def test_gradients_in_another_layout_are_checked_anew() -> None:
    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(4, 8, 3)

    both = Both(adamw, module)
    for strided in (False, False, False, True, True):
        for each, optimizer in both:
            gradient = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1))
            each.weight.grad = gradient.to(memory_format=torch.channels_last) if strided else gradient
            each.bias.grad = torch.ones(8)
            optimizer.step()
    both.are_alike()
    assert both.update.looked == 2


# ---- within a captured step ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("graphs")
def test_a_replay_counts_and_writes_its_rates_and_knows_when_it_does_not_fit() -> None:
    both = Both(adamw)
    module, optimizer, update = both.modules[1], both.optimizers[1], both.update
    assert not update.ready
    first = update.constants()
    both.train(2)
    assert graphed(optimizer) is update
    assert update.ready
    update.prepare()
    number = update.constants()
    assert number == first, "a graph that is captured after a step or two has the same key"
    optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.75))
    update.prepare()
    assert update.constants() == number
    update.count()
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}
    assert sorted(map(float, update.scalars())) == [0.5, 0.5, 0.75, 2.0], "two steps were made before"
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert update.constants() != number, "it is taken by value"
    optimizer.param_groups[0]["weight_decay"] = 0.01
    optimizer.state[module.head.bias]["step"].zero_()
    assert update.constants() != number, "one graph has one count for all"


@pytest.mark.usefixtures("graphs")
def test_a_recorded_step_begins_with_the_numbers_that_it_reads() -> None:
    both = Both(adamw)
    both.train(3)
    for step in range(3):
        for optimizer in both.optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        both.update.prepare()
        before = [float(one) for one in both.update.scalars()]
        both.train(1)
        assert [float(one) for one in both.update.scalars()] == before
    both.are_alike()


@pytest.mark.usefixtures("graphs")
def test_what_was_to_be_captured_and_fails_is_captured_as_torchs_own_step() -> None:
    both, compiler = faulty()
    compiler.wrong = FAULTS["no number"]
    held = graphed(both.optimizers[1])
    both.train(3)
    assert both.update.state == "failed"
    held.prepare()
    with held.capturable():
        held.constants()
    held.count()
    held.release()
    assert isinstance(graphed(both.optimizers[1]), OwnStep)
    both.train(2)
    both.are_alike()


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["AdamW amsgrad maximize", "SGD nesterov"], every=2))
def test_inductor_trains_as_torch_does_in_bfloat16_and_double(name: str) -> None:
    for dtype, closeness in ((torch.bfloat16, 1e-2), (torch.float64, 1e-7)):

        def module(dtype: torch.dtype = dtype) -> nn.Module:
            torch.manual_seed(0)
            return nn.ModuleList([nn.Linear(8, 8, dtype=dtype)])

        both = Both(OPTIMIZERS[name], module, backend="inductor")
        for step in range(5):
            for each, optimizer in both:
                generator = torch.Generator().manual_seed(step)
                for parameter in each.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
                optimizer.step()
        assert both.update.state == "compiled"
        for theirs, ours in zip(both.modules[0].parameters(), both.modules[1].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=closeness, atol=closeness)


def test_hyperparameters_that_a_graph_takes_by_value_may_be_lists_and_tensors_of_the_cpu() -> None:
    rate = torch.tensor(0.1)
    settings: dict[str, Any] = {"lr": rate, "betas": [0.9, 0.99]}  # as a configuration in YAML gives them
    captured = OwnStep(torch.optim.AdamW([nn.Parameter(torch.ones(2))], foreach=False, **settings))
    captured.prepare()
    before = captured.constants()
    assert hash(before) == hash(captured.constants())
    rate.fill_(0.2)  # as a schedule does
    assert captured.constants() != before
    captured.release()
