"""What is kept away from users of one version of torch, shown with torch's own class and sizes of our own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._guards import SLoc
from torch._inductor import tiling_utils
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from strategies import torch_patches as inductor_faults
from strategies.base import compiler_settings

B, S = (sympy.Symbol(name, integer=True, positive=True) for name in "bs")


@pytest.fixture(autouse=True)
def fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would fuse whatever it is asked about; a node is its own size here."""
    monkeypatch.setattr(MixOrderReduction, "can_fuse", classmethod(lambda *_: True))
    monkeypatch.setattr(MixOrderReduction, "get_numel_rnumel", classmethod(lambda _, node: node))


def fuses(*size: Any) -> bool:
    node: Any = tuple(sympy.sympify(each) for each in size)
    return MixOrderReduction.can_fuse(node, node)


@pytest.mark.parametrize("rows", [32 * S - 32, 32 * (S - 1)], ids=["sum", "product of a sum"])
def test_reductions_with_a_sum_for_a_size_stay_apart_in_2_11(monkeypatch: pytest.MonkeyPatch, rows: sympy.Expr) -> None:
    monkeypatch.setattr(inductor_faults.torch, "__version__", "2.11.0+cu130")
    with compiler_settings({}):
        assert fuses(8192, 768)
        assert fuses(32 * S, 768)
        assert not fuses(rows, 768)
        assert not fuses(8192, S + 1)
    assert fuses(rows, 768), "torch is as it was"


@pytest.mark.parametrize("version", ["2.12.0", "2.15.1+cu130"])
def test_later_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(inductor_faults.torch, "__version__", version)
    with compiler_settings({}):
        assert fuses(32 * S - 32, 768)


@pytest.mark.parametrize(("version", "expands"), [("2.11.0+cu130", True), ("2.12.0", False)])
def test_sizes_are_compared_by_value_in_2_11(monkeypatch: pytest.MonkeyPatch, version: str, expands: bool) -> None:
    monkeypatch.setattr(inductor_faults.torch, "__version__", version)
    seen: list[Any] = []
    monkeypatch.setattr(tiling_utils, "get_pw_red_splits", lambda n, pointwise, *_, **__: seen.append(pointwise))
    graph = SimpleNamespace(sizevars=SizeVarAllocator())
    node: Any = SimpleNamespace(_body=SimpleNamespace(sizes=((B, S - 1), ())))
    with compiler_settings({}), V.set_graph_handler(graph):  # type: ignore[arg-type]
        tiling_utils.get_pw_red_splits(node, B * S - B, 768, none_if_not_divisible=True)
        tiling_utils.get_pw_red_splits(node, B * S, 768)
    assert seen == [B * (S - 1) if expands else B * S - B, B * S]


def test_a_guard_that_belongs_to_no_line_is_printed() -> None:
    with compiler_settings({}):
        assert str(SLoc(None, "model.py:3")) == "model.py:3 ()"


def test_what_is_traced_knows_that_nothing_is_exported() -> None:
    def added(x: torch.Tensor) -> torch.Tensor:
        return x + (2 if torch.compiler.is_exporting() else 1)

    with compiler_settings({}):
        assert torch.compile(added, backend="eager")(torch.zeros(())) == 1
