"""``tests/gpu/several.py``: what it would run, and how it shares GPUs out; how ``rank_faults`` judges what came of a
fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import rank_faults, several
from tests.gpu.several import Job, members, plan, run, table
from trainer.config import compose
from trainer.run_start import SWEEP_VARIABLE
from trainer.telemetry.record import RunRecord


def job(name: str, *, devices: int = 1, seconds: float = 60.0) -> Job:
    return Job(kind="captioning", arm="one", what=name, devices=devices, seconds=seconds, overrides=())


@pytest.mark.parametrize("smoke", [False, True])
def test_every_job_of_a_plan_is_a_valid_command(smoke: bool, edge: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWEEP_VARIABLE, "1")
    jobs = plan([1, 2, 4, 8], smoke=smoke)
    assert len({one.name for one in jobs}) == len(jobs)
    for one in jobs:
        words = [word for word in several.command(one, Path("out")) if "=" in word and not word.startswith("-")]
        compose([word for word in words if not word.startswith("hydra.")])
    measured = {(one.devices, one.arm, one.what) for one in jobs if one.kind == "captioning"}
    both = {(count, arm, what) for count in (2, 4, 8) for arm in ("ddp", "fsdp2") for what in ("ours", "loop")}
    assert measured == both | {(1, "one", "ours"), (1, "one", "loop")}
    assert {(one.kind, one.devices) for one in jobs if one.kind != "captioning"} == {
        *(("llama", 8), ("ragged", 8), ("ragged", 1)),
    }


def test_no_two_jobs_have_a_gpu_together_and_nothing_outlives_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(one: Job, folder: Path) -> list[str]:
        after = "setsid sleep 1000 & sleep 1000" if one.seconds == 0 else f"echo $CUDA_VISIBLE_DEVICES > {folder}/gpus"
        return ["sh", "-c", after]

    monkeypatch.setattr(several, "command", command)
    jobs = [job("both", devices=2), job("too long", seconds=0), job("first"), job("second")]
    run(jobs, tmp_path, gpus=2, seconds=1000)
    assert (tmp_path / jobs[0].name / "gpus").read_text() == "0,1\n"
    assert [one.ended.partition(" after")[0] for one in jobs] == [
        "exit code 0",
        "cut off",
        "exit code 0",
        "exit code 0",
    ]
    assert all(one.process is not None and not members(tmp_path / one.name) for one in jobs)
    assert len(capsys.readouterr().out.splitlines()) == 4
    late = [job("late")]
    run(late, tmp_path, gpus=2, seconds=0)
    assert late[0].process is None
    assert "| captioning-1-one-late | - |" in table(late)
    assert late[0].ended in table(late)


def test_the_table_holds_what_records_say(tmp_path: Path) -> None:
    jobs = plan([1, 2])
    for one, rate in zip(jobs, (190.0, 200.0, 150.0, 200.0, 100.0, 125.0), strict=False):
        folder = tmp_path / one.name / "run"
        folder.mkdir(parents=True)
        RunRecord(task="captioning", status="finished", samples_per_second=rate, first_step_seconds=4.0).save(folder)
        one.figures, one.ended = several.figures(folder.parent), "exit code 0 after 9 s"
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:5] for line in table(jobs).splitlines()}
    assert rows["captioning-2-ddp-ours"] == ["190", "0.950", "0.950", "4.0"]
    assert rows["captioning-2-fsdp2-ours"] == ["150", "0.750", "0.750", "4.0"]
    assert rows["captioning-1-one-ours"][1:3] == ["0.800", "-"]


SUMMARY = """
Failures:
[1]:
  rank      : {other} (local_rank: {other})
  exitcode  : -15 (pid: 8)
Root Cause (first observed failure):
[0]:
  rank      : {first} (local_rank: {first})
  exitcode  : -9 (pid: 7)
"""
"""Of torchrun's."""


@pytest.mark.parametrize(
    ("fault", "text", "seconds", "code", "left", "expected"),
    [
        ("killed", SUMMARY.format(first=1, other=0), 17.0, 1, False, "ok"),
        ("killed", SUMMARY.format(first=0, other=1), 17.0, 1, False, "no line names it"),
        ("killed", SUMMARY.format(first=1, other=0), 90.0, 1, False, "90 s, more than the deadline"),
        ("killed", SUMMARY.format(first=1, other=0), 17.0, 0, False, "exit code 0"),
        ("killed", "", 130.0, 1, True, "still there after 130 s"),
        ("killed", "", None, 1, False, "the fault did not come"),
        ("sys.exit", "failed: RankFailed: rank 1 (node3, pid 7): SystemExit: 3", 17.0, 1, False, "ok"),
        ("slow 30 s", "rank 0 trained 30 steps\nrank 1 trained 30 steps", 40.0, 0, False, "ok"),
        ("slow 30 s", "rank 0 trained 30 steps", 40.0, 1, False, "a healthy run ended: exit code 1, 1 of 2 done"),
        ("terminated", "", 20.0, 0, False, "ok"),
    ],
)
def test_what_came_of_a_planted_fault_is_judged(
    fault: str, text: str, seconds: float | None, code: int, left: bool, expected: str
) -> None:
    line = next(rank_faults.lines_that_name(text), "")
    assert rank_faults.verdict(rank_faults.FAULTS[fault], text, seconds, code, left, line) == expected


def test_every_fault_is_planted_and_no_job_twice() -> None:
    for cpu in (False, True):
        jobs = rank_faults.plan(cpu=cpu)
        assert len({job.name for job in jobs}) == len(jobs) >= 30
        assert {job.fault for job in jobs} == set(rank_faults.FAULTS)
