"""Faults that no check was made for: written after the others, and run on checks as they were by then.

A rate over cases by which checks were improved may be too good; these say whether it is. They are a table of their own:

    python -m tests.catch_rate.held_out --out F
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.catch_rate.__main__ import main
from tests.catch_rate.case import AOT, CASES, DYNAMO, INDUCTOR, Block, case
from tests.promises.training import WIDTH

LATER: dict[str, Any] = {"begins": 3, "steps": 12}
ON: dict[str, Any] = {"backend": "inductor", "steps": 6}


# ---- Dynamo: what Python changes ------------------------------------------------------------------------------------


def _once(self: Any, h: Tensor) -> Tensor:
    return h * 1.0


def _often(self: Any, h: Tensor) -> Tensor:
    return h * 3.0


_ONCE = _once.__code__


class _Scaler:
    scaled = _once


@case("a method whose code is exchanged", "loss", DYNAMO, 197860, reported="2.15, open", **LATER)
class MethodCode(Block):
    scaler = _Scaler()

    @classmethod
    def prepare(cls, module: Any) -> None:
        _once.__code__ = _ONCE

    @classmethod
    def before_step(cls, module: Any, step: int) -> None:
        if step == 3:
            _once.__code__ = _often.__code__

    def mix(self, h: Tensor) -> Tensor:
        return self.scaler.scaled(h)


@case("a branch by which object an attribute is", "loss", DYNAMO, 196173, reported="2.15, open", **LATER)
class ByIdentity(Block):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = object(), object()
        self.current = self.left

    @classmethod
    def before_step(cls, module: Any, step: int) -> None:
        if step == 3:
            for block in module.net.blocks:
                block.current = block.right

    def mix(self, h: Tensor) -> Tensor:
        return h if self.current is self.left else 3 * h


def _by(operation: Any) -> Any:
    def apply(left: Tensor, right: Tensor) -> Tensor:
        return operation(left, right)

    return apply


@case("closures over methods of Tensor", "loss", DYNAMO, 197811, reported="2.15, open")
class OverMethods(Block):
    """One block adds, the next multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.operation = _by(torch.Tensor.__add__)

    @classmethod
    def prepare(cls, module: Any) -> None:
        module.net.blocks[1].operation = _by(torch.Tensor.__mul__)

    def mix(self, h: Tensor) -> Tensor:
        return self.operation(h, 2 * h)


@case("a closure over another method of Tensor later", "loss", DYNAMO, 197811, reported="2.15, open", **LATER)
class OverAnotherMethod(Block):
    def __init__(self) -> None:
        super().__init__()
        self.operation = _by(torch.Tensor.__add__)

    @classmethod
    def before_step(cls, module: Any, step: int) -> None:
        if step == 3:
            for block in module.net.blocks:
                block.operation = _by(torch.Tensor.__mul__)

    def mix(self, h: Tensor) -> Tensor:
        return self.operation(h, 2 * h)


@case("a property's setter", "loss", DYNAMO, 176599, reported="2.10, open")
class Setter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept = 1.0

    @property
    def factor(self) -> float:
        return self.kept + 1

    @factor.setter
    def factor(self, value: float) -> None:
        self.kept = 2 * value

    def mix(self, h: Tensor) -> Tensor:
        self.factor = 0.25
        return h * self.factor


class _Flag:
    def __init__(self, flag: bool) -> None:
        self.flag = flag


@torch.compiler.nested_compile_region
def _inner(layer: _Flag, h: Tensor) -> Tensor:
    return h.sin() if layer.flag else h.cos()


@torch.compiler.nested_compile_region
def _outer(layer: _Flag, h: Tensor) -> Tensor:
    return _inner(layer, h) + 1.0


@case("a nested region within one, by a flag", "loss", DYNAMO, 192905, reported="2.14, open")
class NestedFlags(Block):
    def __init__(self) -> None:
        super().__init__()
        self.flags = [_Flag(True), _Flag(False), _Flag(True), _Flag(False)]

    def mix(self, h: Tensor) -> Tensor:
        return torch.stack([_outer(flag, h) for flag in self.flags]).mean(0)


@case("a counter by which a table is read", "loss", DYNAMO, 123535, 120248, reported="2.3")
class Counted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.calls = torch.arange(1.0, 100.0), 0

    def mix(self, h: Tensor) -> Tensor:
        row = self.table[self.calls // 2]
        self.calls += 1
        return h * row / 10


@case("a list within a list that a loop fills", "loss", DYNAMO, 103563, reported="2.0")
class NestedList(Block):
    def mix(self, h: Tensor) -> Tensor:
        rows: list[list[Any]] = [[1, 2, 3], [4, 5, 6]]
        for place in range(3):
            rows[0][place] = h if place == 0 else rows[0][place - 1] * 0.5
        return rows[0][-1]


# ---- AOTAutograd ----------------------------------------------------------------------------------------------------


@case("an input that wants gradients, written to", "gradient", AOT, 128035, reported="2.4")
class WrittenInput(Block):
    def forward(self, x: Tensor) -> Any:
        x.mul_(torch.sigmoid(self.linear.bias))
        return x + torch.tanh(self.linear(x))

    @classmethod
    def called(cls, block: Any, x: Tensor) -> Tensor:
        given = x * 1.0
        return block(given) + given


@case("a squeezed view, written to around a branch", "loss", AOT, 97083, 97130, reported="2.0")
class AroundBranch(Block):
    def mix(self, h: Tensor) -> Tensor:
        one = torch.ones(1)[0:1]
        view = one.squeeze()
        one[0] = 0
        if one[0] < 1e5:
            pass
        one[0] = 2
        return h * view


# ---- Inductor -------------------------------------------------------------------------------------------------------


@case("a buffer copied by a full slice, then written to", "buffer", INDUCTOR, 198131, reported="2.14, open", **ON)
class CopiedThenWritten(Block):
    of_before: Tensor
    now: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("of_before", torch.zeros(3, WIDTH))
        self.register_buffer("now", torch.zeros(3, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.of_before[0:, :] = self.now[0:, :]
            self.now.add_(1)
        return h + 0.01 * self.now.mean()


@case("a view of another type, read before a write", "loss", INDUCTOR, 198101, reported="2.14, open", **ON)
class OtherTypesView(Block):
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.arange(-12, 12).reshape(4, 6))

    def mix(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            twice = self.counts.view(torch.int32) * 2
            twice.sub_(-4)
            self.counts[:, 2:5] += 2
            read = twice.view(torch.int64)
        return h * (1 + 0.01 * (read % 7).float().mean())


@case(
    "the place of the largest of a sum with a transposed matrix", "loss", INDUCTOR, 178964, reported="2.10, open", **ON
)
class LargestOfSum(Block):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(8, 8))

    def mix(self, h: Tensor) -> Tensor:
        at = (self.by.t() + h[:, :8]).max(dim=1).indices
        return h + 0.1 * at.unsqueeze(1)


@case("argmax of a transposed matrix that was written to", "loss", INDUCTOR, 183082, 163929, reported="2.10", **ON)
class ArgmaxOfWritten(Block):
    def mix(self, h: Tensor) -> Tensor:
        written = h.detach() * 20
        written.sin_()
        return h * (1 + 0.01 * written.t().argmax())


@case("argmin of an input's transposed write", "loss", INDUCTOR, 163929, reported="2.10", **ON)
class ArgminOfInput(Block):
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.randn(4, 6))

    def mix(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.state.tan_()
            at = self.state.t().argmin()
        return h * (1 + 0.01 * at)


@case("the place of the least of booleans", "loss", INDUCTOR, 184893, 174069, reported="2.12", **ON)
class LeastBoolean(Block):
    def mix(self, h: Tensor) -> Tensor:
        at = (h > 0.05).min(0).indices
        return h + 0.02 * at


@case("a reduction's last vector, stored in full", "loss", INDUCTOR, 196681, reported="2.14, open", **ON)
class LastVector(Block):
    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(1, 8, 66, 66, generator=torch.Generator().manual_seed(3))
        self.image = nn.Parameter(drawn.contiguous(memory_format=torch.channels_last))

    def mix(self, h: Tensor) -> Tensor:
        image = self.image * (1 + h.mean())
        soft = (image * 0.5) * (torch.erf(image * 0.7071067811865476) + 1)
        left = functional.pad(soft, (0, 0, 0, 0, 0, 58), value=0.5)
        right = functional.pad(soft.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5)
        return h + 1e-4 * torch.matmul(left, right).mean()


@case("slices of special functions, stacked", "loss", INDUCTOR, 185702, reported="2.13", **ON)
class StackedSpecial(Block):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def mix(self, h: Tensor) -> Tensor:
        wide, rates = h.view(8, 4, 4)[..., 2], functional.softplus(h[:, :4]) + 1e-4
        positive = functional.softplus(wide) + 1e-4
        parts = [
            torch.special.gammaln(positive + self.alpha.exp()),
            torch.special.erf(wide * self.beta),
            torch.special.xlogy(positive, rates),
        ]
        return h + 0.1 * torch.stack(parts, dim=-1).mean((1, 2)).unsqueeze(1)


@case("dropouts that are put in another order", "loss", INDUCTOR, 192635, reported="2.12, open", **ON)
class AnotherOrder(Block):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 512)

    @classmethod
    def prepare(cls, module: Any) -> None:
        torch._inductor.config.fallback_random = True
        torch._inductor.config.reorder_for_peak_memory = True

    def mix(self, h: Tensor) -> Tensor:
        wide = functional.dropout(torch.relu(self.wide(h)), 0.5)
        wide = functional.dropout(torch.tanh(wide @ self.wide.weight), 0.3)
        narrow = functional.dropout(h[:, :4], 0.5)
        return wide + narrow.mean()


@case("averages kept by lerp_", "buffer", INDUCTOR, 183575, reported="2.13", **ON)
class Averages(Block):
    first: Tensor
    second: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("second", torch.zeros(WIDTH, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            gram = (h.t() @ h).bfloat16()
            self.first.lerp_(gram.float(), 0.05)
            self.second.lerp_((gram @ gram).float(), 0.05)
        return h + 0.01 * (h @ self.first - h @ self.second)


def _filled(into: Tensor, value: Tensor) -> None:
    into.copy_(value)


_LIBRARY = torch.library.Library("catch_rate", "FRAGMENT")
_LIBRARY.define("fill_with_(Tensor(a!) into, Tensor value) -> ()")
_LIBRARY.impl("fill_with_", _filled, "CPU")
_LIBRARY.impl("fill_with_", lambda into, value: None, "Meta")


@case("an operator of one's own that writes, read afterwards", "loss", INDUCTOR, 127821, 127835, reported="2.4", **ON)
class OwnOperator(Block):
    def mix(self, h: Tensor) -> Tensor:
        into = torch.full((len(h), WIDTH), 1.0)
        torch.ops.catch_rate.fill_with_(into, h.detach())
        return h + into * into


if __name__ == "__main__":
    for other in [name for name, one in CASES.items() if one.block.__module__ != __name__]:
        del CASES[other]
    main()
