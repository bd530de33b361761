"""``compile=[regional,buckets]``: ragged lengths padded up to a few edges that are fitted to the data.

A Lightning project takes part with what its batches hold and, where it is cheap, the lengths of its examples
(docs/strategies.md). Attention has to mask what is padded, and the loss to ignore it: that is the module's part. For
data of varying lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from strategies.base import Program, Stage, Strategy, require_types, wrong

ON_RECOMPILE = ("fail", "warn")


@dataclass(kw_only=True, slots=True)
class Buckets(Strategy):
    """Group examples of like length and pad each batch up to the edge of its bucket: a handful of shapes in all.

    Only training batches are regrouped; validation keeps its examples, batches and order, and is only padded.
    """

    name: ClassVar[str] = "buckets"
    stage: ClassVar[Stage] = Stage.SHAPES
    headlines: ClassVar[tuple[str, ...]] = (
        *("edges", "expected_padded_share", "seen_padded_share"),
        *("unexpected_training_batches", "unexpected_validation_batches"),
    )
    reorders_data: ClassVar[bool] = True

    count: int = 8
    """Most buckets; each one is a set of graphs, in training and in validation."""
    multiple: int = 16
    """Every edge is a multiple of this many positions; where all examples have one length, that is the edge. Matrix
    units want 8 (bf16) or 16 (fp8); attention kernels align to 8 or 16; on lognormal lengths 16 costs under 0.1% more
    padding than 1."""
    edges: list[int] | None = None
    """Given edges, ascending, in positions; null = those with the fewest padded positions on the training data, none
    beyond where a table of the module may end."""
    tokens_per_batch: int | None = None
    """Positions a training batch on each device, padding included: shorter buckets then have more examples a batch,
    and the loss is a mean over a varying number of them. null = the loader's own batch size."""
    warm: bool = True
    """Whether a training begins with one batch of each shape, so that what has to be compiled is compiled at once; the
    epoch holds the same batches."""
    on_recompile: str = "warn"
    """When something compiles after all shapes have come: ``fail``, or ``warn``."""
    required: bool = True
    """Whether a task that declares no tensor ragged is an error; false = the strategy is left out, with a note."""

    def __post_init__(self) -> None:
        require_types(self)
        for name in ("count", "multiple", "tokens_per_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise wrong("compile.buckets", name, value, "must be at least 1")
        if self.on_recompile not in ON_RECOMPILE:
            raise wrong("compile.buckets", "on_recompile", self.on_recompile, f"is not one of {ON_RECOMPILE}")
        if self.edges is not None:
            edges = list(self.edges)
            if not edges or min(edges) < 1 or edges != sorted(set(edges)):
                raise wrong("compile.buckets", "edges", edges, "must be ascending and above 0")

    def apply(self, program: Program) -> None:
        """Say how batches are grouped and padded. Raises ValueError when no tensor is declared ragged."""
        from strategies.base import Padding
        from strategies.padding import require_ragged, table_sizes

        if not program.ragged and not self.required:
            program.notes.append("buckets: left out, no tensor of the batch is declared ragged")
            return
        require_ragged(program.ragged, self.name, "; compile.buckets.required=false leaves buckets out instead")
        program.padding = Padding(
            name=self.name,
            ragged=program.ragged,
            multiple=self.multiple,
            choose_edges=partial(self._choose, program=program),
            tables=table_sizes(program.module),
            tokens_per_batch=self.tokens_per_batch,
            warm=self.warm,
            on_recompile=self.on_recompile,
            # A handful of shapes is worth a static graph each; left alone, the second one would turn symbolic.
            dynamic=False,
        )

    def end(self, program: Program) -> None:
        if program.padding is None or program.padding.seen is None:
            return
        seen = program.padding.seen()
        program.report.setdefault(self.name, {}).update(seen)
        for kind, than in (("training", "planned"), ("validation", "the last edge")):
            if count := seen[f"unexpected_{kind}_batches"]:
                were = "batch was" if count == 1 else "batches were"
                program.notes.append(
                    f"buckets: {count} {kind} {were} longer than {than} and padded further, each such shape a graph of "
                    "its own"
                )

    def _choose(self, lengths: Sequence[int], *, program: Program) -> tuple[int, ...]:
        """Edges for examples of ``lengths``, at which cuDNN's attention is right; given ones stay, with a note."""
        from strategies.base import end_of_table
        from strategies.buckets.batches import clear_of_64, optimal

        assert program.padding is not None
        multiple, limit = self.multiple, end_of_table(max(lengths, default=0), program.padding.tables)
        edges = tuple(self.edges or optimal(lengths, count=self.count, multiple=multiple, limit=limit))
        if not _cudnn_fails(program):
            return edges
        if self.edges is None:
            edges = clear_of_64(edges, multiple=multiple, limit=limit)
        if left := [edge for edge in edges if edge % 128 == 64]:
            program.notes.append(
                f"buckets: at {', '.join(map(str, left))} positions the backward of cuDNN's attention can give NaN "
                "with this torch (pytorch issue 196678); torch.backends.cuda.enable_cudnn_sdp(False) does without it"
            )
        return edges


def _cudnn_fails(program: Program) -> bool:
    """Whether attention may run in cuDNN's kernels here, in a version that fails at some lengths."""
    import torch

    from strategies.compile_options import cudnn_attention_fails

    device = program.device
    if device is None or device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return cudnn_attention_fails(torch.__version__, torch.cuda.get_device_capability(device))
