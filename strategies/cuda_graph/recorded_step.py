"""Recorded step: a real step that ran without its graph, with all that it began with and left, for the graph to repeat.

The graph replays the recorded batch from the recorded tensors and has to leave the same. Both run the same kernels, so
that they agree to the last bit where no kernel adds up in an order of its own; where one does, a second replay shows
how far such a step is from itself. Afterwards the present tensors have their contents back. No Python of the user's
runs for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strategies.compile_errors import is_out_of_memory
from strategies.device_memory import free_bytes
from strategies.tolerance import MULTIPLES, SINGLE, UNCALIBRATED, Difference, compare, differing, exceeding

Left = Mapping[str, Mapping[str, Tensor]]
"""Tensors by kind (``loss``, ``weight``, ...) and name."""

DEVICE_SHARE = 0.5
"""Of the device's free memory that the copies of a step may take; larger ones are kept on the host."""
HOST_SHARE = 0.25
"""Of the host's."""
NOISY = 1 / 16
"""Difference of two runs of one step in an element of the mean gradient, relative, from which on it is all rounding."""
BY_MEAN = 2.0
"""Times the relative difference of an element of the mean gradient that its step may differ."""
FURTHER_REPLAYS = 6
"""Where replays differ from each other, before a difference from the step counts: two may be close by chance."""
COPIES = 4
"""Of the state of a step that exist at once: what it began with, what it left, the present, and one replay."""


def local_shard(tensor: Tensor) -> Tensor:
    """This process's part of a sharded one (DTensor)."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def free_memory(device: torch.device) -> tuple[float, float]:
    """Free bytes of ``device``, and of the host for each of its devices."""
    host = float("inf")
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        host = float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # no Linux
        pass
    if device.type != "cuda":
        return host, host
    return float(free_bytes(device)), host / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Copies:
    """Contents of ``tensors``, on their device or on the host."""

    def __init__(self, tensors: Sequence[Tensor], *, on_host: bool) -> None:
        self.tensors = [local_shard(one).detach() for one in tensors]
        with torch.no_grad():
            if on_host:
                self.kept = [one.to("cpu", copy=True) for one in self.tensors]
            else:
                self.kept = [one.clone() for one in self.tensors]

    def restore(self) -> None:
        """In place, and by ``data``: the contents are what they were, so that no version is counted."""
        with torch.no_grad():
            targets = [one.data for one in self.tensors]
            if targets:
                torch._foreach_copy_(targets, self.kept)

    def still_those(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` lie where the copied ones lay."""
        return len(tensors) == len(self.tensors) and all(
            local_shard(one).data_ptr() == mine.data_ptr() and local_shard(one).shape == mine.shape
            for one, mine in zip(tensors, self.tensors, strict=True)
        )


def flatten_by_name(left: Left) -> dict[tuple[str, str], Tensor]:
    """By kind and name; of tensors that share their memory one."""
    found: dict[tuple[str, str], Tensor] = {}
    places: set[tuple[Any, ...]] = set()
    for kind, tensors in left.items():
        for name, tensor in tensors.items():
            part = local_shard(tensor)
            if part.layout is not torch.strided or part.is_inference() or not part.numel():
                continue
            place = part.data_ptr(), part.shape, part.stride(), part.dtype
            if place not in places:
                places.add(place)
                found[kind, name] = tensor
    return found


@dataclass(slots=True, eq=False)
class RecordedStep:
    """What one step began with and left."""

    number: int
    """Of the step; in all processes the same."""
    inputs: list[Tensor]
    """Its batch: tensors that nobody writes to."""
    names: list[tuple[str, str]]
    """Of the tensors that it works on, by kind and name."""
    starts: Copies
    random_state: Any
    scalars: list[Tensor]
    """Numbers that the optimizer reads from the device, a learning rate for instance."""
    on_host: bool
    ends: list[Tensor] = field(default_factory=list)
    """Contents of those tensors after it; empty where they are the present ones."""
    results: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """What it returned, and gradients, by kind and name."""

    def free(self) -> None:
        """Let go of all copies."""
        self.inputs, self.ends, self.results, self.starts = [], [], {}, Copies([], on_host=True)


class StepRecorder:
    """Records steps on ``device`` and lets graphs repeat them.

    Args:
        mode: The option ``parity``: ``on``, ``strict`` or ``off``.
        unit: See ``strategies.tolerance.rounding_unit``.
        random: Reads and sets the state of the device's random numbers.
    """

    def __init__(
        self,
        device: torch.device,
        mode: str,
        unit: float = SINGLE,
        *,
        random: tuple[Callable[[], Any], Callable[[Any], Any]],
    ) -> None:
        self.mode, self._device, self._unit = mode, device, unit
        self._random_state, self._set_random_state = random
        self.room: Callable[[torch.device], tuple[float, float]] = free_memory
        self.on_host: bool | None = None
        """Where the copies were kept last."""
        self.short: str | None = None
        """Why a step could not be recorded."""

    def begin(
        self, number: int, inputs: Sequence[Tensor], state: Left, scalars: Sequence[Tensor]
    ) -> RecordedStep | None:
        """Before a step: copy what it begins with. None, with the reason in ``short``, where there is no memory."""
        tensors = flatten_by_name(state)
        size = COPIES * sum(local_shard(one).nbytes for one in tensors.values())
        device, host = self.room(self._device)
        on_host = size > DEVICE_SHARE * device
        if on_host and size > HOST_SHARE * host:
            self.short = "neither the device nor the host has memory for a second copy of the state"
            return None
        make = functools.partial(
            RecordedStep,
            number=number,
            inputs=list(inputs),
            names=list(tensors),
            random_state=self._random_state(),
            scalars=[one.clone() for one in scalars],
        )
        for where in dict.fromkeys((on_host, True)):
            try:
                self.on_host = where
                return make(starts=Copies(list(tensors.values()), on_host=where), on_host=where)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        self.short = "there is no memory for a second copy of the state"
        return None

    def end(self, record: RecordedStep, state: Left, results: Left, *, later: bool) -> RecordedStep | None:
        """After the step. ``later``: its graph repeats it once other steps have followed, so that what it left is
        copied too. None where it has put other tensors in the place of some, as one does that makes optimizer state."""
        tensors = flatten_by_name(state)
        if set(tensors) != set(record.names):
            return None
        tensors = {name: tensors[name] for name in record.names}
        if not record.starts.still_those(list(tensors.values())):
            return None
        try:
            if later:
                record.ends = Copies(record.starts.tensors, on_host=record.on_host).kept
            record.results = {key: _kept(one, record.on_host) for key, one in flatten_by_name(results).items()}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.short = "there is no memory for a second copy of what the step left"
            return None
        return record

    def repeat(
        self,
        record: RecordedStep,
        replay: Callable[[], Any],
        inputs: Sequence[Tensor],
        scalars: Sequence[Tensor],
        results: Callable[[], Left],
    ) -> list[Difference]:
        """Let ``replay`` repeat the step, and put all back that it changes but ``inputs``, the graph's own.

        ``results`` reads what the replay returned, as ``end`` was given it; of gradients only those that are there.
        Returns what differs, with the tolerances; nothing where all is equal to the last bit.
        """
        present = Copies(record.starts.tensors, on_host=record.on_host)
        random_state, numbers = self._random_state(), [one.clone() for one in scalars]

        def again() -> dict[tuple[str, str], Tensor]:
            record.starts.restore()
            with torch.no_grad():  # a step may ask for gradients by its batch
                if inputs:
                    torch._foreach_copy_(list(inputs), record.inputs)
                for one, value in zip(scalars, record.scalars, strict=True):
                    one.copy_(value)
            self._set_random_state(record.random_state)
            replay()
            seen = dict(zip(record.names, record.starts.tensors, strict=True))
            return seen | flatten_by_name(results())

        expected = dict(zip(record.names, record.ends or present.kept, strict=True)) | record.results
        starts = dict(zip(record.names, record.starts.kept, strict=True))
        try:
            seen = again()
            # What one of the two lacks: gradients that lie in memory which graphs use for other things, too.
            both = [key for key in expected if key in seen]
            if not any(unequal((expected[key], seen[key]) for key in both)):
                return []
            first = {key: _kept(seen[key], record.on_host) for key in both}
            second = again()
            if not any(unequal((first[key], second[key]) for key in both)):
                return self._compare(both, expected, first, None, starts)
            found = self._compare(both, first, expected, second, starts)
            for _ in range(FURTHER_REPLAYS):
                if not exceeding(found):
                    break
                others = {(one.kind, one.name): one for one in self._compare(both, first, expected, again(), starts)}
                found = [min(one, others[one.kind, one.name], key=lambda each: each.share) for one in found]
            return found
        finally:
            present.restore()
            for one, value in zip(scalars, numbers, strict=True):
                one.copy_(value)
            self._set_random_state(random_state)

    def _compare(
        self,
        keys: Iterable[tuple[str, str]],
        expected: Mapping[tuple[str, str], Tensor],
        seen: Mapping[tuple[str, str], Tensor],
        exact: Mapping[tuple[str, str], Tensor] | None,
        starts: Mapping[tuple[str, str], Tensor],
    ) -> list[Difference]:
        # Replays that agree to the last bit round alike. In the step they may have rounded otherwise, once each.
        alike = exact is None and self._unit > SINGLE
        seen = {**seen, **_without_noise(expected, seen, starts)}
        exact = None if exact is None else {**exact, **_without_noise(expected, exact, starts)}
        found: list[Difference] = []
        for kind in dict.fromkeys(kind for kind, _ in keys):
            names = [key for key in keys if key[0] == kind]
            found += compare(
                kind,
                {key[1]: local_shard(expected[key]) for key in names},
                {key[1]: local_shard(seen[key]) for key in names},
                None if exact is None else {key[1]: local_shard(exact[key]) for key in names},
                starts={key[1]: local_shard(starts[key]) for key in names if key in starts},
                unit=self._unit,
                multiple=MULTIPLES[self.mode] / (UNCALIBRATED if alike else 1.0),
            )
        return found


def _without_noise(
    expected: Mapping[tuple[str, str], Tensor],
    seen: Mapping[tuple[str, str], Tensor],
    starts: Mapping[tuple[str, str], Tensor],
) -> dict[tuple[str, str], Tensor]:
    """Weights of ``seen`` that Adam and its like have moved, with what was ``expected`` in elements whose difference
    their mean gradient explains. It divides a gradient by its own size, so that one which is all rounding (of the bias
    of an attention's keys) moves a weight as far as any other does, and by as much more or less, relative, as it
    differs itself. That mean gradient is compared as it is."""
    found: dict[tuple[str, str], Tensor] = {}
    weights = [key for key in expected if key[0] == "weight" and key in seen and key in starts]
    for key, differs in zip(weights, unequal((expected[key], seen[key]) for key in weights), strict=True):
        mean = "optimizer", f"{key[1]}.exp_avg"
        if not differs or mean not in expected or mean not in seen:
            continue
        weight = local_shard(expected[key]).detach()
        one, other, moved, start = (
            local_shard(tensor).detach().to(weight.device)
            for tensor in (expected[mean], seen[mean], seen[key], starts[key])
        )
        if one.shape == other.shape == moved.shape == start.shape:
            away = (one - other).abs()
            explained = (weight - moved).abs() * one.abs() <= BY_MEAN * away * (weight - start).abs()
            found[key] = torch.where(explained | (away > one.abs() * NOISY), weight, moved)
    return found


def _kept(tensor: Tensor, on_host: bool) -> Tensor:
    tensor = local_shard(tensor).detach()
    return tensor.to("cpu", copy=True) if on_host else tensor.clone()


def unequal(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """``differing`` of this process's parts."""
    return differing([(local_shard(one), local_shard(other)) for one, other in pairs])


def tensors_of(results: Any) -> Left:
    """What a step returned, for comparison: ``{"loss": ..., "output": ...}``."""
    loss: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(results)[0]:
        if isinstance(leaf, Tensor):
            name = pytree.keystr(path)
            (loss if name == "['loss']" else others)[name.strip("[]'")] = leaf
    return {"loss": loss, "output": others}
