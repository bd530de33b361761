"""What ``compile=auto`` tries, keeps and remembers, in trainings on a simulated clock."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategies.compile_errors import SECOND_ORDER
from tests.trainer.simulated import STARTED, Workload, simulate, simulate_together
from trainer.auto import chooser
from trainer.auto.past_runs import load_timings, save_timings
from trainer.auto.rule import CACHED_SECONDS, CAPTURE_SECONDS, EAGER, MARGIN, Arm, Timings
from trainer.report.statistics import Cost, best_at, envelope

ARMS = ("eager", "regional", "whole", "cuda_graph", "regional+cuda_graph", "whole+cuda_graph")


def measured_as(
    milliseconds: tuple[float, ...], compiling: tuple[float, float], layers: tuple[int, int], **options: Any
) -> Workload:
    """Of a step under each of ``ARMS``; seconds that ``regional`` and ``whole`` compile, and layers."""
    modules = ("regional", "whole")
    return Workload(
        steps={arm: one / 1000 for arm, one in zip(ARMS, milliseconds, strict=True)},
        compiling=dict(zip(modules, compiling, strict=True)),
        layers=dict(zip(modules, layers, strict=True)),
        **options,
    )


# Measured on H200s and H100s in November 2026; of those without a source, the order is what counts.
WORKLOADS = {
    "captioning": measured_as((36.9, 38.1, 27.2, 34.4, 23.5, 22.9), (8.5, 31.0), (22, 114), kinds=4),
    "gpt2": measured_as(
        (89.4, 65.2, 65.2, 89, 65.1, 65.1),
        (5.7, 13.0),
        (8, 42),
        kinds=2,
        capture=1.2,
        never_waits=("eager", "regional", "whole"),
    ),
    "resnet50": measured_as((31.2, 30, 21, 29.4, 20.5, 20.1), (33.0, 23.0), (55, 80), kinds=9),
    "llama": measured_as((30, 25, 22, 20, 13, 11.2), (7.7, 20.0), (8, 62), kinds=1, parts=False),
    "efficientnet": measured_as((45, 35, 30, 36.4, 15, 11.4), (76.0, 67.0), (105, 110), kinds=7, parts=False),
    # this and the others: H200, 2026-11-27
    "unet": measured_as((19.7, 19, 17, 10.4, 7.1, 5.8), (51.0, 31.0), (33, 44), kinds=6, parts=False),
    "gemma3": measured_as((71.5, 60, 55, 28.5, 12.6, 10.9), (16.5, 51.0), (11, 86), kinds=1, parts=False),
    "swin": measured_as((52.1, 50, 46, 33.5, 18.6, 16.2), (100.0, 74.0), (28, 66), kinds=4, parts=False),
    # its capture saves 0.74 of a step, more than any bound
    "t5": measured_as((67.6, 60, 55, 17.9, 10.9, 9.9), (30.0, 57.0), (24, 70), kinds=4, parts=False),
    "convnext": measured_as((32.3, 30, 29, 26.5, 16.5, 16.4), (46.0, 42.0), (62, 64), kinds=4, parts=False),
}
SMALL = Workload(
    steps={"eager": 0.1, "regional": 0.08, "whole": 0.07},
    compiling={"regional": 4.0, "whole": 9.0},
    layers={"regional": 1, "whole": 200},
)


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("steps", [100, 500])
def test_a_short_run_costs_at_most_two_percent_over_eager(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate(monkeypatch, WORKLOADS[name], steps).train()
    assert run.seconds + STARTED <= 1.02 * (run.only(EAGER) + STARTED)
    assert steps > 100 or run.tried == [EAGER]


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize(("steps", "over"), [(500, 1.05), (2_000, 1.10), (20_000, 1.04)])
def test_a_run_takes_little_longer_than_under_the_best_fixed_strategy(
    name: str, steps: int, over: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate(monkeypatch, WORKLOADS[name], steps).train()
    assert run.seconds + STARTED <= over * (run.best + STARTED), run.tried


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_long_run_ends_in_the_fastest_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(monkeypatch, WORKLOADS[name], 20_000).train()
    steps = run.workload.steps
    assert steps[run.chosen] <= 1.03 * min(steps.values()), run.tried
    assert run.chooser.decided


def test_what_is_cheap_comes_first_and_one_thing_changes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(monkeypatch, WORKLOADS["llama"], 20_000).train()
    assert run.tried == ["eager", "cuda_graph", "whole+cuda_graph"], "whose extra seconds 20,000 steps pay for"
    run = simulate(monkeypatch, WORKLOADS["llama"], 4_000).train()
    assert run.tried == ["eager", "cuda_graph", "regional+cuda_graph"]


def test_without_a_capture_modules_alone_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(monkeypatch, SMALL, 20_000, captures=False).train()
    assert run.tried == ["eager", "regional", "whole"]
    only = simulate(monkeypatch, WORKLOADS["llama"], 20_000, captures=False, candidates=["whole"]).train(300)
    assert only.tried == ["eager", "whole"]


def test_the_plan_counts_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(monkeypatch, WORKLOADS["captioning"], 200, planned_steps=20_000).train()
    assert run.chosen == "regional+cuda_graph"


def test_under_several_optimizers_a_step_of_the_loop_counts_for_all_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate(monkeypatch, SMALL, 300, captures=False).train().tried == ["eager", "regional"]
    run = simulate(monkeypatch, replace(SMALL, optimizers=2), 300, captures=False)
    assert run.train(150).tried == ["eager"], "half as many steps"


@pytest.mark.parametrize("fails", ["", "regional"])
@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("name", ["captioning", "llama", "resnet50"])
def test_processes_of_unlike_times_batches_and_memories_try_the_same_arms_at_the_same_steps(
    name: str, remembers: bool, fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chooser, "timings_file", lambda _, loop, *__, **___: tmp_path / f"{loop.is_first_process}.json")
    alike = replace(WORKLOADS[name], never_waits=(), fails={fails: "it does not compile"} if fails else {})
    if remembers:  # on the first host alone
        simulate(monkeypatch, replace(alike, fails={}), 4_000, remember=True).train()
    slower = {arm: 0.05 * (1 + place) for place, arm in enumerate(ARMS)}
    other = replace(alike, steps=slower, shapes=lambda step: step % 400)  # too many for captures to pay
    alone = simulate(monkeypatch, other, 4_000).train()
    runs = simulate_together(monkeypatch, [alike, other], 4_000, remember=True)
    first, second = ({**run.program.report["auto"], "summary": run.chosen} for run in runs)
    assert first == second
    assert runs[0].switches == runs[1].switches
    assert runs[1].tried != alone.tried, "by itself it would choose otherwise"
    assert len(runs[0].switches) > 1
    announced = [[note for note in run.program.notes if "begins to compile" in note] for run in runs]
    assert announced[0] == announced[1]
    assert (first["remembered"] is not None) is remembers


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("steps", [100, 500, 2_000, 20_000])
def test_a_comparison_of_the_same_runs_advises_what_auto_takes(name: str, steps: int) -> None:
    workload, known = WORKLOADS[name], arms()
    for arm in known.arms.values():
        arm.step_seconds = workload.steps[arm.name]
        arm.setup_seconds = workload.compiling.get(arm.module, 0.0) + workload.capture * arm.captured
    costs = {
        arm.name: Cost(step_seconds=workload.steps[arm.name], warmup_seconds=arm.setup_seconds or 0.0)
        for arm in known.arms.values()
    }
    total = {arm: cost.warmup_seconds + steps * cost.step_seconds for arm, cost in costs.items()}
    advised = best_at(envelope(costs, costs[EAGER]), steps)
    taken = known.next(known.arms[EAGER, False], steps, 0.0)
    assert taken is not None
    assert total[taken.name] <= total[advised] + MARGIN * total[EAGER], "but for what is not worth a change"


# ---- timing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager_first", [True, False])
def test_an_arm_that_is_slower_steps_back(eager_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(SMALL, steps={"eager": 0.1, "regional": 0.11 if eager_first else 0.07, "whole": 0.105})
    run = simulate(monkeypatch, slow, 20_000, captures=False).train(600)
    table = run.program.report["auto"]["table"]
    assert run.chosen == ("eager" if eager_first else "regional")
    assert run.arm == run.chosen
    assert table["whole"]["stepped_back_at_step"] is not None
    assert table["whole"]["gained_seconds"] < 0
    assert table["whole"]["failed"] is None


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    same = replace(SMALL, steps={"eager": 0.1, "regional": 0.095, "whole": 0.0955}, spread=0.01)
    run = simulate(monkeypatch, same, 20_000, captures=False)
    run.chance = random.Random(seed)
    assert run.train(600).chosen == "regional"


# ---- what does not work ----------------------------------------------------------------------------------------------


def test_a_strategy_that_does_not_fit_is_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(SMALL, refused={"whole": "nothing of it can be compiled"})
    run = simulate(monkeypatch, odd, 20_000, captures=False).train(600)
    assert run.chosen == "regional"
    assert run.arm == "regional"
    assert run.program.report["auto"]["table"]["whole"]["failed"] == "nothing of it can be compiled"
    assert any("whole is out: nothing of it can be compiled" in note for note in run.program.notes)


def test_a_module_without_blocks_is_not_tried_region_by_region(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(monkeypatch, replace(SMALL, kinds=0, parts=False), 20_000, captures=False)
    run.program.blocks = ()
    assert run.train(300).tried == ["eager", "whole"]
    assert "no repeated blocks" in run.program.report["auto"]["table"]["regional"]["failed"]


def test_a_gradient_within_the_loss_is_compiled_once_it_was_found_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chooser, "timings_file", lambda *_, **__: tmp_path / "memory.json")
    reason = f"a gradient of its gradient is taken; {SECOND_ORDER}"
    forces = replace(SMALL, steps={**SMALL.steps, "second_order": SMALL.steps["whole"]}, fails={"regional": reason})
    run = simulate(monkeypatch, forces, 20_000, captures=False, remember=True).train(900)
    assert run.tried == ["eager", "regional", "second_order"], "one graph of all would meet the same gradient"
    assert run.chosen == "second_order"
    assert run.program.report["auto"]["table"]["whole"]["failed"] == reason
    again = simulate(monkeypatch, forces, 20_000, captures=False, remember=True).train(900)
    assert again.tried == ["eager", "second_order"], "as the first run found out"


def test_steps_that_eager_cannot_capture_are_not_captured_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = replace(WORKLOADS["llama"], fails={"cuda_graph": "it reads its loss"})
    run = simulate(monkeypatch, reads, 20_000).train(600)
    assert run.tried == ["eager", "cuda_graph", "whole"]
    assert run.program.report["auto"]["table"]["whole+cuda_graph"]["failed"] == "it reads its loss"


# ---- batches of many shapes ------------------------------------------------------------------------------------------


def drawn(count: int, steps: int) -> list[int]:
    """Shapes of batches as lengths of captions come: most are met a few times, some once."""
    chance = random.Random(0)
    return [min(count - 1, int(chance.lognormvariate(0.0, 0.5) * count / 4)) for _ in range(steps)]


@pytest.mark.parametrize("seen", [45, 150, 500])
def test_shapes_to_come_are_estimated_from_those_seen_once_and_twice(seen: int) -> None:
    known = Timings(arms={}, shapes=Counter(drawn(200, seen)))
    came = len(set(drawn(200, 2_000))) - len(known.shapes)
    assert came / 3 <= known.new_shapes(2_000 - seen) <= 2 * came, "a lower bound of what is expected"


@pytest.mark.parametrize("shapes", [{}, {"a": 30}, {"a": 30, "last": 1}, dict.fromkeys("abcdefgh", 4)])
def test_batches_of_shapes_that_all_came_often_bring_no_new_one(shapes: dict[str, int]) -> None:
    assert Timings(arms={}, shapes=Counter(shapes)).new_shapes(10**6) <= 1


def test_steps_of_many_lengths_are_not_captured_unless_the_run_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = drawn(200, 20_000)
    ragged = replace(WORKLOADS["captioning"], shapes=lambda step: lengths[step])
    short = simulate(monkeypatch, ragged, 2_000).train(300)
    assert short.tried == ["eager"]
    assert any("where lengths differ, compile=[auto,buckets] leaves a few" in note for note in short.program.notes)
    few = replace(ragged, shapes=lambda step: step % 4)
    assert "cuda_graph" in simulate(monkeypatch, few, 2_000).train(300).tried


def test_compiles_for_further_shapes_are_expected_where_the_modules_need_them() -> None:
    known = arms()
    eager, regional = known.arms[EAGER, False], known.arms["regional", False]
    seconds = known.compiling["regional"]
    assert known.expected_setup(regional, eager) == seconds
    known.shapes = Counter(range(8))
    assert known.expected_setup(regional, eager) == 2.5 * seconds, "the second one makes sizes symbolic"
    known.shapes = Counter(range(2))
    assert known.expected_setup(regional, eager) == 1.5 * seconds, "a last, smaller batch"
    known.shapes, known.static = Counter(range(8)), True
    assert known.expected_setup(regional, eager) == 4.5 * seconds


# ---- memory ----------------------------------------------------------------------------------------------------------


def arms() -> Timings:
    every = [Arm(module=name, captured=one) for one in (False, True) for name in (EAGER, "regional", "whole")]
    arms = {(arm.module, arm.captured): arm for arm in every}
    return Timings(arms=arms, compiling={"regional": 15.0, "whole": 35.0})


def measured() -> Timings:
    known = arms()
    eager, regional = known.arms[EAGER, False], known.arms["regional", False]
    eager.step_seconds, eager.setup_seconds = 1.0, 0.0
    regional.step_seconds, regional.setup_seconds = 0.5, 7.0
    known.arms["whole", False].failed = "not compiled"
    return known


@pytest.mark.parametrize(("workload", "best"), [(SMALL, "whole"), (WORKLOADS["captioning"], "regional+cuda_graph")])
def test_a_second_run_begins_with_what_was_best(
    workload: Workload, best: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    captures = "cuda_graph" in best
    monkeypatch.setattr("trainer.auto.chooser.timings_file", lambda *_, **__: tmp_path / "a.json")
    first = simulate(monkeypatch, workload, 20_000, captures=captures, remember=True).train(600)
    second = simulate(monkeypatch, workload, 20_000, captures=captures, remember=True).train(100)
    assert first.program.report["auto"]["remembered"] is None
    assert second.program.report["auto"]["remembered"]
    assert first.chosen == second.chosen == best
    assert second.tried == ["eager", best]
    assert second.program.report["auto"]["table"][best]["switched_at_step"] == 0
    short = simulate(monkeypatch, workload, 40, captures=captures, remember=True).train()
    assert short.tried == ["eager"], "forty steps do not pay for the same compile"


def test_what_is_in_the_compilers_caches_is_expected_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(caches))
    save_timings(measured(), tmp_path / "a.json")
    for there, seconds in ((False, 15.0), (True, CACHED_SECONDS)):
        if there:
            caches.mkdir()
            (caches / "kernel").touch()
        known = arms()
        load_timings(known, tmp_path / "a.json")
        assert known.expected_setup(known.arms["regional", False], known.arms[EAGER, False]) == seconds
        assert known.cached == ({"regional"} if there else set())


def test_the_next_run_counts_captures_of_all_shapes(tmp_path: Path) -> None:
    known, file = measured(), tmp_path / "a.json"
    captured = known.arms[EAGER, True]
    captured.step_seconds, captured.setup_seconds = 0.9, 0.2
    known.shapes = Counter(drawn(200, 45))
    assert save_timings(known, file) is None
    kept = arms()
    load_timings(kept, file)
    setup = kept.arms[EAGER, True].setup_seconds
    assert setup > len(known.shapes) * CAPTURE_SECONDS


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 6, "arms": 3, "written": "x"}'])
def test_a_damaged_or_foreign_memory_counts_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    known = arms()
    assert load_timings(known, file) is None
    assert known.arms["regional", False].step_seconds is None
    assert save_timings(measured(), file) is None
    assert json.loads(file.read_text())["arms"]["regional"]["step_seconds"] == 0.5


def test_memory_that_cannot_be_written_is_said_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    why = save_timings(measured(), tmp_path / "file" / "folder" / "a.json")
    assert "Not a directory" in why


# ---- what a reader sees ----------------------------------------------------------------------------------------------


def test_the_record_says_what_was_tried_and_gained_in_one_sentence_and_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = simulate(monkeypatch, replace(SMALL, spread=0.0), 20_000, captures=False).train()
    facts: dict[str, Any] = run.program.report["auto"]
    assert facts["summary"].startswith("auto: whole from step ")
    assert "70.0 ms a step where eager takes 100.0, " in facts["summary"].replace("69.9", "70.0").replace(
        "99.9", "100.0"
    )
    row = facts["table"]["regional"]
    assert row["setup_seconds"] == pytest.approx(4.0)
    eager, best = run.program.report["slowdown"]["before_the_first_step"].values(), facts["table"]["whole"]
    assert len(list(eager)) == 3
    assert best["step_seconds_before"] == row["step_seconds"]
    saved = (row["step_seconds_before"] - row["step_seconds"]) * (20_000 - row["switched_at_step"])
    assert row["gained_seconds"] == pytest.approx(saved - row["setup_seconds"])
    table = next(note for note in run.program.notes if note.startswith("auto tried"))
    assert [line.split()[0] for line in table.splitlines()] == ["auto", "eager", "regional", "whole"]
    assert table.splitlines()[-1].endswith("stays")
    assert any("begins to compile whole, which may take " in note for note in run.program.notes)
