"""A PyTorch loop of one's own: ``crucible.compile``, by which it trains under strategies, measured and checked.

    training = crucible.compile(model, optimizer, [Regional()])
    with training:
        for batch in training.batches(loader):
            ...  # forward, backward and optimizer, as they were

    training = crucible.compile(model, optimizer, [Regional(), CudaGraph()], loss=loss_function)
    with training:
        for batch in loader:
            loss = training.step(batch)

Where the loop runs backward and optimizer itself, it is told where a batch begins and ends, and nothing else is done.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning.fabric import is_wrapped
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, distributed, nn
from tqdm import tqdm

from strategies import Strategy
from strategies.padding import length_of, to_edge
from trainer.advice import refuse_unknown
from trainer.loops.compiled_training import CompiledTraining
from trainer.loops.plain import AUTOCAST, PlainLoop
from trainer.run_end import main_script
from trainer.telemetry.record import RunRecord, TrainingInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "compile_runs"
"""Where records go that are given no folder: into ``run-1``, ``run-2``, ... in it."""
PRECISIONS = {torch.bfloat16: "bf16-true", torch.float16: "16-true", torch.float64: "64-true"}
"""Lightning's name for the precision of a model, by the type of its weights."""
NO_BATCH = object()


def compile(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategies: Iterable[Strategy] = (),
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    micro_batches: int = 1,
    clip: float | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    precision: str | None = None,
    planned_steps: int | None = None,
    folder: str | Path | None = None,
    writer: SummaryWriter | None = None,
    log_every_n_steps: int = 50,
    **options: Any,
) -> PlainTraining:
    """Let a PyTorch loop of your own train ``module`` under ``strategies``, measured and checked.

    Args:
        module: Any module, on the device where it trains; it is compiled in place. Several: ``nn.ModuleList([a, b])``.
        optimizer: The one that trains it; several where the loop steps them itself.
        strategies: What to apply; empty means eager, measured by the same code.
        loss: Called with ``module`` and a batch, returns the loss. ``PlainTraining.step`` then runs forward, backward
            and optimizer, which ``CudaGraph`` needs. None: the loop does that itself, and takes its batches from
            ``PlainTraining.batches``.
        micro_batches: Batches whose gradients are accumulated for an optimizer step.
        clip: With ``loss``: the largest norm of the gradients; None = no clipping.
        schedule: With ``loss``: steps after each optimizer step; a loop may step it itself instead.
        scaler: With ``loss``: scales it for float16.
        precision: Lightning's name. With ``loss``, ``bf16-mixed`` and ``16-mixed`` enter autocast around it; without,
            it says what the loop enters. None = that of the weights.
        planned_steps: Optimizer steps that are going to be taken, for ``Auto`` and the last audit; None = not known.
        folder: Where ``record.json`` goes; a second one into ``run-2`` in it. None: where ``writer`` writes, else
            ``compile_runs/run-1``, ``run-2``, ...
        writer: TensorBoard's, which gets curves and pages as well; it stays open.
        log_every_n_steps: Optimizer steps between two writes of these.
        options: As of ``Compile``: ``blocks``, ``parts``, ``count``, ``parity``, ``on_difference``, ``save``, ... By
            default ``whole`` is the module itself.

    Raises:
        ValueError: Strategies that conflict, and what of strategies and loop cannot be combined.
    """
    refuse_unknown("crucible.compile", options, compile, CompiledTraining)
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} must be at least 1")
    if precision not in (None, *(known := ("32-true", *AUTOCAST, *PRECISIONS.values()))):
        raise ValueError(f"precision={precision!r} is not one of {known}")
    if not isinstance(module, nn.Module):
        raise ValueError(f"crucible.compile: {module!r} is not a module")
    given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in given:
        if not (hasattr(one, "step") and hasattr(one, "zero_grad")):
            raise ValueError(f"crucible.compile: {one!r} is no optimizer, which comes before the strategies")
    # Of Fabric and accelerate, which wrap them: what is compiled lies within.
    model: Any = module.module if is_wrapped(module) else module
    optimizers = [getattr(one, "optimizer", one) for one in given]
    training = CompiledTraining(strategies, **{"whole": ("",), **options})
    wrapped = model is not module or any(one is not inner for one, inner in zip(given, optimizers, strict=True))
    ours = {"clip": clip, "schedule": schedule, "scaler": scaler}
    needless = [name for name, value in ours.items() if loss is None and value is not None]
    refused = list(_refusals(model, given, training.strategies, takes_steps=loss is not None, wrapped=wrapped))
    refused += [f"{name}= goes with loss=; without, your loop does that itself" for name in needless]
    if refused:
        raise ValueError("\n".join(f"crucible.compile: {line}" for line in refused))
    kinds = (one.dtype for one in model.parameters() if one.is_floating_point())
    where = Path(folder if folder is not None else FOLDER if writer is None else writer.log_dir)
    loop = (ManualLoop if loss is None else PlainLoop)(
        model,
        *optimizers,
        loss=None if loss is None else functools.partial(loss, module),
        schedule=schedule,
        micro_batches=micro_batches,
        clip=clip,
        precision=precision or PRECISIONS.get(next(kinds, torch.float32), "32-true"),
        scaler=scaler,
        max_steps=planned_steps,
        directory=str(where),
        log_every_n_steps=log_every_n_steps,
        writer=writer,
    )
    settings = {"micro_batches": micro_batches, "clip": clip, "max_steps": planned_steps, "precision": loop.precision}
    logs = TrainingInfo(
        folder=where, shared=folder is None and writer is None, settings=settings, entry="crucible.compile"
    )
    return PlainTraining(loop, training, logs)


def _refusals(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    strategies: Sequence[Strategy],
    *,
    takes_steps: bool,
    wrapped: bool,
) -> Iterator[str]:
    """What of strategies and loop cannot be combined, a line each."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        yield "several processes are not supported in a loop of your own yet; Lightning's Trainer takes them"
    if takes_steps and len(optimizers) != 1:
        yield f"loss= takes one optimizer, not {len(optimizers)}: without it, your loop steps them itself"
    if takes_steps and wrapped:
        yield "loss= calls backward and step itself, which Fabric or accelerate wants to: leave it out, use batches()"
    for strategy in strategies:
        if strategy.captures_step and not takes_steps:
            yield f"{strategy.name} captures whole steps: give loss=, a function of module and batch, and use step()"
        if strategy.reorders_data:
            yield f"{strategy.name} groups and pads batches, and your loop makes its own: pad where they are collated"


class ManualLoop(PlainLoop):
    """One of the user's, which runs backward and optimizers itself: a batch in which one of them stepped is a step."""

    manual = True

    def __init__(self, module: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(module, *optimizers, **options)
        self._handles = [one.register_step_post_hook(self._note) for one in optimizers]

    def _note(self, *_: Any) -> None:
        self.stepped = True

    def batch_begins(self) -> None:
        self.stepped = False

    def batch_ends(self) -> None:
        self._progress.batches += 1
        self._progress.steps += self.stepped

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()


_open: PlainTraining | None = None
"""The training under way: settings of the compiler are those of the process, so that there is one at a time."""


class PlainTraining:
    """What ``compile`` returns: tells the training where batches begin and end, and has its record.

    At the end of a ``with`` block, by ``close``, or else when the script ends, the record is completed and saved, and
    what was compiled is given back. Outside of batches the module is what its author wrote.
    """

    def __init__(self, loop: PlainLoop, training: CompiledTraining, logs: TrainingInfo) -> None:
        global _open
        self._loop, self._training, self._logs = loop, training, logs
        self._batch: Any = NO_BATCH
        self._loss: Tensor | None = None
        self._epochs = 0
        self._begun = self._over = False
        self._in_file = main_script() is not None  # at exit Python has forgotten it
        if _open is not None:
            _open.close()
        try:
            self._program = training.apply_to(
                loop.module, device=loop.device, precision=loop.precision, print_line=tqdm.write
            )
        except BaseException:
            training.close()
            loop.release()
            raise
        _open = self
        atexit.register(self._at_exit)

    @property
    def record(self) -> RunRecord:
        """What was measured, complete once the training is closed."""
        return self._training.record

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far."""
        return self._loop.steps_done

    # ---- what a loop calls -----------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor | None:
        """Train on ``batch``: forward, ``loss``, backward and, where a step ends, clipping and optimizer.

        Args:
            batch: Whatever ``loss`` takes, on the device.

        Returns:
            What ``loss`` returned, detached.

        Raises:
            ValueError: ``compile`` was given no ``loss``.
            RuntimeError: The training is closed.
        """
        if self._loop.manual:
            raise ValueError("training.step needs a loss: crucible.compile(..., loss=a function of module and batch)")
        if self._batch is NO_BATCH:
            batch = self._begin_batch(batch, None)
        try:
            self._loss = self._loop.train_on_batch(batch)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts
                self._end_batch()
            raise
        loss, micro_batches = self._loss, self._loop.micro_batches
        self._end_batch()
        return loss if loss is None or micro_batches == 1 else loss * micro_batches

    def batches(self, loader: Iterable[Any]) -> Batches:
        """One pass over ``loader``, or over any other iterable: from one batch to the next is what trains on it. How
        long the loop waits for batches is measured. Leave it at any time."""
        return Batches(loader, self._batches)

    def evaluation(self, loader: Iterable[Any]) -> Batches:
        """One pass over ``loader`` for an evaluation, between two passes of training or within one: it runs compiled as
        well, and its time belongs to no step. ``model.eval()`` and ``torch.no_grad()`` are yours to call."""
        return Batches(loader, self._evaluation)

    def pause(self) -> None:
        """What follows, up to the next batch, belongs to no step: saving a checkpoint, drawing a picture. Before the
        optimizer has stepped, the step under way is left out of the figures."""
        self._pause("saving")

    def log_loss(self, loss: Tensor) -> None:
        """Keep the loss of the batch under way for the record; ``step`` does so itself. Of a step of several batches
        their sum counts. Nothing waits for the device."""
        self._loss = loss.detach()

    def close(self) -> None:
        """The training is over: complete and save the record, and print what it says. Raises what the last checks do
        where an option asks for it."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    # ---- batches ---------------------------------------------------------------------------------------------------

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._end_batch()
        self._loop.epoch_begins(self._epochs)
        self._epochs += 1
        self._begin(loader)
        own: Any = None
        try:
            for batch in self._loop.fetched(iter(loader)):
                own = self._begin_batch(batch, loader)
                yield own
                self._end_batch()
        except GeneratorExit:
            # Left in the middle. Whatever ends the batch may raise, and nobody would hear of it here.
            if self._batch is own and not self._over:
                self._program.activate(False)
                self._training.telemetry.leave_out()
            raise
        self._pause("training")

    def _evaluation(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._require_open()
        self._pause("validating")
        try:
            for batch in loader:
                padded = self._padded(batch)
                self._training.evaluation_begins(padded)
                try:
                    yield padded
                finally:
                    self._training.evaluation_ends()
        finally:
            if self._batch is not NO_BATCH and not self._over:
                self._program.activate(True)

    def _begin(self, loader: Any) -> None:
        self._require_open()
        if self._begun:
            return
        now = next((one.device for one in self._loop.module.parameters()), self._loop.device)
        if now != self._loop.device:
            raise ValueError(
                f"the module is on {now} and was on {self._loop.device} in crucible.compile: move it before"
            )
        self._begun = True
        size = getattr(loader, "batch_size", None)
        self._training.begin(self._loop, dataclasses.replace(self._logs, batch_size=size))

    def _begin_batch(self, batch: Any, loader: Any) -> Any:
        self._begin(loader)
        padded = self._padded(batch)
        self._loop.batch_begins()
        self._training.batch_begins(padded)
        self._batch = padded
        return padded

    def _end_batch(self) -> None:
        """The batch under way, if there is one, is through."""
        if self._batch is NO_BATCH:
            return
        batch, loss = self._batch, self._loss
        self._batch, self._loss = NO_BATCH, None
        self._loop.batch_ends()
        self._training.batch_ends(loss, batch)

    def _padded(self, batch: Any) -> Any:
        padding = self._program.padding
        if padding is None:
            return batch
        return to_edge(batch, padding.ragged, padding.edge_of(length_of(batch, padding.ragged)))

    def _pause(self, phase: str) -> None:
        if self._batch is not NO_BATCH and not self._loop.stepped:
            self._training.telemetry.leave_out()
            return
        self._end_batch()
        if self._begun and not self._over:
            self._training.pause(phase)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._over:
            raise RuntimeError("this training is over: crucible.compile(...) begins another, one at a time")

    def _end(self, error: BaseException | None) -> None:
        global _open
        if self._over:
            return
        self._over, _open = True, None
        atexit.unregister(self._at_exit)
        if isinstance(error, SystemExit) and not error.code:
            error = None
        try:
            if error is None:
                self._end_batch()
                self._training.finish()
        except BaseException as raised:
            self._training.fail(raised)
            raise
        finally:
            if error is not None:
                if self._loop.stepped:
                    with contextlib.suppress(Exception):  # the first error counts
                        self._end_batch()
                self._training.fail(error)
            self._training.close()
            self._loop.release()
        if not self._begun and error is None:
            rank_zero_warn("crucible.compile: no batch came by training.step or training.batches: there is no record")

    def _at_exit(self) -> None:
        """The script ends without ``close``, perhaps by an error. In a notebook the last one may be of anything."""
        self._end(getattr(sys, "last_value", None) if self._in_file else None)


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """Batches of a loader, as many as it says; what iterates marks where each begins and ends."""

    loader: Iterable[Any]
    run: Callable[[Iterable[Any]], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.run(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]
