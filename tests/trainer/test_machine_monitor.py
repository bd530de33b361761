"""The machine beside a run: what others took of it is told from what the run took itself, and withholds verdicts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import train
from trainer.console import summary
from trainer.telemetry import machine_monitor
from trainer.telemetry.machine_monitor import MachineFacts, MachineMonitor
from trainer.telemetry.record import RunRecord

SPIN = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
linux = pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="the kernel counts no waits")


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def facts(**changes: Any) -> MachineFacts:
    seen = {"load_average": 10.3, "other_processors": 1.06, "waited_share": 0.5}
    return MachineFacts(**{"seconds": 30.0, "processors": 2, **seen, **changes})


BUSY = "load 10 on 2 cores, others took 53% of the processor time"


@pytest.mark.parametrize(
    ("changes", "busy"),
    [
        ({}, BUSY),
        ({"waited_share": 0.01}, None),  # there were processors for all
        ({"other_processors": 0.1}, None),  # it waited for workers of its own
        ({"other_processors": 0.6, "processors": 128}, "load 10 on 128 cores, others took 0% of the processor time"),
        ({"waited_share": None}, BUSY),
        ({"waited_share": None, "processors": 16}, None),
        ({"other_processors": None}, None),
        ({"other_processors": 0.0, "gpu_throttled": ["power brake"]}, "the GPU was throttled (power brake)"),
        ({"other_processors": 0.0, "gpu_clock_mhz": 1200}, None),
    ],
)
def test_it_is_busy_where_others_took_what_the_run_wanted(changes: dict[str, Any], busy: str | None) -> None:
    assert facts(**changes).busy == busy


@linux
def test_processes_of_others_are_seen(tmp_path: Path) -> None:
    for number in range(len(os.sched_getaffinity(0)) + 1):  # orphans: no children of this process
        begun = tmp_path / str(number)
        code = f"open({str(begun)!r}, 'w').close()\nwhile os.path.exists({str(begun)!r}): pass"
        subprocess.run(["sh", "-c", '"$0" -S -c "$1" &', sys.executable, f"import os\n{code}"], check=True)
        while not begun.exists():
            time.sleep(0.01)
    watch = MachineMonitor()
    watch.begin()
    spin(1.2)
    found = watch.facts()
    for begun in tmp_path.iterdir():
        begun.unlink()
    assert "of the processor time" in found.busy


@linux
def test_workers_of_the_run_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    every, own = machine_monitor._ticks(sorted(os.sched_getaffinity(0))) or (0, 0)
    before = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    nested = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, SPIN]
    children = [subprocess.Popen(nested), subprocess.Popen([sys.executable, "-c", SPIN])]
    spin(0.8)
    living = machine_monitor._ticks(sorted(os.sched_getaffinity(0)))
    assert [child.wait() for child in children] == [0, 0]
    ended = machine_monitor._ticks(sorted(os.sched_getaffinity(0)))
    took = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) - before
    assert living[1] - own > 0, "also while they live"
    assert (ended[1] - own) / os.sysconf("SC_CLK_TCK") == pytest.approx(took, abs=0.15)
    assert ended[0] - every >= 0.9 * (ended[1] - own)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert os.getppid() in machine_monitor._tree(), "ranks that are siblings are not others either"


def test_where_the_kernel_does_not_tell_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_monitor, "PROC", tmp_path)
    watch = MachineMonitor()
    assert watch.facts() is None, "never begun"
    watch.begin()
    assert watch.facts() is None, "too short"
    found = watch.facts(shortest=0.0)
    assert (found.other_processors, found.waited_share) == (None, None)
    assert found.busy is None


def test_a_run_records_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineMonitor, "facts", lambda watch: facts(seconds=time.monotonic() - watch._began))
    began = time.monotonic()
    record = train(tmp_path, "trainer.max_steps=4", strategy="eager")
    assert 0 < record.machine.seconds < time.monotonic() - began
    assert RunRecord.load(record.save(tmp_path)).machine == record.machine
    assert summary(record)["machine"] == f"busy while it was measured: {BUSY}; measure again on a quiet one"
    record.machine = None
    assert "machine" not in summary(record)


def test_a_throttled_board_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    for name, answer in (
        ("nvmlDeviceGetClockInfo", 1200),
        ("nvmlDeviceGetPowerUsage", 690_000),
        ("nvmlDeviceGetEnforcedPowerLimit", 700_000),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x40 | 0x4),  # the power cap is as under any full load
        ("nvmlDeviceGetTemperature", 61),
    ):
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    watch = MachineMonitor(object())
    watch.begin()
    watch.look()
    seen = watch.facts(shortest=0.0)
    assert (seen.gpu_throttled, seen.gpu_clock_mhz, seen.gpu_celsius) == (["hardware thermal"], 1200, 61)
    assert (seen.gpu_power_watts, seen.gpu_power_limit_watts) == (690, 700)
