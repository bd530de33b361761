"""Bench: one built program of which any submodules can be compiled by themselves, each try from the same state."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from strategies import Modular, Program, Stage, Strategy
from strategies.errors import one_line
from strategies.modular import Part
from strategies.optimizer.step import installed, own_step
from strategies.options import ModuleRequest
from strategies.regions import compile_in_place, fixed_sizes, uncompile
from trainer.guards.snapshot import Snapshot
from trainer.locate.capture import Captured, captured
from trainer.locate.observe import Observer
from trainer.locate.tree import holds
from trainer.locate.trial import OPTIMIZER, Node, Outcome, Site, Trial
from trainer.loops.lightning import LightningLoop, why_not
from trainer.telemetry import hardware

OPTIONS = tuple(option.name for option in dataclasses.fields(ModuleRequest))
"""Names of the options that reach torch.compile."""
_NEUTRAL = Part()


class Bench:
    """Tries what strategies compile, piece by piece.

    Args:
        program: With the strategies applied; what they compiled is undone and can be tried from here on.
        strategies: Those that are applied.
        batches: On their device, one of each shape.
        passes: Quiet for as long as the bench is used.
        cuda_graphs: Whether Inductor replays what it compiled from CUDA graphs.
        kinds, counts: What each batch looks like, and how many of the epoch look so.

    Raises ValueError where nothing can be tried: a step that cannot be repeated, or that fails in eager.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        program: Program,
        strategies: Sequence[Strategy],
        batches: Sequence[Any],
        passes: LightningLoop,
        *,
        cuda_graphs: bool,
        kinds: Sequence[str],
        counts: Sequence[int],
        notes: Sequence[str] = (),
    ) -> None:
        reason = why_not(trainer)
        if reason is not None:
            raise ValueError(f"no step can be tried and undone: {reason}")
        self._trainer, self._program, self._batches = trainer, program, list(batches)
        self._requests = _requests(program, strategies)
        self._strategy = next((each for each in strategies if each.stage is Stage.MODULE), None)
        paths = [region.path for region in program.regions]
        uncompile(program)
        self._observer = Observer(trainer, program, passes, cuda_graphs=cuda_graphs)
        self._optimizer = any(installed(optimizer) is not None for optimizer in program.optimizers)
        self._snapshot = Snapshot(LightningLoop(trainer), self._batches)
        called = self._called()
        self.site = Site(
            regions=[_node(program.module.get_submodule(path), path, called) for path in paths],
            strategy=self._strategy.name if self._strategy is not None else None,
            requests={path: _not_neutral(self._requests[path]) for path in paths},
            paths=[path for path, _ in program.module.named_modules() if path],
            optimizer=self._optimizer,
            batches=list(kinds),
            counts=list(counts),
            device=trainer.strategy.root_device.type,
            versions=hardware.versions(),
            notes=list(notes),
        )

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial from the state of the first step."""
        torch.compiler.reset()
        batches = [self._batches[number] for number in trial.batches]
        with contextlib.ExitStack() as aside:
            if OPTIMIZER not in trial.paths:
                for optimizer in self._program.optimizers:
                    aside.enter_context(own_step(optimizer))
            aside.callback(self._snapshot.restore)
            aside.callback(uncompile, self._program)
            self._compile(trial)
            return self._observer.observe(trial, batches, self._snapshot)

    def capture(self, path: str, batch: int, changes: dict[str, Any]) -> Captured:
        """Submodule and inputs of its first call, and what it is compiled with. Raises ValueError without a call."""
        self._snapshot.restore()
        arguments = self._arguments(path, changes)
        if arguments["dynamic"] is None:
            arguments["dynamic"] = self._program.dynamic
        with self._all_eager():
            return captured(
                self._program,
                path,
                arguments=arguments,
                run=lambda: self._observer.step(self._batches[batch]),
            )

    def _compile(self, trial: Trial) -> None:
        paths = [path for path in trial.paths if path != OPTIMIZER]
        for path in paths:
            arguments = self._arguments(path, trial.changes)
            if trial.symptom == "breaks":
                arguments["fullgraph"] = False
            # Compiled apart, what were parts of one graph would have one code for their several sizes.
            if len(paths) > 1 and fixed_sizes(self._program, paths, arguments["dynamic"]):
                arguments["dynamic"] = False
            compile_in_place(self._program, path, arguments)

    def _arguments(self, path: str, changes: dict[str, Any]) -> dict[str, Any]:
        """torch.compile's arguments for what lies in a region: the region's own."""
        region = next(region for region in self._requests if holds(region, path))
        request = self._requests[region]
        return dataclasses.replace(request, **changes).compile_arguments()

    def _called(self) -> set[int]:
        """Modules that a step of eager calls. Raises ValueError if that step fails."""
        called: set[int] = set()

        def see(module: nn.Module, _: Any) -> None:
            called.add(id(module))

        with self._all_eager(), _watched(see):
            for batch in self._batches:
                try:
                    self._observer.step(batch)
                except Exception as error:
                    raise ValueError(f"the training step fails in eager already: {one_line(error)}") from error
                finally:
                    self._snapshot.restore()
        return called

    @contextlib.contextmanager
    def _all_eager(self) -> Iterator[None]:
        with contextlib.ExitStack() as aside:
            for optimizer in self._program.optimizers:
                aside.enter_context(own_step(optimizer))
            yield


@contextlib.contextmanager
def _watched(see: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_pre_hook(see)
    try:
        yield
    finally:
        handle.remove()


def _requests(program: Program, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """What each region is compiled with. Raises ValueError for a strategy that does not say."""
    requests: dict[str, Any] = {}
    for strategy in strategies:
        if strategy.stage is not Stage.MODULE:
            continue
        if isinstance(strategy, Modular):
            for name, paths in program.report[strategy.name].items():
                requests |= dict.fromkeys(paths, strategy.parts[name])
        elif isinstance(strategy, ModuleRequest):
            requests |= {region.path: strategy for region in program.regions}
        else:
            raise ValueError(f"compile.{strategy.name}: only strategies with torch.compile's options can be searched")
    return requests


def _not_neutral(request: Any) -> dict[str, Any]:
    """Options that a ``Part`` would have to be given to be compiled like ``request``."""
    values = {name: copy.deepcopy(getattr(request, name)) for name in OPTIONS}
    return {name: value for name, value in values.items() if value != getattr(_NEUTRAL, name)}


def _node(module: nn.Module, path: str, called: set[int]) -> Node:
    kind = type(module)
    file = line = None
    with contextlib.suppress(TypeError, OSError):
        file, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
    sizes = [tuple(parameter.shape) for parameter in module.parameters()]
    return Node(
        path=path,
        kind=kind.__name__,
        file=str(Path(file).resolve()) if file else None,
        line=line,
        likeness=f"{kind.__module__}.{kind.__qualname__} {module!r} {sizes}",
        called=id(module) in called,
        children=[_node(child, f"{path}.{name}", called) for name, child in module.named_children()],
    )
