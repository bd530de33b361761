"""A CUDA graph for the CPU: records the tensor operations of a call and replays them on the same tensors.

No Python of the call runs at a replay, and numbers are those of the recording. What was executed while recording is
taken back, since a capture on a GPU executes nothing. What that refuses is an error while recording: reading a value
back to the host, results whose shape depends on values, copies of Python's numbers to the device, and compiling.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from strategies import Program, Strategy
from strategies.base import Stage
from strategies.cuda_graph.network import NetworkGraphs
from strategies.cuda_graph.step_graphs import StepGraphs
from strategies.proven_code import capturing
from strategies.torch_patches import as_capturing

aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""A mask among their indices is turned into positions, whose number the host has to know."""
REFUSED = "operation not permitted when stream is capturing"


_ONE_THREAD = threading.RLock()
"""Held by what patches torch: patches of two threads that overlap would stay for good."""


class Recorder(TorchDispatchMode):
    """Executes and records."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled: Dynamo goes eager under any other mode."""
        return True

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads_values(operation, args) or (operation is aten.lift_fresh.default and _copies(args[0])):
            raise RuntimeError(REFUSED)
        if operation.namespace == "aten":
            given = zip(operation._schema.arguments, args, strict=False)
            written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
            written += [value for name, value in (kwargs or {}).items() if name == "out"]
            self.written += [(one, one.clone()) for one in pytree.tree_leaves(written) if isinstance(one, Tensor)]
        results = operation(*args, **(kwargs or {}))
        if operation.namespace == "c10d" or not _waits():  # where gloo copies its results; a replay waits, too
            self.operations.append((operation, args, kwargs or {}, results))
        return results

    @contextlib.contextmanager
    def sizes(self) -> Iterator[None]:
        """FSDP2 frees what it has gathered by the size of its memory, which is no operation of a tensor's."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            self.operations.append((resize, (storage, size), {}, None))
            return resize(storage, size)

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def undo(self) -> None:
        """Take back what was written: a capture on a device executes nothing, so that one that fails leaves nothing."""
        with torch.no_grad():
            for tensor, before in reversed(self.written):
                if local(tensor).untyped_storage().size():  # else freed by FSDP2
                    tensor.data.copy_(before)
        self.written.clear()

    def replay(self) -> None:
        with torch.no_grad():
            for operation, args, kwargs, results in self.operations:
                if getattr(operation, "namespace", "") == "c10d":
                    operation(*args, **kwargs)[-1].wait()  # on a device, the operations that follow wait by themselves
                    continue
                for old, new in zip(
                    pytree.tree_leaves(results), pytree.tree_leaves(operation(*args, **kwargs)), strict=True
                ):
                    if isinstance(old, Tensor) and local(old).data_ptr() != local(new).data_ptr():
                        local(old).copy_(local(new))


def local(tensor: Tensor) -> Any:
    """This process's part of a sharded one, whose own address is none."""
    return getattr(tensor, "_local_tensor", tensor)


class Watcher(TorchDispatchMode):
    """Notes what ``Recorder`` refuses."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads_values(operation, args) or (operation is aten.lift_fresh.default and _copies(args[0])):
            self._found.append(REFUSED)
        return operation(*args, **(kwargs or {}))


class RecordingEngine:
    """Records by executing, and takes back what was executed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.eager_calls = 0

    def eager(self, call: Callable[[], Any]) -> Any:
        self.eager_calls += 1
        with _ONE_THREAD, as_capturing():
            return call()

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[str]]:
        found: list[str] = []
        with Watcher(found):
            yield found

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def capture(self, call: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any]:
        before = torch.get_rng_state()
        # Running statistics, too: a batch norm's schema does not say that it writes them.
        state = [
            (local(one), local(one).detach().clone()) for one in (*self._module.parameters(), *self._module.buffers())
        ]
        recorder = Recorder()
        try:
            with (
                _ONE_THREAD,
                as_capturing(),
                capturing(),
                without_reading(),
                recorder.sizes(),
                recorder,
            ):
                return recorder.replay, call()
        finally:
            torch.set_rng_state(before)
            recorder.undo()
            for tensor, value in state:
                tensor.data.copy_(value)


@contextlib.contextmanager
def without_reading() -> Iterator[None]:
    """Refuse what reads a tensor of the CPU without an operation."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError(REFUSED)

    with contextlib.ExitStack() as patched:
        for name in ("tolist", "numpy", "cpu"):
            patched.enter_context(mock.patch.object(Tensor, name, refused))
        yield


def _waits() -> bool:
    """Whether a collective is being waited for."""
    caller: Any = sys._getframe(2)
    while caller.f_code.co_filename.endswith(("_python_dispatch.py", "eval_frame.py", "_compile.py")):
        caller = caller.f_back
    return bool(caller.f_code.co_filename == distributed_c10d.__file__)


def _reads_values(operation: Any, args: Any) -> bool:
    if operation in INDEXED:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        # With one number for all positions it is a masked_fill, which needs no positions.
        filled = operation is not aten.index.Tensor and len(args[1]) == 1 and args[2].numel() == 1
        return bool(masks) and not filled
    tags = operation.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _copies(made: Tensor) -> bool:
    """Whether ``torch.tensor(..., device=...)`` has made a tensor, from Python's numbers; an empty one needs no copy.

    Patching ``torch.tensor`` would make Dynamo compile anew whatever calls it.
    """
    caller = sys._getframe(1)
    while caller.f_code.co_filename.startswith((__file__, os.path.dirname(torch.__file__))):
        assert caller.f_back is not None
        caller = caller.f_back
    line, end, *_ = list(caller.f_code.co_positions())[caller.f_lasti // 2]
    text = "".join(linecache.getline(caller.f_code.co_filename, number) for number in range(line or 0, (end or 0) + 1))
    return made.numel() > 0 and "device" in text


class Recorded(Strategy):
    """``cuda_graph`` with an engine that works on a CPU."""

    name: ClassVar[str] = "recorded"
    stage: ClassVar[Stage] = Stage.STEP
    engine: ClassVar[type[RecordingEngine]] = RecordingEngine
    scope: ClassVar[str] = "step"

    def begin(self, program: Program) -> None:
        engine = self.engine(program.module)
        program.step = StepGraphs(engine)
        if self.scope != "step":
            program.network = NetworkGraphs(engine, program, wanted=self.scope == "network")
            program.step.given_up = self.scope == "network"

    def end(self, program: Program) -> None:
        if program.step is not None:
            facts = program.step.facts()
            if program.network is not None:
                facts |= program.network.facts()
                program.network.close()
            program.report[self.name] = facts
            program.step = program.network = None


class RecordedStepOrNetwork(Recorded):
    """With ``scope=auto``."""

    scope: ClassVar[str] = "auto"


class RecordedNetwork(Recorded):
    """With ``scope=network``."""

    scope: ClassVar[str] = "network"
