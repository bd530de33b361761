"""The optimizer's step alone: ``python -m scripts.benchmark_optimizer task=captioning task/size=base``.

Foreach (torch's default), ``fused=True``, ``compile=optimizer`` and the same with ``graph=false`` ("compiled,
launched") take turns on the parameters of one module, each with a state of its own and a learning rate that changes at
every step; odd rounds go backwards. Ratios are taken within a round; median and range are printed. Then the first
compiled step of a fresh process with empty compile caches.
Arguments that are no flag are overrides of the configuration, as for the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from scripts.hand_loop import optimizer_and_schedule, placed
from strategies import Optimizer, Program
from trainer.build import device_of
from trainer.config import compose
from trainer.process import process_settings

FORMS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
    "compiled": {"foreach": False, "fused": False},
    "compiled, launched": {"foreach": False, "fused": False},
}
SMOKE = ("task.size.encoder_layers=2", "task.size.decoder_layers=2", "trainer.accelerator=cpu")


def main() -> None:
    """Parse, measure, print a table and write one JSON file."""
    options = parse()
    warnings.filterwarnings("ignore")
    if options.cold_cell:
        print("RESULT " + json.dumps(cold_cell(options)))
        return
    result: dict[str, Any] = {"overrides": options.overrides, "clip": options.clip}
    result.update(measure(options))
    result["cold"] = None if options.no_cold else in_fresh_process(options)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    Console(width=150).print(table(result))
    sys.exit("error" in (result["cold"] or {}))


def parse() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration, e.g. task/size=base")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which each form takes a turn (default 9)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn (default 20)")
    parser.add_argument("--clip", type=float, help="clip gradients to this norm before (compiled: within) each step")
    parser.add_argument("--backend", default="inductor", help="backend of the compiled form (default inductor)")
    parser.add_argument("--no-cold", action="store_true", help="leave the cold start out")
    parser.add_argument("--smoke", action="store_true", help="two layers each, on the CPU, to see that it runs")
    parser.add_argument("--out", type=Path, help="JSON file for every figure")
    parser.add_argument("--cold-cell", action="store_true", help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args()
    if flags := [argument for argument in unknown if argument.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    options.overrides += unknown
    if options.smoke:
        options.overrides += SMOKE
        options.rounds, options.steps = 3, 3
    return options


class Workload:
    """One module with random gradients and its optimizer in every form."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = compose([*options.overrides, "compile=eager"])
        self.device = device_of(config.trainer)
        self.settings = config.trainer
        torch.manual_seed(config.seed)
        declared = config.task.declare()
        self.module = placed(config.task.build_module(max_steps=1_000_000), self.device)
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        self.own, _ = optimizer_and_schedule(self.module)
        self.strategies, self.programs = {}, {}
        for form in FORMS:
            if form.startswith("compiled"):
                graph = form == "compiled"
                self.strategies[form] = Optimizer(backend=options.backend, graph=graph)
                self.strategies[form].check()
                self.programs[form] = Program(module=self.module, blocks=declared.blocks, device=self.device)

    def optimizer(self, form: str) -> torch.optim.Optimizer:
        """The module's own optimizer in one of ``FORMS``, without state."""
        kind: Any = type(self.own)
        known = {name: value for name, value in FORMS[form].items() if name in self.own.param_groups[0]}
        made: torch.optim.Optimizer = kind([{**group, **known} for group in self.own.param_groups])
        if form in self.strategies:
            self.programs[form].optimizers = (made,)
            self.strategies[form].begin(self.programs[form])
        return made

    def report(self, form: str) -> dict[str, Any]:
        """What the strategy reports of a compiled form; ends it."""
        self.strategies[form].end(self.programs[form])
        return self.programs[form].report["optimizer"]

    def stepper(self, form: str, clip: float | None) -> Callable[[], None]:
        """What runs one step of this form, as a training loop with a schedule would."""
        from strategies.optimizer.step import installed

        optimizer = self.optimizer(form)
        parameters = list(self.module.parameters())
        number = 0

        def step() -> None:
            nonlocal number
            number += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 / (1 + number)
            if clip is not None:
                update = installed(optimizer)
                if update is not None:
                    update.max_norm = clip
                else:
                    torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()

        return step

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step of each form in each round: of the device, host included, and of the host alone."""
    workload = Workload(options)
    with process_settings(workload.settings):
        steppers = {form: workload.stepper(form, options.clip) for form in FORMS}
        for _ in range(3):  # state is created and everything compiled before anything is measured
            for step in steppers.values():
                step()
        rounds = []
        for number in range(options.rounds):
            times: dict[str, float] = {}
            for form in FORMS if number % 2 == 0 else reversed(FORMS):
                times[form], times[f"{form} host"] = turn(workload, steppers[form], options.steps)
            rounds.append(times)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    count = sum(parameter.numel() for parameter in workload.module.parameters())
    return {
        "device": torch.cuda.get_device_name() if workload.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "optimizer": type(workload.own).__name__,
        "parameters": count,
        "report": {form: workload.report(form) for form in workload.strategies},
        "rounds": rounds,
    }


def turn(workload: Workload, step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Milliseconds a step until the device is through, and until the host is."""
    step()  # the first of a turn finds cold caches
    workload.wait()
    began = time.perf_counter()
    if workload.device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    for _ in range(steps):
        step()
    host = (time.perf_counter() - began) * 1e3 / steps
    if workload.device.type != "cuda":
        return host, host
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / steps, host


def in_fresh_process(options: argparse.Namespace) -> dict[str, Any]:
    """The first compiled step in a process with empty caches; an error becomes part of the result."""
    print("cold start", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        command = [sys.executable, "-m", "scripts.benchmark_optimizer", "--cold-cell", "--backend", options.backend]
        done = subprocess.run(
            [*command, *options.overrides], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": f"exit code {done.returncode}"}
    cell: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return cell


def cold_cell(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first compiled step in this process, and of the second."""
    workload = Workload(options)
    with process_settings(workload.settings):
        step = workload.stepper("compiled", None)
        seconds = []
        for _ in range(2):
            workload.wait()
            began = time.perf_counter()
            step()
            workload.wait()
            seconds.append(time.perf_counter() - began)
    return {"first_step_seconds": seconds[0], "second_step_seconds": seconds[1], **workload.report("compiled")}


def table(result: dict[str, Any]) -> Table:
    """The forms side by side, ratios within rounds as median (least to most)."""
    facts, cold = result["report"]["compiled"], result["cold"]
    clip = "" if result["clip"] is None else f", clipped to {result['clip']}"
    title = (
        f"{result['optimizer']} step{clip}: {result['parameters'] / 1e6:.1f} M parameters, {facts['tensors']} tensors, "
        f"{facts['chunks']} chunks, {facts['graphs']} graphs, {facts['replayed_steps']} steps replayed; "
        f"{result['device']}, torch {result['torch']}"
    )
    if cold is not None:
        title += "\ncold start of the compiled step: " + (
            cold.get("error") or f"{cold['first_step_seconds']:.1f} s, then {cold['second_step_seconds']:.3f} s"
        )
    shown = Table("form", "ms a step", "host ms", "foreach / this", "fused / this", title=title)
    for form in FORMS:
        milliseconds = [times[form] for times in result["rounds"]]
        shown.add_row(
            form,
            spread(milliseconds),
            spread([times[f"{form} host"] for times in result["rounds"]]),
            *(spread([times[other] / times[form] for times in result["rounds"]]) for other in ("foreach", "fused")),
        )
    return shown


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
