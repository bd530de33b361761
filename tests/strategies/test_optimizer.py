"""``compile=optimizer``: eager's numbers and eager's state, one graph for all blocks, and never another one."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.symbolic_convert import SpeculationLogDivergence
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.optim import lr_scheduler

from strategies import CudaGraph, Optimizer, Program, base
from strategies.optimizer.step import graphed, installed
from tests.strategies import backends
from tests.strategies.modules import Block, Stack

Made = torch.optim.Optimizer
Make = Callable[[Iterable[Any]], Made]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda given: torch.optim.AdamW(given, lr=1e-2),
    "AdamW amsgrad maximize": lambda given: torch.optim.AdamW(given, lr=1e-4, amsgrad=True, maximize=True),
    "AdamW fused": lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True),
    "Adam decay": lambda given: torch.optim.Adam(given, lr=1e-2, weight_decay=0.1),
    "Adam tensor rate": lambda given: torch.optim.Adam(given, lr=torch.tensor(1e-2)),
    "SGD": lambda given: torch.optim.SGD(given, lr=1e-3),
    "SGD nesterov": lambda given: torch.optim.SGD(given, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampening": lambda given: torch.optim.SGD(given, lr=1e-3, momentum=0.9, dampening=0.5),
}


def stack(blocks: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(nn.ModuleList([Block() for _ in range(blocks)]))


def begin(module: nn.Module, *optimizers: Made, **options: Any) -> tuple[Optimizer, Program]:
    strategy = Optimizer(**{"backend": backends.COUNTING, **options})
    program = Program(module=module, strategies=(strategy,))
    strategy.apply(program)
    program.optimizers = optimizers
    base.begin([strategy], program)
    return strategy, program


def train(module: nn.Module, optimizer: Made, steps: int, *, seed: int = 1, schedule: Any = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = next(module.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 8, generator=generator, dtype=kind)).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


class Both:
    """The same module and optimizer twice, the second one compiled."""

    def __init__(self, make: Make, module: Callable[[], nn.Module] = stack, **options: Any) -> None:
        self.modules: list[Any] = [module(), module()]
        self.optimizers = [make(module.parameters()) for module in self.modules]
        self.strategy, self.program = begin(self.modules[1], self.optimizers[1], **options)
        self.update: Any = installed(self.optimizers[1])

    def __iter__(self) -> Iterator[tuple[Any, Made]]:
        return zip(self.modules, self.optimizers, strict=True)

    def train(self, steps: int, *, seed: int = 1, scheduled: bool = False) -> None:
        for module, optimizer in self:
            schedule = lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
            train(module, optimizer, steps, seed=seed, schedule=schedule)

    def are_alike(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Weights, and of the states the keys, in order, the types, devices and values."""
        eagers, ours = (module.state_dict() for module in self.modules)
        torch.testing.assert_close(ours, eagers, rtol=rtol, atol=atol)
        theirs, mine = (optimizer.state_dict() for optimizer in self.optimizers)
        assert mine["param_groups"] == theirs["param_groups"]
        assert list(mine["state"]) == list(theirs["state"])
        for index, expected in theirs["state"].items():
            assert list(mine["state"][index]) == list(expected)
            torch.testing.assert_close(mine["state"][index], expected, rtol=10 * rtol, atol=atol)


def adamw(given: Iterable[Any]) -> Made:
    return torch.optim.AdamW(given, lr=1e-2)


# ---- eager's numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_and_state_are_eagers(make: Make, graphs: list[GraphModule]) -> None:
    def in_groups(given: Iterable[Any]) -> Made:
        given = list(given)
        vectors = {"params": [p for p in given if p.ndim == 1], "weight_decay": 0.0}
        return make([{"params": [p for p in given if p.ndim > 1]}, vectors])

    both = Both(in_groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of schedules, which are made after it
        both.train(12, scheduled=True)
    both.are_alike()
    assert len(graphs) == 2, "one for the blocks, one for stem and head"
    assert both.program.report["optimizer"]["form"] == "functional"
    assert both.update.state == "compiled"


# ---- one graph, and never another ------------------------------------------------------------------------------------


def test_many_tensors_outside_blocks_are_cut_into_chunks(graphs: list[GraphModule]) -> None:
    module = nn.ParameterList(torch.zeros(3) for _ in range(96))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, program = begin(module, optimizer)
    for parameter in module:
        parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.step()
    assert len(graphs) == 1, "three chunks of the same shapes"
    assert program.report["optimizer"]["chunks"] == 3
    torch.testing.assert_close(torch.stack(list(module)), torch.full((96, 3), -0.2))


def _parts(optimizer: Made) -> list[lr_scheduler.LRScheduler]:
    return [lr_scheduler.LinearLR(optimizer, total_iters=50), lr_scheduler.ExponentialLR(optimizer, 0.999)]


SCHEDULERS: dict[str, Callable[[Made], lr_scheduler.LRScheduler]] = {
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(_parts(optimizer), optimizer=optimizer),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=1e-4, max_lr=1e-2, step_size_up=100),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=121),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=3, threshold=0.5),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(optimizer, _parts(optimizer), milestones=[50]),
}
"""Those that do more than to set a rate: they change betas or momentum, ask for a metric, or hold others."""


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_scheduler_recompiles(name: str, graphs: list[GraphModule]) -> None:
    parameters = [nn.ParameterList([torch.ones(3)]) for _ in range(2)]
    optimizers = [torch.optim.AdamW(parameter, lr=1e-3) for parameter in parameters]
    gradients = torch.randn(120, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "lr_scheduler.step() before optimizer.step()" and its like
        warnings.filterwarnings("ignore", message=".*epoch parameter")  # SequentialLR's own
        schedules = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
        begin(parameters[1], optimizers[1])
        rates = set()
        for gradient in gradients:
            for (parameter,), optimizer, schedule in zip(parameters, optimizers, schedules, strict=True):
                parameter.grad = gradient
                optimizer.step()
                schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))  # type: ignore[arg-type]
            rates.add(optimizers[1].param_groups[0]["lr"])
    assert len(rates) > 1, "the schedule changes something"
    assert len(graphs) == 1
    assert type(optimizers[1].param_groups[0]["lr"]) is float
    assert optimizers[1].state_dict()["param_groups"] == optimizers[0].state_dict()["param_groups"]
    torch.testing.assert_close(parameters[1][0], parameters[0][0], rtol=1e-4, atol=1e-6)


def test_every_hyperparameter_may_change(graphs: list[GraphModule]) -> None:
    both = Both(adamw)
    for step in range(10):
        for optimizer in both.optimizers:
            optimizer.param_groups[0].update(
                betas=(0.5 + step / 30, 0.9), weight_decay=(1 + step) / 10, eps=10.0**-step
            )
        both.train(1, seed=step)
    assert len(graphs) == 2 * 2, "betas are tensors, the others are constants at first and inputs from then on"
    assert both.update.looked == 2, "once anew, when constants became inputs"
    both.are_alike()


# ---- the optimizer stays itself --------------------------------------------------------------------------------------


# ---- other optimizers ----------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Somebody's own optimizer: https://arxiv.org/abs/2302.06675."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                parameter.sub_(state["mean"].sign() * group["lr"])
                state["mean"].mul_(group["beta"]).add_(parameter.grad * (1 - group["beta"]))


OTHERS: dict[str, tuple[Make, str, int]] = {
    "Lion": (lambda given: Lion(given), "eager", 0),
    "NAdam": (lambda given: torch.optim.NAdam(given), "generic", 1),
    "ASGD": (lambda given: torch.optim.ASGD(given), "generic", 1),
    "RAdam": (lambda given: torch.optim.RAdam(given, lr=1e-2, weight_decay=0.1), "functional", 1),
    "RMSprop": (lambda given: torch.optim.RMSprop(given, lr=1e-3, momentum=0.9, centered=True), "functional", 1),
    "Adadelta": (lambda given: torch.optim.Adadelta(given, weight_decay=0.1), "functional", 1),
    "Adamax": (lambda given: torch.optim.Adamax(given, weight_decay=0.1), "functional", 1),
    "Rprop": (lambda given: torch.optim.Rprop(given), "functional", 1),
    "Adagrad": (lambda given: torch.optim.Adagrad(given, lr_decay=0.1, initial_accumulator_value=0.1), "generic", 1),
}
"""With its form, and graphs: a schedule does not recompile."""


@pytest.mark.parametrize(("make", "form", "compiled"), OTHERS.values(), ids=OTHERS)
def test_another_optimizer_is_compiled_or_runs_eager(
    make: Make, form: str, compiled: int, graphs: list[GraphModule]
) -> None:
    both = Both(make, lambda: stack(1))
    both.train(8, scheduled=True)
    both.are_alike()
    assert len(graphs) == compiled
    assert both.program.report["optimizer"]["form"] == form
    assert any("runs eager" in note for note in both.program.notes) == (form == "eager")
    assert type(both.optimizers[1].param_groups[0]["lr"]) is float


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_what_an_optimizer_casts_itself_is_held_against_what_it_would_make_of_more_digits(factor: float) -> None:
    def compiler(graph: GraphModule, _: Any) -> Callable[..., Any]:
        """Leaves out casts to bfloat16, as Inductor does; what the last product adds to is off by the factor."""
        for node in graph.graph.nodes:
            if node.kwargs.get("dtype") is torch.bfloat16:
                node.kwargs = {**node.kwargs, "dtype": torch.float32}
        last = [node for node in graph.graph.nodes if node.target is torch.addmm][-1]
        last.kwargs = {**last.kwargs, "beta": factor * last.kwargs["beta"]}
        graph.recompile()
        return graph.forward

    torch.manual_seed(0)
    module = nn.Linear(24, 16, bias=False)
    optimizer = torch.optim.Muon(module.parameters(), lr=1e-3)
    register_backend(compiler, name=(name := f"without_casts_{factor}"))
    _, program = begin(module, optimizer, backend=name)
    for _ in range(6):
        module.weight.grad = torch.randn(16, 24)
        optimizer.step()
    update = installed(optimizer)
    assert (update.state, bool(program.notes)) == (("failed", True) if factor > 1 else ("compiled", False))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("kind", [FailOnRecompileLimitHit, SpeculationLogDivergence])
def test_an_optimizer_that_cannot_be_traced_once_more_runs_eager_and_says_so(kind: type[Exception]) -> None:
    def recompiled_too_often() -> None:
        raise kind("Hard failure due to fullgraph=True")

    both = Both(lambda given: torch.optim.NAdam(given))
    both.train(3)
    assert both.update.state == "compiled"
    both.update._compiled = recompiled_too_often
    both.train(4)
    both.are_alike()
    assert both.update.state == "failed"
    assert any("NAdam runs eager: it does not compile once more" in note for note in both.program.notes)


EAGER: list[tuple[Make, dict[str, Any], str]] = [
    (torch.optim.LBFGS, {}, "as often as the loss demands"),
    (partial(torch.optim.SGD, differentiable=True), {}, "differentiable"),
    (partial(torch.optim.Adam, betas=(torch.tensor(0.9), torch.tensor(0.99))), {}, "betas are tensors"),
    (torch.optim.NAdam, {"module": lambda: stack(1).double()}, "single precision"),
    (torch.optim.ASGD, {"module": lambda: stack(1).double()}, "single precision"),
    (torch.optim.Adagrad, {"module": lambda: stack(1).double()}, "single precision"),
    (torch.optim.AdamW, {}, "was not compiled"),
    (torch.optim.NAdam, {}, "was not compiled"),
    (torch.optim.AdamW, {"backend": backends.BROKEN_FORWARD}, "compiles no forward"),
    (torch.optim.NAdam, {"backend": backends.BROKEN_FORWARD}, "compiles no forward"),
    (torch.optim.SGD, {"backend": backends.BROKEN_FORWARD}, "compiles no forward"),
]
"""Optimizers, options of ``Both``, and why torch's own step runs."""


@pytest.mark.parametrize(("make", "options", "reason"), EAGER)
def test_what_does_not_compile_is_torchs_own_step_and_is_said(
    make: Make, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends.register()
    if reason == "was not compiled":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    both = Both(make, **options)
    if both.update is None and reason != "single precision":
        assert "step" not in vars(both.optimizers[1])
    else:
        both.train(3)
        both.are_alike(rtol=0, atol=0)
    assert both.update is None or both.update.state == "failed"
    assert any("runs eager" in note and reason in note for note in both.program.notes)
    assert reason in both.program.eager_parts["optimizer"]
    assert both.program.report["optimizer"]["form"] == "eager"
    assert not both.strategy.is_compiled(both.program)


def test_an_optimizer_compiled_as_written_is_left_to_a_graph_of_the_whole_step() -> None:
    optimizer = torch.optim.NAdam(stack(2).parameters())
    strategy = Optimizer(backend=backends.COUNTING)
    for device, taken in (("cuda", False), ("cpu", True)):
        program = Program(module=stack(2), optimizers=(optimizer,), device=torch.device(device))
        program.strategies = (strategy, CudaGraph(required=False))
        strategy.begin(program)
        assert (installed(optimizer) is not None) == taken
        assert any("captured as it is" in note for note in program.notes) != taken


def test_what_one_training_gave_up_the_next_one_tries_again(graphs: list[GraphModule]) -> None:
    module = stack(2)
    capture, loop = CudaGraph(required=False), SimpleNamespace(collectives_obstacle=lambda: None)
    strategy, program = begin(module, torch.optim.AdamW(module.parameters()))
    program.device, program.loop = torch.device("cpu"), loop  # type: ignore[assignment]
    base.disable_other_strategies(program, "slower than eager's")
    program.given_up["step"] = "it changes on the host"
    base.end([strategy, capture], program)
    assert set(program.eager_parts) == {"optimizer", "step"}
    base.begin([strategy, capture], program)
    assert program.eager_parts == {}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_group_may_be_empty(kind: Any, graphs: list[GraphModule]) -> None:
    module = nn.Linear(8, 8)
    optimizer = kind([{"params": list(module.parameters())}, {"params": [], "weight_decay": 0.0}], lr=0.1)
    captured = graphed(optimizer)
    captured.prepare()
    with captured.capturable():
        before = captured.constants()
    optimizer.param_groups[1]["lr"] = 0.05
    assert captured.constants() == before, "a schedule of an empty group changes no kernel"
    captured.release()
    begin(module, optimizer)
    train(module, optimizer, 4)
    assert len(graphs) == 1
    assert optimizer.param_groups[1]["capturable"] is False


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop])
def test_what_eager_steps_have_counted_on_the_host_goes_on_in_captured_ones(kind: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # CUDA without a device
        weight = nn.Parameter(torch.empty(3, device="cuda"))
        weight.grad = torch.empty(3, device="cuda")
        optimizer = kind([weight])

        def devices(state: dict[str, Any]) -> set[str]:
            return {one.device.type for one in state.values() if one.ndim == 0}

        optimizer.step()
        captured = graphed(optimizer)
        captured.prepare()
        for _ in range(2):
            with captured.capturable():
                optimizer.step()
        assert devices(optimizer.state[weight]) == {"cuda"}
        assert devices(optimizer.state_dict()["state"][0]) == {"cpu"}
        captured.release()
        assert devices(optimizer.state[weight]) == {"cpu"}


# ---- nothing silent --------------------------------------------------------------------------------------------------


def test_the_forms_of_several_optimizers_are_reported_together(graphs: list[GraphModule]) -> None:
    module = stack(2)
    optimizers = [torch.optim.AdamW(module.layers.parameters()), torch.optim.LBFGS(module.head.parameters())]
    _, program = begin(module, *optimizers)
    train(module, optimizers[0], 1)
    assert program.report["optimizer"]["form"] == "eager, functional"
    assert program.report["optimizer"]["tensors"] == 8


def test_a_step_that_somebody_has_replaced_is_left_alone() -> None:
    module = stack(2)
    optimizer = torch.optim.AdamW(module.parameters())
    theirs = types.MethodType(lambda self, closure=None: None, optimizer)
    optimizer.step = theirs  # type: ignore[method-assign]
    _, program = begin(module, optimizer)
    assert optimizer.step is theirs
    assert any("replaced already" in note for note in program.notes)
