"""Records by what they are to show; ``test_golden.py`` keeps what becomes of them."""

from __future__ import annotations

from typing import Any

from tests.report.records import ragged, record
from trainer.telemetry.machine_monitor import MachineFacts
from trainer.telemetry.record import Event, RunRecord


def steady(arm: str, milliseconds: float, *, warmup: float | None = 1.0, **changes: Any) -> RunRecord:
    """A run of exactly that pace, without scatter; imports and setup take 10 s."""
    seconds = milliseconds / 1e3
    values = {
        "steady_steps_per_second": 1 / seconds,
        "samples_per_second": 32 / seconds,
        "warmup_seconds": warmup,
        "warmup_steps": 0,
        "import_seconds": 7.0,
        "setup_seconds": 3.0,
    }
    return record(arm, step_seconds=seconds, **{**values, **changes})


def rounds(arm: str, *milliseconds: float, start: str = "cold", **changes: Any) -> list[RunRecord]:
    """Three rounds of a pace, or rounds of several."""
    paces = milliseconds * 3 if len(milliseconds) == 1 else milliseconds
    return [steady(arm, pace, round=number, start=start, **changes) for number, pace in enumerate(paces)]


def configured(arm: str = "eager", **settings: Any) -> RunRecord:
    """A record whose configuration holds ``settings``, with ``__`` for dots."""
    one = record(arm)
    for name, value in settings.items():
        *sections, last = name.split("__")
        place = one.config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return one


BUSY = MachineFacts(seconds=9.0, processors=2, load_average=10.0, other_processors=1.5, waited_share=0.6)
EAGER = rounds("eager", 100)
COLD = rounds("whole", 50, warmup=31.0, compile_seconds=20.0)
WARM = rounds("whole", 50, start="warm", warmup=3.0, compile_seconds=1.0)
MODES = [*rounds("whole mode=default", 50), *rounds("whole mode=reduce-overhead", 40)]
PACES = {1: 1.0, 2: 1.2, 3: 0.9, 4: 1.1}


def profiled() -> list[RunRecord]:
    """Of both arms, the last run under the profiler, which slows it."""
    runs = [*EAGER[:2], *rounds("whole", 50, 50), steady("eager", 100), steady("whole", 500)]
    for one in runs[-2:]:
        one.config["profile"] = "on"
    return runs


COMPARED: dict[str, tuple[list[RunRecord], dict[str, Any]]] = {
    "half of eager's 100 ms, for 30 s more of warming up": ([*COLD, *EAGER], {"at_steps": [100, 2000]}),
    "2 s of the setup wait for the compiler": (
        [*EAGER, *rounds("whole", 50, warmup=31.0, compile_seconds=20.0, setup_seconds=5.0, preparation_seconds=2.0)],
        {"at_steps": [100]},
    ),
    "cold and warm starts": ([*EAGER, *COLD, *WARM], {}),
    "warm starts alone": ([*EAGER, *WARM], {}),
    "slower": ([*EAGER, *rounds("whole", 110, warmup=31.0)], {}),
    "pays back late": ([*EAGER, *rounds("whole", 99, warmup=61.0)], {}),
    "runs that scatter": ([*EAGER, *rounds("whole", 80, 120, 95)], {}),
    "a pace of each round, and a run that is missing": (
        [
            steady(arm, milliseconds * pace, round=number, start="cold", warmup=warmup)
            for number, pace in PACES.items()
            for arm, milliseconds, warmup in (("eager", 100, 1.0), ("whole", 80, 31.0))
            if (arm, number) != ("eager", 2)
        ],
        {},
    ),
    "steps of twice the samples": ([*EAGER, *rounds("buckets", 100, samples_per_second=640.0, warmup=2.0)], {}),
    "another baseline": ([*EAGER, *COLD, *rounds("regional", 60)], {"baseline": "regional"}),
    "a baseline with a parameter": (MODES, {"baseline": "whole (mode=default)"}),
    "no eager": (MODES, {}),
    "eager failed": ([steady("eager", 100, status="failed", reason="out of memory\nmore"), *COLD], {}),
    "eager on a busy machine": ([*rounds("eager", 100, machine=BUSY), *COLD], {}),
    "without warm-up": ([*rounds("eager", 100, warmup=None), *rounds("whole", 50, warmup=None)], {}),
    "single runs": ([record("eager", warmup_seconds=1.0), record("whole", warmup_seconds=2.0, step_seconds=0.05)], {}),
    "a lonely run that failed": ([RunRecord(task="toy", status="failed", reason="no compiler")], {}),
    "long names, brackets and what else a table might read": (
        [
            record("eager"),
            record("cached+buckets+regional+optimizer+checkpointing+dynamic+cuda_graph"),
            record("regional blocks=[net]"),
            record("mine|*<b>"),
        ],
        {},
    ),
    "under the profiler, beside others": (profiled(), {}),
    "under the profiler, alone": (profiled()[-2:], {}),
    "ragged captions, with a run that failed": (ragged(), {"at_steps": [500]}),
}
"""Runs, and the options of their comparison."""

ROLLED_BACK = "slower than eager: a step takes 5 ms; on_slower=eager: 2 regions go on eager"
IN_PART = "on_compile_error=eager: compile=optimizer runs eager, it did not compile: no"
FLAGGED: dict[str, list[dict[str, Any]]] = {
    "nothing": [{}],
    "a recompile of validation": [{"events": [Event(kind="recompile", reason="size", phase="validating")]}],
    "nothing compiled": [{"report": {"parity": {"verdict": "skipped", "reason": "nothing compiled"}}}],
    "19 steps": [{"steady_steps": 19}],
    "many new shapes": [{"new_shape_steps": 60, "steady_steps": 100}],
    "another loss": [{"final_loss": 0.6}],
    "graph breaks": [{"events": [Event(kind="graph_break", reason="print")] * 2}],
    "a recompile": [{"events": [Event(kind="recompile", reason="size")]}],
    "an unknown cache": [{"start": None, "cache": None}],
    "still running": [{"status": "running"}],
    "interrupted": [{"status": "interrupted", "steps": 1200, "reason": "SIGINT"}],
    "not compared": [{"report": {"parity": {"verdict": "not compared", "reason": "it draws"}}}],
    "comparison skipped": [{"report": {"parity": {"verdict": "skipped", "reason": "manual optimization"}}}],
    "one of two passed": [
        {"report": {"parity": {"verdict": "passed"}}},
        {"report": {"parity": {"verdict": "not compared", "reason": "it draws"}}},
    ],
    "scattered, one in part in eager": [
        {"steady_steps_per_second": 20.0, "samples_per_second": 640.0},
        {"steady_steps_per_second": 25.0, "samples_per_second": 800.0, "eager_parts": {"net": "no reason"}},
    ],
    "all in eager": [
        {
            "events": [Event(kind="fallback", reason=ROLLED_BACK)],
            "ended_in_eager": True,
            "eager_parts": {"net": ROLLED_BACK},
        }
    ]
    * 2,
    "in part in eager": [
        {"events": [Event(kind="fallback", reason=IN_PART)], "eager_parts": {"optimizer": IN_PART}},
    ]
    * 2,
    "a busy machine": [{"machine": BUSY}] * 2,
    "a machine that was busy in one run of two": [{"machine": BUSY}, {}],
    "another network": [{"report": {"network": {"class": "Mine", "parameters": 12345}}}],
    "another device": [{"device": "NVIDIA A100"}] * 2,
    "another precision": [{"precision": "32-true"}] * 2,
    "another world size": [{"world_size": 8}] * 2,
    "another torch": [{"versions": {"torch": "2.15.0"}}] * 2,
    "another schema": [{"schema": 1}] * 2,
}
"""Changes of runs of ``whole``, whose steps take half of eager's."""


def against_eager(changes: list[dict[str, Any]]) -> list[RunRecord]:
    runs = [record("eager", warmup_seconds=1.0, round=turn) for turn in (1, 2)]
    values = {"start": "cold", "warmup_seconds": 9.0, "compile_seconds": 6.0, "step_seconds": 0.05}
    return [*runs, *(record("whole", **{**values, "round": turn, **each}) for turn, each in enumerate(changes, 1))]


def of_micro(model: str) -> RunRecord:
    one = record("eager", task=f"micro {model}")
    one.config["task"]["model"] = model
    return one


def in_store(**values: Any) -> RunRecord:
    one = record("cached url=s3://bucket")
    one.strategies[0] |= values
    return one


CELLS: dict[str, list[RunRecord]] = {
    "seeds, lengths, guards and places": [
        configured(),
        configured(seed=1),
        configured(trainer__max_steps=9, trainer__val_every_n_steps=3),
        configured(trainer__progress="none", trainer__summary="full"),
        configured(parity="off", resume="somewhere"),
        configured(task__data__root="/elsewhere"),
    ],
    "what a step depends on": [
        configured(),
        configured(task__data__batch_size=64),
        configured(trainer__precision="32-true"),
    ],
    "the fewest settings that tell apart": [
        configured(task__network__layers=layers, task__network__width=64 * layers, task__network__heads=2)
        for layers in (2, 12)
    ],
    "parameters that are not defaults": [
        record("eager"),
        record("regional"),
        record("whole mode=default"),
        record("whole mode=reduce-overhead"),
        record("buckets+regional backend=aot_eager"),
    ],
    "a default alone": [record("whole mode=default")],
    "somebody else's strategies": [record("mine speed=1"), record("mine speed=2"), record("other size=3")],
    "where a cache lies, and what an older record lacks": [record("cached"), in_store(max_gib=10.0)],
    "how runs started and ended": [
        record("whole", start="cold"),
        record("whole", start="warm"),
        record("whole", cache="cold"),  # nobody saw to it, but every graph was compiled anew
        record("whole", cache="mixed"),
        record("whole", status="failed", reason="no"),
        record("whole", status="interrupted"),
        record("whole", status="running"),
    ],
    "models of micro": [of_micro("ragged"), of_micro("convnet")],
    "an option that strategies had once": [
        record("cuda_graph"),
        record("cuda_graph max_graphs=64"),
        record("cuda_graph max_graphs=2"),
    ],
}


def on(devices: int, step_seconds: float, *, how: str = "ddp", batch_size: int = 32, **changes: Any) -> RunRecord:
    """A run of ``batch_size`` samples a step and device."""
    one = record("regional", step_seconds=step_seconds, batch_size=batch_size, **changes)
    one.world_size = devices
    one.config["trainer"] |= {"devices": devices, "strategy": how if devices > 1 else "auto"}
    one.samples_per_second = devices * batch_size / step_seconds
    return one


def two_of_eager() -> RunRecord:
    one = record("eager")
    one.world_size = 2
    return one


SCALED: dict[str, list[RunRecord]] = {
    "a machine that is slower in the second round, and another arm": [
        *(
            on(devices, step * pace, round=number, how=how)
            for number, pace in ((1, 1.0), (2, 1.2))
            for devices, how, step in ((1, "ddp", 0.1), (2, "ddp", 0.125), (2, "fsdp2", 0.2))
        ),
        record("eager"),
    ],
    "half of the batch a device": [on(1, 0.1), on(2, 0.06, batch_size=16)],
    "without one device": [on(2, 0.1), on(4, 0.1)],
    "another strategy": [on(1, 0.1), two_of_eager()],
    "a run that failed": [on(1, 0.1), on(2, 0.1, status="failed")],
    "one number of devices": [on(2, 0.1), on(2, 0.1, how="fsdp2")],
    "another board": [on(1, 0.1), on(2, 0.1, device="NVIDIA A100")],
}


# ---- verdicts of single runs ----------------------------------------------------------------------------------------


def timed(eager: list[float], compiled: list[float], **more: Any) -> dict[str, Any]:
    return {"eager_seconds": eager, "compiled_seconds": compiled, **more}


def run(*batches: dict[str, Any], names: tuple[str, ...] = ("regional",), **fields: Any) -> RunRecord:
    """A run whose steps were timed beside eager's, by windows."""
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


SAME = [0.100, 0.101, 0.099]
FASTER = timed(SAME, [0.080, 0.081, 0.079])
SLOWER = timed(SAME, [0.130, 0.131, 0.129])
NOISY = timed([0.1, 0.2, 0.1], [0.15, 0.09, 0.16])
ONE_SIDED = [0.09, 0.10, 0.11] * 4
OPTIONS = ["task=toy", "compile.regional.mode=default", 'compile.regional.options={"trace.enabled":true}']
REPLAYED = timed(SAME, [0.030, 0.031, 0.029], replayed=True)
CAPTURED: dict[str, Any] = {"names": ("regional", "cuda_graph"), "steady_steps": 5000}
VERDICTS: dict[str, RunRecord] = {
    "faster": run(FASTER),
    "faster, and long enough": run(FASTER, steady_steps=1990),
    "faster, with a store": run(FASTER, names=("cached", "regional")),
    "on a busy machine": run(FASTER, machine=BUSY),
    "of accumulated steps": run(report={"slowdown": {"before_the_first_step": FASTER, "micro_batches": 4}}),
    "a composite": run(NOISY, names=("cached", "regional", "cuda_graph"), command=["compile=full_stack"]),
    "noise": run(NOISY),
    "noise, and no time": run(report={"slowdown": {"before_the_first_step": NOISY, "short_of_time": True}}),
    "one pair": run(timed([0.1], [0.05])),
    "an interval to 44,000": run(timed([0.1, 0.1], [0.05, 0.2])),
    "closer than eager's own steps": run(timed(ONE_SIDED, [seconds * 0.97 for seconds in ONE_SIDED])),
    "batches of two lengths": run(FASTER, timed([1.0, 1.01, 0.99], [0.8, 0.81, 0.79])),
    "one pair a window, in agreement": run(
        *(timed([length], [length / gain]) for length in (1.0, 3.0) for gain in (1.0, 1.12) * 5)
    ),
    "one pair a window, of noise": run(*(timed([1.0], [1.0 / gain]) for gain in (0.96, 1.12) * 10)),
    "captured, not yet replayed": run(report={"cuda_graph": {"graphs": 1}, "slowdown": {
        "before_the_first_step": FASTER}}, **CAPTURED),
    "captured": run(FASTER, REPLAYED, **CAPTURED),
    "eager": run(names=(), steady_step_seconds_mean=0.05),
    "slower": run(SLOWER),
    "slower, with options": run(SLOWER, names=("regional", "cuda_graph"), command=OPTIONS),
    "noise, with options": run(NOISY, names=("regional", "cuda_graph"), command=OPTIONS),
    "graph breaks": run(FASTER, graph_breaks=2),
    "went eager": run(ended_in_eager=True),
    "ragged": run(FASTER, padded_share=0.3, events=[Event(kind="recompile", reason="size")] * 3),
    "ragged, under dynamic": run(
        FASTER, names=("dynamic", "regional"), padded_share=0.3, events=[Event(kind="recompile", reason="size")] * 3
    ),
    "host-bound": run(device_type="cuda", steady_steps=5000, report={"profile": {"idle_share": 0.6}, "slowdown": {
        "before_the_first_step": FASTER}}),
    "not host-bound": run(device_type="cuda", steady_steps=5000, report={"profile": {"idle_share": 0.1}, "slowdown": {
        "before_the_first_step": FASTER}}),
    "paid": run(FASTER, steady_steps=5000),
    "failed": run(FASTER, status="failed"),
    "a peer": run(names=("peer",), device_type="cuda"),
    "not compared": run(report={"parity": {"verdict": "skipped", "reason": "two optimizers"}}),
    "parity=off": run(config={"parity": "off"}),
    "short of time": run(report={"slowdown": {"short_of_time": True}}),
    "another result than eager's": run(FASTER, report={"parity": {"verdict": "failed"}}),
    "a script with another result": run(report={"parity": {"verdict": "failed"}}, script="train.py", entry="Compile"),
    "a script": run(FASTER, script="train.py", entry="Compile"),
    "a script that is slower": run(SLOWER, script="train.py", entry="Compile"),
}  # fmt: skip
