"""ModuleComparer: a few eager steps, in which each region is compiled and compared with eager at its first call.

The comparison is that of a run (``strategies.region_check``), on copies of the inputs. Where a region is not eager's,
or does not compile, what it calls is looked at in the same way, down to the smallest submodule at fault. The training
goes on with eager's results, in a module of this process's own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scripts.bisect.search import MAX_SHAPES, ComparedModule, Report, all_of, searched
from scripts.explain.run import training
from strategies import Program, Stage, Strategy
from strategies.base import apply, compiler_settings
from strategies.compile_errors import one_line
from strategies.region import Checking, is_ancestor, submodules
from strategies.region_check import check_call
from strategies.region_state import RegionState
from strategies.regions import compile_in_place, never_called
from strategies.tolerance import rounding_unit
from trainer.callback import Compile
from trainer.loops.lightning import throwaway_trainer
from trainer.settings import Config
from trainer.telemetry.source_lines import display_path

MAX_BATCHES = 32
"""Batches among which different shapes are looked for."""
MAX_NAMED = 2
"""Differences that a line names, the largest first."""

Saw = Callable[[ComparedModule], object]
"""Called with each submodule once it was looked at, before its children are."""


class ModuleComparer:
    """Looks at what strategies compile.

    Args:
        program: With the strategies applied; its regions are not in force.
        saw: Told of each look.

    Attributes:
        arguments: By the paths of the regions, those of ``torch.compile``.
    """

    def __init__(self, program: Program, saw: Saw) -> None:
        self._program, self._saw = program, saw
        self._regions = {region.path: region for region in submodules(program.regions)}
        self._unit = rounding_unit(program.precision, program.device or torch.device("cpu"), program.module)
        self.arguments = {path: copy.deepcopy(region.arguments) for path, region in self._regions.items()}

    @contextlib.contextmanager
    def looking(self) -> Iterator[list[ComparedModule]]:
        """Inside, each region is looked at when it is called for the first time; what was seen is in the list."""
        with self._at_first_calls(self._program, self._regions) as looks:
            yield looks

    @contextlib.contextmanager
    def _at_first_calls(self, program: Program, paths: Iterable[str]) -> Iterator[list[ComparedModule]]:
        looks: list[ComparedModule] = []
        handles: dict[str, Any] = {}

        def looked(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            handles[path].remove()  # what is compared has the user's hooks alone
            looks.append(self._compare_module(program, path, args, kwargs))

        with contextlib.ExitStack() as stack:
            for path in paths:
                module, looks_at = program.module.get_submodule(path), partial(looked, path)
                # First of all hooks, so that those of the user's change the arguments once.
                handles[path] = module.register_forward_pre_hook(looks_at, with_kwargs=True, prepend=True)
                stack.callback(handles[path].remove)
            yield looks

    def _compare_module(
        self, program: Program, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ComparedModule:
        module = program.module.get_submodule(path)
        look = ComparedModule(path=path, about=_about(module))
        region = self._regions.get(path) or compile_in_place(program, path, self._arguments_of(path))
        assert region is not None
        try:
            outcome = check_call(module, region.compiled, args, kwargs, unit=self._unit)
        except Exception as error:  # eager's own, on the copies
            if "CUDA error" in str(error):  # nothing works in this process any more
                raise
            look.skipped = one_line(error)
        else:
            look.skipped = outcome.skipped
            if outcome.error is not None:
                look.wrong = f"it does not compile: {one_line(outcome.error)}"
            elif outcome.wrong:
                look.wrong = "; ".join(map(str, outcome.wrong[:MAX_NAMED]))
        self._saw(look)
        if look.wrong is not None or look.skipped is not None:
            look.children = self._looks_inside(path, args, kwargs)
        return look

    def _looks_inside(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ComparedModule]:
        """Run the submodule once more, eager and on copies, and look at what it calls."""
        module = self._program.module.get_submodule(path)
        children = list(_children(module, path))
        if not children:
            return []
        # Regions of their own, which share code among each other as those of one program do.
        apart = dataclasses.replace(self._program, regions=[], kinds={}, checking=Checking())
        state = RegionState(module, (args, kwargs))
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        with self._at_first_calls(apart, children) as looks:
            try:
                module._call_impl(*args, **kwargs)
            except Exception as error:  # which the step is about to raise itself
                if "CUDA error" in str(error):
                    raise
            finally:
                state.restore()
        return looks

    def _arguments_of(self, path: str) -> dict[str, Any]:
        """Those of the region that it lies in."""
        region = next(region for region in self.arguments if is_ancestor(region, path))
        return copy.deepcopy(self.arguments[region])  # torch pops keys from options


def _about(module: nn.Module) -> str:
    kind = type(module)
    about = kind.__name__
    with contextlib.suppress(TypeError, OSError):  # no source to read
        about += f", {display_path(str(inspect.getsourcefile(kind)))}:{inspect.getsourcelines(kind)[1]}"
    return about


def _children(module: nn.Module, path: str) -> Iterator[str]:
    """Paths of the submodules that ``module`` may call, those of a list of modules in its place."""
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if never_called(child):
            yield from _children(child, inner)
        elif not isinstance(child, torch.jit.ScriptModule):
            yield inner


# ---- a training whose steps are looked at ----------------------------------------------------------------------------


def bisect_config(config: Config, strategies: Sequence[Strategy], saw: Saw, begins: Callable[[], object]) -> Report:
    """Search ``config.task`` under ``strategies``; ``begins`` is called once Lightning has set its signal handlers.

    Raises ValueError for bad input, and where nothing can be compared.
    """
    made: list[BisectCallback] = []

    def callbacks(compile_: Compile) -> list[L.Callback]:
        made.append(BisectCallback(compile_, strategies, saw, begins))
        return [compile_, *made]

    with training(
        config,
        not_compiling(strategies),
        callbacks,
        max_steps=MAX_SHAPES,
        accumulate_grad_batches=1,
        val_every_n_steps=0,
        checkpoint_every_n_steps=0,
    ) as (_, trainer, module, data):
        trainer.fit(module, datamodule=data)
    return made[0].report()


def bisect_module(
    module: L.LightningModule,
    loader: Any,
    strategies: Iterable[Strategy],
    saw: Saw = lambda look: None,
    **declared: Any,
) -> Report:
    """Search a copy of any module, with batches of ``loader``; ``declared`` are further arguments of ``Compile``.

    Raises ValueError where nothing compiles, or nothing can be compared.
    """
    kept, _ = searched(strategies)
    compile_ = Compile(not_compiling(kept), parity="off", measure_peak=False, save=False, verbose=False, **declared)
    callback = BisectCallback(compile_, kept, saw)
    module = copy.deepcopy(module)
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        trainer = throwaway_trainer(folder, module, [compile_, callback], max_epochs=1, limit_val_batches=0)
        trainer.fit(module, train_dataloaders=loader)
    return callback.report()


def not_compiling(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Those that a training of eager steps has as well: how batches are padded, what is computed again."""
    return [one for one in strategies if one.stage is not Stage.MODULE]


class BisectCallback(L.Callback):
    """Comes after ``Compile`` in the trainer's callbacks, and ends after one batch of each shape, or at a fault."""

    def __init__(
        self, compile_: Compile, strategies: Sequence[Strategy], saw: Saw, begins: Callable[[], object] = lambda: None
    ) -> None:
        self._compile, self._saw, self._begins = compile_, saw, begins
        self._strategies = [one for one in strategies if one.stage is Stage.MODULE]
        for strategy in self._strategies:
            strategy.check()
        self._bench: ModuleComparer | None = None
        self._chosen: dict[str, Any] = {}  # by dtypes and shapes of the tensors
        self._looks: list[ComparedModule] = []
        self._batches = 0
        self._called: set[str] = set()
        self._compared = False
        self._around = contextlib.ExitStack()
        self._within_batch = contextlib.ExitStack()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Strategies are applied: stand between the training loader and the loop."""
        strategy: Any = trainer.strategy
        process = strategy.process_dataloader
        strategy.process_dataloader = lambda loader: self._choose(process(loader))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Everything is in place: name the regions, which stay eager."""
        self._begins()
        self._compile.telemetry.compiler.lines_left = 0  # what compiles again is expected here
        program = self._compile.program
        assert program is not None
        program = dataclasses.replace(program, regions=[], kinds={}, settings={}, report={}, checking=Checking())
        apply(self._strategies, program)
        self._around.enter_context(compiler_settings(program.settings))
        self._bench = ModuleComparer(program, self._saw)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._bench is not None
        self._batches += 1
        self._looks = self._within_batch.enter_context(self._bench.looking())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._within_batch.close()
        looks = list(all_of(self._looks))
        self._called.update(look.path for look in looks)
        self._compared |= any(look.skipped is None for look in looks)
        fault = any(look.wrong is not None for look in looks)
        trainer.should_stop |= fault or self._batches == len(self._chosen)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._around.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._within_batch.close()
        self._around.close()

    def report(self) -> Report:
        """What was found. Raises ValueError where nothing was compared."""
        if self._bench is None or not self._batches:
            raise ValueError("the training loader brings no batch")
        never_called = [path for path in self._bench.arguments if path not in self._called]
        if not self._compared:
            reasons = [f"{look.path}: {look.skipped}" for look in self._looks]
            raise ValueError(
                "nothing can be compared with eager: "
                + (reasons[0] if reasons else f"a training step calls none of {', '.join(never_called[:3])}")
            )
        return Report(
            looks=self._looks,
            batch=list(self._chosen)[self._batches - 1],
            batches=self._batches,
            never_called=never_called,
            arguments=self._bench.arguments,
        )

    def _choose(self, loader: Any) -> Any:
        """The first batch of each shape."""
        for batch in itertools.islice(loader, MAX_BATCHES):
            tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
            kinds = [f"{str(one.dtype).removeprefix('torch.')} {' x '.join(map(str, one.shape))}" for one in tensors]
            if len(self._chosen) < MAX_SHAPES:
                self._chosen.setdefault(", ".join(kinds) or "no tensor", batch)
        return list(self._chosen.values())
