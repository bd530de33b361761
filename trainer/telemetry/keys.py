"""The TensorBoard keys of every run, with unit and meaning; the README's table is checked against this one."""

from __future__ import annotations

SCALARS: dict[str, tuple[str, str]] = {
    "train/loss": ("task's own", "training loss, mean of the optimizer steps since the last point"),
    "train/learning_rate": ("1", "learning rate of the first parameter group"),
    "throughput/steps_per_second": ("1/s", "steady optimizer steps since the last point"),
    "throughput/samples_per_second": ("1/s", "samples of those steps, this process"),
    "throughput/tokens_per_second": ("1/s", "token positions computed, padding included"),
    "throughput/useful_tokens_per_second": ("1/s", "token positions without padding"),
    "throughput/padded_share": ("1", "padding over all token positions"),
    "throughput/teraflops_per_second": ("TFLOP/s", "the task's forward and backward operations"),
    "throughput/model_flops_utilization": (
        "1",
        "the same over the datasheet's dense peak; absent when that is unknown",
    ),
    "throughput/model_flops_utilization_measured_peak": ("1", "the same over the peak measured when the run began"),
    "data/wait_share": (
        "1",
        "share of those steps lost to waiting for the data loader; above 0.05 the summary says so",
    ),
    "time/step_milliseconds_median": ("ms", "median steady step since the last point"),
    "time/step_milliseconds_p95": ("ms", "95th percentile of the same steps"),
    "time/batch_milliseconds_median": ("ms", "inference: median latency of a batch in one timed run, a point a run"),
    "time/batch_milliseconds_p95": ("ms", "inference: 95th percentile of the same batches"),
    "time/first_step_seconds": ("s", "first optimizer step, compilation included"),
    "time/warmup_seconds": ("s", "the rehearsal and all steps that are not steady, so far"),
    "time/slow_steps": ("count", "steps so far that took ten times the median or more, page `run/slow_steps`"),
    "audit/worst_of_tolerance": (
        "1",
        "largest difference from eager in an audited step over its tolerance; above 1 the run ends",
    ),
    "audit/seconds": ("s", "time spent on audits so far, at most 0.5% of the run"),
    "compile/seconds": ("s", "wall time inside the compiler so far"),
    "compile/graphs": ("count", "graphs compiled so far"),
    "compile/graph_breaks": ("count", "graph breaks so far"),
    "compile/recompiles": ("count", "recompiles so far, validation's own graphs included"),
    "compile/cache_hits": ("count", "graphs taken from Inductor's cache so far"),
    "compile/cache_misses": ("count", "graphs that were not there"),
    "memory/peak_device_gib": ("GiB", "highest allocation on the accelerator so far; absent on a CPU"),
    "memory/peak_process_gib": ("GiB", "highest resident memory of the process so far"),
    "energy/joules_per_sample": ("J", "board energy over steady steps so far; absent without NVML"),
}
"""Written every ``trainer.log_every_n_steps`` optimizer steps; a figure that does not exist is not written."""

FINAL: dict[str, str] = {
    "final/steps_per_second": "steady_steps_per_second",
    "final/useful_tokens_per_second": "useful_tokens_per_second",
    "final/step_milliseconds_p95": "steady_step_seconds_p95",
    "final/compile_seconds": "compile_seconds",
    "final/loss": "final_loss",
    "final/samples_per_second": "samples_per_second",
    "final/first_step_seconds": "first_step_seconds",
    "final/warmup_seconds": "warmup_seconds",
    "final/peak_device_gib": "peak_device_memory_gib",
    "final/rehearsal_seconds": "rehearsal_seconds",
    "final/latency_milliseconds_median": "latency_seconds_median",
    "final/latency_milliseconds_p95": "latency_seconds_p95",
}
"""Metric columns of the HParams table and the record field behind each, written when a run finishes.
TensorBoard shows the first five of them before it is asked for more."""

TEXTS: dict[str, str] = {
    "compile/events": "graph breaks, recompiles, fallbacks with reason and source line",
    "run/strategies": "what each strategy found and did: bucket edges, graphs captured, artifacts loaded",
    "run/slow_steps": "steps that took ten times the median or more, with their cause",
    "run/profile": "profile=on: share of device idle time, top kernels or operators",
    "run/config": "the whole configuration as YAML-like text",
    "run/summary": "the summary table of the run",
}
"""Text summaries."""
