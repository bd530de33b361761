"""Eager beside the compiled program: forwards of a step under way and in eval mode, steps under several seeds, and the
update of a few parameters by torch's own step.

None leaves a trace in the training. What the training step draws outside of its regions (the noise that a generator
begins with, the time steps of a diffusion) is the same in eager and compiled: both begin from the same state of the
generators. So it makes no comparison less sharp. Where regions draw, a compiler may draw other numbers: steps of both
arms under several seeds are then compared as samples. Their means may differ by what the spread between seeds explains;
the spreads are alike.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from strategies import Program
from strategies.base import eager, has_another_step
from strategies.loop import Loop
from strategies.padding import to_edge, used_length
from trainer.guards.compare import TENSOR_FLOOR, Comparison, Tensors, displaced, local, loss_sizes, norms, on_host
from trainer.guards.snapshot import Snapshot, drew_random_numbers, random_state
from trainer.telemetry.record import AuditDifference

LIMITS = {4: 6.0, 16: 7.0}
"""Standard errors that two means may be apart, by the steps of each arm: few are looked at first, many before a
difference counts. With 30 degrees of freedom, a difference of 7 comes by chance once in ten million."""
SAYS_NOTHING = 0.05
"""Tolerance, relative, beyond which a comparison of losses is none."""
SEED = 2**31 - 1
"""Seeds of the calibration count from here, far from the seeds that people choose."""
PASSES = 5
"""Passes of eager in eval mode, a rounding off, before a difference counts; the first two are enough for most."""
MAX_ELEMENTS = 1 << 20
"""Of one parameter of the sample whose update is compared."""
SAMPLE = 8
"""Parameters of all sizes in it; beside them is the smallest of each group, of four times as many groups at most."""
TOLERANCE, MAX_TOLERANCE = 1e-3, 0.5
"""Relative to the update: what is allowed in any precision, since compiled kernels round differently and the gate has
compared every update more closely; and beyond which a comparison says nothing, as for weights of few bits that hardly
move."""
RETURNED = "the returned loss"
FORMS = ("foreach", "fused", "capturable", "differentiable")

State = dict[str, Any]
"""What the optimizer keeps for one parameter, and its ``weight``."""


def left_by_forward(loss: Tensor | None, module: nn.Module) -> Tensors:
    """Copies of what the forward of a training step left: its loss, divided by the micro-batches of a step, and the
    floating-point buffers of ``module``."""
    losses = {} if loss is None else {"loss": {"loss": loss.detach().flatten().cpu()}}
    return {**losses, "buffers": {name: one.detach().clone() for name, one in floating_buffers(module).items()}}


@dataclass(slots=True, kw_only=True)
class EagerSeen:
    """What eager's forward left, and what it began from."""

    left: Tensors
    before: Snapshot
    starts: dict[str, Tensor]
    """The buffers before it."""
    drew: bool
    """Whether a region drew random numbers, of which compiled code may draw others."""
    wrote: bool
    """Whether it wrote to the sample of parameters whose update is compared."""

    def comparison(self, multiple: float, unit: float) -> Comparison:
        """With this forward: its loss, and each buffer relative to how far it moved."""
        made, buffers = Comparison(multiple), self.left["buffers"]
        if "loss" in self.left:
            made.keep("loss", self.left["loss"], **loss_sizes(self.left["loss"].values(), unit))
        starts = [self.starts.get(name) for name in buffers]
        made.keep_stored("buffers", buffers, starts, max(TENSOR_FLOOR, 16 * unit))
        return made


def eager_forward(
    loop: Loop, program: Program, arguments: Mapping[str, Any], sample: Sequence[nn.Parameter], *, gradients: bool
) -> EagerSeen:
    """Run ``training_step`` under eager where the training step itself is about to run, with what ``gradients`` need or
    without, and put everything back. Raises what ``training_step`` raises, alike on all processes."""
    before = Snapshot(loop, arguments["batch"], of_forward=True)
    if (lost := before.lost) is not None:
        raise RuntimeError(lost)
    starts = {name: before.of(buffer) for name, buffer in floating_buffers(loop.module).items()}
    seen: EagerSeen | None = None
    error: Exception | None = None
    try:
        with eager(program), region_draws(program) as drawn, loop.quiet(), torch.set_grad_enabled(gradients):
            loss = loop.forward_loss(arguments)
            seen = EagerSeen(
                left=left_by_forward(loss, loop.module),
                before=before,
                starts=starts,
                drew=bool(drawn),
                wrote=any(not torch.equal(local(one), local(before.of(one))) for one in sample),
            )
    except Exception as caught:
        error = caught
    finally:
        before.restore()
    if loop.anywhere(error is not None) or seen is None:
        raise error or RuntimeError("training_step failed on another process")
    before.forget(held for one in loop.module.parameters() for held in (one, one.grad))  # the step needs the memory
    return seen


def floating_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}


@contextlib.contextmanager
def region_draws(program: Program) -> Iterator[list[str]]:
    """Inside, which has to be eager, the paths of the regions that drew in a forward are added to the list."""
    regions = {id(region.module): region.path for region in program.regions}
    drawn: list[str] = []
    before: list[tuple[int, tuple[Any, ...]]] = []

    def enters(module: nn.Module, _: Any) -> None:
        if id(module) in regions and not drawn and not before:
            before.append((id(module), random_state()))

    def leaves(module: nn.Module, *_: Any) -> None:
        if before and before[0][0] == id(module) and drew_random_numbers(before.pop()[1]):
            drawn.append(regions[id(module)])

    # Not on the modules: what is compiled from them is guarded against hooks that come and go.
    hooks = nn.modules.module
    with hooks.register_module_forward_pre_hook(enters), hooks.register_module_forward_hook(leaves):
        yield drawn


# ---- forwards in eval mode -------------------------------------------------------------------------------------------


def compare_evaluation(
    loop: Loop, program: Program, snapshot: Snapshot, batch: Any, multiple: float, unit: float
) -> tuple[list[str], dict[str, Any]]:
    """Compare forwards in eval mode, each of which begins from ``snapshot``, on all processes alike; returns complaints
    and facts, ``reason`` among these where nothing was compared.

    Losses are compared: those that ``validation_step`` logs or returns where the run validates, or that of
    ``training_step``'s forward. Other metrics may count (an accuracy), and jump where a loss moves by a rounding. A
    loss may differ by ``multiple`` times what eager's moves by where every parameter is moved by ``unit``, relative.
    """
    reasons = []
    for step in [*(["validation_step"] if loop.validates else []), *([] if loop.manual else ["training_step"])]:
        snapshot.restore()
        before = random_state()
        with eager(program), region_draws(program) as drawn:
            reference, why = _losses(loop, batch, step)
        if drawn or (program.step is not None and drew_random_numbers(before)):
            why = why or "the step draws random numbers"
        seen: dict[str, Tensor] = {}
        if not loop.anywhere(bool(why)):
            snapshot.restore()
            seen, why = _losses(loop, batch, step)
        if loop.anywhere(bool(why)):
            reasons.append(f"{step}: {why or 'not possible in another process'}")
            continue
        comparison = Comparison(multiple)
        comparison.keep("loss", reference, **loss_sizes(reference.values(), unit))
        apart = comparison.distances({"loss": seen})["loss"]
        snapshot.restore()  # a forward may have left gathered parameters in the place of those that train
        parameters = [one for one in loop.module.parameters() if one.is_floating_point()]
        for sample in range(PASSES):
            snapshot.restore()
            with eager(program), displaced(parameters, unit, SEED + sample):
                again, _ = _losses(loop, batch, step)
            comparison.noise.append(comparison.distances({"loss": again}))
            if sample and not loop.anywhere(bool((apart > comparison.tolerances("loss")).any())):
                break
        snapshot.restore()
        name, difference, tolerance, beyond = comparison.worst("loss", apart)
        loss = {"name": name, "eager": float(reference[name]), "difference": difference, "tolerance": tolerance}
        facts = {"step": step, "loss": loss}
        if loop.anywhere(tolerance > SAYS_NOTHING):
            return [], {"reason": f"{step} differs so much from itself in eager that errors would not show", **facts}
        line = (
            f"in eval mode, {name} of {step} is {difference:.2e} of eager's {loss['eager']:.6g} away from it, "
            f"tolerance {tolerance:.2e}"
        )
        return [line] if beyond else [], facts
    return [], {"reason": "; ".join(reasons) or "manual optimization without a validation"}


def loss_of_padding(loop: Loop, program: Program, batch: Any, unit: float) -> str:
    """What ``training_step`` returns in eval mode on ``batch`` with its padding and without, where that differs by more
    than rounding; empty where it does not, or cannot be known. A forward may leave what has to be restored."""
    assert program.padding is not None
    shorter = to_edge(batch, program.padding.ragged, used_length(batch, program.padding.ragged))
    if shorter is batch or loop.manual or loop.world_size > 1:  # where processes might differ in their forwards
        return ""
    with eager(program):
        seen = [_losses(loop, one, "training_step")[0].get(RETURNED) for one in (batch, batch, shorter)]
    padded, again, without = (math.nan if one is None else float(one) for one in seen)
    tolerance = 64 * unit * abs(padded)
    if abs(padded - again) > tolerance or not abs(padded - without) > tolerance:  # random numbers, or nothing to tell
        return ""
    return f"{padded:.6g} with the padding of the first batch, {without:.6g} without"


def _losses(loop: Loop, batch: Any, step: str) -> tuple[dict[str, Tensor], str]:
    """Losses that a forward shows, by name, or why it shows none: it may not take this batch, or not at this moment."""
    try:
        with loop.recording_logs() as logged:
            returned = loop.evaluate(batch, step)
    except Exception as error:
        return {}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    shown = {call.name: value for call, value in logged if "loss" in call.name.lower()}
    shown[RETURNED] = returned.get("loss") if isinstance(returned, dict) else returned
    found = {name: torch.as_tensor(one) for name, one in shown.items() if isinstance(one, float | Tensor)}
    losses = {name: one.detach() for name, one in found.items() if one.is_floating_point() and one.numel() == 1}
    return losses, "" if losses else "it shows no loss"


# ---- steps under several seeds ---------------------------------------------------------------------------------------


class Draws:
    """Losses and gradients of steps under several seeds, of eager and compiled, each as a few numbers.

    Of every tensor (gradients, and what buffers moved) these are its length, its projection on that of a first eager
    step, and its distance from it: scale, direction and spread.
    """

    def __init__(self, names: Sequence[str], unit: float) -> None:
        self._names, self._unit = names, unit
        self._losses: dict[str, list[float]] = {"eager": [], "compiled": []}
        self._figures: dict[str, list[Tensor]] = {"eager": [], "compiled": []}
        """``(tensors, 3)`` of each step."""
        self._first: list[Tensor] | None = None
        self._sizes = self._least = torch.empty(0)

    @torch.no_grad()
    def add(self, arm: str, loss: float, tensors: Sequence[Tensor]) -> None:
        """A step of ``arm``; the very first one, of eager, is what the others are measured by."""
        if self._first is None:
            self._first = [tensor.detach().float().clone() for tensor in tensors]
            self._sizes = norms(self._first)
            counts = torch.tensor([float(tensor.numel()) for tensor in self._first])
            self._least = float(self._sizes.norm()) / math.sqrt(max(1.0, float(counts.sum()))) * counts.sqrt()
            return
        now = [tensor.detach().float() for tensor in tensors]
        pairs = list(zip(now, self._first, strict=True))
        along = on_host([(one * first).sum() for one, first in pairs])
        lengths = along / torch.where(self._sizes > 0, self._sizes, torch.ones_like(self._sizes))
        found = torch.stack([norms(now), lengths, norms([one - first for one, first in pairs])], dim=1)
        self._losses[arm].append(loss)
        self._figures[arm].append(found.double().reshape(-1, 3))

    def complaints(self, limit: float, loss: float, gradients: Tensor) -> tuple[list[str], dict[str, Any]]:
        """What cannot be chance (beyond ``limit`` standard errors), in words, and figures for the record.

        ``loss`` and ``gradients``, ``(parameters,)``, are the relative differences that rounding alone explains, which
        more seeds do not average out; buffers are allowed the median.
        """
        eager, compiled = self._losses["eager"], self._losses["compiled"]
        found: list[str] = []
        figures: dict[str, Any] = {"steps": len(eager)}
        if all(map(math.isfinite, [*eager, *compiled])):
            spread = math.sqrt((statistics.variance(eager) + statistics.variance(compiled)) / len(eager))
            mean, other = statistics.fmean(eager), statistics.fmean(compiled)
            allowed = limit * spread + max(16 * self._unit, loss) * abs(mean)
            figures["loss"] = {"eager": mean, "compiled": other, "tolerance": allowed / (abs(mean) or 1.0)}
            if abs(mean - other) > allowed:
                found.append(f"mean loss {other:.6g} under {len(eager)} seeds, eager's is {mean:.6g} +- {spread:.2g}")
            if len(set(compiled)) == 1 < len(set(eager)):
                found.append("its loss does not depend on the random numbers, eager's does")
        one, two = (torch.stack(self._figures[arm]) for arm in ("eager", "compiled"))
        apart, scale = (one.mean(0) - two.mean(0)).abs(), torch.maximum(one.abs().mean(0), two.abs().mean(0))
        error = ((one.var(0) + two.var(0)) / 2 * (2 / len(one))).sqrt()
        buffers = len(self._names) - len(gradients)
        rounding = torch.cat([gradients, gradients.nanmedian().expand(buffers)]) if len(gradients) else gradients
        rounding = rounding.double().nan_to_num(nan=math.inf).clamp(min=16 * self._unit)[:, None]
        floor = rounding * torch.maximum(scale, self._least[:, None].double())
        beyond = apart / (limit * error + floor).clamp(min=1e-300)
        beyond = torch.where(apart == 0, torch.zeros_like(beyond), beyond.nan_to_num(nan=0.0))
        if beyond.numel() and float(beyond.max()) > 1:
            worst = int(beyond.amax(1).argmax())
            what = ("length", "direction", "spread")[int(beyond[worst].argmax())]
            found.append(
                f"{what} of the gradient or the change of {self._names[worst]!r} is not eager's under any seed"
            )
        return found, figures


# ---- the update of a few parameters ----------------------------------------------------------------------------------


class UpdateSample:
    """Parameters of all sizes but very large ones; ``names`` are by identity."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], program: Program) -> None:
        self._optimizer, self._names, self._program = optimizer, names, program
        with eager(program):
            self.reason = _why_not(optimizer)
        """Why nothing is compared, or None."""
        self.parameters: list[nn.Parameter] = [] if self.reason else _chosen(optimizer)
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
        used = [None if one is None or one.layout is not torch.strided else self._scaled(one) for one in gradients]
        now = self._named([self._now(parameter) for parameter in self.parameters], used)
        expected = self._named(self._stepped(before, used), used)
        # A training that has diverged under eager too is left alone.
        expected = {what: one for what, one in expected.items() if what in now and one.isfinite().all()}
        if not expected:
            return []
        starts, comparison = self._named(before, used), Comparison(multiple=1.0)
        epsilon = [torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0 for one in expected.values()]
        least = (8 * torch.tensor(epsilon)).clamp(min=TOLERANCE)
        comparison.keep_stored("weights", expected, [starts.get(what) for what in expected], least)
        apart = comparison.distances({"weights": now})["weights"]
        each = zip(expected, apart.tolist(), comparison.tolerances("weights").tolist(), strict=True)
        found = [AuditDifference(what=what, difference=size, tolerance=most) for what, size, most in each]
        return [one for one in found if one.tolerance <= MAX_TOLERANCE]

    def _named(self, states: Sequence[State], gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """By the parameter's name and the state's, the tensors of all parameters that were given a gradient."""
        return {
            self._names[id(parameter)] + ("" if name == "weight" else f" ({name})"): value
            for parameter, state, gradient in zip(self.parameters, states, gradients, strict=True)
            for name, value in ({} if gradient is None else state).items()
            if isinstance(value, Tensor)
        }

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
        kind: Any = type(optimizer)
        other = kind(groups)
        other.state.update({weight: held for weight, held in zip(weights, states, strict=True) if held})
        other.step()
        return [{"weight": weight, **other.state[weight]} for weight in weights]


def _why_not(optimizer: Any) -> str | None:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is not an optimizer of torch.optim, it may look at all parameters at once"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS looks at all parameters at once"
    if isinstance(optimizer, torch.optim.Muon):
        return "Muon computes in bfloat16, whatever the weights are"
    if has_another_step(optimizer):
        return f"the step of {kind.__name__} was replaced"
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
        return f"hooks run within the step of {kind.__name__}"
    return None


def _chosen(optimizer: Optimizer) -> list[nn.Parameter]:
    given = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    fitting = [one for one in given if not is_lazy(one) and one.is_floating_point() and 0 < one.numel() <= MAX_ELEMENTS]
    fitting.sort(key=Tensor.numel)
    group_of = {id(one): place for place, group in enumerate(optimizer.param_groups) for one in group["params"]}
    smallest = [*{group_of[id(one)]: one for one in reversed(fitting)}.values()]  # of each group, small groups last
    return list(dict.fromkeys([*fitting[:: -(-len(fitting) // SAMPLE) or 1], *smallest[-4 * SAMPLE :]]))


def _copied(state: Mapping[str, Any]) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in state.items()}
