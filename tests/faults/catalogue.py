"""The catalogue: faults that compilers and compiled optimizers have had, or could have, each a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from strategies import Strategy
from tests.faults.planted import Call, Edit, Fault, FaultyStep, floating, gradient, nodes, regional

LATER = 30
"""Calls after which the gate is over: it and the passes before it take about half as many."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One fault, and who is expected to catch it."""

    name: str
    kind: str
    plant: Callable[[], Strategy]
    guard: str = "gate"
    """``gate`` (before the first step) or ``audit`` (while training)."""
    module: dict[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = (8,)
    rows: Sequence[int] = (8,)
    trainer: dict[str, Any] = field(default_factory=dict)
    only_single: bool = False
    """Whether it is no fault in bfloat16, where eager rounds as much."""


def _kernels() -> list[Planted]:
    def edited(edit: Edit) -> Callable[[], Strategy]:
        return lambda: regional(edit=edit)

    def called(fault: Fault) -> Callable[[], Strategy]:
        return lambda: regional(fault)

    def outputs(change: Callable[[Tensor], Tensor]) -> Callable[[], Strategy]:
        return called(lambda call: floating(call.run(), change))

    def swap(name: str, function: Callable[..., Tensor]) -> Edit:
        def edit(graph: GraphModule) -> None:
            for node in nodes(graph, name):
                if node.op == "call_function":
                    node.target = function

        return edit

    def keyword(name: str, **changes: Any) -> Edit:
        def edit(graph: GraphModule) -> None:
            for node in nodes(graph, name):
                node.kwargs = {**node.kwargs, **changes}

        return edit

    def norm_epsilon(graph: GraphModule) -> None:
        for node in nodes(graph, "layer_norm"):
            if node.op == "call_function":
                node.args = (*node.args[:4], 1e-2)

    def without_bias(call: Call) -> list[Any]:
        for place in call.at("out_parameters_bias"):
            call.inputs[place] = torch.zeros_like(call.inputs[place]) + 0 * call.inputs[place]
        return call.run()

    def without_residual(graph: GraphModule) -> None:
        node = nodes(graph, "add_1")[-1]
        node.replace_all_uses_with(node.args[1])

    def wrong_rows(one: Tensor) -> Tensor:
        return torch.cat([one[:-1], one[:1]])

    def stale(call: Call) -> list[Any]:
        out = call.run()
        before = call.memory.get("out", [one.detach() for one in out])
        call.memory["out"] = [one.detach() for one in out]
        return [one + (old - one).detach() for one, old in zip(out, before, strict=True)]

    def one_nan(one: Tensor) -> Tensor:
        return one + torch.zeros_like(one).index_fill_(-1, torch.tensor([3]), float("nan"))

    scales = torch.ones(16).index_fill_(0, torch.tensor([5]), 0.0)
    tanh = lambda one: functional.gelu(one, approximate="tanh")  # noqa: E731
    return [
        Planted(name=name, kind="kernel", plant=plant, only_single=only_single)
        for name, plant, only_single in (
            ("output 1% too large", outputs(lambda one: one * 1.01), False),
            ("one of sixteen channels left at zero", outputs(lambda one: one * scales), False),
            ("last row computed from the first one's", outputs(wrong_rows), False),
            ("one column is not a number", outputs(one_nan), False),
            ("results of the call before", called(stale), False),
            ("output rounded to bfloat16", outputs(lambda one: one.bfloat16().float()), True),
            ("tanh's approximation of GELU", edited(swap("gelu", tanh)), True),
            ("ReLU for GELU", edited(swap("gelu", functional.relu)), False),
            ("a norm's epsilon a thousand times too large", edited(norm_epsilon), False),
            ("a bias left out", called(without_bias), False),
            ("a residual connection left out", edited(without_residual), False),
            ("attention not causal", edited(keyword("scaled_dot_product", is_causal=False)), False),
            ("attention's scale twice as large", edited(keyword("scaled_dot_product", scale=0.5)), False),
        )
    ]


def _gradients() -> list[Planted]:
    weights = ("mix_parameters_weight", "out_parameters_weight")

    def stale(call: Call) -> list[Any]:
        def change(one: Tensor) -> Tensor:
            before = call.memory.get("gradient", one)
            call.memory["gradient"] = one.clone()
            return before

        return gradient(change, "up_parameters_weight")(call)

    given: list[tuple[str, Fault]] = [
        ("gradients of the inputs 1% too large", gradient(lambda one: one * 1.01, "l_x_btd")),
        ("gradients of the inputs 10% too large", gradient(lambda one: one * 1.1, "l_x_btd")),
        ("half of the gradients halved", gradient(lambda one: one * 0.5, *weights)),
        ("a small parameter's gradient times 0.01", gradient(lambda one: one * 0.01, "norm_parameters_bias")),
        ("a small parameter's gradient times 10", gradient(lambda one: one * 10, "norm_parameters_bias")),
        ("a gradient lost", gradient(torch.zeros_like, "out_parameters_bias")),
        ("a gradient transposed", gradient(lambda one: one.t(), "up_parameters_weight")),
        ("a gradient's sign turned", gradient(torch.neg, "out_parameters_weight")),
        ("a gradient added twice", gradient(lambda one: 2 * one, "mix_parameters_bias")),
        ("a gradient with one row missing", gradient(_without_row, "mix_parameters_weight")),
        ("a gradient of the call before", stale),
        ("a gradient that is not a number", gradient(lambda one: one * float("nan"), "up_parameters_bias")),
    ]
    return [
        Planted(name=name, kind="gradient", plant=lambda fault=fault: regional(fault))  # type: ignore[misc]
        for name, fault in given
    ]


def _without_row(one: Tensor) -> Tensor:
    return torch.cat([one[:-1], torch.zeros_like(one[-1:])])


def _optimizers() -> list[Planted]:
    def own(**groups: Any) -> Callable[[Any], None]:
        return lambda step: step.own(**groups)

    def uncorrected(step: Any) -> None:
        counts = [state["step"] for state in step.optimizer.state.values()]
        before = [count.clone() for count in counts]
        for count in counts:
            count.zero_()
        step.own()
        for count, value in zip(counts, before, strict=True):
            count.copy_(value + 1)

    def frozen_rate(step: Any) -> None:
        step.own(lr=step.memory.setdefault("lr", step.optimizer.param_groups[0]["lr"]))

    def frozen_weights(step: Any) -> None:
        kept = step.parameters[3].detach().clone()
        step.own()
        with torch.no_grad():
            step.parameters[3].copy_(kept)

    def twice(step: Any) -> None:
        kept = step.parameters[5].detach().clone()
        step.own()
        with torch.no_grad():
            step.parameters[5].mul_(2).sub_(kept)

    def coupled(step: Any) -> None:
        decay = step.optimizer.param_groups[0]["weight_decay"]
        for one in step.parameters:
            one.grad.add_(one.detach(), alpha=decay)
        step.own(weight_decay=0.0)

    def stuck(name: str) -> Callable[[Any], None]:
        def change(step: Any) -> None:
            before = {one: state[name].clone() for one, state in step.optimizer.state.items()}
            step.own()
            for one, value in before.items():
                step.optimizer.state[one][name].copy_(value)

        return change

    def forgets(step: Any) -> None:
        step.optimizer.state.clear()
        step.own()

    def coarse(step: Any) -> None:
        step.own()
        for state in step.optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())

    def once_more(step: Any) -> None:
        step.own()
        for state in step.optimizer.state.values():
            state["step"].sub_(1) if step.steps % 2 else None

    given: list[tuple[str, Callable[[Any], None]]] = [
        ("AdamW's betas 0.5/0.9", own(betas=(0.5, 0.9))),
        ("AdamW's second beta 0.99", own(betas=(0.9, 0.99))),
        ("bias correction stuck at step 1", uncorrected),
        ("weight decay left out", own(weight_decay=0.0)),
        ("weight decay 10% too small", own(weight_decay=0.009)),
        ("weight decay added to the gradient", coupled),
        ("epsilon 1e-5 for 1e-8", own(eps=1e-5)),
        ("learning rate of the first step for ever", frozen_rate),
        ("learning rate 1% too large", lambda step: step.own(lr=1.01 * step.optimizer.param_groups[0]["lr"])),
        ("one tensor never updated", frozen_weights),
        ("one tensor updated twice", twice),
        ("second moment never updated", stuck("exp_avg_sq")),
        ("state forgotten at each step", forgets),
        ("first moment kept in bfloat16", coarse),
        ("every other step not counted", once_more),
    ]
    return [
        Planted(name=name, kind="optimizer", plant=lambda change=change: FaultyStep(step=change))  # type: ignore[misc]
        for name, change in given
    ]


def _buffers() -> list[Planted]:
    def after(change: Callable[[Tensor, Tensor], Any], part: str) -> Fault:
        def fault(call: Call) -> list[Any]:
            places = call.at(part)
            before = [call.inputs[place].clone() for place in places]
            out = call.run()
            for place, old in zip(places, before, strict=True):
                if call.training:
                    change(call.inputs[place].data, old)  # behind autograd's back, as a kernel does
            return out

        return fault

    def momentum(graph: GraphModule) -> None:
        for node in nodes(graph, "batch_norm"):
            if node.op == "call_function":
                node.args = (*node.args[:6], 0.2, *node.args[7:])

    given: list[tuple[str, Callable[[], Strategy]]] = [
        ("running means zeroed", lambda: regional(after(lambda now, _: now.zero_(), "running_mean"))),
        ("running variances never updated", lambda: regional(after(lambda now, old: now.copy_(old), "running_var"))),
        ("running statistics move twice as fast", lambda: regional(edit=momentum)),
        ("variances of the batch biased", lambda: regional(after(_biased, "running_var"))),
        ("batches not counted", lambda: regional(after(lambda now, old: now.copy_(old), "num_batches"))),
    ]
    return [Planted(name=name, kind="buffer", plant=plant, module={"statistics": True}) for name, plant in given]


def _biased(now: Tensor, before: Tensor) -> None:
    unbiased = (now - 0.9 * before) / 0.1
    now.copy_(0.9 * before + 0.1 * unbiased * (63 / 64))


def _random() -> list[Planted]:
    def rate(value: float, training: bool = True) -> Edit:
        def edit(graph: GraphModule) -> None:
            for node in nodes(graph, "dropout"):
                if node.op == "call_function":
                    node.args = (node.args[0], value, training, False)

        return edit

    def same_mask(call: Call) -> list[Any]:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return call.run()

    def drawn_apart(fault: Fault) -> Fault:
        """As Inductor does: numbers that are not eager's, under the same seed."""

        def other(call: Call) -> list[Any]:
            seed = int(torch.randint(2**31, ()))
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return fault(call)

        return other

    def unscaled(graph: GraphModule) -> None:
        for node in nodes(graph, "dropout"):
            if node.op == "call_function":
                node.target = lambda one, rate, *_: functional.dropout(one, rate) * (1 - rate)
                node.args = node.args[:2]

    given: list[tuple[str, Callable[[], Strategy]]] = []
    for words, wrapped in (("", lambda fault: fault), (", other draws than eager's", drawn_apart)):
        given += [
            (f"dropout left out{words}", lambda wrapped=wrapped: regional(wrapped(Call.run), rate(0.0, False))),  # type: ignore[misc]
            (f"dropout of 0.5 for 0.1{words}", lambda wrapped=wrapped: regional(wrapped(Call.run), rate(0.5))),  # type: ignore[misc]
            (f"dropout not scaled up{words}", lambda wrapped=wrapped: regional(wrapped(Call.run), unscaled)),  # type: ignore[misc]
        ]
    given.append(("a mask that never changes", lambda: regional(same_mask)))
    return [Planted(name=name, kind="random", plant=plant, module={"dropout": 0.1}) for name, plant in given]


def _graphs() -> list[Planted]:
    """Wrong graphs of their own: validation's, a shape's, one that goes wrong later."""

    def when(holds: Callable[[Call], bool], change: Callable[[Tensor], Tensor] = lambda one: one * 1.1) -> Fault:
        return lambda call: floating(call.run(), change) if holds(call) else call.run()

    def frozen(call: Call) -> list[Any]:
        for place in call.at("parameters"):
            key = (call.names[place], id(call.inputs[place]))
            kept = call.memory.setdefault(str(key), call.inputs[place].detach().clone())
            call.inputs[place] = call.inputs[place] + (kept - call.inputs[place]).detach()
        return call.run()

    def batch_statistics(graph: GraphModule) -> None:
        for node in nodes(graph, "batch_norm"):
            if node.op == "call_function":
                node.args = (node.args[0], None, None, *node.args[3:5], True, *node.args[6:])

    def in_eval(edit: Edit) -> Edit:
        return lambda graph: None if torch.is_grad_enabled() else edit(graph)

    def dropping(graph: GraphModule) -> None:
        for node in nodes(graph, "dropout"):
            if node.op == "call_function":
                node.args = (node.args[0], 0.1, True, False)

    def late(step: Any) -> None:
        step.own(lr=step.optimizer.param_groups[0]["lr"] * (1.0 if step.steps < 12 else 2.0))

    statistics, dropout = {"statistics": True}, {"dropout": 0.1}
    return [
        Planted(name="weights of the first call for ever", kind="graph", plant=lambda: regional(frozen)),
        Planted(
            name="validation's graph 10% off",
            kind="graph",
            plant=lambda: regional(when(lambda call: not call.training)),
        ),
        Planted(
            name="validation by the batch's statistics",
            kind="graph",
            plant=lambda: regional(edit=in_eval(batch_statistics)),
            module=statistics,
        ),
        Planted(
            name="dropout in validation", kind="graph", plant=lambda: regional(edit=in_eval(dropping)), module=dropout
        ),
        Planted(
            name="wrong from the second call on",
            kind="graph",
            plant=lambda: regional(when(lambda call: call.number > 1)),
        ),
        *(
            Planted(name=name, kind="later", guard="audit", plant=plant, lengths=lengths, rows=rows)
            for name, plant, lengths, rows in (
                ("another length wrong", lambda: regional(when(lambda call: call.length != 8)), (8, 12), (8,)),
                (
                    "one bucket of three wrong",
                    lambda: regional(when(lambda call: call.length == 16)),
                    (8, 12, 16),
                    (8,),
                ),
                ("a smaller batch wrong", lambda: regional(when(lambda call: call.rows < 8)), (8,), (8, 8, 5)),
                ("wrong after the gate", lambda: regional(when(lambda call: call.number > LATER)), (8,), (8,)),
                ("learning rate doubled after the gate", lambda: FaultyStep(step=late), (8,), (8,)),
            )
        ),
    ]


CATALOGUE = [*_kernels(), *_gradients(), *_optimizers(), *_buffers(), *_random(), *_graphs()]
