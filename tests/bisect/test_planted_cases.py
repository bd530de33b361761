"""Each planted case is found: submodule, batch; where nothing is wrong, nothing is."""

from __future__ import annotations

import re

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from scripts.bisect.search import OPTIMIZER, Report
from strategies import Modular, Optimizer, Regional, Whole
from tests.bisect.conftest import Searched, searched_in, with_module
from tests.bisect.planted import Cosine, Middle, Net, Plain, Sine, SineBetween
from tests.bisect.test_search import culprit_of


def test_a_wrong_kernel_is_found_at_the_one_module_that_uses_it(searched: Searched) -> None:
    report = searched(Net(Plain(), Middle(Sine())), "planted_wrong_sine")
    assert culprit_of(report) == "net.blocks.1.inner"
    assert re.match(r"Sine, .*planted.py:\d+$", report.culprit.about if report.culprit else "")
    assert report.rest_is_clean
    assert set(report.rest) == {"net.blocks.0", "net.blocks.1.before", "net.blocks.1.after", "net.head"}
    assert report.whole.differs
    assert report.culprit is not None


def test_copies_of_a_culprit_are_left_out_with_it(searched: Searched) -> None:
    strategies = [Regional(backend="planted_wrong_sine")]
    report = searched(Net(*(Middle(Sine()) for _ in range(3))), strategies=strategies)
    assert culprit_of(report) == "net.blocks.0.inner"
    assert report.copies == [f"net.blocks.{number}.inner" for number in (1, 2)]
    assert report.rest == [f"net.blocks.{number}.{name}" for number in range(3) for name in ("before", "after")]
    assert report.rest_is_clean


def test_two_modules_that_are_fine_alone(searched: Searched) -> None:
    report = searched(Net(Plain(), Sine(), Cosine()), "planted_together")
    assert culprit_of(report) == "net"
    assert report.rest == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net.head"]
    assert not report.rest_is_clean
    parts = {f"net.blocks.{number}": {"backend": "planted_together"} for number in (1, 2)}
    report = searched(Net(Plain(), Sine(), Cosine()), strategies=[Modular(parts=parts)])
    assert (report.whole.differs, report.culprit, report.rest) == (True, None, [])


def test_one_shape_of_several(searched: Searched) -> None:
    report = searched(Net(Plain()), "planted_seven_rows", rows=(4, 7, 5), dynamic=False)
    assert report.outcome is not None
    assert report.outcome.batch == "float32 7 x 8"


def test_parts_of_modular_are_searched_with_their_own_options(searched: Searched) -> None:
    parts = {"net.blocks.1": {"backend": "eager"}, "net.blocks.2": {"backend": "planted_wrong_sine"}}
    report = searched(Net(Plain(), Sine(), Sine()), strategies=[Modular(parts=parts)])
    assert culprit_of(report) == "net.blocks.2"
    assert report.rest == ["net.blocks.1"]


def test_the_optimizer_step_is_distinguished_from_the_model(searched: Searched) -> None:
    report = searched(Net(Plain()), strategies=[Whole(backend="eager"), Optimizer(backend="planted_wrong_step")])
    assert culprit_of(report) == OPTIMIZER
    assert report.rest == ["net"]
    assert report.rest_is_clean


def test_code_between_submodules_leaves_these_compiled(searched: Searched) -> None:
    report = searched(Net(SineBetween(Plain())), "planted_wrong_sine")
    assert culprit_of(report) == "net.blocks.0"
    assert report.rest == ["net.blocks.0.before", "net.blocks.0.inner", "net.blocks.0.after", "net.head"]
    assert report.rest_is_clean


def test_what_does_not_compile_is_referred_to_explain(searched: Searched) -> None:
    with pytest.raises(ValueError, match=r"^the compiled step cannot be.*nothing compiles.*explain"):
        searched(Net(Plain()), "planted_failing")


def test_what_eager_itself_does_not_repeat_is_not_called_equal(
    searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    vague = {"verdict": "not compared", "reason": "a step of eager differs too much from itself"}
    monkeypatch.setattr("scripts.bisect.bench.ParityGate.run", lambda *_: vague)
    with pytest.raises(ValueError, match=r"cannot be compared with eager's: a step of eager differs too much"):
        searched(Net(Plain()))


def test_nothing_wrong_with_a_demo_model() -> None:
    found: list[Report] = []
    loader = BoringModel().train_dataloader()
    with_module(BoringModel(), loader, [Whole(backend="aot_eager")], lambda bench: found.append(searched_in(bench)))
    assert not found[0].whole.differs
