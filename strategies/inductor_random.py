"""Inductor's random numbers in eager: a check compares dropout mask for mask.

Code of Inductor draws a seed for each random operation of a graph, all of them at once where the first is, and computes
numbers from seed and place by Philox-4x32-10. Eager run within ``InductorDraws`` does the same, from the same state of
the generator. Where that is not what the compiler at hand did (it left an operation out, or its version draws in
another way), the numbers are others, and results of the two are as far apart as under other masks: then they show
nothing.

Source: torch/_inductor/fx_passes/replace_random.py, lowering.py (``inductor_random``) and, for the numbers, Triton's
``tl.rand`` and torch's ``cpp_prefix.h``.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_LOW = 0xFFFFFFFF
_SCALE = 4.6566127342e-10
"""Of 31 bits to a number below one, in single precision."""
_AT_ONCE = 1 << 22
"""Numbers computed together: eight 64-bit tensors of them are 256 MiB."""


class NotAligned(Exception):
    """What Inductor draws there is not known."""


class InductorDraws(TorchDispatchMode):
    """Inside, what Inductor draws by generators of its own is drawn as its compiled code does.

    Args:
        counts: Seeds that are drawn on each device, from ``counted`` of a run before; None = only count them.
        drawn: Numbers of a run before in their order, which are used again, whatever the state of the generators is.
    """

    def __init__(self, counts: Mapping[torch.device, int] | None = None, drawn: Sequence[Tensor] | None = None) -> None:
        from torch._inductor.decomposition import select_decomp_table

        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[torch.device] = Counter()
        self.drawn: list[Tensor] = []
        self.passed = False
        """Whether something was drawn by eager's kernels, which Inductor calls as well."""
        self._counts, self._before = counts, drawn
        self._entered: list[contextlib.ExitStack] = []
        self._seeds: dict[torch.device, list[int]] = {}
        self._decompositions = select_decomp_table()

    def __enter__(self) -> InductorDraws:
        self._entered.append(contextlib.ExitStack())
        self._entered[-1].enter_context(enable_python_dispatcher())  # takes dropout apart as tracing does
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw as Inductor does what it draws by itself; all else is eager's."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in (_aten.rand.default, _aten.randn.default):
            return self._draw(func is _aten.randn.default, *args, **kwargs)
        if func in (_aten.randint.low, _aten.randint.default, _aten.randint_like.default, _aten.randint_like.low_dtype):
            raise NotAligned(str(func))
        if func is _aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        if func in self._decompositions:
            with self:
                result = self._decompositions[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.passed = True
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p in (0, 1):
            return _aten.native_dropout.default(x, p, train)
        # Inductor's numbers stay in single precision; on CPUs what they are compared with does not, by 2.15.
        limit = float(torch.tensor(p, dtype=x.dtype)) if x.device.type == "cpu" else p
        with self:
            mask = self._decompositions[_aten.rand_like.default](x, dtype=torch.float32) > limit
        return mask * x * (1.0 / (1.0 - p)), mask

    def _draw(
        self,
        normal: bool,
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: Any,
    ) -> Tensor:
        device = torch.empty(0, device=device).device
        number = self.counted[device]
        self.counted[device] += 1
        if self._before is not None:
            made = self._before[len(self.drawn)]
        elif self._counts is None:
            made = torch.rand(size, device=device)
        else:
            if device not in self._seeds:
                limits = torch.iinfo(torch.int64)
                seeds = torch.randint(limits.min, limits.max, (self._counts[device],), device=device)
                self._seeds[device] = seeds.tolist()
            made = inductor_numbers(self._seeds[device][number], size, device, normal=normal)
        self.drawn.append(made)
        return made.to(dtype or torch.get_default_dtype())


def inductor_numbers(seed: int, size: Sequence[int], device: torch.device, *, normal: bool = False) -> Tensor:
    """Numbers of ``size`` that code of Inductor draws from ``seed``, in single precision; uniform in [0, 1) or normal.

    On CPUs the C++ code takes the lower half of the seed.
    """
    keys = (seed & _LOW, 0 if device.type == "cpu" else seed >> 32 & _LOW)
    made = torch.empty(math.prod(size), device=device)
    for start in range(0, len(made), _AT_ONCE):
        end = min(start + _AT_ONCE, len(made))
        first, second = _philox(torch.arange(start, end, device=device), *keys)
        made[start:end] = _normal(first, second) if normal else _uniform(first)
    return made.view(*size)


def _philox(counter: Tensor, key: int, other_key: int) -> tuple[Tensor, Tensor]:
    """The first two of the four 32-bit numbers of each counter, after ten rounds."""
    words: list[Any] = [counter & _LOW, 0, 0, 0]
    for _ in range(10):
        products = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        high, other_high = (one >> 32 & _LOW for one in products)
        words = [other_high ^ words[1] ^ key, products[1] & _LOW, high ^ words[3] ^ other_key, products[0] & _LOW]
        key, other_key = key + 0x9E3779B9 & _LOW, other_key + 0xBB67AE85 & _LOW
    return words[0], words[1]


def _uniform(bits: Tensor) -> Tensor:
    if bits.device.type == "cpu":
        return (bits & 0x7FFFFFFF).float() * _SCALE
    return torch.where(bits > 0x7FFFFFFF, bits ^ _LOW, bits).float() * _SCALE  # as the distance from -1 below zero


def _normal(bits: Tensor, others: Tensor) -> Tensor:
    length, angle = _uniform(bits), _uniform(others)
    if bits.device.type == "cpu":
        length, angle = 1 - length, 1 - angle
    return (
        torch.sqrt(-2 * length.clamp(min=1e-7 if bits.device.type != "cpu" else 0).log()) * (2 * math.pi * angle).cos()
    )
