"""profile=on: a few steady steps recorded, out of the steady figures, and read for idle time and what takes longest."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from torch._C._autograd import DeviceType

from tests.trainer.lightning_modules import Blocks, fit
from tests.trainer.runs import train
from trainer.callback import Compile
from trainer.config import compose
from trainer.console import summary
from trainer.telemetry import profile
from trainer.telemetry.profile import profile_line, with_idle_share
from trainer.telemetry.record import RunRecord


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> tuple[RunRecord, Path]:
    """A profiled run and its folder."""
    folder = tmp_path_factory.mktemp("profiled")
    steps = ("trainer.max_steps=20", "trainer.warmup_steps=2")
    train(folder, "profile=on", *steps, strategy="regional", task="micro")
    return RunRecord.load(folder), folder


def test_a_few_steady_steps_are_recorded_and_are_neither_steady_nor_warm_up(profiled: tuple[RunRecord, Path]) -> None:
    record, folder = profiled
    facts = record.report["profile"]
    assert facts["steps"] == profile.STEPS
    assert facts["first_step"] > 2 + 1
    shares = [row["share"] for row in facts["operators"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert "idle_share" not in facts, "there is no device"
    counted = sum(one or 0 for one in (record.steady_steps, record.warmup_steps, record.left_out_steps))
    assert counted + profile.STEPS == record.steps == 20
    with gzip.open(folder / facts["trace"], "rt", encoding="utf-8") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == profile.STEPS
    assert "profile/trace.json.gz" in summary(record)["profile"]


def test_a_run_that_is_too_short_says_why_there_is_no_profile(tmp_path: Path) -> None:
    record = train(tmp_path, "profile=on", "parity=off", "trainer.warmup_steps=4", task="micro")
    assert record.status == "finished"
    assert record.report["profile"] == {"reason": "the run ended before a steady step and a profiled one"}
    assert summary(record)["profile"].startswith("none: the run ended before")
    assert not (tmp_path / "profile").exists()


class PausesInsideAStep(L.Callback):
    """Writes a checkpoint between the two batches of the sixth step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and batch_idx % 2 == 0:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "inside.ckpt")


def test_a_step_that_is_recorded_in_part_is_neither_counted_nor_steady(tmp_path: Path) -> None:
    compile_ = Compile(warmup_steps=0, profile="on")
    callbacks = [compile_, PausesInsideAStep()]
    fit(Blocks(), tmp_path, callbacks, accumulate_grad_batches=2, max_steps=12)
    record = compile_.record
    assert record.report["profile"]["steps"] == 4, "the second to the fifth; the sixth was cut"
    assert record.steady_steps == 12 - 5


@pytest.mark.parametrize("moment", ["start", "stop"])
def test_a_profiler_that_fails_does_not_end_the_run(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = profile.profile.stop

    def fails(recorder: Any) -> None:
        if moment == "stop":
            stop(recorder)  # a process that ends while torch's profiler records is a segmentation fault
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nmore")

    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    monkeypatch.setattr(profile.profile, moment, fails)
    compile_ = Compile(warmup_steps=0, profile="on")
    fit(Blocks(), tmp_path, [compile_])
    assert compile_.record.report["profile"] == {
        "reason": "the profiler failed: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    }
    assert compile_.record.steps == 6
    assert (os.environ.get("TEARDOWN_CUPTI"), os.environ["KINETO_LOG_LEVEL"]) == (None, "1"), "put back"


def test_a_wrong_option_is_refused() -> None:
    for refuse in (lambda: compose(["profile=yes"]), lambda: Compile(profile="yes")):
        with pytest.raises(ValueError, match="profile='yes' is not one of"):
            refuse()


def event(name: str, begin: float, end: float, *, on: DeviceType = DeviceType.CUDA, annotates: bool = False) -> Any:
    span = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=on, is_user_annotation=annotates)


def test_idle_is_what_no_kernel_of_any_stream_covers() -> None:
    events = [
        event("void gemm", 100.0, 300.0),
        event("gemm2", 250.0, 400.0),  # another stream
        event("gemm2", 700.0, 800.0),
        event("Optimizer.step#SGD.step", 0.0, 900.0, annotates=True),
        event("aten::mm", 80.0, 90.0, on=DeviceType.CPU),
    ]
    facts = profile.of_device(events, steps=2)
    assert facts["busy_seconds_per_step"] == pytest.approx(400e-6 / 2)
    top = facts["kernels"][0]
    assert (top["name"], top["calls_per_step"]) == ("gemm2", 1.0)
    assert top["share"] == pytest.approx(250 / 450)
    assert "not_seen" in profile.of_device([], steps=2)


def test_exposed_communication_is_what_runs_while_nothing_computes() -> None:
    kernels = [
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 100.0, 300.0),
        event("gemm", 0.0, 200.0),
        event("gemm2", 150.0, 250.0),  # another stream
        event("void ncclKernel_AllGather", 400.0, 450.0),
        event("adam", 450.0, 500.0),
        event("nccl:all_reduce", 0.0, 500.0, annotates=True),
        event("aten::mm", 250.0, 500.0, on=DeviceType.CPU),
    ]
    facts = profile.of_collectives(kernels, steps=2, on_cuda=True)
    assert facts["exposed_communication_seconds_per_step"] == pytest.approx(100e-6 / 2)
    assert facts["exposed_communication_share"] == pytest.approx(100 / 500)
    assert "communication that nothing hides 20%" in profile_line({**facts, "kernels": []})
    host = [
        event("gloo:all_reduce", 0.0, 100.0, on=DeviceType.CPU),
        event("aten::mm", 20.0, 60.0, on=DeviceType.CPU),
        event("c10d::allreduce_", 0.0, 5.0, on=DeviceType.CPU),
    ]
    assert profile.of_collectives(host, steps=1, on_cuda=False)["exposed_communication_share"] == pytest.approx(0.6)
    assert profile.of_collectives(host[1:], steps=1, on_cuda=False) == {}, "nothing where there is no collective"


def test_the_idle_share_of_a_step_is_taken_of_steps_that_no_profiler_slowed_down() -> None:
    facts = {"busy_seconds_per_step": 0.002, "kernels": []}
    assert with_idle_share(facts, 0.004)["idle_share"] == pytest.approx(0.5)
    assert with_idle_share(facts, 0.001)["idle_share"] is None, "steps of another size"
    assert with_idle_share(facts, None)["idle_share"] is None
    assert profile_line(with_idle_share(facts, 0.004)).startswith("GPU idle 50% of the time")
