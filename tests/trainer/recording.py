"""A CUDA graph for the CPU: records the tensor operations of a call and replays them on the same tensors.

No Python of the call runs at a replay, numbers are those of the recording, and reading a value back to the host while
recording is an error: what makes a step unfit for a CUDA graph makes it unfit for this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS_BACK = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class Recorder(TorchDispatchMode):
    """Executes and records."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in READS_BACK:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        with torch.no_grad():
            for operation, args, kwargs, results in self.operations:
                for old, new in zip(
                    pytree.tree_leaves(results), pytree.tree_leaves(operation(*args, **kwargs)), strict=True
                ):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class RecordingEngine:
    """Records by executing; the replay that follows a capture at once is therefore left out."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.eager_calls = 0

    def eager(self, call: Callable[[], Any]) -> Any:
        self.eager_calls += 1
        return call()

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        before = torch.get_rng_state()
        state = {name: value.clone() for name, value in self._module.state_dict().items()}
        recorder = Recorder()
        try:
            with recorder:
                results = call()
        except BaseException:
            # A capture on a device executes nothing, so that one that fails leaves nothing behind.
            torch.set_rng_state(before)
            self._module.load_state_dict(state)
            raise
        executed = [True]

        def replay() -> None:
            if executed:
                executed.clear()
                return
            recorder.replay()

        return replay, results
