"""The verdict of one run: what it claims follows from its pairs, and what it advises from its record's fields."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from trainer.report.run_verdict import run_verdict, verdict_lines
from trainer.sweep.plan import with_arms
from trainer.telemetry.machine_monitor import MachineFacts
from trainer.telemetry.record import Event, RunRecord


def timed(eager: list[float], compiled: list[float], **more: Any) -> dict[str, Any]:
    return {"eager_seconds": eager, "compiled_seconds": compiled, **more}


SAME = [0.100, 0.101, 0.099]
FASTER = timed(SAME, [0.080, 0.081, 0.079])
SLOWER = timed(SAME, [0.130, 0.131, 0.129])
NOISY = timed([0.1, 0.2, 0.1], [0.15, 0.09, 0.16])


def record(*batches: dict[str, Any], names: tuple[str, ...] = ("regional",), **fields: Any) -> RunRecord:
    slowdown = {"before_the_first_step": batches[0], "on_later_batches": list(batches[1:])} if batches else {}
    values: dict[str, Any] = {
        "task": "toy",
        "label": "+".join(names) or "eager",
        "strategies": [{"name": name} for name in names],
        "command": ["task=toy", f"compile=[{','.join(names)}]", "resume=old"],
        "status": "finished",
        "report": {"slowdown": slowdown},
        "steady_steps": 590,
        "warmup_steps": 10,
        "warmup_seconds": 30.8,
        "compile_seconds": 20.0,
        "cache": "cold",
    }
    return RunRecord(**{**values, **fields})


def test_a_faster_run_says_both_speeds_the_wait_and_after_how_many_steps_it_pays() -> None:
    one = record(FASTER)
    assert verdict_lines(one) == [
        "verdict: faster than eager (regional 80 ms, eager 100 ms a step, by turns: 1.25x, 1.24 to 1.26 in 3 pairs)",
        "wait: 30.0 s for compiling and warm-up, pays after 1,500 steps; this run of 600 was too short",
        "next: python -m trainer task=toy 'compile=[cached,regional]'  # the next start takes its graphs from a store",
    ]
    assert "this run of 2,000 was long enough" in verdict_lines(record(FASTER, steady_steps=1990))[1]
    busy = MachineFacts(seconds=9.0, processors=2, other_processors=1.5)
    assert "in 3 pairs; the machine was busy)" in verdict_lines(record(FASTER, machine=busy))[0]


def test_a_composite_is_advised_by_its_name() -> None:
    one = record(NOISY, names=("cached", "regional", "cuda_graph"), command=["compile=full_stack"])
    assert "next: python -m trainer -m compile=eager,full_stack hydra.launcher.rounds=3" in verdict_lines(one)[-1]


def test_no_payback_is_claimed_where_the_spread_allows_no_claim() -> None:
    verdict = run_verdict(record(NOISY))
    assert verdict.outcome == "no difference shown"
    assert verdict.break_even_steps is verdict.paid is None
    assert verdict.next_command is not None
    assert verdict.next_command.endswith("-m task=toy compile=eager,regional hydra.launcher.rounds=3")
    assert verdict.ratio is not None
    assert verdict.shown_ratio is None, "no number stands where there is no room for its interval"
    assert run_verdict(record(FASTER)).shown_ratio == pytest.approx(1.25, rel=0.01)
    lines = verdict_lines(record(NOISY))
    assert "pays" not in " ".join(lines)
    single = run_verdict(record(timed([0.1], [0.05])))
    assert single.outcome == "no difference shown", "one pair has no spread"
    wide = verdict_lines(record(timed([0.1, 0.1], [0.05, 0.2])))[0]
    assert ": 1.00x in 2 pairs" in wide, "0.00 to 44,000 would say nothing"


def test_an_interval_on_one_side_shows_nothing_where_the_steps_of_one_side_differ_by_more() -> None:
    eager = [0.09, 0.10, 0.11] * 4
    one = record(timed(eager, [seconds * 0.97 for seconds in eager]))
    assert one.verdict is None
    assert run_verdict(one).ratio_low > 1  # type: ignore[operator]
    line = verdict_lines(one)[0]
    assert line.startswith("verdict: no difference shown (regional 97 ms, eager 100 ms")
    assert line.endswith("in 12 pairs)")


def test_batches_of_other_lengths_are_compared_each_with_itself() -> None:
    """A ratio over seconds as they are would drown in how much longer the second batch is."""
    long = timed([1.0, 1.01, 0.99], [0.8, 0.81, 0.79])
    verdict = run_verdict(record(FASTER, long))
    assert (verdict.outcome, verdict.pairs, verdict.batches) == ("faster", 6, 2)
    assert verdict.ratio == pytest.approx(1.25, rel=0.01)
    assert verdict.eager_step_seconds == pytest.approx(0.55)


def test_of_batches_with_one_pair_each_the_ratio_holds_the_noise_of_both_sides() -> None:
    """One side's steps alone would seem to spread by all that the ratios do, and hide what they agree on."""
    pairs = [timed([length], [length / gain]) for length in (1.0, 3.0) for gain in (1.0, 1.12) * 5]
    verdict = run_verdict(record(*pairs))
    assert (verdict.outcome, verdict.pairs, verdict.batches) == ("faster", 20, 20)
    noise = [timed([1.0], [1.0 / gain]) for gain in (0.96, 1.12) * 10]
    assert run_verdict(record(*noise)).outcome == "no difference shown"


def test_a_captured_step_is_compared_by_its_replays_alone() -> None:
    report = {"cuda_graph": {"graphs": 1}}
    facts = {"before_the_first_step": FASTER, "on_later_batches": []}
    one = record(names=("regional", "cuda_graph"), report={**report, "slowdown": facts})
    assert run_verdict(one).outcome == "not compared", "these pairs are of the step before it was captured"
    facts["on_later_batches"] = [timed(SAME, [0.030, 0.031, 0.029], replayed=True)]
    assert run_verdict(one).ratio == pytest.approx(3.33, rel=0.01)


ADVICE: list[tuple[str, RunRecord, str | None]] = [
    ("eager", record(names=()), "python -m trainer task=toy compile=auto"),
    ("slower", record(SLOWER), "python -m trainer task=toy compile=eager"),
    ("breaks", record(FASTER, graph_breaks=2), "python -m scripts.explain task=toy compile=regional"),
    ("went eager", record(ended_in_eager=True), "python -m scripts.explain task=toy compile=regional"),
    (
        "ragged",
        record(FASTER, padded_share=0.3, events=[Event(kind="recompile", reason="size")] * 3),
        "python -m trainer task=toy 'compile=[buckets,regional]'",
    ),
    (
        "host-bound",
        record(FASTER, device_type="cuda", steady_steps=5000, report={"profile": {"idle_share": 0.6}, "slowdown": {
            "before_the_first_step": FASTER}}),
        "python -m trainer task=toy 'compile=[regional,cuda_graph]'",
    ),
    ("paid", record(FASTER, steady_steps=5000), "python -m trainer -m task=toy compile=eager,regional hydra."),
    ("failed", record(FASTER, status="failed"), None),
    ("a peer", record(names=("peer",), device_type="cuda"), None),
]  # fmt: skip


@pytest.mark.parametrize(("one", "command"), [each[1:] for each in ADVICE], ids=[each[0] for each in ADVICE])
def test_what_to_try_next_follows_from_the_records_fields(one: RunRecord, command: str | None) -> None:
    found = run_verdict(one).next_command
    assert found is None if command is None else (found or "").startswith(command)


def test_options_of_a_strategy_go_where_it_goes() -> None:
    options = ["compile.regional.mode=default", 'compile.regional.options={"trace.enabled":true}']
    given = ["task=toy", *options]
    one = record(SLOWER, names=("regional", "cuda_graph"), command=given)
    assert run_verdict(one).next_command == "python -m trainer task=toy compile=eager"
    repeated = shlex.split(
        run_verdict(record(NOISY, names=("regional", "cuda_graph"), command=given)).next_command or ""
    )
    assert repeated[:5] == ["python", "-m", "trainer", "-m", "task=toy"]
    arms = OverridesParser.create().parse_override(repeated[5]).value()
    chosen = [arm for _, arm in with_arms(["task=toy"], [str(arm) for arm in arms])]
    assert chosen == [("compile=eager",), ("compile=[regional,cuda_graph]", *options)]


def test_an_eager_run_and_one_without_pairs_claim_nothing() -> None:
    eager = verdict_lines(record(names=(), steady_step_seconds_mean=0.05))
    assert eager[0] == "verdict: eager, 50 ms a steady step; nothing compiled to compare it with"
    without = verdict_lines(record(report={"parity": {"verdict": "skipped", "reason": "two optimizers"}}))
    assert without[0] == "verdict: regional was not compared with eager: two optimizers"
    assert verdict_lines(record(FASTER, status="failed")) == []


def test_the_verdict_is_kept_with_the_record(tmp_path: Path) -> None:
    one = record(FASTER)
    one.verdict = run_verdict(one)
    one.save(tmp_path)
    again = RunRecord.load(tmp_path)
    assert dataclasses.asdict(again)["verdict"] == dataclasses.asdict(one)["verdict"]
    assert verdict_lines(again) == verdict_lines(one)
