"""Whether somebody else uses the machine now: figures taken meanwhile are theirs as well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from trainer.doctor.finding import Finding, ok, warning
from trainer.telemetry.machine import MUCH_USE, MachineFacts, MachineMonitor

SECONDS = 0.6
WAIT = "wait until it is quiet, or measure elsewhere: runs record it, and comparisons of such runs have no verdict"


def busy(seconds: float = SECONDS) -> Iterator[Finding]:
    """A line for the processors, and one for each NVIDIA board."""
    watch = MachineMonitor()
    watch.begin()
    time.sleep(seconds)
    facts = watch.facts(shortest=0.0)
    if facts is not None and facts.other_processors is not None:
        facts.waited_share = None  # of this process, which slept
        yield processors(facts)
    yield from boards()


def processors(facts: MachineFacts) -> Finding:
    """What others take of the processors."""
    assert facts.other_processors is not None
    if facts.busy is not None:
        return warning("machine", f"busy: {facts.busy}", WAIT)
    load = "" if facts.load_average is None else f"load {facts.load_average:.2g} on {facts.processors} cores, "
    return ok("machine", f"{load}others take {facts.other_processors / facts.processors:.0%} of the processor time")


def boards() -> Iterator[Finding]:
    """Use, clock and power of each board, and why it is slow; nothing without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        used = [pynvml.nvmlDeviceGetUtilizationRates(board).gpu / 100 for board in found]
    except Exception:  # not installed, or no driver, or no board that tells
        return
    for number, (handle, share) in enumerate(zip(found, used, strict=True)):
        yield board(number, handle, share)


def board(number: int, handle: Any, used: float) -> Finding:
    """One board, which computes ``used`` of the time."""
    watch = MachineMonitor(handle)
    watch.begin()
    watch.look()
    facts = watch.facts(shortest=0.0)
    assert facts is not None
    said = f"computes {used:.0%} of the time"
    if facts.gpu_power_watts is not None and facts.gpu_power_limit_watts is not None:
        said += f", {facts.gpu_power_watts:.0f} of {facts.gpu_power_limit_watts:.0f} W"
    if facts.gpu_clock_mhz is not None and facts.gpu_clock_limit_mhz is not None:
        said += f", {facts.gpu_clock_mhz} of {facts.gpu_clock_limit_mhz} MHz"
    if facts.gpu_throttled:
        return warning(f"board {number}", f"{said}, throttled: {', '.join(facts.gpu_throttled)}", "cool it; " + WAIT)
    return ok(f"board {number}", said) if used < MUCH_USE else warning(f"board {number}", said, WAIT)
