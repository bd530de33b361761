"""The catalogue of faults, each a few lines, with the step in which it begins and the step by which it must be found:

    python -m tests.promises.faults [--bf16] [NAME OR KIND ...]

The first checks find what is wrong from the first call on. Audits come at steps 2, 4, 8, 16, 32 and so on, one kind of
region a step, before checkpoints and at the last step; a difference counts when it shows twice.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from crucible import RunRecord, Strategy
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from tests.promises.architectures import alarm
from tests.promises.planted import (
    LENGTH,
    ROWS,
    Call,
    Clock,
    Edit,
    Fault,
    Small,
    batches,
    floating,
    gradient,
    nodes,
    optimizer,
    regional,
    stale_gradient,
    swapped,
    whole,
    written,
)
from tests.promises.training import Outcome, apart, train


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One fault."""

    name: str
    kind: str
    plant: Callable[[int], list[Strategy]]
    """Given the step in which it begins."""
    begins: int = 1
    by: int = 4
    """The step by which it must be found: with a second look, and one for each kind of region."""
    steps: int = 6
    """The length of the training."""
    module: dict[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = (LENGTH,)
    rows: Sequence[int] = (ROWS,)
    only_single: bool = False
    """Whether it is no fault in bfloat16, where eager rounds as much."""
    validates: bool = False
    ruins: bool = False
    """Whether weights are no numbers from then on, eager's results neither: it is enough that no audit says clean."""


# ---- what is wrong from the first call on ---------------------------------------------------------------------------


def _keyword(name: str, **changes: Any) -> Edit:
    def edit(graph: GraphModule) -> None:
        for node in nodes(graph, name):
            node.kwargs = {**node.kwargs, **changes}

    return edit


def _argument(name: str, place: int, value: Any) -> Edit:
    def edit(graph: GraphModule) -> None:
        for node in nodes(graph, name):
            if node.op == "call_function":
                node.args = (*node.args[:place], value, *node.args[place + 1 :])

    return edit


def _without_residual(graph: GraphModule) -> None:
    node = nodes(graph, "add_1")[-1]
    node.replace_all_uses_with(node.args[1])


def _outputs(change: Callable[[Tensor], Tensor], when: Callable[[Call], bool] = lambda call: True) -> Fault:
    return lambda call: floating(call.run(), change) if when(call) else call.run()


def _without_bias(call: Call) -> list[Any]:
    for place in call.at("out_parameters_bias"):
        call.inputs[place] = torch.zeros_like(call.inputs[place]) + 0 * call.inputs[place]
    return call.run()


def _wrong_rows(one: Tensor) -> Tensor:
    return torch.cat([one[:-1], one[:1]])


def _one_nan(one: Tensor) -> Tensor:
    return one + torch.zeros_like(one).index_fill_(-1, torch.tensor([3]), float("nan"))


def _dead_channel(one: Tensor) -> Tensor:
    return one * torch.ones(one.shape[-1]).index_fill_(0, torch.tensor([5]), 0.0)


def _stale(call: Call) -> list[Any]:
    """The results of the call before."""
    out = call.run()
    before = call.memory.get("out")
    call.memory["out"] = [one.detach() for one in out]
    if before is None or [one.shape for one in before] != [one.shape for one in out]:
        return out
    return [one + (old - one).detach() for one, old in zip(out, before, strict=True)]


def _frozen(call: Call) -> list[Any]:
    """The weights of the first call for ever."""
    for place in call.at("parameters"):
        key = (call.names[place], call.inputs[place].data_ptr())
        kept = call.memory.setdefault(key, call.inputs[place].detach().clone())
        call.inputs[place] = call.inputs[place] + (kept - call.inputs[place]).detach()
    return call.run()


def _without_row(one: Tensor) -> Tensor:
    return torch.cat([one[:-1], torch.zeros_like(one[-1:])])


def _half(one: Tensor) -> Tensor:
    return one * (torch.arange(one.shape[-1]) < one.shape[-1] // 2)


FORWARD: dict[str, tuple[Fault, Edit | None]] = {
    "output 1% too large": (_outputs(lambda one: one * 1.01), None),
    "output 0.1% too large": (_outputs(lambda one: one * 1.001), None),
    "one of sixteen channels left at zero": (_outputs(_dead_channel), None),
    "last row computed from the first one's": (_outputs(_wrong_rows), None),
    "one column is not a number": (_outputs(_one_nan), None),
    "output rounded to bfloat16": (_outputs(lambda one: one.bfloat16().float()), None),
    "a bias left out": (_without_bias, None),
    "tanh's approximation of GELU": (
        Call.run_faulty,
        swapped("gelu", lambda one: functional.gelu(one, approximate="tanh")),
    ),
    "ReLU for GELU": (Call.run_faulty, swapped("gelu", functional.relu)),
    "a norm's epsilon a thousand times too large": (Call.run_faulty, _argument("layer_norm", 4, 1e-2)),
    "a residual connection left out": (Call.run_faulty, _without_residual),
    "attention not causal": (Call.run_faulty, _keyword("scaled_dot_product", is_causal=False)),
    "attention's scale twice as large": (Call.run_faulty, _keyword("scaled_dot_product", scale=0.5)),
}
ONLY_SINGLE = {"output 0.1% too large", "output rounded to bfloat16", "tanh's approximation of GELU"}
ALL = ("parameters", "l_args_0")
BACKWARD: dict[str, Fault] = {
    "all gradients 1% too large": gradient(lambda one: one * 1.01, *ALL),
    "all gradients doubled": gradient(lambda one: one * 2, *ALL),
    "gradients of the inputs 1% too large": gradient(lambda one: one * 1.01, "l_args_0"),
    "gradients of the inputs 10% too large": gradient(lambda one: one * 1.1, "l_args_0"),
    "half of the gradients halved": gradient(lambda one: one * 0.5, "mix_parameters_weight", "out_parameters_weight"),
    "half of a bias's gradient": gradient(_half, "out_parameters_bias"),
    "a bias's gradient halved": gradient(lambda one: one * 0.5, "up_parameters_bias"),
    "one weight's gradient 1% too large": gradient(lambda one: one * 1.01, "up_parameters_weight"),
    "a small parameter's gradient times 0.01": gradient(lambda one: one * 0.01, "norm_parameters_bias"),
    "a small parameter's gradient times 10": gradient(lambda one: one * 10, "norm_parameters_bias"),
    "a gradient lost": gradient(torch.zeros_like, "out_parameters_bias"),
    "a gradient transposed": gradient(lambda one: one.t(), "up_parameters_weight"),
    "a gradient's sign turned": gradient(torch.neg, "out_parameters_weight"),
    "a gradient added twice": gradient(lambda one: 2 * one, "mix_parameters_bias"),
    "a gradient with one row missing": gradient(_without_row, "mix_parameters_weight"),
    "a gradient that is not a number": gradient(lambda one: one * float("nan"), "up_parameters_bias"),
}
ONLY_SINGLE |= {"gradients of the inputs 1% too large", "one weight's gradient 1% too large"}


def _restored(now: Tensor, old: Tensor, number: int) -> None:
    now.copy_(old)


def _zeroed(now: Tensor, old: Tensor, number: int) -> None:
    now.zero_()


def _biased(now: Tensor, old: Tensor, number: int) -> None:
    now.copy_(0.9 * old + (now - 0.9 * old) * (63 / 64))


ONLY_SINGLE |= {"variances of the batch biased"}
BUFFERS: dict[str, tuple[Fault, Edit | None]] = {
    "running means zeroed": (written(_zeroed, "running_mean"), None),
    "running variances never updated": (written(_restored, "running_var"), None),
    "variances of the batch biased": (written(_biased, "running_var"), None),
    "batches not counted": (written(_restored, "num_batches"), None),
    "running statistics move twice as fast": (Call.run_faulty, _argument("batch_norm", 6, 0.2)),
}


def _unscaled(graph: GraphModule) -> None:
    for node in nodes(graph, "dropout"):
        if node.op == "call_function":
            node.target = lambda one, rate, *_: functional.dropout(one, rate) * (1 - rate)
            node.args = node.args[:2]


def _rate(value: float, training: bool = True) -> Edit:
    def edit(graph: GraphModule) -> None:
        for node in nodes(graph, "dropout"):
            if node.op == "call_function":
                node.args = (node.args[0], value, training, False)

    return edit


def _same_mask(call: Call) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return call.run()


def _drawn_apart(call: Call) -> list[Any]:
    """As Inductor does: numbers that are not eager's, under the same seed."""
    seed = int(torch.randint(2**31, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return call.run_faulty()


RANDOM: dict[str, tuple[Fault, Edit | None]] = {"a mask that never changes": (_same_mask, None)}
for _words, _drawn in (("", Call.run_faulty), (", other draws than eager's", _drawn_apart)):
    RANDOM[f"dropout left out{_words}"] = (_drawn, _rate(0.0, False))
    RANDOM[f"dropout of 0.5 for 0.1{_words}"] = (_drawn, _rate(0.5))
    RANDOM[f"dropout not scaled up{_words}"] = (_drawn, _unscaled)


def _in_eval(edit: Edit) -> Edit:
    return lambda graph: None if torch.is_grad_enabled() else edit(graph)


def _batch_statistics(graph: GraphModule) -> None:
    for node in nodes(graph, "batch_norm"):
        if node.op == "call_function":
            node.args = (node.args[0], None, None, *node.args[3:5], True, *node.args[6:])


EVALUATION: dict[str, tuple[Fault, Edit | None, dict[str, Any]]] = {
    "validation's graph 10% off": (_outputs(lambda one: one * 1.1, lambda call: not call.training), None, {}),
    "validation's graph 1% off": (_outputs(lambda one: one * 1.01, lambda call: not call.training), None, {}),
    "validation by the batch's statistics": (Call.run_faulty, _in_eval(_batch_statistics), {"statistics": True}),
    "dropout in validation": (Call.run_faulty, _in_eval(_rate(0.1)), {"dropout": 0.1}),
}


# ---- the optimizer's step: what a graph writes ----------------------------------------------------------------------


def _further(factor: float) -> Callable[[Tensor, Tensor, int], None]:
    def change(now: Tensor, old: Tensor, number: int) -> None:
        if now.is_floating_point():
            now.copy_(old + factor * (now - old))

    return change


def _only(at: int, change: Callable[[Tensor, Tensor, int], None]) -> Callable[[Tensor, Tensor, int], None]:
    def changed(now: Tensor, old: Tensor, number: int) -> None:
        if number == at:
            change(now, old, number)

    return changed


def _nan(now: Tensor, old: Tensor, number: int) -> None:
    if now.is_floating_point():
        now.view(-1)[0] = float("nan")


def _coarse(now: Tensor, old: Tensor, number: int) -> None:
    if now.is_floating_point() and now.dim():
        now.copy_(now.bfloat16())


def _half_written(now: Tensor, old: Tensor, number: int) -> None:
    if now.dim():
        now[len(now) // 2 :] = old[len(now) // 2 :]


STEPS: dict[str, Fault] = {
    "everything written goes 1% too far": written(_further(1.01)),
    "everything written twice": written(_further(2.0)),
    "nothing is written": written(_restored),
    "one tensor never written": written(_only(0, _restored)),
    "another tensor never written": written(_only(2, _restored)),
    "one tensor written twice": written(_only(1, _further(2.0))),
    "one tensor written in half": written(_only(0, _half_written)),
    "one number is not a number": written(_only(0, _nan)),
    "all rounded to bfloat16": written(_coarse),
    "one tensor 10% too far": written(_only(0, _further(1.1))),
}


# ---- the table ------------------------------------------------------------------------------------------------------

LATE = {5: (12, 16), 8: (20, 24), 20: (38, 40)}
"""By the step in which a fault begins: by which it is found, and how long the training is."""


def _catalogue() -> list[Planted]:
    table: list[Planted] = []

    def add(name: str, kind: str, plant: Callable[[int], list[Strategy]], **more: Any) -> None:
        table.append(Planted(name=name, kind=kind, plant=plant, only_single=rounds(name), **more))

    def rounds(name: str) -> bool:
        return name.partition(", under")[0] in ONLY_SINGLE

    def late(
        name: str, kind: str, plant: Callable[[int], list[Strategy]], *, at: Sequence[int] = (), **more: Any
    ) -> None:
        for begins in at or LATE:
            by, steps = LATE[begins]
            given = {"begins": begins, "by": by, "steps": steps, "ruins": "not a number" in name, **more}
            words = f"{name}, from step {begins}"
            table.append(Planted(name=words, kind="later", plant=plant, only_single=rounds(name), **given))

    def region(fault: Fault, edit: Edit | None = None, how: Any = regional) -> Callable[[int], list[Strategy]]:
        return lambda begins: how(fault, edit, begins=begins)

    for name, (fault, edit) in FORWARD.items():
        add(name, "forward", region(fault, edit))
        at = () if name in ("output 1% too large", "one column is not a number", "ReLU for GELU") else (5,)
        late(name, "forward", region(fault, edit), at=at)
    for name, backward in BACKWARD.items():
        add(name, "gradient", region(backward))
        late(name, "gradient", region(backward), at=() if "all" in name or "number" in name or "half" in name else (5,))
    for name, (fault, edit) in BUFFERS.items():
        add(name, "buffer", region(fault, edit), module={"statistics": True})
        late(name, "buffer", region(fault, edit), at=(5, 20), module={"statistics": True})
    for name, (fault, edit) in RANDOM.items():
        add(name, "random", region(fault, edit), module={"dropout": 0.1})
        late(name, "random", region(fault, edit), at=(5,), module={"dropout": 0.1})
    for name, (fault, edit, module) in EVALUATION.items():
        # Validation comes after steps 4, 8, 12 and so on: the first look at 4, the second at 8.
        add(name, "evaluation", region(fault, edit), module=module, validates=True, by=8, steps=10)
        late(name, "evaluation", region(fault, edit), at=(8, 20), module=module, validates=True)
    for name, fault in STEPS.items():
        for sgd in (False, True):
            words = f"{name}, {'SGD' if sgd else 'AdamW'}"
            add(words, "optimizer", lambda begins, fault=fault: optimizer(fault, begins=begins), module={"sgd": sgd})
        late(name, "optimizer", lambda begins, fault=fault: optimizer(fault, begins=begins))
    for name in ("output 1% too large", "ReLU for GELU", "one column is not a number"):
        for how in (regional, whole):
            fault, edit = FORWARD[name]
            add(
                f"code for another number: {name}, {how.__name__}",
                "anew",
                lambda begins, fault=fault, edit=edit, how=how: how(fault, edit, begins=begins, anew=True),
                module={"scaled_from": 7},
                begins=7,
                by=8,
                steps=10,
            )
    add("results of the call before", "memory", region(_stale), by=6, steps=8)
    add("a gradient of the call before", "memory", region(stale_gradient("up_parameters_weight")), by=6, steps=8)
    add("weights of the first call for ever", "memory", region(_frozen), by=6, steps=8)
    late("results of the call before", "memory", region(_stale))
    late("weights of that call for ever", "memory", region(_frozen))
    for name, (fault, edit) in list(FORWARD.items())[:5]:
        add(f"{name}, under whole", "forward", region(fault, edit, whole))
    for name, backward in list(BACKWARD.items())[:2]:
        late(f"{name}, under whole", "gradient", region(backward, None, whole))
    another = {
        "another length wrong": (lambda call: call.batch[1] != LENGTH, (8, 12), (ROWS,)),
        "one bucket of three wrong": (lambda call: call.batch[1] == 16, (8, 12, 16), (ROWS,)),
        "a smaller batch wrong": (lambda call: call.batch[0] < ROWS, (LENGTH,), (8, 8, 5)),
    }
    for name, (when, lengths, rows) in another.items():
        fault = _outputs(lambda one: one * 1.1, when)
        add(name, "shape", region(fault), lengths=lengths, rows=rows, by=8, steps=10)
        late(name, "shape", region(fault), lengths=lengths, rows=rows)
    return table


CATALOGUE = _catalogue()


# ---- planting -------------------------------------------------------------------------------------------------------

SAID = re.compile(r"not eager's|differ|is not torch's|not that of")


def found_at(record: RunRecord) -> int | None:
    """The step in which a difference was called one; None where none was."""
    steps = [event.step or 0 for event in record.events if event.kind == "fallback" and SAID.search(event.reason)]
    if steps:
        return min(steps) + 1
    if alarm(record) is not None:
        return max(record.audits.steps, default=1) if record.audits is not None else 1
    if any(SAID.search(reason) for reason in record.eager_parts.values()):
        return record.steps
    return None


def plant(fault: Planted, *, bf16: bool = False, on_difference: str = "eager", healthy: bool = False) -> Outcome:
    """Train with the fault, or ``healthy``: eager, without the callback."""
    Clock.step = 0
    return train(
        lambda: Small(**fault.module),
        None if healthy else fault.plant(fault.begins),
        data=batches(fault.steps, fault.lengths, fault.rows),
        validation=batches(1) if fault.validates else None,
        callbacks=[Clock()],
        compile_options={"on_difference": on_difference},
        precision="bf16-mixed" if bf16 else "32-true",
        **({"val_check_interval": 4} if fault.validates else {}),
    )


def _called_clean(record: RunRecord, begins: int) -> bool:
    audits = record.audits
    return audits is not None and (audits.last_clean_step or 0) >= begins


_HEALTHY: dict[str, list[float]] = {}


def _healthy(fault: Planted, *, bf16: bool) -> list[float]:
    """Losses of the same training without the fault, which is made once for all faults that are planted into it."""
    key = repr((fault.module, fault.steps, fault.lengths, fault.rows, fault.validates, bf16))
    if key not in _HEALTHY:
        _HEALTHY[key] = plant(fault, bf16=bf16, healthy=True).losses
    return _HEALTHY[key]


def missed(fault: Planted, outcome: Outcome) -> str | None:
    """How a fault was not found as it must be; None where it was."""
    if outcome.ended is not None or outcome.steps != fault.steps:
        return f"the run did not finish: {outcome.end}"
    step = found_at(outcome.record)
    if step is None and fault.ruins and not _called_clean(outcome.record, fault.begins):
        return None
    if step is None:
        return f"NOT FOUND; {outcome.record.eager_parts or ''} {outcome.record.notes[-2:]}"
    if step > fault.by:
        return f"found at step {step} of {fault.steps}, it begins at {fault.begins} and was to be found by {fault.by}"
    if step < fault.begins:
        return f"FALSE ALARM at step {step}, it begins at {fault.begins}"
    if fault.validates and (outcome.record.eager_parts or not outcome.record.eager_evaluations):
        return f"found at step {step}, and what trains ran eager: {outcome.record.eager_parts}"
    if fault.kind == "anew" or (
        fault.begins == 1 and fault.kind in ("forward", "gradient", "buffer", "optimizer", "random")
    ):
        expected = _healthy(fault, bf16=outcome.trainer.precision != "32-true")
        if (distance := apart(outcome.losses, expected)) > 1e-5:
            return f"found at step {step}, and trained with before: losses are {distance:.1e} apart from eager's"
    return None


def main() -> None:
    """Plant them all, or some; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    found = tried = 0
    for fault in CATALOGUE:
        if given.names and not any(name in fault.name or name == fault.kind for name in given.names):
            continue
        if given.bf16 and fault.only_single:
            continue
        tried += 1
        outcome = plant(fault, bf16=given.bf16)
        wrong = missed(fault, outcome)
        found += wrong is None
        step = outcome.record and found_at(outcome.record)
        print(f"{'ok ' if wrong is None else '** '} {fault.kind}: {fault.name}: {wrong or f'step {step}'}", flush=True)
    print(f"RESULT {'bf16' if given.bf16 else 'fp32'}: {found} of {tried} faults found in time")


if __name__ == "__main__":
    main()
