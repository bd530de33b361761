"""Each planted case is found: submodule, difference, batch; where nothing is wrong, nothing is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from scripts.bisect.module_comparer import bisect_module
from scripts.bisect.search import Report
from strategies import Modular, Regional, Whole
from tests.bisect.conftest import Searched
from tests.bisect.planted import WIDTH, Cosine, Middle, Net, Plain, Sine, SineBetween, Trained, loader


def culprits_of(found: Report) -> list[str]:
    return [look.path for look in found.culprits]


def test_a_wrong_kernel_is_found_at_the_one_module_that_uses_it(searched: Searched) -> None:
    report = searched(Net(Plain(), Middle(Sine())), "planted_wrong_sine")
    (culprit,) = report.culprits
    assert culprit.path == "net.blocks.1.inner"
    assert re.match(r"Sine, .*planted.py:\d+$", culprit.about)
    assert re.search(r"output '0' is 1\.00e-02 away from eager's, tolerance \d\.\d+e-0[678]", str(culprit.wrong))
    assert report.equal_modules == ["net.blocks.0", "net.blocks.1.before", "net.blocks.1.after", "net.head"]
    assert report.looks[0].path == "net"
    assert report.batch == "float32 4 x 8"


def test_copies_are_found_with_it(searched: Searched) -> None:
    strategies = [Regional(backend="planted_wrong_sine")]
    report = searched(Net(*(Middle(Sine()) for _ in range(3))), strategies=strategies)
    assert culprits_of(report) == [f"net.blocks.{number}.inner" for number in range(3)]
    assert report.equal_modules == [
        f"net.blocks.{number}.{name}" for number in range(3) for name in ("before", "after")
    ]


def test_modules_that_are_fine_alone_and_not_in_one_graph(searched: Searched) -> None:
    report = searched(Net(Plain(), Sine(), Cosine()), "planted_together")
    assert culprits_of(report) == ["net"]
    assert report.equal_modules == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net.head"]


def test_one_shape_of_several(searched: Searched) -> None:
    report = searched(Net(Plain()), "planted_seven_rows", rows=(4, 7, 5), dynamic=False)
    assert (report.batch, report.batches) == ("float32 7 x 8", 2)
    assert report.culprits


def test_parts_of_modular_are_searched_with_their_own_options(searched: Searched) -> None:
    parts = {"net.blocks.1": {"backend": "eager"}, "net.blocks.2": {"backend": "planted_wrong_sine"}}
    report = searched(Net(Plain(), Sine(), Sine()), strategies=[Modular(parts=parts)])
    assert culprits_of(report) == ["net.blocks.2"]
    assert report.equal_modules == ["net.blocks.1"]


def test_code_between_submodules_leaves_these_compiled(searched: Searched) -> None:
    report = searched(Net(SineBetween(Plain())), "planted_wrong_sine")
    assert culprits_of(report) == ["net.blocks.0"]
    assert report.equal_modules == ["net.blocks.0.before", "net.blocks.0.inner", "net.blocks.0.after", "net.head"]


class Breaking(nn.Module):
    """Branches on a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_does_not_compile_is_found_as_well(searched: Searched) -> None:
    report = searched(Net(Plain(), Middle(Breaking())), fullgraph=True)
    (culprit,) = report.culprits
    assert culprit.path == "net.blocks.1.inner"
    assert str(culprit.wrong).startswith("it does not compile: ")
    assert "net.blocks.0" in report.equal_modules


class Counting(nn.Module):
    """Reads from an iterator, which nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.numbers)


def test_what_cannot_be_compared_is_not_called_equal_and_its_parts_are_looked_at() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counting, self.sine, self.last = Counting(), Sine(), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.sine(self.counting(x))).square().mean()

    module = LazilyMade(Outer)
    report = bisect_module(module, loader(4), [Whole(backend="planted_wrong_sine")], whole=["net"])
    assert culprits_of(report) == ["net.sine"]
    assert [look.path for look in report.not_compared] == ["net.counting"]
    with pytest.raises(ValueError, match=r"^nothing can be compared with eager: net: its forward may use up .*numbers"):
        bisect_module(LazilyMade(Alone), loader(4), [Whole(backend="eager")], whole=["net"])


class Alone(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * super().forward(x)).mean()


class LazilyMade(Trained):
    """Makes its network when it is set up, so that the module can be copied before."""

    def __init__(self, make: Any) -> None:
        super().__init__(nn.Identity())
        self.make = make

    def configure_model(self) -> None:
        self.net = self.make()


def test_a_region_that_no_step_calls_is_named() -> None:
    module = Trained(Net(Plain()))
    module.add_module("beside", nn.Linear(2, 2))
    parts = {"net": {"backend": "eager"}, "beside": {"backend": "eager"}}
    report = bisect_module(module, loader(4), [Modular(parts=parts)])
    assert (report.culprits, report.never_called) == ([], ["beside"])


def test_nothing_wrong_with_a_demo_model_which_stays_as_it_was() -> None:
    module = BoringModel()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    report = bisect_module(module, BoringModel().train_dataloader(), [Whole(backend="aot_eager")])
    assert report.culprits == []
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
