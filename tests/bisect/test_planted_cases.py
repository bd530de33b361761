"""Each planted case is found: submodule, phase and line, batch, option; where nothing is wrong, nothing is."""

from __future__ import annotations

from lightning.pytorch.demos.boring_classes import BoringModel

from scripts.bisect.search import OPTIMIZER, Report, Search
from strategies import Modular, Optimizer, Regional, Whole
from tests.bisect.conftest import Searched, with_module
from tests.bisect.planted import Breaking, BreaksBetween, Cosine, Middle, Net, Plain, Sine


def test_a_wrong_kernel_is_found_at_the_one_module_that_uses_it(searched: Searched) -> None:
    report = searched(Net(Plain(), Middle(Sine())), "planted_wrong_sine", "differs")
    assert report.symptom == "differs"
    assert [blamed.path for blamed in report.culprits] == ["net.blocks.1.inner"]
    assert report.culprits[0].kind == "Sine"
    assert "planted.py:" in (report.culprits[0].source or "")
    assert report.rest_is_clean
    assert set(report.rest) == {
        "net.blocks.0",
        "net.blocks.1.before",
        "net.blocks.1.after",
        "net.head",
    }
    assert {option.text: option.shows for option in report.options} == {
        "compile.whole.backend=aot_eager": False,
        "compile.whole.backend=eager": False,
    }
    assert report.exit_code == 1


def test_a_backend_that_raises_in_the_backward_only(searched: Searched) -> None:
    report = searched(Net(Plain(), Sine()), "planted_backward", "fails")
    assert (report.symptom, report.whole and report.whole.phase) == ("fails", "backward")
    assert [blamed.path for blamed in report.culprits] == ["net.blocks.1"]
    assert report.culprits[0].outcome.code == 'raise ValueError("no kernel for a cosine")'


def test_a_slow_backend(searched: Searched) -> None:
    report = searched(Net(Plain(), Middle(Sine())), "planted_slow_sine", "slower")
    assert report.symptom == "slower"
    assert [blamed.path for blamed in report.culprits] == ["net.blocks.1.inner"]
    assert report.whole is not None
    assert (report.whole.lost_seconds or 0.0) > 0.02


def test_what_cannot_be_traced_under_fullgraph(searched: Searched) -> None:
    report = searched(Net(Middle(Middle(Breaking()))), fullgraph=True)
    assert report.symptom == "fails"
    assert [blamed.path for blamed in report.culprits] == ["net.blocks.0.inner.inner"]
    assert report.culprits[0].outcome.code == "torch._dynamo.graph_break()  # planted"
    assert {option.text: option.shows for option in report.options}["compile.whole.fullgraph=false"] is False


def test_a_break_deep_in_the_tree(searched: Searched) -> None:
    report = searched(Net(Plain(), Middle(Breaking())))
    assert (report.symptom, report.searched_for) == ("breaks", ["fails", "breaks"])
    assert [blamed.path for blamed in report.culprits] == ["net.blocks.1.inner"]
    assert report.culprits[0].outcome.code == "torch._dynamo.graph_break()  # planted"
    assert "net.blocks.0" in report.rest
    assert report.rest_is_clean
    assert report.options == []


def test_copies_of_a_culprit_are_tried_together(searched: Searched) -> None:
    strategies = [Regional(backend="eager", fullgraph=True)]
    report = searched(Net(*(Middle(Breaking()) for _ in range(3))), "eager", "fails", strategies=strategies)
    assert [blamed.path for blamed in report.culprits] == ["net.blocks.0.inner"]
    assert report.culprits[0].copies == [f"net.blocks.{number}.inner" for number in (1, 2)]
    assert report.rest == [f"net.blocks.{number}.{name}" for number in range(3) for name in ("before", "after")]
    assert report.rest_is_clean


def test_two_modules_that_are_fine_alone(searched: Searched) -> None:
    report = searched(Net(Plain(), Sine(), Cosine()), "planted_together", "fails")
    assert report.symptom == "fails"
    assert [(blamed.path, blamed.own_code) for blamed in report.culprits] == [("net", True)]
    assert report.together == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net.head"]
    parts = {f"net.blocks.{number}": {"backend": "planted_together"} for number in (1, 2)}
    report = searched(Net(Plain(), Sine(), Cosine()), "", "fails", strategies=[Modular(parts=parts)])
    assert (report.culprits, report.exit_code) == ([], 3)
    assert report.together == ["net.blocks.1", "net.blocks.2"]


def test_one_shape_of_several(searched: Searched) -> None:
    report = searched(Net(Plain()), "planted_seven_rows", "fails", rows=(4, 7, 5), dynamic=False)
    assert report.symptom == "fails"
    assert report.culprits[0].outcome.batch == "float32 7 x 8"
    assert report.culprits[0].outcome.where is not None


def test_an_option_that_causes_it(searched: Searched) -> None:
    report = searched(Net(Plain()), "planted_symbols", "fails", dynamic=True)
    assert report.symptom == "fails"
    assert {option.text: option.shows for option in report.options}["compile.whole.dynamic=null"] is False


def test_parts_of_modular_are_searched_with_their_own_options(searched: Searched) -> None:
    parts = {"net.blocks.1": {"backend": "eager"}, "net.blocks.2": {"backend": "planted_backward"}}
    report = searched(Net(Plain(), Sine(), Sine()), strategies=[Modular(parts=parts)])
    assert [blamed.path for blamed in report.culprits] == ["net.blocks.2"]
    assert report.rest == ["net.blocks.1"]


def test_the_optimizer_step_is_told_from_the_model(searched: Searched) -> None:
    given = [Whole(backend="eager"), Optimizer(backend="planted_failing")]
    report = searched(Net(Plain()), strategies=given)
    assert (report.symptom, report.whole and report.whole.phase) == ("fails", "optimizer step")
    assert [blamed.path for blamed in report.culprits] == [OPTIMIZER]
    assert report.rest == ["net"]
    assert report.rest_is_clean


def test_code_between_submodules_leaves_these_compiled(searched: Searched) -> None:
    report = searched(Net(BreaksBetween(Plain())), "eager", "fails", fullgraph=True)
    assert [(blamed.path, blamed.own_code) for blamed in report.culprits] == [("net.blocks.0", True)]
    assert report.rest == ["net.blocks.0.before", "net.blocks.0.inner", "net.blocks.0.after", "net.head"]
    assert report.rest_is_clean


def test_what_fails_while_something_else_is_looked_for_is_searched_as_a_failure(searched: Searched) -> None:
    report = searched(Net(Plain()), "planted_failing", "differs")
    assert report.symptom == "fails"
    assert report.searched_for == ["differs", "fails"]
    assert report.notes[0].startswith("looked for 'differs', and it failed:")


def test_nothing_wrong_with_a_demo_model() -> None:
    report = Report(task="boring", strategies="whole")
    loader = BoringModel().train_dataloader()
    with_module(
        BoringModel(),
        loader,
        [Whole(backend="aot_eager")],
        lambda bench: Search(bench, report).run(("fails", "differs")),
    )
    assert report.symptom is None
    assert report.exit_code == 0
    assert report.trials == 2
