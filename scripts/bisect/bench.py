"""Bench: a training up to its first step, of which any submodules can be compiled by themselves, each try from the
same state. Nothing is trained: the first step is never taken, no checkpoint, record or artifact is written.

It also captures one submodule with the inputs of its first call, for a Python file that shows the failure alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import os
import pickle
import pprint
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scripts.bisect.probe import Probe
from scripts.bisect.report import OPTIMIZER, Node, Outcome, Site, Trial
from scripts.bisect.search import holds, searched
from scripts.explain.recorder import kind_of, wrap_training_loader
from strategies import Modular, Program, Stage, Strategy
from strategies.compose import aside
from strategies.errors import one_line
from strategies.modular import Part
from strategies.options import BudgetedBackend, ModuleRequest, file_of_backend
from strategies.regions import compile_in_place, fixed_sizes, uncompile
from trainer.build import build_trainer, compile_callback
from trainer.callback import Compile
from trainer.guards.rollback import throwaway
from trainer.guards.snapshot import Snapshot
from trainer.loops.lightning import LightningLoop
from trainer.process import process_settings
from trainer.run import new_record
from trainer.settings import Config
from trainer.telemetry import hardware
from trainer.telemetry.source import is_library

REPRODUCER, STATE = "reproduce.py", "reproduce.pt"
TEMPLATE = Path(__file__).with_name("reproducer_template.txt")
OPTIONS = tuple(option.name for option in dataclasses.fields(ModuleRequest))
"""Names of the options that reach torch.compile."""
_NEUTRAL = Part()
MAX_SECONDS = 60.0
"""After so long no further batch is looked at."""


class Bench:
    """Tries what strategies compile, piece by piece.

    Args:
        program: With the strategies applied; what they compiled is undone and can be tried from here on.
        strategies: Those that are applied.
        batches: On their device, one of each shape.
        passes: Quiet for as long as the bench is used.
        kinds: What each batch looks like.

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
        kinds: Sequence[str],
        notes: Sequence[str] = (),
    ) -> None:
        reason = passes.why_not_apart()
        if reason is not None:
            raise ValueError(f"no step can be tried and undone: {reason}")
        self._program, self._batches, self._passes = program, list(batches), passes
        self._device = trainer.strategy.root_device.type
        self._requests = _requests(program, strategies)
        strategy = next((each for each in strategies if each.stage is Stage.MODULE), None)
        paths = [region.path for region in program.regions]
        uncompile(program)
        self._probe = Probe(trainer, program, passes)
        self._snapshot = Snapshot(passes, self._batches, program)
        called = self._called()
        self.site = Site(
            regions=[_node(program.module.get_submodule(path), path, called) for path in paths],
            strategy=strategy.name if strategy is not None else None,
            requests={path: _not_neutral(self._requests[path]) for path in paths},
            paths=[path for path, _ in program.module.named_modules() if path],
            optimizer=bool(program.compiled_beside_regions),
            batches=list(kinds),
            device=self._device,
            versions=hardware.versions(),
            notes=list(notes),
        )

    def trial(self, trial: Trial) -> Outcome:
        """Do one trial from the state of the first step."""
        torch.compiler.reset()
        batches = [self._batches[number] for number in trial.batches]
        with contextlib.ExitStack() as stack:
            if OPTIMIZER not in trial.paths:
                stack.enter_context(aside(self._program))
            stack.callback(self._snapshot.restore)
            stack.callback(uncompile, self._program)
            self._compile(trial)
            return self._probe.run(trial, batches, self._snapshot)

    def reproducer(self, path: str, batch: int, folder: Path, *, symptom: str, reason: str | None) -> Path:
        """Write a Python file that runs the submodule at ``path`` alone, on the inputs of its first call.

        Raises ValueError when the step does not call it, or where it cannot be run outside of this process.
        """
        arguments = self._arguments(path, {})
        if arguments["dynamic"] is None:
            arguments["dynamic"] = self._program.dynamic
        if symptom == "breaks":
            arguments["fullgraph"] = True  # so that the break is an error, which names the line
        backend: Any = arguments["backend"]
        budget = backend.budget if isinstance(backend, BudgetedBackend) else None
        backend = backend.backend if isinstance(backend, BudgetedBackend) else backend
        if not isinstance(backend, str):
            raise ValueError(f"backend {backend!r} has no name to load it by")
        state, autocast = self._captured(path, batch)
        roots, modules = _imports(state["module"], backend)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(state, folder / STATE)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            (folder / STATE).unlink(missing_ok=True)
            raise ValueError(f"{path} cannot be saved: {error}") from error
        kind = type(state["module"])
        source = _source_of(kind)
        text = {
            "PATH": path,
            "KIND": f"{kind.__module__}.{kind.__qualname__}",
            "SOURCE": f"{source[0]}:{source[1]}" if source else "unknown file",
            "REASON": " ".join((reason or "").split()),
            "TORCH": str(torch.__version__),
        }
        values = {
            "SYMPTOM": symptom,
            "ROOTS": roots,
            "MODULES": modules,
            "ARGUMENTS": {**arguments, "backend": backend},
            "BUDGET": budget,
            "DEVICE": self._device,
            "AUTOCAST": autocast,
            "MATMUL": torch.get_float32_matmul_precision(),
        }
        program = TEMPLATE.read_text(encoding="utf-8")
        for name, value in (text | {name: pprint.pformat(value, width=100) for name, value in values.items()}).items():
            program = program.replace(f"@{name}@", value)
        (folder / REPRODUCER).write_text(program, encoding="utf-8")
        return folder / REPRODUCER

    def _captured(self, path: str, batch: int) -> tuple[dict[str, Any], str | None]:
        """The submodule as it is before a step of eager with the inputs of its first call, and its type of autocast."""
        module = self._program.module.get_submodule(path)
        found: list[tuple[dict[str, Any], str | None]] = []

        def capture(_: nn.Module, args: Any, kwargs: Any) -> None:
            handle.remove()  # before the copy: it would be a part of it
            kept = {"args": pytree.tree_map(_kept, args), "kwargs": pytree.tree_map(_kept, kwargs)}
            autocast = str(torch.get_autocast_dtype(self._device)).removeprefix("torch.")
            enabled = torch.is_autocast_enabled(self._device)
            found.append(({"module": copy.deepcopy(module), **kept}, autocast if enabled else None))
            raise _Captured

        self._snapshot.restore()
        handle = module.register_forward_pre_hook(capture, with_kwargs=True)
        try:
            with aside(self._program):
                self._passes.step(self._batches[batch])
        except _Captured:
            pass
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} cannot be copied: {type(error).__name__}: {error}") from error
        finally:
            handle.remove()
        if not found:
            raise ValueError(f"a step does not call {path}")
        return found[0]

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
        arguments: dict[str, Any] = dataclasses.replace(self._requests[region], **changes).compile_arguments()
        return arguments

    def _called(self) -> set[int]:
        """Modules that a step of eager calls. Raises ValueError if that step fails."""
        called: set[int] = set()
        handle = nn.modules.module.register_module_forward_pre_hook(lambda module, _: called.add(id(module)))
        try:
            with aside(self._program):
                for batch in self._batches:
                    try:
                        self._passes.step(batch)
                    except Exception as error:
                        raise ValueError(f"the training step fails in eager already: {one_line(error)}") from error
                    finally:
                        self._snapshot.restore()
        finally:
            handle.remove()
        return called


def _requests(program: Program, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """What each region is compiled with. Raises ValueError for a strategy without torch.compile's options."""
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
    file, line = _source_of(kind) or (None, None)
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


def with_config(config: Config, use: Callable[[Bench], object], *, batches: int, shapes: int) -> None:
    """Call ``use`` with the bench of ``config.task`` under ``config.compile``. Raises ValueError for bad input.

    The shapes of the epoch's first ``batches`` are looked at, and so many different ``shapes`` are kept and tried.
    """
    strategies, notes = searched(config.compile.values())
    if config.trainer.devices not in (None, 1) or config.trainer.strategy != "auto":
        notes.append("several devices: tried on one, without what DDP or FSDP changes")
    tried = throwaway(config, strategies, val_every_n_steps=0, checkpoint_every_n_steps=0)
    with process_settings(tried.trainer), tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        compile_ = compile_callback(tried, new_record(tried, []))
        L.seed_everything(config.seed, verbose=False)
        data = config.task.build_data(seed=config.seed)
        module = config.task.build_module(max_steps=config.trainer.max_steps)
        callback = BenchCallback(compile_, use, notes, batches=batches, shapes=shapes)
        trainer = build_trainer(tried, Path(folder), [callback, compile_])
        trainer.loggers = []
        callback.run(trainer, module, datamodule=data)


class _Done(BaseException):
    """The bench was used. Not an Exception, so that nobody takes it for a failure."""


class BenchCallback(L.Callback):
    """Comes before ``Compile`` in the trainer's callbacks, hands over a bench and ends before the first step."""

    def __init__(
        self,
        compile_: Compile,
        use: Callable[[Bench], object],
        notes: Sequence[str] = (),
        *,
        batches: int = 32,
        shapes: int = 4,
    ) -> None:
        self._compile, self._use, self._notes = compile_, use, list(notes)
        self._max_batches, self._max_shapes = batches, shapes
        self._chosen: list[Any] = []
        self._kinds: Counter[str] = Counter()

    def run(self, trainer: L.Trainer, module: L.LightningModule, **data: Any) -> None:
        """Fit up to the first batch."""
        with contextlib.suppress(_Done):
            trainer.fit(module, **data)
            raise ValueError("the training loader brings no batch")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Strategies are applied: stand between the training loader and the loop."""
        wrap_training_loader(trainer, self._choose)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Everything is in place: use the bench, then end."""
        program = self._compile.program
        assert program is not None
        kinds = list(self._kinds)[: len(self._chosen)]
        if len(self._kinds) > len(kinds):
            self._notes.append(
                f"{len(self._kinds)} shapes among the first {self._kinds.total()} batches, {len(kinds)} of them tried "
                "(--shapes)"
            )
        passes = LightningLoop(trainer, cuda_graphs=program.uses_cuda_graphs)
        on_device = [batch, *(passes.to_device(other) for other in self._chosen[1:])]
        with passes.quiet():
            strategies = self._compile.strategies
            self._use(Bench(trainer, program, strategies, on_device, passes, kinds=kinds, notes=self._notes))
        raise _Done

    def _choose(self, loader: Any) -> Any:
        """The first batch of each shape."""
        began = time.perf_counter()
        for batch in loader:
            kind = kind_of(batch)
            if kind not in self._kinds and len(self._chosen) < self._max_shapes:
                self._chosen.append(batch)
            self._kinds[kind] += 1
            if self._kinds.total() >= self._max_batches or time.perf_counter() - began > MAX_SECONDS:
                break
        # The loop is given one batch more than it will get to: its fetcher looks ahead.
        return [copy.deepcopy(batch) for batch in self._chosen[:1] * 2]


class _Captured(Exception):
    """The first call was captured; the rest of the step is not needed."""


def _kept(value: Any) -> Any:
    """A leaf of its own, that asks for a gradient where the original had one."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _imports(module: nn.Module, backend: str) -> tuple[list[str], list[str]]:
    """Folders that have to be on the path, and modules to import, so that both can be loaded. Raises ValueError."""
    files = [getattr(sys.modules.get(type(each).__module__), "__file__", None) for each in module.modules()]
    roots = [_importable(Path(file))[0] for file in dict.fromkeys(files) if file is not None]
    modules = []
    if (file := file_of_backend(backend)) is not None:
        root, name = _importable(file)
        roots, modules = [*roots, root], [name]
    return [root for root in dict.fromkeys(roots) if not is_library(f"{root}{os.sep}")], modules


def _importable(file: Path) -> tuple[str, str]:
    """The folder on the path below which ``file`` is, and its name as a module. Raises ValueError if there is none."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__file__", None) and Path(str(module.__file__)) == file:
            depth = name.count(".") + (file.name == "__init__.py")
            return str(file.resolve().parents[depth]), name
    raise ValueError(f"{file} is not a module that can be imported")


def _source_of(kind: type) -> tuple[str, int] | None:
    """File and first line of a class; None where there is none to read."""
    try:
        return str(inspect.getsourcefile(kind)), inspect.getsourcelines(kind)[1]
    except (TypeError, OSError):
        return None
