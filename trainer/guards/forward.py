"""Eager beside a training step under way: its forward, and the update of a few parameters by torch's own step.

Neither leaves a trace in the training.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from strategies import Program
from strategies.compose import eager
from strategies.loop import Loop
from strategies.options import file_of_backend
from trainer.guards.compare import (
    TENSOR_FLOOR,
    UNITS,
    Comparison,
    Tensors,
    local,
    loss_sizes,
    moved_since,
    norms,
    perturb,
    stored_sizes,
)
from trainer.guards.snapshot import Snapshot, drew_random_numbers, random_state
from trainer.telemetry.record import AuditDifference

MAX_ELEMENTS = 1 << 20
"""Of one parameter of the sample."""
MAX_GROUPS = 8
"""Parameter groups that a sample is taken of, evenly spaced."""
SAMPLES = 4
"""Steps from copies one rounding off by which the tolerance is widened before a difference counts."""
MAX_TOLERANCE = 0.5
"""Relative to the update, beyond which a comparison says nothing: weights of few bits that hardly move."""
FORMS = ("foreach", "fused", "capturable", "differentiable")
SEED = 2**31 - 101

State = dict[str, Any]
"""What the optimizer keeps for one parameter, and its ``weight``."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one forward of a training step left."""

    loss: Tensor | None
    """Divided by the micro-batches of a step; None where the step returned none."""
    buffers: dict[str, Tensor]
    """Copies of the floating-point buffers after it."""

    @property
    def tensors(self) -> Tensors:
        """By kind and name, what is compared."""
        loss = {} if self.loss is None else {"loss": {"loss": self.loss.detach().flatten().cpu()}}
        return {**loss, "buffers": self.buffers}


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

    def comparison(self, multiple: float, unit: float) -> Comparison:
        """With this forward: its loss, and each buffer relative to how far it moved."""
        made, tensors = Comparison(multiple), self.tensors
        if "loss" in tensors:
            made.keep("loss", tensors["loss"], **loss_sizes(tensors["loss"]["loss"], unit))
        buffers = list(self.buffers.values())
        moved = moved_since([self.starts.get(name) for name in self.buffers], buffers)
        made.keep("buffers", self.buffers, **stored_sizes(buffers, moved, max(TENSOR_FLOOR, 16 * unit)))
        return made


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


@contextlib.contextmanager
def region_draws(program: Program) -> Iterator[list[str]]:
    """Inside, which has to be eager, the paths of the regions that drew in a forward are added to the list."""
    regions = {id(program.module.get_submodule(region.path)): region.path for region in program.regions}
    drawn: list[str] = []
    before: list[tuple[int, tuple[Any, ...]]] = []

    def enters(module: nn.Module, _: Any) -> None:
        if id(module) in regions and not drawn and not before:
            before.append((id(module), random_state()))

    def leaves(module: nn.Module, *_: Any) -> None:
        if before and before[0][0] == id(module) and drew_random_numbers(before.pop()[1]):
            drawn.append(regions[id(module)])

    # Not on the modules: what is compiled from them is guarded against hooks that come and go.
    handles = [
        nn.modules.module.register_module_forward_pre_hook(enters),
        nn.modules.module.register_module_forward_hook(leaves),
    ]
    try:
        yield drawn
    finally:
        for handle in handles:
            handle.remove()


def draws_as_eager(program: Program) -> bool:
    """Whether compiled code that leaves the generators where eager does has drawn eager's numbers.

    A dropout that is taken apart draws others, in double precision as many of them. Torch's own backends, all but
    two, may take operations apart.
    """
    return not any(
        strategy.needs_inductor or _takes_apart(getattr(strategy, "backend", "eager"))
        for strategy in program.strategies
    )


def _takes_apart(backend: str) -> bool:
    if backend in ("eager", "aot_eager"):
        return False
    try:
        return file_of_backend(backend) is None
    except ValueError:  # nobody knows whose it is
        return True


class UpdateSample:
    """Of each parameter group the smallest parameter and one of middle size.

    Args:
        names: Name of each parameter, by its identity.
        multiple: How many times the noise of rounding a difference may be.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], program: Program, *, multiple: float) -> None:
        self._optimizer, self._names, self._program, self._multiple = optimizer, names, program, multiple
        with eager(program):
            self.reason = _why_not(optimizer)
        """Why nothing is compared, or None."""
        self.parameters: list[nn.Parameter] = [] if self.reason else list(_chosen(optimizer))
        """The sample."""
        self._before: list[State] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy weights and state, as they are before the step."""
        self._before = [_copied(self._now(parameter)) for parameter in self.parameters]

    def _now(self, parameter: nn.Parameter) -> State:
        return {"weight": parameter.detach(), **self._optimizer.state.get(parameter, {})}

    @torch.no_grad()
    def compare(self, gradients: Sequence[Tensor | None]) -> list[AuditDifference]:
        """Compare weights and state after the step; ``gradients`` are the unscaled ones that it was given. Nothing is
        left where a comparison would say nothing. Raises what torch's own step raises."""
        before, self._before = self._before, []
        used = [
            None if gradient is None or gradient.layout is not torch.strided else self._scaled(gradient)
            for gradient in gradients
        ]
        expected = self._stepped(before, used)
        found = []
        noise: list[list[State]] = []
        for place, parameter in enumerate(self.parameters):
            now = self._now(parameter)
            for name, reference in {} if used[place] is None else expected[place].items():
                if not isinstance(reference, Tensor) or not isinstance(now.get(name), Tensor):
                    continue
                if not math.isfinite(_norm(reference)):
                    continue  # a training that has diverged under eager too
                scale, tolerance = self._allowed(reference, before[place].get(name))
                difference = _norm(now[name].to(reference.device) - reference) / scale
                if not difference <= tolerance:
                    noise = noise or [self._one_rounding_off(before, used, seed) for seed in range(SAMPLES)]
                    widest = max(_norm(one[place][name] - reference) / scale for one in noise)
                    tolerance = max(tolerance, self._multiple * widest)
                if tolerance <= MAX_TOLERANCE:
                    what = self._names[id(parameter)] + ("" if name == "weight" else f" ({name})")
                    found.append(AuditDifference(what=what, difference=difference, tolerance=tolerance))
        return found

    def _scaled(self, gradient: Tensor) -> Tensor:
        # Clipping may have happened within the compiled update, which leaves the gradients as they were.
        by = [strategy.gradient_scale(self._optimizer, gradient.device) for strategy in self._program.strategies]
        return gradient * math.prod(by)

    def _stepped(self, before: list[State], gradients: Sequence[Tensor | None]) -> list[State]:
        """Weights and states after a step of torch's own, tensor by tensor."""
        optimizer = self._optimizer
        states = [_copied(held) for held in before]
        weights: list[Tensor] = [held.pop("weight") for held in states]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            members = [weights[places[id(one)]] for one in group["params"] if id(one) in places]
            if members:
                plain = {form: False for form in FORMS if form in group}
                numbers = {name: float(one) if isinstance(one, Tensor) else one for name, one in group.items()}
                groups.append({**numbers, **plain, "params": members})
        other = object.__new__(type(optimizer))
        hidden = ("step", "grad_scale", "found_inf")
        vars(other).update({name: value for name, value in vars(optimizer).items() if name not in hidden})
        other.param_groups = groups
        kept = {weight: held for weight, held in zip(weights, states, strict=True) if held}
        other.state = state = defaultdict(dict, kept)
        inspect.unwrap(type(optimizer).step)(other)
        return [{"weight": weight, **state[weight]} for weight in weights]

    def _one_rounding_off(self, before: list[State], gradients: Sequence[Tensor | None], seed: int) -> list[State]:
        moved = [_copied(held) for held in before]
        given = [None if gradient is None else gradient.clone() for gradient in gradients]
        for held in moved:
            tensors = [value for name, value in held.items() if _is_floating(value) and name != "step"]
            perturb(tensors, self._unit(held["weight"]), SEED + seed)
        for gradient in given:
            if gradient is not None:
                perturb([gradient], max(self._unit(gradient), self._own_unit), SEED + 50 + seed)
        return self._stepped(moved, given)

    def _allowed(self, reference: Tensor, start: Any) -> tuple[float, float]:
        """What differences are relative to, and how large they may be at least: rounding, of the values that are
        stored and of the sums that lead to them."""
        size = _norm(reference)
        change = _norm(reference - start.to(reference.device)) if isinstance(start, Tensor) else size
        stored = 8 * self._unit(reference)
        if not change:
            return size or 1.0, stored
        return change, max(TENSOR_FLOOR, 16 * max(self._unit(reference), self._own_unit)) + stored * size / change

    @property
    def _own_unit(self) -> float:
        # Muon computes in bfloat16 whatever the weights are.
        return UNITS["bf16-true"] if isinstance(self._optimizer, getattr(torch.optim, "Muon", ())) else 0.0

    @staticmethod
    def _unit(tensor: Tensor) -> float:
        return torch.finfo(tensor.dtype).eps / 2 if tensor.is_floating_point() else 0.0


def _why_not(optimizer: Any) -> str | None:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is not an optimizer of torch.optim, it may look at all parameters at once"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS looks at all parameters at once"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"the step of {kind.__name__} was replaced"
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    ):
        return f"hooks run within the step of {kind.__name__}"
    return None


def _chosen(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    groups = optimizer.param_groups
    for group in groups[:: max(1, -(-len(groups) // MAX_GROUPS))]:
        made = [one for one in group["params"] if one.requires_grad and not is_lazy(one)]
        fitting = [one for one in made if 0 < one.numel() <= MAX_ELEMENTS]
        ordered = sorted((one for one in fitting if one.is_floating_point()), key=Tensor.numel)
        chosen = {id(one): one for one in (*ordered[:1], *ordered[len(ordered) // 2 :][:1])}
        yield from chosen.values()


def _copied(state: Mapping[str, Any]) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in state.items()}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _norm(tensor: Tensor) -> float:
    return float(norms([tensor.double() if tensor.device.type != "mps" else tensor.float()]))
