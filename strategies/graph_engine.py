"""Graph engine: captures what a call launches in a CUDA graph, and says why where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from strategies.base import CannotCapture
from strategies.torch_patches import as_capturing


class Engine(Protocol):
    """What captures and replays."""

    def eager(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` as it is, in the surroundings that a capture will have."""

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record ``call`` without executing it on the device; returns what replays it, and its static results.

        When that fails, graphs captured before are not to be replayed any more: their random numbers are another
        generator's.
        """


class CudaEngine:
    """CUDA graphs on one device: captured on one side stream, into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.cuda.default_generators[torch.cuda._utils._get_device_index(device, optional=True)]
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def eager(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` on the side stream, where its libraries set up what a capture may not."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), as_capturing():
            results = call()
        current.wait_stream(self._stream)
        return results

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        random_state = self._generator.get_state()
        try:
            # The outer stream: a capture that fails at its end does not come back from the side stream by itself.
            # thread_local: the data loader's pinning thread goes on calling CUDA meanwhile.
            # fail_on_recompile: a compile within a capture breaks it on 2.11 with an error that names nothing.
            with (
                torch.compiler.set_stance("fail_on_recompile"),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = call()
        except BaseException:
            # A capture that fails leaves the generator waiting for its end: "Offset increment outside graph capture
            # encountered unexpectedly" at the next random number. It continues with a state of its own.
            fresh = torch.Generator(self._device)
            fresh.set_state(random_state)
            self._generator.graphsafe_set_state(fresh)
            raise
        return graph.replay, results


class NotYet(CannotCapture):
    """A step that could not be captured before one like it has run; asked again, it runs."""
