"""Layout of TensorBoard's custom scalars: one chart for each question, with all runs on it. Needs no torch."""

from __future__ import annotations

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

CHARTS: dict[str, dict[str, str]] = {
    "speed": {
        "optimizer steps per second": r"^throughput/steps_per_second$",
        "samples per second": r"^throughput/samples_per_second$",
        "useful tokens per second": r"^throughput/useful_tokens_per_second$",
        "median step or batch, milliseconds": r"^time/(step|batch)_milliseconds_median$",
        "p95 step or batch, milliseconds": r"^time/(step|batch)_milliseconds_p95$",
    },
    "cost": {
        "seconds in the compiler so far": r"^compile/seconds$",
        "warm-up seconds so far": r"^time/warmup_seconds$",
        "recompiles so far": r"^compile/recompiles$",
        "peak memory of the device, GiB": r"^memory/peak_device_gib$",
        "peak memory of the process, GiB": r"^memory/peak_process_gib$",
        "joules per sample": r"^energy/joules_per_sample$",
    },
    "learning": {
        "training loss": r"^train/loss$",
        "validation loss": r"^val/loss$",
    },
}
"""Charts by category, and the keys on each. TensorBoard puts every chosen run on each chart."""


def layout() -> Summary.Value:
    """The layout as an event; TensorBoard merges those of all runs, which are alike."""
    told = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=category,
                chart=[
                    layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[keys]))
                    for title, keys in charts.items()
                ],
            )
            for category, charts in CHARTS.items()
        ]
    )
    tensor = TensorProto(dtype=DT_STRING, string_val=[told.SerializeToString()], tensor_shape=TensorShapeProto(dim=[]))
    return Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=metadata.create_summary_metadata())
