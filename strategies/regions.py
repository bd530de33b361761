"""Compile a submodule in place, or a method of one: same object, same state-dict keys, no wrapper.

Every strategy that compiles modules does it by this.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from strategies.base import Found, Program
from strategies.compile_errors import CannotCapture
from strategies.compile_options import ModuleOptions, ModuleRequest, suggestion
from strategies.region import Kind, Method, MethodRegion, Region, State, is_ancestor, paths_in_words, plain, submodules

RECOMPILE_LIMIT = 64
"""Graphs one piece of code may hold. Torch's 8 is used up by a few widths x (train, eval) when blocks share code."""
MAX_STATISTICS = 1 << 16
"""Values of a buffer that may be batch norm's."""
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
COMPILED_ALREADY = "is compiled by torch.compile already"


def compile_in_place(program: Program, path: str, arguments: dict[str, Any]) -> Region | None:
    """Hand ``program.module``'s submodule at ``path`` to the compiler and note it as a region.

    ``arguments`` are ``torch.compile``'s keyword arguments; where they leave ``dynamic`` open, a strategy of the SHAPES
    stage may have decided it. Compilation itself happens at the first call. A module that is a region under another
    path already stays that one; within another region it is that one's part: None.
    """
    module = program.module.get_submodule(path)
    for other in program.regions:
        if other.module is module:
            return other
        if other.path != path and is_ancestor(other.path, path):
            return None
    for other in [one for one in program.regions if is_ancestor(path, one.path)]:
        uncompile(program, [other])
    return add_region(program, path, module, arguments)


def add_region(
    program: Program, path: str, module: nn.Module, arguments: dict[str, Any], make: type[Region] = Region
) -> Region:
    """A region of ``program`` that is compiled with ``arguments``, and the settings under which it may be."""
    if arguments.get("dynamic") is None:
        arguments = {**arguments, "dynamic": program.dynamic}
    # Containers of torch's have one class whatever is in them.
    layout = tuple(map(type, module.modules())) if type(module) is nn.Sequential else None
    named = (type(module), layout, repr(sorted(arguments.items())))
    kind = program.kinds.setdefault(named, Kind(type(module).__name__))
    region = make(path, module, kind, arguments, program.checking)
    program.regions.append(region)
    program.settings.setdefault("recompile_limit", RECOMPILE_LIMIT)
    # Else a hook that is added within a region once it is compiled is left out without a word.
    program.settings.setdefault("skip_nnmodule_hook_guards", False)
    # Else weights that are frozen when they are compiled get no gradient once they are not. Seen in torch 2.11, not in
    # 2.15: https://github.com/pytorch/pytorch/pull/177158.
    if TorchVersion(torch.__version__) < "2.15":
        program.settings.setdefault("skip_tensor_guards_with_matching_dict_tags", False)
    return region


def compile_regions(program: Program, request: ModuleRequest, paths: Sequence[str], *, small: bool) -> Sequence[str]:
    """Hand the submodules at ``paths`` to the compiler as ``request`` asks; ``small``: they are parts of a forward.
    Returns those that are, or lie in, a region now: what holds, or lies in, a module that the user has compiled is left
    to that."""
    scripts = [path for path in paths if isinstance(program.module.get_submodule(path), torch.jit.ScriptModule)]
    if scripts:
        program.notes.append(f"{', '.join(scripts)}: TorchScript stays as it is, torch.compile does not take it")
        paths = [path for path in paths if path not in scripts]
    theirs = _compiled_around(program.module, paths)
    program.given_up |= theirs
    paths = [path for path in paths if path not in theirs]
    for path in paths:
        compile_in_place(program, path, request.compile_arguments())
    if request.embedding_gradient == "inductor":
        program.settings["embedding_gradient"] = "inductor"
    if small:  # DDPOptimizer would split every region again at its bucket boundaries
        program.settings["optimize_ddp"] = False
    return paths


def uncompile(program: Program, regions: Collection[Region] | None = None) -> None:
    """Undo ``compile_in_place`` for ``regions`` (None: for all), so that they run eager again."""
    gone = list(program.regions if regions is None else regions)
    for region in gone:
        region.set_state(State.EAGER, active=False)
        region.of.regions.remove(region)
    program.regions[:] = [region for region in program.regions if region not in gone]
    program.kinds = {named: kind for named, kind in program.kinds.items() if kind.regions}


def find_containers(module: nn.Module) -> list[str]:
    """Paths of the outermost ModuleLists and Sequentials with two or more children of one class that holds others.

    A list of bare layers (Linear, Conv2d) is not a list of blocks: compiling a single layer gains nothing. Lists of
    lists count by the blocks in them, one class of which has to repeat; dicts by blocks that hold no others.
    """
    found: list[str] = []
    for path, candidate in module.named_modules():
        if not isinstance(candidate, CONTAINERS) or any(is_ancestor(each, path) for each in found):
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


def callable_paths(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """``paths``, but for a list or dict of modules, which is never called itself, the blocks in it."""
    found: list[str] = []
    for path in paths:
        found += expand_blocks(module, [path]) if never_called(module.get_submodule(path)) else [path]
    return found


def require_submodules(module: nn.Module, key: str, paths: Sequence[str]) -> None:
    """Raise ValueError naming near matches and candidates when a path is no submodule of ``module``."""
    names = [name for name, _ in module.named_modules()]
    for path in paths:
        if path not in names:
            candidates = find_containers(module)
            raise ValueError(
                f"{key}: {path!r} matches no submodule{suggestion(path, names)}"
                + (f"; repeated blocks found: {', '.join(candidates)}" if candidates else "")
            )


def compiled_already(module: nn.Module) -> list[str]:
    """Paths of submodules that the user has compiled, which would be compiled twice; of the module itself it is empty.
    What stands in for a call during a step is not there between steps."""
    own = getattr(module, "_compiler_ctx", None) is not None  # Lightning's name, of a module that it was given compiled
    return [
        path
        for path, one in module.named_modules()
        if one._compiled_call_impl is not None or hasattr(one, "_orig_mod") or (own and one is module)
    ]


def _compiled_around(module: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """Those of ``paths`` that hold, or lie in, what the user has compiled, with the reason."""
    theirs = compiled_already(module)
    around = {path: [one for one in theirs if is_ancestor(one, path) or is_ancestor(path, one)] for path in paths}
    return {path: f"{own[0] or 'the module'} {COMPILED_ALREADY}" for path, own in around.items() if own}


def exclude_user_compiled(program: Program) -> None:
    """Give up the regions that hold, or lie in, what the user has compiled since, and say so."""
    theirs = _compiled_around(program.module, [one.path for one in submodules(program.regions)])
    if gone := [one for one in program.regions if one.path in theirs]:
        uncompile(program, gone)
        program.given_up |= theirs
        program.notes.append(f"{paths_in_words(gone)} as written: {theirs[gone[0].path]}")


def containers_for(program: Program, name: str, blocks: Sequence[str] | None = None, within: str = "") -> list[str]:
    """The ``blocks`` that strategy ``name`` was given, else those ``within`` a submodule that the task declares, else
    those found there, with a note. Raises ValueError as ``require_submodules`` does."""
    if blocks is None:
        blocks = [path for path in program.blocks if is_ancestor(within, path)]
        if not blocks:
            blocks = [f"{within}.{path}".strip(".") for path in find_containers(program.module.get_submodule(within))]
            if blocks:
                program.notes.append(f"{name}: found repeated blocks in {', '.join(blocks)}")
    require_submodules(program.module, f"compile.{name}.blocks", blocks)
    return list(blocks)


# ---- what is called --------------------------------------------------------------------------------------------------


def compile_children(program: Program, request: ModuleOptions) -> list[str]:
    """Hand each child of the module that owns parameters to the compiler; returns their paths. Where there is none, the
    strategy runs eager."""
    paths = [path for path, child in program.module.named_children() if any(True for _ in child.parameters())]
    if not paths:
        program.given_up[request.name] = "the module has no child with parameters to compile"
        program.notes.append(f"{request.name}: {program.given_up[request.name]}; it runs eager")
    compiled = compile_regions(program, request, callable_paths(program.module, paths), small=False)
    program.found = Found(request.name, tuple(compiled), partial(compile_regions, program, request, small=False))
    return [path for path in paths if any(is_ancestor(path, one) for one in compiled)]


class CalledModules(contextlib.ExitStack):
    """Inside, notes which submodules of ``program.module`` with parameters are called; regions run as written."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._regions = program.regions
        modules = program.module.named_modules()
        self._paths = {one: path for path, one in modules if path and any(True for _ in one.parameters())}
        self._under_way: list[nn.Module] = []
        self._outermost: dict[str, None] = {}
        self.paths: set[str] = set()

    def __enter__(self) -> CalledModules:
        self.enter_context(plain(self._regions))
        hooks = (
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        )
        for hook in hooks:
            self.callback(hook.remove)
        return self

    def _begins(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # a torch.compile of the user's takes hooks of all modules in
            return
        if module in self._paths:
            self.paths.add(self._paths[module])
            if not self._under_way:
                self._outermost[self._paths[module]] = None
            self._under_way.append(module)

    def _ends(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._under_way and self._under_way[-1] is module:
            self._under_way.pop()

    @property
    def outermost(self) -> list[str]:
        """Those that no other one called; what a backward computes again was called by its module before."""
        others = self._outermost.keys()
        return [path for path in others if not any(is_ancestor(other, path) for other in others if other != path)]


def instead_of(program: Program, found: Sequence[str], called: CalledModules) -> tuple[list[str], list[str]]:
    """Of ``found`` those that are never called, and what is called in their place: the outermost module around them, or
    those within, without bare layers where others are there. Where there is neither, or where the one around them holds
    a region that is called, they stay."""
    gone: list[str] = []
    taken: dict[str, None] = {}
    outermost, regions = called.outermost, [one.path for one in program.regions if one.path in called.paths]
    for path in found:
        if path in called.paths:
            continue
        around = [one for one in outermost if is_ancestor(one, path)]
        within = [one for one in outermost if is_ancestor(path, one)]
        if any(is_ancestor(one, other) for one in around for other in regions):
            continue
        if around or within:
            gone.append(path)
            taken |= dict.fromkeys(around or within)
    larger = [path for path in taken if any(True for _ in program.module.get_submodule(path).children())]
    return gone, larger or list(taken)


# ---- blocks that compute their activations again --------------------------------------------------------------------
# The module gets a ``forward`` of its own that calls its class's under ``torch.utils.checkpoint`` (the non-reentrant
# kind, https://docs.pytorch.org/docs/stable/checkpoint.html). Hooks, state-dict keys and class stay what they were, and
# a compiler that traces the call decides in the graph what is computed again.

_FORWARDS: weakref.WeakKeyDictionary[type[nn.Module], types.FunctionType] = weakref.WeakKeyDictionary()
"""The recomputing forward of each class, made once: blocks of a class share their compiled code by it."""


class Recomputed:
    """A block that computes its activations again in the backward, while a step is under way: outside of one it is as
    it was written, and can be saved whole. Raises ValueError where its forward is patched."""

    def __init__(self, path: str, block: nn.Module) -> None:
        if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
            raise ValueError(
                f"compile.checkpointing: {path}: the forward of this {type(block).__name__} has been replaced on the "
                "object itself, or is TorchScript"
            )
        self._block, self._forward = block, recomputing(block)

    def activate(self, active: bool) -> None:
        attributes = vars(self._block)
        if active:
            attributes["forward"] = self._forward
        elif attributes.get("forward") is self._forward:
            del attributes["forward"]


def recomputing(module: nn.Module) -> types.MethodType:
    """The forward of ``module`` that computes its activations again: a bound method of this object, as the class's own
    forward is, so that copies of the module have their own, too."""
    kind = type(module)
    if kind not in _FORWARDS:
        _FORWARDS[kind] = _make_forward(kind)
    return types.MethodType(_FORWARDS[kind], module)


def _make_forward(kind: type[nn.Module]) -> types.FunctionType:
    own = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(self, *args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
            return own(self, *args, **kwargs)  # transforms of torch.func do not take hooks for saved tensors
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
    tensors and attributes that the first forward began with, and leaves what it finds. Else batch norm would take each
    batch for two, a counter, too."""

    def __init__(self, module: nn.Module) -> None:
        owners = [one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule)]
        users = [one for one in owners if not type(one).__module__.startswith("torch.nn.")]
        self._attributes = [(vars(one), dict(vars(one))) for one in users]
        # Parameters as well: those of ``torch.func.functional_call`` are gone when the backward comes.
        held: list[dict[str, Any]] = [each for one in owners for each in (one._parameters, one._buffers) if each]
        self._tensors = [(one, dict(one)) for one in held]
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
        self._found.append([(place, dict(place)) for place, _ in (*self._attributes, *self._tensors)])
        fresh: dict[Tensor | None, Tensor] = {buffer: copied.clone() for buffer, (_, copied) in self._copies.items()}
        for place, entries in self._attributes:
            _put(place, entries)
        for place, tensors in self._tensors:
            _put(place, {name: fresh.get(one, one) for name, one in tensors.items()})

    def __exit__(self, *error: object) -> None:
        for place, entries in self._found.pop():
            _put(place, entries)


def _put(place: dict[str, Any], entries: dict[str, Any]) -> None:
    if list(map(id, place.values())) != list(map(id, entries.values())):
        place.clear()
        place.update(entries)


def _in_capture() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# ---- methods as regions ----------------------------------------------------------------------------------------------


def compile_method(program: Program, path: str, request: ModuleRequest) -> None:
    """Hand the method at ``path`` (``method``, or ``submodule.method``) to the compiler. Raises ValueError, naming
    what there is, where there is none."""
    place, _, name = path.rpartition(".")
    try:
        owner = program.module.get_submodule(place)
    except AttributeError:
        raise ValueError(
            f"compile.second_order.functions: {path!r}: there is no submodule {place!r} in "
            f"{type(program.module).__name__}"
        ) from None
    if not callable(getattr(type(owner), name, None)):
        known = [one for one in vars(type(owner)) if callable(getattr(owner, one)) and not one.startswith("_")]
        raise ValueError(
            f"compile.second_order.functions: {type(owner).__name__} has no method {name!r}; it has {', '.join(known)}"
        )
    method = type(name, (Method,), {})(owner, name)  # a class of its own, by which kinds are told apart
    add_region(program, path, method, request.compile_arguments(), MethodRegion)
