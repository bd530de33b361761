"""What is changed in torch while a run lasts, and restored after it; each with the versions that it is for."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import socket
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame, trace_rules
from torch._dynamo.side_effects import SideEffects
from torch.torch_version import TorchVersion

from strategies.compiler_warmup import environment, is_prepared

_graphs: Any = torch.cuda.graphs
_asked: Callable[[], bool] = _graphs._cuda_isCurrentStreamCapturing
"""What ``torch.cuda.is_current_stream_capturing`` calls by this name, however the caller imported that function."""


@contextlib.contextmanager
def as_capturing(answer: bool = True) -> Iterator[None]:
    """Inside, ``torch.cuda.is_current_stream_capturing()`` is True but to torch and us; else it tells the truth.

    Libraries take another path in a capture. Transformers then builds the attention masks that it leaves out otherwise,
    because leaving one out takes reading a tensor on the host (``transformers.masking_utils``). The run before a
    capture has to take the capture's path: else the capture is the first to hand a compiled region a mask, and has to
    compile. All versions of torch: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/cuda/graphs.py.
    """
    with mock.patch.object(_graphs, "_cuda_isCurrentStreamCapturing", _capturing if answer else _asked):
        yield


def _capturing() -> bool:
    # Torch itself gets the truth: Dynamo compiles in no capture (2.15), and optimizers refuse to step in one. So do our
    # own packages: a compiled optimizer leaves the host's part of a step, counting it, out of a capture alone.
    asker = sys._getframe(2).f_globals.get("__name__", "")
    return _asked() if asker.startswith(("torch.", "strategies.", "trainer.")) else True


@contextlib.contextmanager
def embeddings_as_in_eager() -> Iterator[None]:
    """Until the block ends, compiled graphs call eager's own kernel for the gradient of an embedding.

    Inductor's own adds the rows of a token that occurs more than once with atomics, in whatever order they arrive. Two
    runs of the same compiled captioner ended at different losses; two of eager's do not. All versions of torch so far:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/decomposition.py (embedding_dense_backward).

    Where Inductor is not imported yet, there is nothing to do.
    """
    if not is_prepared():
        yield
        return
    from torch._inductor import decomposition, lowering

    # As torch does it on XPUs: what is not taken apart is called as it is. The entry says how, and is never reached
    # where it is taken apart, so that it may stay.
    lowering.make_fallback(torch.ops.aten.embedding_dense_backward, warn=False, override_decomp=True)
    with mock.patch.object(decomposition, "decomp_embedding_dense_backward", return_value=NotImplemented):
        yield


@contextlib.contextmanager
def faults_avoided() -> Iterator[None]:
    """Until the block ends; where Inductor is not imported yet, there is nothing to do.

    Both are those of torch 2.11, on a GPU, with a sum for a symbolic size: a language model that reads all tokens but
    the last, as one graph for all lengths.

    The two reductions of a layer norm's backward become one kernel, whose partial sums lie at a size times another,
    written as text: with ``2*s - 2`` it says ``0 * (-2) + 2*s * 768``. The step fails with "shape '[512, 768]' is
    invalid for input of size 0". Reductions with a sum for a size stay two kernels here. Fixed in 2.12:
    https://github.com/pytorch/pytorch/pull/176008, https://github.com/pytorch/pytorch/pull/176483

    Where the batch is symbolic too, ``b*(s - 1)`` and ``b*s - b`` are taken for two sizes, and the compile ends in an
    AssertionError without a message. They are compared by value here. Fixed in 2.12:
    https://github.com/pytorch/pytorch/pull/181793
    """
    if "torch._inductor.scheduler" not in sys.modules or TorchVersion(torch.__version__) >= "2.12":
        yield
        return
    import torch._inductor.tiling_utils as tiling
    from torch._inductor.utils import sympy_product
    from torch._inductor.virtualized import V

    fusing: Any = sys.modules["torch._inductor.scheduler"].MixOrderReduction
    can_fuse, splits = vars(fusing)["can_fuse"].__func__, tiling.get_pw_red_splits

    def can_fuse_here(cls: Any, node1: Any, node2: Any) -> bool:
        fused: bool = can_fuse(cls, node1, node2)
        return fused and not any(size.expand().is_Add for size in cls.get_numel_rnumel(node1))

    def splits_here(n: Any, pointwise_numel: Any, *others: Any, **options: Any) -> Any:
        size = sympy_product(n._body.sizes[0])
        if V.graph.sizevars.statically_known_equals(size, pointwise_numel):
            pointwise_numel = size
        return splits(n, pointwise_numel, *others, **options)

    with (
        mock.patch.object(fusing, "can_fuse", classmethod(can_fuse_here)),
        mock.patch.object(tiling, "get_pw_red_splits", splits_here),
    ):
        yield


@contextlib.contextmanager
def guards_are_printed() -> Iterator[None]:
    """Until the block ends, a shape guard that belongs to no line of torch's has a text.

    Torch 2.11 writes the line into a comment of every guard, and where there is none, the compile ends with
    "'NoneType' object has no attribute 'filename'": NequIP's forces on a GPU, with symbolic sizes. Later versions leave
    it out: https://github.com/pytorch/pytorch/blob/v2.15.0/torch/_guards.py (SLoc).
    """
    guards: Any = torch._guards
    try:
        str(guards.SLoc(None, None))
    except AttributeError:
        text = guards.format_frame
        with mock.patch.object(guards, "format_frame", lambda frame: "" if frame is None else text(frame)):
            yield
    else:
        yield


@contextlib.contextmanager
def exporting_is_told() -> Iterator[None]:
    """Until the block ends, ``torch.compiler.is_exporting()`` tells the truth in code that Dynamo traces.

    Before 2.14 it is always True there. Transformers (5.18 and later) then builds attention masks that eager leaves
    out, and attention with a mask is not flash attention. Fixed in 2.14: https://github.com/pytorch/pytorch/pull/176499
    """
    if TorchVersion(torch.__version__) >= "2.14":
        yield
        return
    import torch._dynamo.variables.torch as variables

    told = variables.tracing_state_functions

    def told_here() -> dict[Callable[[], Any], bool | None]:
        return {**told(), torch.compiler.is_exporting: torch.compiler.is_exporting()}

    with mock.patch.object(variables, "tracing_state_functions", told_here):
        yield


@contextlib.contextmanager
def leaves_within_graphs() -> Iterator[None]:
    """Until the block ends, a graph may return what is derived by a tensor that is made within it.

    A forward that takes a gradient by a tensor of its own (``strain = zeros(...).requires_grad_()``, as NequIP does for
    the stress) returns what depends on that tensor. Dynamo refuses it, as whoever takes a further gradient by such a
    result, or by the tensor itself, gets none of the part through the tensor. Nobody outside can name the tensor but
    through the outputs; a wrong gradient of inputs or weights is found by the region's check. Tried: 2.15,
    https://github.com/pytorch/pytorch/blob/v2.15.0/torch/_dynamo/output_graph.py
    (OutputGraph._check_requires_grad_intermediate_outputs).
    """
    from torch._dynamo.output_graph import OutputGraph

    name = "_check_requires_grad_intermediate_outputs"
    patch = mock.patch.object(OutputGraph, name, return_value=None) if hasattr(OutputGraph, name) else _requiring_grad()
    with patch:
        yield


def _requiring_grad() -> contextlib.AbstractContextManager[Any]:
    """What later versions have, for torch 2.11: ``requires_grad_()`` of a tensor that is made within a graph is traced.

    AOTAutograd traces the graph once more, under functorch, which refuses the call unless it is told to allow it.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    functorch: Any = torch._C._functorch
    refuse = TensorVariable.method_requires_grad_

    def requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        value = self.as_proxy().node.meta["example_value"]
        asked = requires_grad is True or requires_grad.as_python_constant()
        if self.source or value.requires_grad or not asked:
            return refuse(self, tx, requires_grad)
        allow, before = functorch.set_inplace_requires_grad_allowed, functorch.get_inplace_requires_grad_allowed()
        tx.output.create_node("call_function", allow, (True,), {})
        tx.output.create_proxy("call_method", "requires_grad_", (self.as_proxy(),), {})
        tx.output.create_node("call_function", allow, (before,), {})
        value.requires_grad_(True)
        self.requires_grad = True
        return self

    return mock.patch.object(TensorVariable, "method_requires_grad_", requires_grad_)


_graphs_left_out = False


@contextlib.contextmanager
def graphs_may_be_left_out() -> Iterator[None]:
    """Until the block ends, Inductor's CUDA graphs run as plain kernels within ``without_inductors_graphs``.

    All versions of torch so far: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/cudagraph_trees.py
    (CUDAGraphTreeManager.run).
    """
    if not is_prepared() or not torch.cuda.is_available():
        yield
        return
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    run = CUDAGraphTreeManager.run

    def run_here(self: Any, new_inputs: list[Any], function_id: Any) -> Any:
        if _graphs_left_out:
            return self.ids_to_funcs[function_id].model(new_inputs)
        return run(self, new_inputs, function_id)

    with mock.patch.object(CUDAGraphTreeManager, "run", run_here):
        yield


@contextlib.contextmanager
def without_inductors_graphs() -> Iterator[None]:
    """Inside, compiled code launches its kernels one by one. A check between two regions of a step would end the
    generation of graphs whose outputs the step still holds, or be recorded as a part of it."""
    global _graphs_left_out
    before, _graphs_left_out = _graphs_left_out, True
    try:
        yield
    finally:
        _graphs_left_out = before


@contextlib.contextmanager
def one_compile_for_all_ranks() -> Iterator[None]:
    """Until the block ends, of the processes that share Inductor's cache directory one compiles a graph; the others
    wait for it and load it. Where this process trains alone, there is nothing to do.

    Torch looks a graph up in its caches and compiles what is not there, without asking whether another process is at
    it: N ranks compile everything N times. Here a process that finds nothing locks the graph's key and looks again. It
    holds no second lock, and no collective is called while it compiles, so no two wait for each other; of a process
    that dies, the kernel lets go. A graph with collectives is compiled by every rank: torch may then call some while
    it compiles. The backward is compiled together with its forward, because torch keeps the two as one entry, which
    would otherwise be there only after the first backward.

    All versions of torch: https://github.com/pytorch/pytorch/issues/170621,
    https://github.com/pytorch/pytorch/issues/189330.
    """
    if not is_prepared() or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    import torch._functorch.config as config
    from torch._inductor.codecache import GuardedCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    _share_hashes()
    backends: Any = sys.modules["torch._dynamo.backends.common"]
    compiling = backends.aot_module_simplified
    finding = vars(GuardedCache)["find_guarded_entry"].__func__
    turn: contextlib.ExitStack | None = None
    locked = False

    def compile_in_turn(*graph: Any, **options: Any) -> Any:
        nonlocal turn, locked
        if turn is not None or _communicates(*graph[:2]):  # a compile within another, or not to be kept waiting
            return compiling(*graph, **options)
        try:
            with contextlib.ExitStack() as turn:
                return compiling(*graph, **options)
        finally:
            turn, locked = None, False

    def find_in_turn(cls: Any, key: str, *others: Any) -> Any:
        nonlocal locked
        found = finding(cls, key, *others)
        if found[0] is not None or turn is None or locked:
            return found
        locked = True
        with contextlib.suppress(OSError):  # a file system without locks: each compiles for itself
            turn.enter_context(_locked(Path(cache_dir()) / "locks" / f"{key}.compile"))
        return finding(cls, key, *others)

    with (
        config.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(backends, "aot_module_simplified", compile_in_turn),
        mock.patch.object(GuardedCache, "find_guarded_entry", classmethod(find_in_turn)),
    ):
        yield


def _share_hashes() -> None:
    """Let one process of a host read all source files of torch and Triton, whose hashes are part of each graph's key:
    a second of processor time. Torch's compile workers are given the first one in the same way.
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/codecache.py (``torch_key``)"""
    from torch._inductor import codecache

    files = os.stat(torch.__file__)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    installed = f"crucible/{socket.gethostname()}/{files.st_dev}/{files.st_ino}/{files.st_mtime_ns}/{start}"
    for name, read in (("torch_key", bytes), ("triton_key", bytes.decode)):
        hashed: Any = getattr(codecache, name, None)
        if not hasattr(hashed, "set"):  # another version's
            continue
        # Whoever waits in vain hashes for itself; what a process knows already is not set again.
        with contextlib.suppress(RuntimeError, AssertionError):
            store: Any = torch.distributed.distributed_c10d._get_default_store()
            place = f"{installed}/{name}"
            if store.add(f"{place}/asked", 1) == 1:
                store.set(place, hashed() or b"")  # there may be no Triton
            else:
                store.wait([place], timedelta(seconds=10))
                hashed.set(read(store.get(place)) or None)


def _communicates(graph: Any, inputs: Any) -> bool:
    """Whether there are collectives in ``graph`` or those that it is given sharded tensors for."""
    from torch._inductor.config import distributed_max_autotune_gemm  # ranks share out the timing of kernels

    sharded: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    nodes = [node for module in graph.modules() for node in getattr(getattr(module, "graph", None), "nodes", ())]
    modules = {str(getattr(node.target, "__module__", "")) for node in nodes}
    return (
        distributed_max_autotune_gemm
        or any("c10d" in name or "distributed" in name for name in modules)
        or any(isinstance(one, sharded) for one in inputs)
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, no other process is inside with the same ``path``. A lock of the process: no child inherits it."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def reset_fsdp_state(module: nn.Module, *, gradients: bool = False) -> None:
    """Bring what FSDP2 has sharded of ``module`` into the state between two steps, as after a backward.

    A forward without a backward leaves the root's parameters gathered: copies that later changes of the shards do not
    reach. One that raises leaves its place in the step behind. With ``gradients``, those that a broken backward has not
    reduced yet are dropped. torch 2.15 has ``FSDPModule.reset_iter_state``, which drops all gradients:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_state.py
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for state in {one._get_fsdp_state() for one in module.modules() if isinstance(one, FSDPModule)}:
        if state._is_root is None:  # nothing has run yet
            continue
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in _groups(state):
            group._training_state = TrainingState.IDLE
            group.finalize_backward()
            group.reshard()
            for held in group.fsdp_params if gradients else ():
                if (gathered := getattr(held, "_unsharded_param", None)) is not None:
                    gathered.grad = None
                if "unsharded_accumulated_grad" in vars(held):  # torch 2.11
                    held.unsharded_accumulated_grad = None


def _groups(state: Any) -> Iterator[Any]:
    return filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])


class UnreducedGradients:
    """Gradients of ``module`` that FSDP2 holds whole until the last micro-batch of a step. They are the same tensors in
    every step: a replay brings numbers, and no Python that would know of others.

    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py
    """

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        states = dict.fromkeys(one._get_fsdp_state() for one in module.modules() if isinstance(one, FSDPModule))
        every = [held for state in states for group in _groups(state) for held in group.fsdp_params]
        self._held = [held for held in every if held.sharded_param.requires_grad]
        self.kept: list[Tensor] = []

    def attach(self, *, empty: bool) -> None:
        """Between micro-batches: make FSDP2 hold what is kept, or nothing where a step begins."""
        for place, held in enumerate(self._held):
            if not hasattr(held, "_unsharded_param"):  # nothing has run yet
                continue
            kept = None if empty or not self.kept else self.kept[place]
            apart = False
            if "unsharded_accumulated_grad" in vars(held):  # torch 2.11, of another precision than the parameter
                apart = kept is not None and kept.dtype != held._unsharded_param.dtype
                held.unsharded_accumulated_grad = kept if apart else None
            held._unsharded_param.grad = None if apart else kept

    def keep(self) -> bool:
        """After a backward that has reduced nothing: keep what FSDP2 holds. False where a parameter has none."""
        now = [
            vars(held).get("unsharded_accumulated_grad") if (own := held._unsharded_param.grad) is None else own
            for held in self._held
        ]
        if any(one is None for one in now):
            return False
        if not self.kept:
            self.kept = now
        moved = [(one, new) for one, new in zip(self.kept, now, strict=True) if one.data_ptr() != new.data_ptr()]
        if moved:
            torch._foreach_copy_([one for one, _ in moved], [new for _, new in moved])
        self.attach(empty=False)
        return True


# ---- a cache directory of a run's own --------------------------------------------------------------------------------


@contextlib.contextmanager
def compiling_in(directory: Path) -> Iterator[None]:
    """Until the block ends, what compiles is looked for in ``directory`` alone, and kept there."""
    from torch._inductor.utils import clear_caches
    from torch.compiler._cache import CacheArtifactManager

    # The artifacts of an earlier run of this process would be saved along; saved a second time, they would hide the new
    # ones (of two sections of one kind, CacheArtifactManager.deserialize keeps the last).
    with CacheArtifactManager.with_fresh_cache():
        clear_caches()
        try:
            variables = {"TORCHINDUCTOR_CACHE_DIR": str(directory), "TRITON_CACHE_DIR": str(directory / "triton")}
            with environment(variables), tuning_in(directory):
                yield
        finally:
            clear_caches()


@contextlib.contextmanager
def tuning_in(directory: Path) -> Iterator[None]:
    """Until the block ends, what was tuned is looked for, and kept, in the cache directory ``directory``.

    Torch keeps the choice of a kernel's configuration beside the file of the generated kernel. A kernel that comes out
    of the cache still names the file of the run that compiled it. In any other directory torch does not find the
    choice, times all configurations again, and perhaps chooses another one, which rounds differently. A warm start
    would then be slow, and not equal to the cold one.

    A directory named by the fingerprint does not do instead: the folder above it differs between users and machines,
    and a cold start in it would not be cold. Torch 2.11 moreover forgets the configurations that it makes while tuning,
    by halving a reduction's block, whatever the directory is called.
    """
    # Private to torch, on all versions supported; there is no public way to move a kernel.
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuner: Any = CachingAutotuner
    forgets = not hasattr(tuner, "_could_rblock_scale")
    recheck, scale = tuner.recheck_autotune_cache, tuner._dynamic_scale_rblock

    @functools.wraps(recheck)
    def recheck_here(kernel: Any, reload_kernel_from_src: Callable[[], Any]) -> None:
        _move(kernel, directory)
        configs = _configs(kernel)
        recheck(kernel, reload_kernel_from_src)
        if forgets:
            _take(kernel, configs, reload_kernel_from_src)

    @functools.wraps(scale)
    def scale_and_keep(kernel: Any) -> None:
        configs = _configs(kernel)
        scale(kernel)
        if len(configs) == 1 < len(kernel.compile_results) and kernel.save_cache_hook is None:
            cache = _cache(kernel, configs)  # torch keeps a choice only where there was one before
            kernel.save_cache_hook = cache and cache.save

    keeps: dict[str, Any] = {"_dynamic_scale_rblock": scale_and_keep} if forgets else {}
    with mock.patch.multiple(tuner, recheck_autotune_cache=recheck_here, **keeps):
        yield


def _move(kernel: Any, directory: Path) -> None:
    """Let ``kernel`` look beside a file in ``directory``; whether that exists does not matter."""

    def moved(file: str) -> str:
        return str(directory.joinpath(*Path(file).parts[-2:]))

    if kernel.filename is not None:
        kernel.filename = moved(kernel.filename)
    # Where a new choice would be kept: a directory of another run, which is not to be made anew.
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    if cache is not None and cache.local_cache is not None:
        store, file = cache.local_cache
        cache.local_cache = store, moved(file)


def _cache(kernel: Any, configs: list[Any]) -> Any:
    """Torch's cache of the choice among ``configs``; None where it keeps none."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.triton_heuristics import hash_configs

    file = kernel.filename
    return AutotuneCache.create(kernel.inductor_meta, file, hash_configs(configs)) if file else None


def _take(kernel: Any, configs: list[Any], reload_kernel_from_src: Callable[[], Any]) -> None:
    """Leave ``kernel`` the configuration that was chosen, compiled anew where it had been made while tuning."""
    cache = _cache(kernel, configs)
    best = None if cache is None else cache._read()
    if not best or best.get("configs_hash") != cache.configs_hash or not _settings(configs[0]).keys() <= best.keys():
        return
    chosen = [result for result in kernel.compile_results if _settings(result.config).items() <= best.items()]
    if not chosen:
        config = copy.deepcopy(configs[0])
        config.kwargs.update({name: best[name] for name in config.kwargs})
        config.num_warps, config.num_stages = best["num_warps"], best["num_stages"]
        if kernel.fn.fn is None:
            kernel.fn = reload_kernel_from_src().fn
        chosen = [kernel._precompile_config(config)]
    kernel.compile_results = chosen[:1]
    # Chosen among all there were: torch would make one more out of it, and time the two.
    kernel.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}


def _configs(kernel: Any) -> list[Any]:
    return [result.config for result in kernel.compile_results]


def _settings(config: Any) -> dict[str, Any]:
    """What torch keeps of a configuration."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


# ---- what a forward changes beside its outputs -----------------------------------------------------------------------
# Dynamo records every attribute, entry, cell and global that the code it traces binds anew, and writes code that does
# the same. That is asked here, before any of it runs, so that a forward that changes what cannot be put back is never
# run once more.

Remember = Callable[[Any, Iterable[str], Callable[[], Any] | None], bool]
"""Given an object, the names of its attributes that change, and how it is found by a global's name: copies what it
holds now, to be put back; returns whether that can be. Of globals the object is None."""


class ChangesElsewhere(Exception):
    """A forward changes something that cannot be put back; nothing of it has run."""


@contextlib.contextmanager
def refused_elsewhere(remember: Remember) -> Iterator[list[str]]:
    """Inside, Dynamo compiles nothing that changes what cannot be put back; yields the names of what it would."""
    own = SideEffects.codegen_update_mutated
    found: list[str] = []

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(name for name in _elsewhere(self, remember) if name not in found)
        if found:
            raise ChangesElsewhere(", ".join(found))  # which Dynamo may wrap in an error of its own
        return own(self, *args, **kwargs)

    with mock.patch.object(SideEffects, "codegen_update_mutated", checked):
        yield found


def _elsewhere(effects: Any, remember: Remember) -> Iterator[str]:
    """Names, as Dynamo writes them, of what is changed and cannot be put back."""
    from torch._dynamo.source import TempLocalSource
    from torch._dynamo.variables import NewGlobalVariable

    names = effects.output_graph_weakref().global_scope
    objects = {id(one): one for one in effects.keepalive}
    keys = {id(variable): key for key, variable in effects.id_to_variable.items()}
    for variable in effects._get_modified_vars():
        if variable.source is None or isinstance(variable.source, TempLocalSource):  # made within the forward
            continue
        stored = [str(name) for name in effects.store_attr_mutations.get(variable, ())]
        name = variable.source.name
        name = name() if callable(name) else name  # a method in torch 2.11
        changed = None if isinstance(variable, NewGlobalVariable) else objects.get(keys[id(variable)])
        if not remember(changed, stored, _by_global_name(variable.source, names)):
            yield name


def _by_global_name(source: Any, names: dict[str, Any]) -> Callable[[], Any] | None:
    """How compiled code finds what ``source`` stands for: attributes of one of the globals, ``names``. None where it
    comes another way."""
    from torch._dynamo.source import AttrSource, GlobalSource

    attributes: list[str] = []
    while isinstance(source, AttrSource):
        attributes.insert(0, source.member)
        source = source.base
    if not isinstance(source, GlobalSource):
        return None
    return lambda: functools.reduce(getattr, attributes, names[source.global_name])


# ---- what Dynamo keeps of this process -------------------------------------------------------------------------------


_STATIC = "_dynamo_static_input_type"


@contextlib.contextmanager
def static_marks_removed(module: nn.Module) -> Iterator[None]:
    """Afterwards parameters and buffers have no mark that Dynamo has left on them inside: ``torch.save`` of the module
    would write it, and of a module that trained eager it writes none. Compiled code does not read it again. All
    versions of torch so far: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_dynamo/decorators.py
    (mark_static_address)."""

    def marked() -> list[Tensor]:
        return [one for one in (*module.parameters(), *module.buffers()) if _STATIC in vars(one)]

    before = set(map(id, marked()))
    try:
        yield
    finally:
        for one in marked():
            if id(one) not in before:
                vars(one).pop(_STATIC)


def compiled_codes() -> list[types.CodeType]:
    """The code of which Dynamo has compiled something in this process."""
    tracked = (*convert_frame.input_codes.seen, *convert_frame.output_codes.seen)
    return [code for one in tracked if (code := one()) is not None]


def forget_compiled(kept: Iterable[types.CodeType]) -> None:
    """Let Dynamo forget what it has compiled of all code but what is ``kept``, which is somebody else's.
    ``torch.compiler.reset`` would forget everything. Tried: torch 2.15."""
    others = {id(code) for code in kept}
    for code in compiled_codes():
        if id(code) not in others:
            reset_code(code)


# ---- custom autograd.Function classes that Dynamo does not trace -----------------------------------------------------

_allowed: set[int] = set()
"""Classes that were allowed here, by identity."""


def allow(functions: Iterable[type[torch.autograd.Function]]) -> None:
    """Let Dynamo call ``functions`` as they are: AOTAutograd then traces their forward and backward."""
    for one in functions:
        if not trace_rules.is_callable_allowed(one):
            torch._dynamo.allow_in_graph(one)
            _allowed.add(id(one))


@contextlib.contextmanager
def allowed_for_now() -> Iterator[None]:
    """After the block, Dynamo traces again what ``allow`` has kept it from."""
    try:
        yield
    finally:
        for one in _allowed:
            if one in trace_rules._allowed_callable_ids:
                trace_rules._allowed_callable_ids.remove(one)
        _allowed.clear()
