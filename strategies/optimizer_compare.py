"""Time the compiled update against torch's own forms, on copies, so that a slower one is not kept quiet."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strategies.optimizer_plan import numbers_of
from strategies.optimizer_update import FunctionalUpdate

ROUNDS, STEPS = 5, 4
COPIES = 9
"""Copies of the parameters that the comparison holds at most: parameters, gradients, states of three optimizers."""


def compare(update: FunctionalUpdate) -> dict[str, Any]:
    """Milliseconds of a step on the GPU, host included, as compiled, ``fused=True`` and ``foreach=True``.

    The arms take turns on copies of as many parameters as half the free memory holds (``compared_tensors``). A form
    that the optimizer does not have is None, and all are None off a GPU or where a form refuses these parameters
    (``not_compared`` says why).
    """
    names = ("compiled_milliseconds", "fused_milliseconds", "foreach_milliseconds")
    facts: dict[str, Any] = dict.fromkeys((*names, "compared_tensors", "not_compared"))
    parameters = [p for group in update.optimizer.param_groups for p in group["params"] if p.grad is not None]
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or (device := devices.pop()).type != "cuda":
        return facts
    arms: dict[str, Callable[[], Any]] = {}
    chosen = _that_fit(parameters, torch.cuda.mem_get_info(device)[0] / 2)
    if not chosen:
        facts["not_compared"] = "copies of not one parameter fit into half of the free memory"
        return facts
    try:
        arms, tensors = _arms(update, chosen)
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(ROUNDS + 1):
            for name, step in arms.items():
                times[name].append(_milliseconds(step))
        facts.update({name: round(statistics.median(values[1:]), 4) for name, values in times.items()})
        facts["compared_tensors"] = tensors
    except RuntimeError as error:  # out of memory is one
        facts["not_compared"] = str(error).splitlines()[0]
    finally:
        arms = {}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # the copies are not what the run needs
    return facts


def verdict(facts: dict[str, Any]) -> str | None:
    """A line for the user where ``fused=True`` is faster."""
    compiled, fused = facts["compiled_milliseconds"], facts["fused_milliseconds"]
    if compiled is None or fused is None or fused >= compiled:
        return None
    return (
        f"optimizer: fused=True is faster here ({fused:.2f} ms against {compiled:.2f} ms a step): "
        "leave compile.optimizer out and give the optimizer fused=True"
    )


def _that_fit(parameters: list[Tensor], room: float) -> set[Tensor]:
    chosen: set[Tensor] = set()
    for parameter in parameters:
        room -= COPIES * parameter.nbytes
        if room < 0:
            break
        chosen.add(parameter)
    return chosen


def _arms(update: FunctionalUpdate, chosen: set[Tensor]) -> tuple[dict[str, Callable[[], Any]], int]:
    groups, places = [], {}
    for group in update.optimizer.param_groups:
        copies = []
        for parameter in group["params"]:
            if parameter not in chosen:
                continue
            copy = parameter.detach().clone().requires_grad_()
            copy.grad = torch.randn_like(parameter.grad) * 1e-3
            copies.append(copy)
            if parameter in update.places:
                places[copy] = update.places[parameter]
        if copies:
            groups.append({**numbers_of(group), "params": copies})
    kind: Any = type(update.optimizer)

    def optimizer(**forms: bool) -> Any:
        known = {name: value for name, value in forms.items() if name in groups[0]}
        return kind([{**group, "capturable": False, **known} for group in groups])

    compiled = update.sibling(optimizer(fused=False, foreach=False), places)

    def step_compiled() -> None:
        with torch.no_grad():
            compiled()

    arms: dict[str, Callable[[], Any]] = {"compiled_milliseconds": step_compiled}
    if "foreach" in groups[0]:
        arms["foreach_milliseconds"] = optimizer(fused=False, foreach=True).step
    if "fused" in groups[0] and all(copy.is_floating_point() for group in groups for copy in group["params"]):
        arms["fused_milliseconds"] = optimizer(fused=True, foreach=False).step
    return arms, sum(len(group["params"]) for group in groups)


def _milliseconds(step: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS
