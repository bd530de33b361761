"""Takeover: the training begins in eager, and compiled regions take it over between steps as they become ready.

Before a region's code is used it runs beside eager's on the inputs of a real step. Outputs and gradients of that call
are compared within a tolerance that eager sets itself: inputs and weights changed by one rounding, under another seed.
Nothing of it reaches the training: gradients are kept apart, buffers and random numbers are put back, and the call
itself is eager's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from strategies.background import Background as Options
from strategies.base import Program, Region
from strategies.compose import compiler_settings
from strategies.errors import one_line
from strategies.loop import Loop
from strategies.regions import give_up, guard_calls, outermost, switch_off, switch_on
from trainer.background import Background
from trainer.guards.compare import MULTIPLES, TENSOR_FLOOR, Comparison, norms, perturb, rounding_unit, without_autocast
from trainer.telemetry.record import Event
from trainer.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    from trainer.loops.processes import Agreement

CHANCES = 10
"""Optimizer steps within which a region that is ready has to be called."""
LAPS = 4000
"""Steps of each phase of which the seconds are kept."""

SAYS_NOTHING = 0.5
"""A tolerance beyond this would let anything pass: the region draws random numbers, a compiler others."""
SEED = 0


class Takeover:
    """Of one training; the owner calls ``before_batch`` and ``after_batch`` until ``over``, and ``close`` at its end:
    until then, the helper may be compiling what validation runs.

    Args:
        options: The strategy that asks for it.
        settings: Takes the compiler's settings; closed when the run ends.
        parity: As ``Guarding.parity``.
    """

    def __init__(
        self,
        options: Options,
        loop: Loop,
        program: Program,
        telemetry: Telemetry,
        settings: contextlib.ExitStack,
        parity: str,
    ) -> None:
        self._options, self._loop, self._program = options, loop, program
        self._telemetry, self._settings, self._parity = telemetry, settings, parity
        self.helper = Background(options, program)
        self._outer = outermost(program)
        self._pending = list(self._outer)
        self._trials: list[Trial] = []
        self._waited: dict[str, int] = {}
        self._imported = False
        self._between_steps, self._began = True, False
        self.over = False
        """Whether nothing will be switched any more."""
        self.vague = False
        """Whether a region could not be compared well, so that a whole step has to be."""
        self._switched: dict[str, int] = {}
        self._laps: dict[str, list[float]] = {"eager": [], "switching": []}
        self._last = 0.0
        self._agreement: Agreement | None = None
        self._agreed: tuple[int, ...] | None = None
        self._asked = False

    def start(self) -> None:
        """Training begins, in eager; every process has a helper of its own, because device numbers are part of keys."""
        if self._loop.world_size > 1:
            from trainer.loops.processes import Agreement

            self._agreement = Agreement()
        self.helper.start()
        self._program.notes.append(
            f"background: eager at first; {len(self._outer)} regions are compiled by another process and take over"
        )
        self._report()

    # ---- around each batch -----------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """A batch is on the device. Let the next regions be tried in its step."""
        if not self._between_steps:
            return
        self._between_steps = False
        due = self._options.at_step
        if not self._began or (due is not None and self._loop.steps_done + 2 < due):
            return
        if due is not None:
            self.helper.wait()
        known = self.helper.ready() if self._import(wait=due is not None) else set()
        for region in self._next(known):
            trial = Trial(program=self._program, region=region, parity=self._parity)
            self._trials.append(trial)
            switch_off(self._program, region, trial)

    def _next(self, known: set[str]) -> list[Region]:
        """The regions to try in this step; several processes try the same ones, once all of them can."""
        pending = self._pending
        if self._agreement is not None:
            settled = [one not in self._pending or one.path in known for one in self._outer] + [False]
            left = [one.path in self._program.eager_parts for one in self._outer]
            answer = self._agreement.exchange(len(settled) - settled.index(False), bool(self._pending), *left)
            if self._asked:  # what comes back is of the step before, and nothing at first
                self._agreed = answer
            self._asked = True
            for region, elsewhere in zip(self._outer, answer[2:], strict=True):
                if elsewhere and region.path not in self._program.eager_parts:
                    self._leave(region, "it stays eager on another process")
            there = 0 if self._agreed is None else len(settled) - self._agreed[0]
            pending = [one for one in pending if one in self._outer[:there]]
        return [one for one in pending if one.path in known][: self._options.regions_per_step]

    def after_batch(self, *, stepped: bool) -> None:
        """A batch is through; between two steps, regions that passed their trial are switched."""
        self._telemetry.disturb()
        if not stepped:
            return
        self._between_steps, self._began = True, True
        self._time()
        ready = self.helper.ready()
        for trial in self._trials:
            self._judge(trial)
        self._trials.clear()
        for region in [one for one in self._pending if one.path in self.helper.refused]:
            self._leave(region, self.helper.refused[region.path])
        if self.helper.failed is not None:
            for region in [one for one in self._pending if one.path not in ready]:
                self._leave(region, self.helper.failed)
        alone = self._agreement is None
        if not self._pending if alone else self._agreed is not None and not self._agreed[1]:
            self._finish()

    def _import(self, *, wait: bool) -> bool:
        """Whether Inductor is imported and set up."""
        if self._imported or not self.helper.imported(wait=wait):
            return self._imported
        self._settings.enter_context(
            compiler_settings(self._program.settings, eager_embeddings=self._program.eager_embeddings)
        )
        self._imported = True
        return True

    def _judge(self, trial: Trial) -> None:
        region = trial.region
        switch_off(self._program, region)
        if not trial.over:
            self._waited[region.path] = waited = self._waited.get(region.path, 0) + 1
            if waited >= CHANCES:
                self._leave(region, f"it was not called in {CHANCES} steps")
            return
        if trial.failed is not None:
            self._leave(region, trial.failed)
            return
        self._pending.remove(region)
        switch_on(self._program, region)
        for inner in self._inside(region):
            switch_on(self._program, inner)
        guard_calls(self._program, self._failed)
        self.vague |= trial.vague
        step = self._loop.steps_done + 1
        self._switched[region.path] = step
        compared = "" if trial.share is None else f", its trial was {trial.share:.1%} of the tolerance from eager"
        line = f"{region.path} runs compiled from step {step} on{compared}"
        self._telemetry.compiler.events.append(Event(kind="switch", reason=line, step=step))

    def _failed(self, region: Region, error: Exception) -> None:
        """Another shape of input does not compile, before the guards are there: eager runs it from here on."""
        reason = one_line(error)
        rank_zero_warn(f"compile.background: {region.path} runs eager from here on: {reason}")
        give_up(self._program, [region, *self._inside(region)], reason)

    def _inside(self, region: Region) -> list[Region]:
        return [one for one in self._program.regions if one.path.startswith(f"{region.path}.")]

    def _leave(self, region: Region, reason: str) -> None:
        """Let ``region`` run eager for the rest of the run."""
        if region in self._pending:
            self._pending.remove(region)
        self._switched.pop(region.path, None)
        switch_off(self._program, region)
        if reason not in self._program.eager_parts.values():
            rank_zero_warn(f"compile.background: the run continues in eager: {region.path}: {reason}")
        give_up(self._program, [region, *self._inside(region)], reason)

    def _time(self) -> None:
        now = time.perf_counter()
        laps = self._laps["switching" if self._trials or self._switched else "eager"]
        if self._last and len(laps) < LAPS:
            laps.append(now - self._last)
        self._last = now

    def _finish(self) -> None:
        self.over = True
        self._report()
        if self._switched:
            where = self._program.report["background"]["switched"]
            rank_zero_info(
                f"compile: background: {len(self._switched)} of {len(self._outer)} regions compiled, switched {where}"
            )

    def _report(self) -> None:
        figures = self._telemetry.compiler.figures()
        eager, switching = self._laps["eager"], self._laps["switching"]
        steps = sorted(self._switched.values())
        self._program.report["background"] = {
            "switched_at_step": dict(self._switched),
            "switched": f"in steps {steps[0]} to {steps[-1]}" if steps else None,
            "regions": len(self._outer),
            "helper_seconds": self.helper.seconds,
            "helper_failed": self.helper.failed,
            "helper_region_seconds": self.helper.facts,
            "eager_step_seconds_median": median(eager) if eager else None,
            "longest_eager_step_seconds": max(eager, default=None),
            "longest_switching_step_seconds": max(switching, default=None),
            "cache_hits": figures.cache_hits,
            "cache_misses": figures.cache_misses,
        }

    def close(self) -> None:
        """The training is over: end the helper, and note what did not take over in time."""
        self.helper.close()
        if not self.over:
            self.over = True
            for region in list(self._pending):
                switch_off(self._program, region)
                give_up(self._program, [region, *self._inside(region)], "the run ended before it was compiled")
        self._report()


# ---- a region's code beside eager's ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Trial:
    """One region, from its next call on until ``failed`` or ``passed`` is known."""

    program: Program
    region: Region
    parity: str
    """``off``, ``on`` or ``strict``; with ``off`` it only has to run."""
    failed: str | None = None
    """Why the region stays eager."""
    passed: bool = False
    vague: bool = False
    """Whether the comparison could say nothing."""
    share: float | None = None
    """The largest difference as a share of its tolerance."""

    @property
    def over(self) -> bool:
        """Whether the region has been called."""
        return self.passed or self.failed is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Eager's own call; before it, the trial, at the first one that trains."""
        module = self.program.module.get_submodule(self.region.path)
        if not self.over and module.training and torch.is_grad_enabled():
            try:
                with _apart(module):
                    self._try(module, args, kwargs)
                self.passed = self.failed is None
            except Exception as error:  # whatever it is, eager can do it
                self.failed = one_line(error)
            finally:
                switch_off(self.program, self.region, self)
        return module._call_impl(*args, **kwargs)

    def _try(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit = rounding_unit(self.program.precision, next(module.parameters(), torch.empty(0)).device)
        switch_off(self.program, self.region)
        if self.parity == "off":
            switch_on(self.program, self.region)
            _pass(module, args, kwargs, dict(module.named_parameters()))
            return
        reference = self._eager(module, args, kwargs, None)
        switch_on(self.program, self.region)
        seen = _pass(module, args, kwargs, dict(module.named_parameters()))
        switch_off(self.program, self.region)
        if reference.keys() != seen.keys():
            raise ValueError("compiled, other gradients exist than in eager")
        comparison = Comparison(MULTIPLES[self.parity])
        sizes = norms(reference.values())
        comparison.keep("outputs", reference, sizes=sizes, least=max(TENSOR_FLOOR, 16 * unit))
        apart = comparison.distances({"outputs": seen})
        del seen
        comparison.noise.append(comparison.distances({"outputs": self._eager(module, args, kwargs, unit)}))
        complaints, figures = comparison.verdict(apart)
        if complaints:  # a learned loss: rounding dwarfs it, and it moves little where inputs are a rounding off
            with without_autocast():
                exact = self._eager(module, args, kwargs, None, torch.double)
            comparison.noise.append(comparison.distances({"outputs": exact}))
            complaints, figures = comparison.verdict(apart)
        self.share = round(figures["outputs"]["difference"] / figures["outputs"]["tolerance"], 4)
        self.vague = bool((comparison.tolerances("outputs") > SAYS_NOTHING).any())
        if complaints:
            self.failed = f"it computes something else than eager: {complaints[0]}"

    def _eager(
        self, module: nn.Module, args: Any, kwargs: Any, unit: float | None, precision: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """A pass in eager, with weights and inputs one rounding off where ``unit`` is given, or in ``precision``."""
        weights = {name: _cast(one.detach(), precision) for name, one in module.named_parameters()}
        if unit is not None:
            weights = {name: one.clone() for name, one in weights.items()}
            perturb([one for one in weights.values() if one.is_floating_point()], unit, SEED)
        for name, one in module.named_parameters():
            weights[name].requires_grad_(one.requires_grad)
        state = {**weights, **{name: _cast(buffer, precision).clone() for name, buffer in module.named_buffers()}}

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, state, args, kwargs)

        return _pass(call, args, kwargs, weights, unit, precision)


def _pass(
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    weights: dict[str, Tensor],
    unit: float | None = None,
    precision: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Outputs of one call on copies of its inputs, and what its backward gives inputs and ``weights``."""
    inputs: dict[str, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name = f"input {len(inputs)}"
        inputs[name] = _copy(_cast(value, precision), unit)
        return inputs[name]

    args, kwargs = pytree.tree_map(copied, (args, kwargs))
    torch.manual_seed(SEED if unit is None else SEED + 1)
    results = [one for one in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(one, Tensor)]
    seen = {f"output {number}": one.detach() for number, one in enumerate(results) if one.is_floating_point()}
    if not seen:
        raise ValueError("its call returns no tensors that could be compared")
    ends = [one for one in results if one.requires_grad]
    wanted = {name: one for name, one in {**inputs, **weights}.items() if one.requires_grad}
    if ends and wanted:
        generator = torch.Generator(ends[0].device).manual_seed(SEED)
        # Of few bits, so that they are the same in every precision.
        drawn = [torch.empty_like(one, dtype=torch.float).normal_(generator=generator).bfloat16() for one in ends]
        given = [one.to(end.dtype) for one, end in zip(drawn, ends, strict=True)]
        gradients = torch.autograd.grad(ends, list(wanted.values()), given, allow_unused=True)
        seen |= {name: one for name, one in zip(wanted, gradients, strict=True) if one is not None}
    return seen


def _cast(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    return tensor if precision is None or not tensor.is_floating_point() else tensor.to(precision)


@torch.no_grad()
def _copy(tensor: Tensor, unit: float | None) -> Tensor:
    """The same values in memory of the same geometry, on which compiled code depends."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if unit is not None and copy.is_floating_point():
        perturb([copy], unit, SEED)
    return copy.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """Inside, what draws random numbers or changes buffers leaves no trace."""
    devices = {one.device for one in module.parameters() if one.device.type == "cuda"}
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    torch.clear_autocast_cache()  # weights cast for the step's own graph stay out of these
    with torch.random.fork_rng(sorted(device.index for device in devices)):
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
