"""Known faults of the compiler, and what to compile with so that they do not show.

Where compiled code does not compute what eager does, or does not compile, it is compiled once more with what is known
to help, and checked again. What passes is used, and named; else the region runs eager.

Importing this must stay cheap (no torch): the doctor names the faults before anything else works.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What a known fault asks for."""

    name: str
    """What is done, in words and options that can be searched for."""
    fault: str
    """What goes wrong without it."""
    issues: tuple[int, ...]
    """Of PyTorch on GitHub."""
    first: str
    """The first version that has the fault."""
    fixed: str | None = None
    """The first that has not; None: none yet."""
    device: str | None = None
    """The type of device that it shows on; None: every."""
    options: dict[str, Any] = field(default_factory=dict)
    """Inductor's options, as ``torch.compile`` takes them."""
    functions: bool = False
    """Whether custom ``autograd.Function`` classes are left to AOTAutograd, which runs them as eager does."""

    def is_for(self, version: str) -> bool:
        """Whether ``version`` of torch has the fault."""
        return _numbers(version) >= _numbers(self.first) and (
            self.fixed is None or _numbers(version) < _numbers(self.fixed)
        )

    def __str__(self) -> str:
        return f"{self.name} (pytorch issue{'s' * (len(self.issues) > 1)} {', '.join(map(str, self.issues))})"


REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        name="torch._dynamo.allow_in_graph of its autograd.Function",
        fault="an autograd.Function that gets one tensor twice, or writes in place, has wrong gradients (2.11) or does "
        "not compile",
        issues=(183604, 180642, 184113),
        first="2.11",
        functions=True,
    ),
    Remedy(
        name="triton.mix_order_reduction=False",
        fault="the gradient of a scale and shift that several norms share is written in part",
        issues=(193061,),
        first="2.10",
        fixed="2.15",
        device="cuda",
        options={"triton.mix_order_reduction": False},
    ),
)
"""In the order in which they are tried."""


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version: ``2.11.0+cu130`` is (2, 11)."""
    return tuple(int(one) for one in re.findall(r"\d+", version)[:2])


def known(version: str) -> list[Remedy]:
    """The faults that ``version`` of torch has."""
    return [one for one in REMEDIES if one.is_for(version)]


def functions_behind(result: Any, inputs: Any) -> set[type[torch.autograd.Function]]:
    """The custom ``autograd.Function`` classes that computed ``result`` from ``inputs``, both any trees of tensors."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    ends = {one.grad_fn for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor)}
    nodes = [one.grad_fn for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
    found: set[type[torch.autograd.Function]] = set()
    seen: set[Any] = {*ends}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (function := getattr(type(node), "_forward_cls", None)) is not None:
            found.add(function)
        nodes += [one for one, _ in node.next_functions]
    return found
