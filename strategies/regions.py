"""Compile a submodule in place: same object, same state-dict keys, no wrapper."""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import external_utils, trace_rules
from torch.nn.parameter import is_lazy
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from strategies.base import CannotCapture, Program, Region, holds
from strategies.errors import is_compile_error
from strategies.options import ModuleRequest, near

RECOMPILE_LIMIT = 64
"""Graphs one piece of code may hold. Torch's 8 is used up by a few widths x (train, eval) when blocks share code."""
MAX_STATISTICS = 1 << 16
"""Values of a buffer that may be batch norm's."""
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def compile_in_place(program: Program, path: str, arguments: dict[str, Any]) -> Region:
    """Hand ``program.module``'s submodule at ``path`` to the compiler and note it as a region.

    ``arguments`` are ``torch.compile``'s keyword arguments; where they leave ``dynamic`` open, a strategy of the SHAPES
    stage may have decided it. Compilation itself happens at the first call. A program that is ``outlined`` only lists
    its regions: torch imports Inductor as soon as it is handed anything. A module that is a region under another path
    already stays that one.
    """
    module = program.module.get_submodule(path)
    for other in program.regions:
        if other.module is module:
            return other
    if arguments.get("dynamic") is None:
        arguments = {**arguments, "dynamic": program.dynamic}
    region = Region(path=path, module=module, kind=type(module).__name__, arguments=arguments)
    if program.outlined:  # traced in a step that trains: what that leaves is collected in a later one
        program.settings["run_gc_after_compile"] = False
    else:
        switch_on(program, region)
    program.regions.append(region)
    program.settings.setdefault("recompile_limit", RECOMPILE_LIMIT)
    # Else a hook that is added within a region once it is compiled is left out without a word.
    program.settings.setdefault("skip_nnmodule_hook_guards", False)
    # Else weights that are frozen when they are compiled get no gradient once they are not. Seen in torch 2.11, not in
    # 2.15: https://github.com/pytorch/pytorch/pull/177158.
    if TorchVersion(torch.__version__) < "2.15":
        program.settings.setdefault("skip_tensor_guards_with_matching_dict_tags", False)
    return region


def compile_regions(program: Program, request: ModuleRequest, paths: Sequence[str], *, small: bool) -> None:
    """Hand the submodules at ``paths`` to the compiler as ``request`` asks; ``small``: they are parts of a forward."""
    scripts = [path for path in paths if isinstance(program.module.get_submodule(path), torch.jit.ScriptModule)]
    if scripts:
        program.notes.append(f"{', '.join(scripts)}: TorchScript stays as it is, torch.compile does not take it")
        paths = [path for path in paths if path not in scripts]
    fixed = fixed_sizes(program, paths, request.dynamic)
    for path in paths:
        arguments = request.compile_arguments()
        if fixed:
            arguments["dynamic"] = False
        compile_in_place(program, path, arguments)
    if request.embedding_gradient == "inductor":
        program.settings["embedding_gradient"] = "inductor"
    if small:  # DDPOptimizer would split every region again at its bucket boundaries
        program.settings["optimize_ddp"] = False


def switch_on(program: Program, region: Region) -> None:
    """Run ``region`` compiled from its next call on; the first time, it is handed to the compiler."""
    module = region.module
    if region.compiled is None:
        # Torch's question fails for a forward that was replaced by another kind of callable.
        if inspect.isroutine(module.forward) and trace_rules.check(module.forward):
            # In torch 2.11 Module.compile() is a silent no-op for a forward defined inside torch.nn (Sequential,
            # TransformerEncoderLayer): Dynamo skips the frame. wrap_inline gives it one that it compiles.
            call = external_utils.wrap_inline(module._call_impl)
            module._compiled_call_impl = torch.compile(call, **region.arguments)
        else:
            module.compile(**region.arguments)
        if program.padding is not None and program.padding.around_region is not None:
            compiled: Any = module._compiled_call_impl
            module._compiled_call_impl = program.padding.around_region(compiled)
        _guard(program, region)
        region.compiled = module._compiled_call_impl
    module._compiled_call_impl = region.compiled


def switch_off(program: Program, region: Region, call: Callable[..., Any] | None = None) -> None:
    """Run ``region`` eager from its next call on, or let ``call`` run it; what was compiled is not lost."""
    region.module._compiled_call_impl = call


def rest(program: Program | None) -> None:
    """Run regions eager until ``wake``: outside of a loop's steps and evaluations a summary counts operations, a logger
    draws a graph, a script exports the module, and compiled code can do none of it."""
    for region in () if program is None else program.regions:
        region.resting = region.resting or region.module._compiled_call_impl
        # removed, not set to None: torch.jit.script looks at what a module has of its own
        region.module.__dict__.pop("_compiled_call_impl", None)


def wake(program: Program | None) -> None:
    """Steps or evaluations begin."""
    for region in () if program is None else program.regions:
        if region.resting is not None:
            region.module._compiled_call_impl, region.resting = region.resting, None


def uncompile(program: Program, regions: Collection[Region] | None = None) -> None:
    """Undo ``compile_in_place`` for ``regions`` (None: for all), so that they run eager again."""
    gone = list(program.regions if regions is None else regions)
    for region in gone:
        switch_off(program, region)
    program.regions[:] = [region for region in program.regions if region not in gone]


def give_up(program: Program, regions: Collection[Region], reason: str) -> None:
    """Let ``regions`` run eager for the rest of the run, and note that they do."""
    program.eager_parts.update({region.path: reason for region in regions})
    uncompile(program, regions)


@contextlib.contextmanager
def compiled_only(program: Program, regions: Collection[Region]) -> Iterator[None]:
    """Inside, only ``regions`` run compiled and the others eager; nothing is lost or compiled again by it."""
    with contextlib.ExitStack() as stack:
        for region in program.regions:
            if region not in regions:
                stack.enter_context(mock.patch.object(region.module, "_compiled_call_impl", None))
        yield


class RegionCall:
    """The compiled call of one region: notes that it was called, and runs eager where its forward does not compile.

    ``failed(region, error)`` decides: it returns after it has rolled back what must be, or raises. None: all raise.
    """

    def __init__(self, region: Region) -> None:
        assert region.module._compiled_call_impl is not None
        self.compiled: Callable[..., Any] = region.module._compiled_call_impl
        self.failed: Callable[[Region, Exception], None] | None = None
        self.undefined: dict[Tensor, None] = {}
        """Parameters that eager gives no gradient where an output is not used, and compiled code one of zeros."""
        self.learns = False
        self._zeros: dict[Any, list[int]] = {}
        self._region = region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled code, or what the module is without it."""
        self._region.called = True
        try:
            result = self.compiled(*args, **kwargs)
        except Exception as error:
            if self.failed is None or not is_compile_error(error):
                raise
            self.failed(self._region, error)
        else:
            if self.undefined:
                for node in {one.grad_fn for one in pytree.tree_leaves(result) if isinstance(one, Tensor)}:
                    if node is not None and type(node).__name__ == "CompiledFunctionBackward":
                        node.register_hook(self._leave_undefined(node))
            return result
        return self._region.module._call_impl(*args, **kwargs)  # whose own errors have nothing to do with that one

    def _leave_undefined(self, node: Any) -> Callable[..., Any]:
        """A hook of the backward ``node``: zeros stay undefined where the same outputs got no gradient. Which they are
        is read from the device once for each graph and each set of such outputs that was compared with eager."""
        kind, inputs = type(node), node.next_functions  # not the node, which holds the hook
        places = [place for place, (of, _) in enumerate(inputs) if getattr(of, "variable", None) in self.undefined]

        def hook(gradients: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...] | None:
            unused = tuple(one is None for one in given)
            compared = self.learns or any(one == unused for _, one in self._zeros)
            if not any(unused) or not compared:  # zeros may be real, of a loss whose factor grows from 0
                return None
            if (kind, unused) not in self._zeros:
                zeros = [one for one in places if gradients[one] is not None and not gradients[one].any()]
                self._zeros[kind, unused] = zeros
            left = self._zeros[kind, unused]
            return tuple(None if place in left else one for place, one in enumerate(gradients))

        return hook


def guard_calls(program: Program, failed: Callable[[Region, Exception], None]) -> None:
    """Let ``failed`` decide about every region in whose forward the compiler fails."""
    for region in program.regions:  # those within others are called by the outer ones
        if isinstance(call := region.module._compiled_call_impl, RegionCall):
            call.failed = failed


def leave_undefined(program: Program, parameters: Iterable[Tensor]) -> None:
    """Let regions give ``parameters`` no gradient, as eager does, where their backward gives zeros because an output of
    the region got none; the same ones as in the steps up to the next call, for no parameters."""
    for region in program.regions:
        if isinstance(call := region.module._compiled_call_impl, RegionCall):
            call.undefined.update(given := dict.fromkeys(parameters))
            call.learns = bool(given)


def outermost(program: Program) -> list[Region]:
    """The regions that lie in no other: inside one, the compiler sees no calls."""
    paths = [region.path for region in program.regions]
    return [one for one in program.regions if not any(one.path.startswith(f"{path}.") for path in paths)]


def _guard(program: Program, region: Region) -> None:
    """Only around regions that lie in no other: where an outer one has a graph break, the compiler would trace it."""
    if any(region.path.startswith(f"{other.path}.") for other in program.regions):
        return
    for other in program.regions:
        call = other.module._compiled_call_impl
        if other.path.startswith(f"{region.path}.") and isinstance(call, RegionCall):
            other.module._compiled_call_impl = call.compiled
    region.module._compiled_call_impl = RegionCall(region)


def find_containers(module: nn.Module) -> list[str]:
    """Paths of the outermost ModuleLists and Sequentials with two or more children of one class that holds others.

    A list of bare layers (Linear, Conv2d) is not a list of blocks: compiling a single layer gains nothing. Lists of
    lists count by the blocks in them, one class of which has to repeat; dicts by blocks that hold no others.
    """
    found: list[str] = []
    for path, candidate in module.named_modules():
        if not isinstance(candidate, CONTAINERS) or any(holds(each, path) for each in found):
            continue
        children = list(candidate.children())
        nested = bool(children) and all(map(never_called, children))
        blocks = [block for _, block in _held(candidate)] if nested else children
        kinds = Counter(type(block) for block in blocks if any(True for _ in block.children()))
        if not nested and (len(kinds) != 1 or kinds.total() < len(children)):
            continue
        if isinstance(candidate, nn.ModuleDict) and (
            not never_called(candidate) or (not nested and any(map(find_containers, children)))
        ):
            continue
        if max(kinds.values(), default=0) >= 2:
            found.append(path)
    return found


def never_called(module: nn.Module) -> bool:
    """Whether ``module`` only holds others: a ModuleList or ModuleDict without a forward of its own."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _held(container: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    held: list[tuple[str, nn.Module]] = []
    for name, child in container.named_children():
        inner = f"{path}.{name}".lstrip(".")
        held.extend(_held(child, inner) if never_called(child) else [(inner, child)])
    return held


def expand_blocks(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Paths of the blocks: the children of each container named, and every other submodule named as it is.

    Of lists within a list those of the blocks in them, bare layers between these left out.
    """
    blocks: list[str] = []
    for path in paths:
        submodule = module.get_submodule(path)
        if isinstance(submodule, nn.Sequential) or never_called(submodule):
            held = _held(submodule, path)
            if any(map(never_called, submodule.children())):
                held = [(name, block) for name, block in held if any(True for _ in block.children())] or held
            blocks.extend(name for name, _ in held)
        else:
            blocks.append(path)
    return blocks


def called_for(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """``paths``, but for a list or dict of modules, which is never called itself, the blocks in it."""
    found: list[str] = []
    for path in paths:
        found += expand_blocks(module, [path]) if never_called(module.get_submodule(path)) else [path]
    return found


def fixed_sizes(program: Program, paths: Sequence[str], dynamic: bool | None) -> bool:
    """Whether blocks at ``paths`` are to be compiled with ``dynamic=False``: a weight has one shape in one block and
    another in the next of its class.

    Torch takes the second size of a kind for one that changes from batch to batch, and makes symbolic code for further
    ones (automatic dynamic shapes), such as most stages of a ResNet. Not where the sizes are the user's or another
    strategy's choice, and not where lengths do change.
    """
    if dynamic is not None or program.dynamic is not None or program.ragged:
        return False
    shapes: dict[tuple[type[nn.Module], str], tuple[int, ...]] = {}
    for path in paths:
        block = program.module.get_submodule(path)
        for name, weight in block.named_parameters():
            # One that is lazy has no shape before its first call.
            if not is_lazy(weight) and shapes.setdefault((type(block), name), tuple(weight.shape)) != weight.shape:
                return True
    return False


def require_submodules(module: nn.Module, key: str, paths: Sequence[str]) -> None:
    """Raise ValueError naming near matches and candidates when a path is no submodule of ``module``."""
    names = [name for name, _ in module.named_modules()]
    for path in paths:
        if path not in names:
            candidates = find_containers(module)
            raise ValueError(
                f"{key}: {path!r} matches no submodule{near(path, names)}"
                + (f"; repeated blocks found: {', '.join(candidates)}" if candidates else "")
            )


def containers_for(program: Program, name: str, blocks: Sequence[str] | None = None, within: str = "") -> list[str]:
    """The ``blocks`` that strategy ``name`` was given, else those ``within`` a submodule that the task declares, else
    those found there, with a note. Raises ValueError as ``require_submodules`` does."""
    if blocks is None:
        blocks = [path for path in program.blocks if holds(within, path)]
        if not blocks:
            blocks = [f"{within}.{path}".strip(".") for path in find_containers(program.module.get_submodule(within))]
            if blocks:
                program.notes.append(f"{name}: found repeated blocks in {', '.join(blocks)}")
    require_submodules(program.module, f"compile.{name}.blocks", blocks)
    return list(blocks)


# ---- blocks that compute their activations again --------------------------------------------------------------------
# The module gets a ``forward`` of its own that calls its class's under ``torch.utils.checkpoint`` (the non-reentrant
# kind, https://docs.pytorch.org/docs/stable/checkpoint.html). Hooks, state-dict keys and class stay what they were, and
# a compiler that traces the call decides in the graph what is computed again.

_FORWARDS: weakref.WeakKeyDictionary[type[nn.Module], types.FunctionType] = weakref.WeakKeyDictionary()
"""The recomputing forward of each class, made once: blocks of a class share their compiled code by it."""


def recompute(path: str, block: nn.Module) -> None:
    """Let ``block`` compute its activations again in the backward. Raises ValueError where its forward is patched."""
    if recomputes(block):  # under another path
        return
    if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
        raise ValueError(
            f"compile.checkpointing: {path}: the forward of this {type(block).__name__} has been replaced on the "
            "object itself, or is TorchScript"
        )
    block.forward = recomputing(block)


def recomputing(module: nn.Module) -> types.MethodType:
    """The forward of ``module`` that computes its activations again: a bound method of this object, as the class's own
    forward is, so that copies of the module have their own, too."""
    kind = type(module)
    if kind not in _FORWARDS:
        _FORWARDS[kind] = _make_forward(kind)
    return types.MethodType(_FORWARDS[kind], module)


def recomputes(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is that of ``recomputing``."""
    own = getattr(vars(module).get("forward"), "__func__", None)
    return any(own is forward for forward in _FORWARDS.values())  # fully_shard gives the module another class


def _make_forward(kind: type[nn.Module]) -> types.FunctionType:
    own = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(self, *args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and _in_capture():
            # Torch cannot read and restore the generator's state there; in a graph of the compiler's it need not.
            raise CannotCapture(
                f"checkpointing: {type(self).__name__} runs eager, and torch cannot repeat its random numbers within a "
                "CUDA graph: compile=[checkpointing,regional,cuda_graph]"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

        if compiling:  # a graph writes to buffers once
            return checkpoint(call, *args, use_reentrant=False, **kwargs)
        again = _Repetition(self)
        return checkpoint(call, *args, use_reentrant=False, context_fn=lambda: (again.first(), again), **kwargs)

    # Of its own name: a compiler keeps what it knows of a piece of code by file, line and name, and so do its messages.
    code = forward.__code__.replace(co_name=f"{kind.__name__}.forward")
    return types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)


class _Repetition(AbstractContextManager[None]):
    """Inside, the forward of ``module`` is repeated, once for each backward of a graph that is kept: it begins with the
    buffers and attributes that the first forward began with, and leaves what it finds. Else batch norm would take each
    batch for two, a counter, too."""

    def __init__(self, module: nn.Module) -> None:
        owners = [one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule)]
        users = [one for one in owners if not type(one).__module__.startswith("torch.nn.")]
        self._attributes = [(vars(one), dict(vars(one))) for one in users]
        self._buffers = [(one._buffers, dict(one._buffers)) for one in owners if one._buffers]
        writable = [one for one in module.buffers() if not one.is_inference()]
        self._copies = {buffer: (buffer._version, buffer.clone()) for buffer in writable}
        self._found: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        yield
        for place, entries in self._attributes:  # without graphs: each step's would hold that of the step before
            anew = {name: one for name, one in entries.items() if place.get(name) is not one}
            entries.update(pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), anew))
        # No memory for masks and tables, which stay as they are. Torch's batch norm writes and leaves versions alone.
        for buffer in [one for one, (version, _) in self._copies.items() if one._version == version]:
            if buffer.numel() > MAX_STATISTICS:
                del self._copies[buffer]

    def __enter__(self) -> None:
        self._found.append([(place, dict(place)) for place, _ in (*self._attributes, *self._buffers)])
        fresh: dict[Tensor | None, Tensor] = {buffer: copied.clone() for buffer, (_, copied) in self._copies.items()}
        for place, entries in self._attributes:
            _put(place, entries)
        for place, buffers in self._buffers:
            _put(place, {name: fresh.get(one, one) for name, one in buffers.items()})

    def __exit__(self, *error: object) -> None:
        for place, entries in self._found.pop():
            _put(place, entries)


def _put(place: dict[str, Any], entries: dict[str, Any]) -> None:
    if list(map(id, place.values())) != list(map(id, entries.values())):
        place.clear()
        place.update(entries)


def _in_capture() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
