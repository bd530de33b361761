"""The eager forward of one training step, on the step's own batch and state, without a trace in the training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from strategies import Program
from trainer.guards.compare import LOSS_FLOOR, Differences, Displaced, Judge
from trainer.guards.draws import region_draws
from trainer.guards.rollback import eager
from trainer.guards.snapshot import Snapshot, random_state
from trainer.passes import Passes


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one forward of a training step left."""

    loss: Tensor | None
    """Divided by the micro-batches of a step, as Lightning returns it; None where the step returned none."""
    buffers: dict[str, Tensor]
    """Copies of the floating-point buffers after it."""


@dataclass(slots=True, kw_only=True)
class EagerSeen(Seen):
    """The same of eager, with what it began from."""

    before: Snapshot
    starts: dict[str, Tensor]
    """The buffers before it."""
    drew: bool
    """Whether a region drew random numbers, of which compiled code may draw others."""
    drawn: tuple[Any, ...]
    """Random generators after it."""
    wrote: set[int]
    """Identities of the parameters that it wrote to, a teacher's moving average for instance."""


class EagerForward:
    """Runs ``training_step`` under eager, where the training step itself is about to run.

    The pieces are Lightning's own, some of them private to it, see ``Passes``.
    """

    def __init__(self, trainer: L.Trainer, program: Program, passes: Passes) -> None:
        self._trainer, self._program, self._passes = trainer, program, passes
        self._module = trainer.lightning_module
        self._gradients = False

    def look(self, arguments: Mapping[str, Any]) -> EagerSeen:
        """Run the forward and put everything back. Raises what ``training_step`` raises, alike on all processes."""
        before = Snapshot(self._trainer, arguments["batch"], weights=False)
        if self._trainer.strategy.reduce_boolean_decision(before.lost is not None, all=False):
            raise RuntimeError(before.lost or "a step may use up something on another process")
        starts = {name: before.of(buffer) for name, buffer in floating_buffers(self._module).items()}
        error: Exception | None = None
        for _ in range(2):
            seen = error = None
            with _Kept(self._module, self._trainer) as kept:
                try:
                    seen = self._forward(arguments, before, starts, kept)
                except Exception as caught:
                    error = caught
            before.restore()
            if not self._trainer.strategy.reduce_boolean_decision(error is not None, all=False):
                assert seen is not None
                return seen
            if self._gradients:
                break
            self._gradients = True  # perhaps it takes gradients itself
        raise error or RuntimeError("training_step failed on another process")

    def _forward(
        self, arguments: Mapping[str, Any], before: Snapshot, starts: dict[str, Tensor], kept: _Kept
    ) -> EagerSeen:
        trainer = self._trainer
        apart = self._passes.apart() if self._gradients else contextlib.nullcontext()
        with eager(self._program), region_draws(self._program) as drawn, self._passes.quiet(), apart:
            with torch.set_grad_enabled(self._gradients), kept.watching():
                output = call._call_strategy_hook(trainer, "training_step", *arguments.values())
            results = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
            loss = results.from_training_step_output(output, trainer.accumulate_grad_batches).loss
            return EagerSeen(
                loss=loss,
                buffers=copied(floating_buffers(self._module)),
                before=before,
                starts=starts,
                drew=bool(drawn),
                drawn=random_state(),
                wrote=kept.written,
            )


def distances(seen: Seen, reference: EagerSeen) -> Differences:
    """How far ``seen`` is from eager: its loss, and as ``weights`` each buffer that both have, by name, relative to
    eager's change of it."""
    names = sorted(seen.buffers.keys() & reference.buffers.keys())
    buffers = [_distance(seen.buffers[name], reference.buffers[name], reference.starts.get(name)) for name in names]
    loss = 0.0 if seen.loss is None or reference.loss is None else _distance(seen.loss, reference.loss, None)
    return Differences(loss=loss, gradient_norm=0.0, gradients=torch.empty(0), weights=torch.tensor(buffers))


def buffer_tolerances(judge: Judge, reference: EagerSeen, names: Sequence[str]) -> Tensor:
    """``(names,)``, relative to each buffer's change: those of ``judge``, or what storing a buffer twice may round, for
    a running variance in bfloat16 hardly moves."""
    stored = []
    for name in names:
        buffer, start = reference.buffers[name].double(), reference.starts.get(name)
        moved = buffer if start is None or start.shape != buffer.shape else buffer - start.double()
        size = float(buffer.nan_to_num().norm())
        unit = torch.finfo(reference.buffers[name].dtype).eps / 2
        stored.append(4 * unit * size / (float(moved.nan_to_num().norm()) or size or 1.0))
    return judge.tensor_tolerances(lambda one: one.weights).maximum(torch.tensor(stored))


def no_noise(like: Differences) -> Differences:
    """No difference at all."""
    return Differences(loss=0.0, gradient_norm=0.0, gradients=like.gradients, weights=torch.zeros_like(like.weights))


def _distance(tensor: Tensor, reference: Tensor, start: Tensor | None) -> float:
    """Length of the difference over that of the reference, or of its change since ``start``; what is no number on
    both sides alike counts as equal, on one side as infinitely far."""
    tensor, reference = (each.detach().double().cpu() for each in (tensor, reference))
    if tensor.shape != reference.shape or not torch.equal(tensor.isfinite(), reference.isfinite()):
        return math.inf
    difference = float((tensor - reference).nan_to_num().norm())
    if not difference:
        return 0.0
    moved = reference if start is None else reference - start.double().cpu()
    size = float(moved.nan_to_num().norm()) or float(reference.nan_to_num().norm())
    return difference / size if size else math.inf


def floating_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers by name."""
    return {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class _Kept:
    """What a forward hardly ever changes, put back at the end: parameters and gradients (copied only once they are
    about to be written to), what schedulers and groups of optimizers hold, and DDP's note to synchronise buffers."""

    def __init__(self, module: torch.nn.Module, trainer: L.Trainer) -> None:
        self._parameters = [(parameter, parameter.data, parameter.grad) for parameter in module.parameters()]
        schedulers = [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._plain = [(held, dict(held)) for held in (*schedulers, *groups)]
        model: Any = trainer.strategy.model
        self._synchronises = (model, model.require_forward_param_sync) if _is_ddp(model) else None
        self._writes: _Writes | None = None

    @property
    def written(self) -> set[int]:
        """Identities of the parameters that were written to or given other tensors."""
        replaced = {id(one) for one, data, _ in self._parameters if one.data_ptr() != data.data_ptr()}
        return replaced if self._writes is None else replaced | {id(one) for one, _ in self._writes.kept.values()}

    def watching(self) -> TorchDispatchMode:
        """Inside, what is about to be written to is copied."""
        gradients = [gradient for *_, gradient in self._parameters if gradient is not None]
        self._writes = _Writes([*(parameter for parameter, *_ in self._parameters), *gradients])
        return self._writes

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for parameter, data, gradient in self._parameters:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            for tensor, kept in self._writes.kept.values() if self._writes is not None else ():
                tensor.detach().copy_(kept)
        for held, before in self._plain:
            if any(held.get(name) is not value for name, value in before.items()):
                held.clear()
                held.update(before)
        if self._synchronises is not None:
            model, synchronises = self._synchronises
            model.require_forward_param_sync = synchronises


class _Writes(TorchDispatchMode):
    """Copies each of ``tensors`` before the first operation that writes to its memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._sharing: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(operation, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            written = [
                given[argument.name]
                for argument in schema.arguments
                if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in pytree.tree_leaves(written):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    for mine in self._sharing.get(tensor.untyped_storage().data_ptr(), ()):
                        self.kept.setdefault(id(mine), (mine, mine.detach().clone()))
        return operation(*args, **kwargs)


def _is_ddp(model: Any) -> bool:
    return isinstance(model, torch.nn.parallel.DistributedDataParallel)


SAMPLES = 5
"""Passes of eager that are a rounding off, before a difference counts; the first two are enough for most."""


class Evaluation:
    """Compares passes in eval mode; every pass begins from the snapshot."""

    def __init__(
        self, trainer: L.Trainer, program: Program, passes: Passes, snapshot: Snapshot, judge: Judge, seed: int
    ) -> None:
        self._trainer, self._program, self._passes, self._snapshot = trainer, program, passes, snapshot
        self._judge, self._seed = judge, seed
        self._module = trainer.lightning_module
        self.validates = bool(trainer.enable_validation) and is_overridden("validation_step", self._module)
        """Whether the run does."""

    def run(self, batch: Any, says_nothing: float) -> tuple[list[str], dict[str, Any]]:
        """Complaints and facts; ``reason`` among these says why nothing was compared."""
        reasons = []
        for step in self._steps():
            with eager(self._program), region_draws(self._program) as drawn:
                reference, why = self._losses(batch, step)
            why = why or ("it draws random numbers in eval mode too" if drawn else "")
            if self._anywhere(bool(why)):
                reasons.append(f"{step}: {why or 'not possible in another process'}")
                continue
            seen, why = self._losses(batch, step)
            if self._anywhere(bool(why)):
                reasons.append(f"{step}, compiled: {why or 'not possible in another process'}")
                continue
            return self._judged(batch, step, reference, seen, says_nothing)
        return [], {"reason": "; ".join(reasons) or "the module optimizes by hand and has no validation"}

    def _steps(self) -> Iterator[str]:
        if self.validates:
            yield "validation_step"
        if self._module.automatic_optimization:
            yield "training_step"

    def _judged(
        self, batch: Any, step: str, reference: dict[str, float], seen: dict[str, float], says_nothing: float
    ) -> tuple[list[str], dict[str, Any]]:
        noise, worst, apart, tolerance = 0.0, "", 0.0, 0.0
        for sample in range(SAMPLES):
            parameters = [one for one in self._module.parameters() if one.is_floating_point()]
            with eager(self._program):
                again, _ = self._losses(batch, step, Displaced(parameters, self._judge.unit, self._seed + sample))
            noise = max([noise, *(_relative(again.get(name), value) for name, value in reference.items())])
            tolerance = max(LOSS_FLOOR, self._judge.unit, self._judge.multiple * noise)
            distances = {name: _relative(seen.get(name), value) for name, value in reference.items()}
            worst = max(distances, key=distances.__getitem__)
            apart = distances[worst]
            if sample and not self._anywhere(apart > tolerance):
                break
        facts: dict[str, Any] = {
            "step": step,
            "loss": {"name": worst, "eager": reference[worst], "difference": apart, "tolerance": tolerance},
        }
        if self._anywhere(tolerance > says_nothing):
            return [], {"reason": f"{step} differs by {noise:.0%} from itself in eager", **facts}
        if apart > tolerance:
            return [
                f"in eval mode, {worst} of {step} is {apart:.2e} of eager's {reference[worst]:.6g} away from it, "
                f"tolerance {tolerance:.2e}"
            ], facts
        return [], facts

    def _losses(self, batch: Any, step: str, displaced: Displaced | None = None) -> tuple[dict[str, float], str]:
        """Losses by name, or why there are none: a user's step may not take this batch, or not at this moment."""
        self._snapshot.restore()
        found: dict[str, float] = {}
        try:
            with self._logged(found), displaced or contextlib.nullcontext():
                returned = self._passes.evaluate(batch, step)
        except Exception as error:
            self._snapshot.restore()
            return {}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        _add(found, "the returned loss", loss)
        return found, "" if found else "it shows no loss"

    @contextlib.contextmanager
    def _logged(self, found: dict[str, float]) -> Iterator[None]:
        """Inside, losses that the module logs are kept."""
        before = {name: vars(self._module).get(name) for name in ("log", "log_dict")}

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            if "loss" in name.lower():
                _add(found, name, value)

        def log_dict(values: Any, *_: Any, **__: Any) -> None:
            for name, value in values.items():
                log(name, value)

        vars(self._module).update(log=log, log_dict=log_dict)
        try:
            yield
        finally:
            for name, value in before.items():
                vars(self._module).pop(name, None)
                if value is not None:
                    vars(self._module)[name] = value

    def _anywhere(self, found: bool) -> bool:
        return self._trainer.strategy.reduce_boolean_decision(found, all=False)


def _add(found: dict[str, float], name: str, value: Any) -> None:
    if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1):
        found[name] = float(value)


def _relative(value: float | None, reference: float) -> float:
    if value is None or math.isfinite(value) != math.isfinite(reference):
        return math.inf
    apart = abs(value - reference) if math.isfinite(reference) else 0.0
    return apart / abs(reference) if apart and reference else (math.inf if apart else 0.0)
