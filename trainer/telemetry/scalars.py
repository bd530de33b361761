"""The points that training and inference write alike: rates, what the compiler did, memory and energy, by their key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch

from trainer.telemetry import memory
from trainer.telemetry.compiler import CompilerWatch
from trainer.telemetry.energy import EnergyMeter
from trainer.telemetry.meter import percentile
from trainer.telemetry.peak import Peak


def rate_scalars(rates: Mapping[str, float | None], peak: Peak) -> dict[str, float | None]:
    """Rates of the steps or batches since the last point."""
    utilization = peak.figures(rates.get("teraflops_per_second"))
    names = ("model_flops_utilization", "model_flops_utilization_measured_peak")
    shares = {name: value for name in names if isinstance(value := utilization[name], float)}
    return {
        "throughput/samples_per_second": rates.get("samples_per_second"),
        "throughput/tokens_per_second": rates.get("tokens_per_second"),
        "throughput/useful_tokens_per_second": rates.get("useful_tokens_per_second"),
        "throughput/padded_share": rates.get("padded_share"),
        "throughput/teraflops_per_second": rates.get("teraflops_per_second"),
        **{f"throughput/{name}": shares.get(name) for name in names},
        "data/wait_share": rates.get("data_wait_share"),
    }


def added_up(rates: Mapping[str, Any], trainer: L.Trainer) -> dict[str, float | None]:
    """Those of ``rates`` that count things, of all processes together, None where one of them has none; every process
    has to call this."""
    if trainer.world_size == 1:
        return {}
    counting = ("samples_per_second", "tokens_per_second", "useful_tokens_per_second")
    mine = [math.nan if rates.get(name) is None else rates[name] for name in counting]
    strategy = trainer.strategy
    total = strategy.reduce(torch.tensor(mine, device=strategy.root_device), reduce_op="sum")
    assert isinstance(total, torch.Tensor)
    return {name: None if math.isnan(rate) else rate for name, rate in zip(counting, total.tolist(), strict=True)}


def time_scalars(unit: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and 95th percentile of ``seconds``, of a step or a batch."""
    median, p95 = percentile(seconds, 0.5), percentile(seconds, 0.95)
    return {
        f"time/{unit}_milliseconds_median": None if median is None else median * 1e3,
        f"time/{unit}_milliseconds_p95": None if p95 is None else p95 * 1e3,
    }


def cost_scalars(watch: CompilerWatch, energy: EnergyMeter, device: torch.device) -> dict[str, float | None]:
    """What the run has cost so far."""
    compiler = watch.figures() if watch.compilations else {}
    return {
        "compile/seconds": compiler.get("compile_seconds"),
        "compile/graphs": compiler.get("graphs"),
        "compile/graph_breaks": compiler.get("graph_breaks"),
        "compile/recompiles": compiler.get("recompiles"),
        "compile/cache_hits": compiler.get("cache_hits"),
        "compile/cache_misses": compiler.get("cache_misses"),
        "memory/peak_device_gib": memory.peak_device_gib(device),
        "memory/peak_process_gib": memory.peak_process_gib(),
        "energy/joules_per_sample": energy.joules_per_sample(),
    }
