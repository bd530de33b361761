"""``compile=cuda_graph``: training steps, or the modules they call, captured in CUDA graphs and replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import Program, Stage, Strategy

SCOPES = ("auto", "step", "network")


@dataclass(kw_only=True, slots=True)
class CudaGraph(Strategy):
    """Forward, loss, backward, clipping and optimizer of a training step as one CUDA graph, or its network alone.

    A replay costs the host one launch instead of thousands, which is what small steps are bound by. Each shape of
    batch has a graph of its own; all of them share one memory pool. Of a step that cannot be captured as a whole, the
    modules that it calls are, forward and backward each in a graph, and the rest of it stays Python: metrics, lists of
    losses, schedules, manual optimization. What cannot be captured either runs as it would without this strategy, and
    the record says why.

    Python code runs while a step is captured, not when it is replayed. So one of the steps before is observed while it
    trains: what it reads on the host tells graphs apart and is compared before each replay; a step that changes
    something there, or reads what cannot be compared, is not captured. Another one is recorded, with all that it began
    with and left: the graph has to repeat it before it may train, and others later.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    name: ClassVar[str] = "cuda_graph"
    stage: ClassVar[Stage] = Stage.STEP
    captures_step: ClassVar[bool] = True
    headlines: ClassVar[tuple[str, ...]] = (
        *("graphs", "replayed_steps", "eager_steps", "parity.verdict", "refused"),
        *("networks", "replayed_calls", "without_a_graph"),
    )

    required: bool = True
    """Whether a machine or processes that can capture no step are an error; false = left out, with a note."""

    scope: str = "auto"
    """What is captured. ``auto``: the whole step, else the modules that it calls; ``step``: the whole step or nothing;
    ``network``: the modules that the step calls."""

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"compile.cuda_graph.scope={self.scope!r} is not one of {SCOPES}")

    def check(self) -> None:
        import torch

        if self.required and not torch.cuda.is_available():
            raise ValueError(
                "compile.cuda_graph: CUDA graphs need a CUDA device and this machine has none; leave it out or set "
                "compile.cuda_graph.required=false"
            )

    def begin(self, program: Program) -> None:
        from strategies.cuda_graph.network import NetworkGraphs
        from strategies.cuda_graph.step_graphs import CudaEngine, StepGraphs

        assert program.device is not None
        assert program.loop is not None
        program.report.pop(self.name, None)  # of an earlier training of this program
        program.given_up.pop("step", None)
        if program.device.type == "cuda":
            reason = program.loop.collectives_obstacle()
        else:
            reason = f"CUDA graphs need a CUDA device, this run trains on {program.device.type}"
        if program.device.type == "cuda" and (reason is None or self.scope != "step"):
            engine = CudaEngine(program.device, program.loop.stream)
            program.step = StepGraphs(engine)
            if self.scope != "step":
                program.network = NetworkGraphs(engine, program, wanted=self.scope == "network")
            if self.scope == "network":
                program.step.given_up = True
            elif reason is not None:
                program.step.reject(reason)
                program.step.given_up = True
        elif self.required:
            raise ValueError(f"compile.cuda_graph: {reason}")
        else:
            program.notes.append(f"cuda_graph: left out, {reason}")

    def end(self, program: Program) -> None:
        if program.step is None:
            return
        facts = program.step.facts()
        if program.network is not None and program.network.wanted:
            facts |= program.network.facts()
        program.report[self.name] = facts
        if not (program.step.captures or program.replays):
            program.notes.append("cuda_graph: no step was captured")
        if program.network is not None:
            program.network.close()
        program.step.drop_graphs()  # a process group that a graph holds cannot be taken down, and its process not end
        program.step = program.network = None
