"""``compile=cuda_graph``: whole training steps captured in CUDA graphs, one for each shape, and replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.base import Program, Stage, Strategy


@dataclass(kw_only=True, slots=True)
class CudaGraph(Strategy):
    """Forward, loss, backward, clipping and optimizer of a training step as one CUDA graph.

    A replay costs the host one launch instead of thousands, which is what small steps are bound by. Each shape of
    batch has a graph of its own; all of them share one memory pool. A step that cannot be captured runs as it would
    without this strategy, and the record says why. Validation is not captured.

    Python code runs while a step is captured, not when it is replayed. So one of the steps before is observed while it
    trains: what it reads on the host tells graphs apart and is compared before each replay; a step that changes
    something there, or reads what cannot be compared, is not captured. Another one is recorded, with all that it began
    with and left: the graph has to repeat it before it may train, and others later.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    name: ClassVar[str] = "cuda_graph"
    stage: ClassVar[Stage] = Stage.STEP
    captures_step: ClassVar[bool] = True
    headlines: ClassVar[tuple[str, ...]] = ("graphs", "replayed_steps", "eager_steps", "parity.verdict", "refused")

    required: bool = True
    """Whether a machine or processes that can capture no step are an error; false = left out, with a note."""

    def check(self) -> None:
        import torch

        if self.required and not torch.cuda.is_available():
            raise ValueError(
                "compile.cuda_graph: CUDA graphs need a CUDA device and this machine has none; leave it out or set "
                "compile.cuda_graph.required=false"
            )

    def begin(self, program: Program) -> None:
        from strategies.cuda_graph.capture import CudaEngine, StepGraphs

        assert program.device is not None
        assert program.loop is not None
        if program.device.type == "cuda":
            reason = program.loop.why_not_capture_together()
        else:
            reason = f"CUDA graphs need a CUDA device, this run trains on {program.device.type}"
        if reason is None:
            program.step = StepGraphs(CudaEngine(program.device))
        elif self.required:
            raise ValueError(f"compile.cuda_graph: {reason}")
        else:
            program.notes.append(f"cuda_graph: left out, {reason}")

    def end(self, program: Program) -> None:
        if program.step is None:
            return
        program.report[self.name] = program.step.facts()
        if not program.step.captures:
            program.notes.append("cuda_graph: no step was captured")
        program.step = None
