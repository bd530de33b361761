"""How far tensors are from eager's, and how far they may be: for regions, optimizers and captured steps alike.

The tolerance is calibrated on eager's own distance to a more exact run of the same thing, tensor by tensor. A tensor
that is zero in exact arithmetic (the gradient of a key's bias in softmax attention) is all rounding: its noise is as
large as itself. Noise that is small by chance is judged by that of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]

MULTIPLES = {"on": 6.0, "strict": 3.0}
"""How many times eager's own noise something may be away, by the option ``parity``."""
UNITS = {"bf16": 2.0**-9, "16": 2.0**-12, "64": 2.0**-53}
"""Rounding error of one operation, relative, by how Lightning's name of the precision begins; else ``SINGLE``."""
SINGLE, TF32 = 2.0**-24, 2.0**-11
BY_CUDNN = (nn.modules.conv._ConvNd, nn.RNNBase)
FEW, MANY = 64, 1024
"""Elements below which a tensor's own noise may be small by chance, and from which on a common factor is looked for."""
LARGE = 0.67
"""Share of the multiple for tensors of more elements than ``FEW``, whose noise is known well."""
CONSTANTS = 2
"""Constants in a lower precision, each a rounding off in all elements alike: a dropout's 1 / (1 - p), an attention's
scale."""
CHUNK_BYTES = 1 << 26
"""Of tensors that are compared at once: what a copy of them may take."""
UNCALIBRATED = 16.0
"""Times the least tolerance where there is no more exact run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one tensor is from eager's, relative to eager's."""

    kind: str
    """``output``, ``gradient``, ``buffer``, ``weight``, ``loss``, ..."""
    name: str
    difference: float
    tolerance: float
    said: str = ""
    """What differs, where no number says it."""

    @property
    def share(self) -> float:
        """The difference over its tolerance; beyond 1 it counts, and what is no number is beyond."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.tolerance if self.difference == self.difference and self.tolerance else math.inf

    def __str__(self) -> str:
        if self.said:
            return self.said
        return f"{self.kind} {self.name!r} is {self.difference:.2e} away from eager's, tolerance {self.tolerance:.2e}"


def exceeding(differences: Iterable[Difference]) -> list[Difference]:
    """Those that count, the largest first."""
    return sorted((one for one in differences if one.share > 1), key=lambda one: -one.share)


class Unlowered:
    """Inside, numbers of ``dtype`` stay so. Who casts to a lower precision himself (Muon, a block in a model of single
    precision) makes no more exact run otherwise: compiled code may keep more digits than such a cast leaves, and is
    then as far from eager as eager from the exact one. No ``TorchFunctionMode``: inside one ``has_torch_function`` is
    true, and a transformer leaves its fast path."""

    casts = ("to", "type", "type_as", "float", "half", "bfloat16")

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.unit = 0.0
        """Rounding of the lowest precision that was asked for."""
        self._patch = mock.patch.multiple(Tensor, **{name: self._kept(getattr(Tensor, name)) for name in self.casts})

    def __enter__(self) -> Unlowered:
        self._patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()

    def _kept(self, cast: Any) -> Any:
        def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = cast(tensor, *args, **kwargs)
            if tensor.dtype != self.dtype or not isinstance(result, Tensor) or not result.is_floating_point():
                return result
            if torch.finfo(result.dtype).eps <= torch.finfo(self.dtype).eps:
                return result
            self.unit = max(self.unit, torch.finfo(result.dtype).eps / 2)
            return tensor.clone() if tensor.device == result.device else tensor.to(result.device)

        return kept


def rounding_unit(precision: str, device: torch.device, module: nn.Module) -> float:
    """Largest relative rounding error of one operation of ``module`` in a run in ``precision`` on ``device``.

    Whatever matrix products do, cuDNN may round to TF32, and need not in another memory format, as compilers choose it:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    lower_or_double = UNITS.get(precision.partition("-")[0])
    if lower_or_double is not None or device.type != "cuda":
        return lower_or_double or SINGLE
    tf32 = torch.get_float32_matmul_precision() != "highest" or (
        torch.backends.cudnn.allow_tf32 and any(isinstance(one, BY_CUDNN) for one in module.modules())
    )
    return TF32 if tf32 else SINGLE


def autocast_unit(module: nn.Module) -> float:
    """The same of a call of ``module`` as the user's own code runs it now: 0 outside of autocast."""
    device = next((one.device.type for one in module.parameters()), "cpu")
    if not torch.is_autocast_enabled(device):
        return 0.0
    lower = {torch.bfloat16: UNITS["bf16"], torch.float16: UNITS["16"]}
    return lower.get(torch.get_autocast_dtype(device), 0.0)


@torch.no_grad()
def compare(
    kind: str,
    expected: Tensors,
    seen: Tensors,
    exact: Tensors | None = None,
    *,
    starts: Tensors | None = None,
    unit: float = SINGLE,
    multiple: float = MULTIPLES["on"],
) -> list[Difference]:
    """Compare ``seen`` with eager's ``expected``, one ``Difference`` a tensor.

    Args:
        exact: The same of a more exact run of eager.
        starts: What stored values (weights, buffers) were before: then differences are relative to how far they moved,
            and some roundings of the stored values are allowed.
        unit: See ``rounding_unit``.
        multiple: See ``MULTIPLES``.

    What one side lacks, or has in another shape, is infinitely far away. Numbers that eager does not have either (NaN,
    infinities) are left out.
    """
    found = [
        Difference(kind=kind, name=name, difference=math.inf, tolerance=0.0)
        for name in dict.fromkeys([*expected, *seen])
        if name not in expected or name not in seen or expected[name].shape != seen[name].shape
    ]
    missing = {one.name for one in found}
    names = [name for name in expected if name not in missing and expected[name].numel()]
    if not names:
        return found
    rows = _rows(names, expected, seen, exact or {}, starts or {})
    lowered = unit in (UNITS["bf16"], UNITS["16"])
    least, least_common = (unit / 4, unit / 8) if lowered else (2 * unit, 2 * unit)
    calibrated = [math.isfinite(noise) for _, _, noise, *_ in rows]
    relative = sorted(noise / own for (own, _, noise, *_), known in zip(rows, calibrated, strict=True) if known and own)
    middle, most = (relative[len(relative) // 2], relative[-1]) if relative else (0.0, 0.0)
    scale = max(own for own, *_ in rows)
    for name, known, (own, away, noise, along, noise_along, size) in zip(names, calibrated, rows, strict=True):
        tensor = expected[name]
        epsilon = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0
        slack = 1.0 if known else UNCALIBRATED
        few = tensor.numel() < FEW
        times = multiple if few or not known else multiple * LARGE
        # Where everything cancels out, rounding of the kind's larger tensors is what is left.
        floor = slack * max(least, epsilon / 8)
        allowed = times * max(noise if known else 0.0, max(most if few else middle, floor) * own, 4 * SINGLE * scale)
        if starts is not None and name in starts:
            allowed += 4 * epsilon * size
        base = own or scale or 1.0
        one = Difference(kind=kind, name=name, difference=away / base, tolerance=allowed / base)
        if known and tensor.numel() >= MANY and own and one.share <= 1:
            # Rounding of elements has no direction. A factor common to all of them shows long before it is as large as
            # the noise.
            chance = 4 * (noise / own) / math.sqrt(tensor.numel())
            floor = max(least_common, epsilon / 32)
            common = multiple * max(abs(noise_along), chance, floor) + (allowed / own if noise >= own / 4 else 0.0)
            common = max(common, CONSTANTS * unit if lowered else 0.0)
            if starts is not None and name in starts:
                common += 4 * epsilon * size / own
            factor = Difference(kind=kind, name=name, difference=abs(along), tolerance=common)
            one = max(one, factor, key=lambda each: each.share)
        found.append(one)
    return found


def differing(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Of each pair, whether shapes or numbers differ; NaN is equal to NaN."""
    largest = [math.nan] * len(pairs)
    for places in _chunks(pairs):
        ones, others = ([pairs[place][side].detach() for place in places] for side in (0, 1))
        for place, norm in zip(places, _norms(torch._foreach_sub(ones, others), math.inf), strict=True):
            largest[place] = norm
    # NaN: of what has a NaN, perhaps the same one on both sides, and of what holds no floats.
    return [not _same(*pair) if math.isnan(most) else most > 0 for pair, most in zip(pairs, largest, strict=True)]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    one, other = _dense(one), _dense(other).to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _chunks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[int]]:
    """Places of pairs of dense floats of one shape, of one type and device and within ``CHUNK_BYTES``: a few launches
    for all."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, (one, other) in enumerate(pairs):
        dense = one.layout is other.layout is torch.strided and one.shape == other.shape
        if dense and one.is_floating_point() and (one.dtype, one.device) == (other.dtype, other.device):
            alike.setdefault((one.device, one.dtype), []).append(place)
    for places in alike.values():
        chunk: list[int] = []
        room = CHUNK_BYTES
        for place in places:
            nbytes = pairs[place][0].nbytes
            if chunk and nbytes > room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
            chunk.append(place)
            room -= nbytes
        yield chunk


def _norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[float]:
    norms: list[float] = torch.stack(torch._foreach_norm(list(tensors), order)).tolist()
    return norms


def _rows(names: Sequence[str], expected: Tensors, seen: Tensors, exact: Tensors, starts: Tensors) -> list[list[float]]:
    """The ``_figures`` of each tensor, with few launches for those that are equal to the last bit."""
    own = _own_of_equal(names, expected, seen, exact, starts)
    others = [name for name in names if name not in own]
    figures = [_figures(name, expected, seen, exact, starts) for name in others]
    rows = dict(zip(others, _on_host(figures), strict=True)) if figures else {}
    for name, size in own.items():
        noise = 0.0 if name in exact else math.nan
        rows[name] = [size, 0.0, noise, 0.0, noise, 0.0]
    return [rows[name] for name in names]


def _own_of_equal(
    names: Sequence[str], expected: Tensors, seen: Tensors, exact: Tensors, starts: Tensors
) -> dict[str, float]:
    """The first of the ``_figures``, which others are measured by, of tensors that are equal on all sides."""
    equal = list(names)
    for side in (seen, exact):
        there = [name for name in equal if name in side]
        differs = dict(zip(there, differing([(expected[name], side[name]) for name in there]), strict=True))
        equal = [name for name in equal if not differs.get(name)]
    begun = {name: starts[name] for name in equal if name in starts and starts[name].shape == expected[name].shape}
    found: dict[str, float] = {}
    for group in ([name for name in equal if name in begun], [name for name in equal if name not in begun]):
        for places in _chunks([(expected[name], begun.get(name, expected[name])) for name in group]):
            chosen = [group[place] for place in places]
            moved = [expected[name].detach() for name in chosen]
            if chosen[0] in begun:
                moved = list(torch._foreach_sub(moved, [begun[name].detach() for name in chosen]))
            for name, norm in zip(chosen, _norms(moved), strict=True):
                if math.isfinite(norm):
                    found[name] = norm / math.sqrt(expected[name].numel())
    return found


def _figures(name: str, expected: Tensors, seen: Tensors, exact: Tensors, starts: Tensors) -> Tensor:
    """``(6,)``: root mean squares of eager's tensor (of how far it moved), of the difference and of eager's noise; the
    share of eager's that the difference and the noise have in common; root mean square of the stored values."""
    one = _wide(expected[name])
    other = _wide(seen[name]).to(one.device)
    finite = one.isfinite()
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, torch.zeros_like(one), other - one)
    held = torch.where(finite, one, torch.zeros_like(one))
    moved = held
    if name in starts and starts[name].shape == one.shape:
        moved = torch.where(finite, one - _wide(starts[name]).to(one.device), torch.zeros_like(one))
    noise = None
    if name in exact and exact[name].shape == one.shape:
        noise = (_wide(exact[name]).to(one.device) - one).where(finite, torch.zeros_like(one))
    count = math.sqrt(one.numel())
    norm = _norm(moved)
    square = (norm * norm).clamp(min=1e-300)
    nowhere = torch.full_like(norm, math.nan)
    return torch.stack(
        [
            norm / count,
            _norm(difference) / count,
            nowhere if noise is None else _norm(noise) / count,
            _dot(difference, moved) / square,
            nowhere if noise is None else _dot(noise, moved) / square,
            _norm(held) / count,
        ]
    )


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.abs() if tensor.is_complex() else tensor, dtype=torch.float64)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    product = one * (other.conj() if other.is_complex() else other)
    return (product.real if product.is_complex() else product).sum(dtype=torch.float64)


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _wide(tensor: Tensor) -> Tensor:
    tensor = _dense(tensor)
    return tensor if tensor.is_complex() or tensor.dtype == torch.double else tensor.float()


def _on_host(figures: Sequence[Tensor]) -> list[list[float]]:
    alike = len({one.device for one in figures}) == 1
    return [
        list(map(float, row)) for row in torch.stack(list(figures) if alike else [f.cpu() for f in figures]).tolist()
    ]
