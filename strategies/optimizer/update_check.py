"""A compiled step compared with torch's own: a pure function of parameters, gradients and state.

The compiled functions run on copies, torch's own step on the parameters themselves, so that a step that is checked is
eager's, whatever comes of it. The tolerance comes from the same step in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strategies.device_memory import free_bytes
from strategies.optimizer.calls import FORMS, Call, Lists, Reader
from strategies.tolerance import SINGLE, Difference, compare

MAX_EXACT = 1 << 20
"""Elements of a tensor beyond which its step is not made once more in double precision."""
SHARE = 0.5
"""Of the memory that is free on a device, for copies."""
NO_MEMORY = "there is no memory for copies"


@dataclass(slots=True, kw_only=True)
class Sample:
    """The parts of a chunk: what a step works on, and copies of it."""

    lists: list[Lists]
    """Those of the optimizer, which torch's own step updates."""
    before: list[Lists]
    seen: list[Lists]
    """What the compiled function updates."""
    counted: list[int | None]
    """Of each part, the place of the list of step counts where these are counted on the host."""


def sample_of(lists: Sequence[Lists], *, counted: list[int | None]) -> Sample:
    """Gradients are no copies where the compiled function only reads them; torch's own may add momentum to them."""
    before = [tuple(map(copies, each)) for each in lists]
    seen = [(copies(each[0]), each[1], *map(copies, each[2:])) for each in lists]
    return Sample(lists=list(lists), before=before, seen=seen, counted=counted)


def fits_memory(tensors: Sequence[Any]) -> bool:
    """Whether there is room for copies of ``tensors``."""
    on_cuda = [one for one in tensors if isinstance(one, Tensor) and one.is_cuda]
    if not on_cuda:
        return True
    return 2 * sum(one.nbytes for one in on_cuda) <= SHARE * free_bytes(on_cuda[0].device)


@torch.no_grad()
def copies(tensors: Sequence[Any]) -> list[Any]:
    return [None if one is None else copied(one) for one in tensors]


def copied(tensor: Tensor) -> Tensor:
    """Of the same class, shape and strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def compared(
    sample: Sample, calls: Sequence[Call], reader: Reader, names: Mapping[int, str], multiple: float
) -> list[Difference]:
    """After torch's own step: how far ``sample.seen`` is from it; ``multiple`` as of ``compare``."""
    parts = zip(sample.before, calls, strict=True)
    exact = [exactly(before, call, reader) for before, call in parts]
    arms = (sample.lists, sample.seen, exact, sample.before)
    expected, seen, more, starts = (_named(sample, arm, reader, names) for arm in arms)
    found: list[Difference] = []
    for (kind, name), value in expected.items():
        # Each by its own scale: elements have nothing to do with each other, so that nothing cancels out.
        own = [{name: arm[kind, name]} if (kind, name) in arm else {} for arm in (seen, more, starts)]
        found += compare(kind, {name: value}, own[0], own[1], starts=own[2], multiple=multiple)
    return found


def _named(
    sample: Sample, arm: Sequence[Lists], reader: Reader, names: Mapping[int, str]
) -> dict[tuple[str, str], Tensor]:
    """The tensors in the lists of ``arm`` by kind (``weight``, or as torch's function calls the list) and name."""
    found: dict[tuple[str, str], Tensor] = {}
    for owners, counted, lists in zip(sample.lists, sample.counted, arm, strict=True):
        for place, (argument, values) in enumerate(zip(reader.arguments, lists, strict=False)):
            if place not in (1, counted):
                for owner, value in zip(owners[0], values, strict=False):
                    if value is not None:
                        name = names.get(id(owner), "a parameter that is not the module's")
                        found["weight" if place == 0 else argument, name] = value.detach()
    return found


@torch.no_grad()
def exactly(before: Lists, call: Call, reader: Reader) -> Lists:
    """What the step leaves of ``before`` in double precision, of tensors that are not very large.

    On a GPU bias corrections are computed in single precision, as torch does with ``capturable=True``: ``1 - beta**t``
    is off by a rounding or two of one. There the weights are those of betas that are off by two.
    """
    parameters = before[0]
    kept = [index for index, one in enumerate(parameters) if one.numel() <= MAX_EXACT and one.device.type != "mps"]
    nothing: Lists = tuple([None] * len(each) for each in before)
    if not kept:
        return nothing
    lists = _stepped(before, kept, call, reader, 0.0)
    if parameters[0].is_cuda and parameters[0].dtype != torch.float64 and "beta2" in call.options:
        lists[0] = _stepped(before, kept, call, reader, 2 * SINGLE)[0]
    for each, exact in zip(nothing, lists, strict=True):
        for index, value in zip(kept, exact, strict=False):
            each[index] = value
    return nothing


def _stepped(before: Lists, kept: list[int], call: Call, reader: Reader, rounding: float) -> list[list[Any]]:
    lists: list[list[Any]] = [[in_float64(each[index]) for index in kept] if each else [] for each in before]
    if reader.steps is not None:
        lists[reader.steps] = [one.cpu() for one in lists[reader.steps]]
    options = {
        name: float(value) if isinstance(value, Tensor) else value
        for name, value in call.options.items()
        if name not in FORMS
    }
    options |= {name: options[name] * (1 - rounding) for name in ("beta1", "beta2") if name in options}
    reader.function(*lists, **options, **{name: False for name in FORMS if name in reader.arguments})
    return lists


def in_float64(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().clone()
