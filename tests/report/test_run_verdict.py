"""A run's verdict: its next command can be typed, it is kept with the record; ``golden/`` holds its lines."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.report.scenarios import FASTER, OPTIONS, VERDICTS, run
from trainer.report.run_verdict import run_verdict, verdict_lines
from trainer.sweep.plan import with_arms
from trainer.telemetry.record import RunRecord


def test_options_of_a_strategy_go_where_it_goes() -> None:
    repeated = shlex.split(run_verdict(VERDICTS["noise, with options"]).next_command or "")
    assert repeated[:5] == ["python", "-m", "trainer", "-m", "task=toy"]
    arms = OverridesParser.create().parse_override(repeated[5]).value()
    chosen = [arm for _, arm in with_arms(["task=toy"], [str(arm) for arm in arms])]
    assert chosen == [("compile=eager",), ("compile=[regional,cuda_graph]", *OPTIONS[1:])]


def test_the_verdict_is_kept_with_the_record(tmp_path: Path) -> None:
    one = run(FASTER)
    one.verdict = run_verdict(one)
    one.save(tmp_path)
    again = RunRecord.load(tmp_path)
    assert dataclasses.asdict(again)["verdict"] == dataclasses.asdict(one)["verdict"]
    assert verdict_lines(again) == verdict_lines(one)


def test_a_difference_from_eager_is_looked_for_by_what_finds_submodules() -> None:
    one = run(FASTER)
    one.report["parity"] = {"verdict": "failed"}
    command = run_verdict(one).next_command or ""
    assert command.startswith("python -m scripts.bisect ")
    one.script = "train.py"
    assert run_verdict(one).next_command is None
