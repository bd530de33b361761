"""Put strategies in order and call them: order comes from their stages, conflicts are errors that name both."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from strategies.base import Program, Strategy


def ordered(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Strategies by stage, then name. Raises ValueError for two of one exclusive stage, or for another object."""
    given = list(strategies) if isinstance(strategies, Iterable) else [None]
    if not all(isinstance(one, Strategy) for one in given):
        raise ValueError(f"compile={strategies!r} is not a list of strategies, such as [Regional()]")
    result = sorted(given, key=lambda strategy: (strategy.stage, strategy.name))
    for first, second in itertools.pairwise(result):
        if first.stage == second.stage and (first.exclusive or second.exclusive):
            raise ValueError(
                f"compile: {first.name!r} and {second.name!r} both act on the {first.stage.name.lower()} stage; "
                "choose one of them"
            )
    capturing = [strategy for strategy in result if strategy.captures_step]
    graphed = [strategy for strategy in result if strategy.uses_cuda_graphs]
    if capturing and graphed:
        raise ValueError(
            f"compile: {capturing[0].name!r} captures whole steps, {graphed[0].name!r} asks Inductor for CUDA graphs "
            f"of its own (mode reduce-overhead or max-autotune); give {graphed[0].name!r} mode default or "
            f"max-autotune-no-cudagraphs, or leave {capturing[0].name!r} out"
        )
    return result


def label(strategies: Iterable[Strategy]) -> str:
    """Name of a combination in paths and tables: the strategies in order joined by ``+``, or ``eager``."""
    return "+".join(strategy.name for strategy in ordered(strategies)) or "eager"


def check(strategies: Sequence[Strategy]) -> None:
    """Let every strategy look at this machine and this torch before any work. Raises ValueError."""
    for strategy in strategies:
        strategy.check()


@contextlib.contextmanager
def compiler_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Set ``torch._dynamo.config`` values for the length of a run, avoid known faults, and restore all of it. An
    ``embedding_gradient`` among the values says that Inductor's own stays, see ``ModuleRequest``."""
    import torch._dynamo.config as config
    import torch._functorch.config as autograd_config

    from strategies.torch_patches import embeddings_as_in_eager, faults_avoided, one_compile_for_all_ranks

    donates = autograd_config.patch(donated_buffer=autograd_config.donated_buffer)  # ``keep_buffers`` changes it
    of_dynamo = {name: value for name, value in settings.items() if name != "embedding_gradient"}
    embeddings = contextlib.nullcontext() if "embedding_gradient" in settings else embeddings_as_in_eager()
    with config.patch(of_dynamo), donates, faults_avoided(), one_compile_for_all_ranks(), embeddings:
        yield


@contextlib.contextmanager
def eager(program: Program) -> Iterator[None]:
    """Inside, everything runs as it was written, optimizers with torch's own step; nothing is compiled, or lost."""
    import torch

    from strategies.torch_patches import as_capturing

    with torch.compiler.set_stance("force_eager"), as_capturing(False), aside(program):
        yield


@contextlib.contextmanager
def aside(program: Program) -> Iterator[None]:
    """Inside, optimizers take their own steps, and nothing else that strategies put in the place of torch's own is in
    force; regions may still be compiled."""
    with contextlib.ExitStack() as stack:
        for strategy in program.strategies:
            stack.enter_context(strategy.aside(program))
        for optimizer, own in program.own_steps:
            stack.callback(_bind, optimizer, "step", vars(optimizer).get("step"))
            _bind(optimizer, "step", own["step"])
        yield


def apply(strategies: Iterable[Strategy], program: Program) -> None:
    """Apply ``strategies`` to ``program`` in the order of their stages."""
    for strategy in ordered(strategies):
        strategy.apply(program)


def begin(strategies: Iterable[Strategy], program: Program) -> None:
    """Tell ``strategies`` that training is about to begin, in the order of their stages."""
    if not program.own_steps:
        program.own_steps = [(one, {name: vars(one).get(name) for name in _OF_A_STEP}) for one in program.optimizers]
    for strategy in ordered(strategies):
        strategy.begin(program)


def end(strategies: Iterable[Strategy], program: Program) -> None:
    """Tell ``strategies`` that training is over, in reverse order; one that fails does not keep the others from it."""
    with contextlib.ExitStack() as ends:
        ends.callback(program.own_steps.clear)
        ends.callback(_restore_steps, program)
        for strategy in ordered(strategies):
            ends.callback(strategy.end, program)


def give_up_others(program: Program, reason: str) -> list[str]:
    """Let all that is compiled beside regions and captured steps run eager from now on; returns whose it was."""
    given_up = program.compiled_beside_regions
    for strategy in given_up:
        strategy.end(program)
        program.eager_parts[strategy.name] = reason
    _restore_steps(program)
    return [strategy.name for strategy in given_up]


_OF_A_STEP = ("step", "_step_supports_amp_scaling")
"""Attributes of an optimizer by which it steps in another way than its class does: a scheduler sets the first."""


def _restore_steps(program: Program) -> None:
    for optimizer, own in program.own_steps:
        for name, value in own.items():
            _bind(optimizer, name, value)


def _bind(optimizer: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(optimizer, name, value)
    elif name in vars(optimizer):
        delattr(optimizer, name)
