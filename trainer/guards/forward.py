"""Forwards of eager beside compiled ones: of a training step under way, and in eval mode, where no dropout hides a
wrong forward. Neither leaves a trace in the training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from strategies import Program
from strategies.compose import eager
from strategies.loop import Loop
from trainer.guards.compare import LOSS_FLOOR, Differences, Displaced, Judge, distance, local
from trainer.guards.draws import region_draws
from trainer.guards.snapshot import Snapshot, random_state

EVALUATIONS = 5
"""Passes of eager in eval mode, a rounding off, before a difference counts; the first two are enough for most."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one forward of a training step left."""

    loss: Tensor | None
    """Divided by the micro-batches of a step; None where the step returned none."""
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
    """Runs ``training_step`` under eager, where the training step itself is about to run."""

    def __init__(self, loop: Loop, program: Program) -> None:
        self._loop, self._program = loop, program
        self._gradients = False

    def run(self, arguments: Mapping[str, Any]) -> EagerSeen:
        """Run the forward and put everything back. Raises what ``training_step`` raises, alike on all processes."""
        loop = self._loop
        before = Snapshot(loop, arguments["batch"], weights=False)
        if loop.anywhere(before.lost is not None):
            raise RuntimeError(before.lost or "a step may use up something on another process")
        starts = {name: before.of(buffer) for name, buffer in floating_buffers(loop.module).items()}
        error: Exception | None = None
        for _ in range(2):
            seen = error = None
            with _Kept(loop) as kept:
                try:
                    seen = self._forward(arguments, before, starts, kept)
                except Exception as caught:
                    error = caught
            before.restore()
            if not loop.anywhere(error is not None):
                assert seen is not None
                return seen
            if self._gradients:
                break
            self._gradients = True  # perhaps it takes gradients itself
        raise error or RuntimeError("training_step failed on another process")

    def _forward(
        self, arguments: Mapping[str, Any], before: Snapshot, starts: dict[str, Tensor], kept: _Kept
    ) -> EagerSeen:
        loop = self._loop
        apart = loop.apart() if self._gradients else contextlib.nullcontext()
        with eager(self._program), region_draws(self._program) as drawn, loop.quiet(), apart:
            with torch.set_grad_enabled(self._gradients), kept.writes:
                loss = loop.forward_loss(arguments)
            return EagerSeen(
                loss=loss,
                buffers=copied(floating_buffers(loop.module)),
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
    buffers = [_apart(seen.buffers[name], reference.buffers[name], reference.starts.get(name)) for name in names]
    loss = 0.0 if seen.loss is None or reference.loss is None else _apart(seen.loss, reference.loss, None)
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


def _apart(tensor: Tensor, reference: Tensor, start: Tensor | None) -> float:
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
    about to be written to), and what schedulers and groups of optimizers hold."""

    def __init__(self, loop: Loop) -> None:
        self._parameters = [(one, one.data, one.grad) for one in loop.module.parameters()]
        groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
        plain: list[dict[str, Any]] = [*(vars(scheduler) for scheduler in loop.schedulers), *groups]
        self._plain = [(held, dict(held)) for held in plain]
        gradients = [gradient for *_, gradient in self._parameters if gradient is not None]
        self.writes = _Writes([*(parameter for parameter, *_ in self._parameters), *gradients])
        """Inside, what is about to be written to is copied."""

    @property
    def written(self) -> set[int]:
        """Identities of the parameters that were written to or given other tensors."""
        replaced = {id(one) for one, data, _ in self._parameters if _address(one) != _address(data)}
        return replaced | {id(one) for one, _ in self.writes.kept.values()}

    def __enter__(self) -> _Kept:
        return self

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for parameter, data, gradient in self._parameters:
            if _address(parameter) != _address(data):
                parameter.data = data
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for tensor, kept in self.writes.kept.values():
            tensor.detach().copy_(kept)
        for held, before in self._plain:
            if any(held.get(name) is not value for name, value in before.items()):
                held.clear()
                held.update(before)


def _address(tensor: Tensor) -> int:
    return local(tensor).data_ptr()


class _Writes(TorchDispatchMode):
    """Copies each of ``tensors`` before the first operation that writes to its memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._sharing: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._sharing.setdefault(local(tensor).untyped_storage().data_ptr(), []).append(tensor)

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
                    for mine in self._sharing.get(local(tensor).untyped_storage().data_ptr(), ()):
                        self.kept.setdefault(id(mine), (mine, mine.detach().clone()))
        return operation(*args, **kwargs)


class Evaluation:
    """Compares forwards in eval mode; each begins from the snapshot.

    Losses are compared: those that ``validation_step`` logs or returns where the run validates, or that of
    ``training_step``'s forward. Other metrics may count (an accuracy), and jump where a loss moves by a rounding.
    """

    def __init__(self, loop: Loop, program: Program, snapshot: Snapshot, judge: Judge, seed: int) -> None:
        self._loop, self._program, self._snapshot, self._judge, self._seed = loop, program, snapshot, judge, seed

    def run(self, batch: Any, says_nothing: float) -> tuple[list[str], dict[str, Any]]:
        """Complaints and facts; ``reason`` among these is why nothing was compared."""
        reasons = []
        steps = [
            *(["validation_step"] if self._loop.validates else []),
            *([] if self._loop.manual else ["training_step"]),
        ]
        for step in steps:
            with eager(self._program), region_draws(self._program) as drawn:
                reference, why = self._losses(batch, step)
            why = why or ("it draws random numbers in eval mode too" if drawn else "")
            if self._loop.anywhere(bool(why)):
                reasons.append(f"{step}: {why or 'not possible in another process'}")
                continue
            seen, why = self._losses(batch, step)
            if self._loop.anywhere(bool(why)):
                reasons.append(f"{step}, compiled: {why or 'not possible in another process'}")
                continue
            return self._judged(batch, step, reference, seen, says_nothing)
        return [], {"reason": "; ".join(reasons) or "manual optimization without a validation"}

    def _judged(
        self, batch: Any, step: str, reference: dict[str, float], seen: dict[str, float], says_nothing: float
    ) -> tuple[list[str], dict[str, Any]]:
        distances = {name: _relative(seen.get(name), value) for name, value in reference.items()}
        worst = max(distances, key=distances.__getitem__)
        apart, noise, tolerance = distances[worst], 0.0, 0.0
        self._snapshot.restore()  # a forward may have left gathered parameters in the place of those that train
        parameters = [one for one in self._loop.module.parameters() if one.is_floating_point()]
        for sample in range(EVALUATIONS):
            with eager(self._program):
                again, _ = self._losses(batch, step, Displaced(parameters, self._judge.unit, self._seed + sample))
            noise = max([noise, *(_relative(again.get(name), value) for name, value in reference.items())])
            tolerance = max(LOSS_FLOOR, self._judge.unit, self._judge.multiple * noise)
            if sample and not self._loop.anywhere(apart > tolerance):
                break
        facts: dict[str, Any] = {
            "step": step,
            "loss": {"name": worst, "eager": reference[worst], "difference": apart, "tolerance": tolerance},
        }
        if self._loop.anywhere(tolerance > says_nothing):
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

        def add(name: str, value: Any) -> None:
            one_number = isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1
            if isinstance(value, float) or one_number:
                found[name] = float(value)

        try:
            with self._loop.recording_logs() as logged, displaced or contextlib.nullcontext():
                returned = self._loop.evaluate(batch, step)
        except Exception as error:
            self._snapshot.restore()
            return {}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        for call, value in logged:
            if "loss" in call.name.lower():
                add(call.name, value)
        add("the returned loss", returned.get("loss") if isinstance(returned, dict) else returned)
        return found, "" if found else "it shows no loss"


def _relative(value: float | None, reference: float) -> float:
    return math.inf if value is None else distance([value], [reference])
