"""One region's compiled code beside eager's, on the inputs of a real step, before it is used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from strategies.base import Program, Region
from strategies.errors import one_line
from strategies.regions import RegionCall, switch_off, switch_on
from trainer.background.calls import Gate
from trainer.guards.compare import MULTIPLES, TENSOR_FLOOR, Comparison, norms, perturb, rounding_unit, without_autocast

SAYS_NOTHING = 0.5
"""A tolerance beyond this would let anything pass: the region draws random numbers, a compiler others."""
SEED = 0


@dataclass(slots=True, kw_only=True)
class Trial:
    """One region, from its next call on until ``failed`` or ``passed`` is known."""

    program: Program
    region: Region
    parity: str
    """``off``, ``on`` or ``strict``; with ``off`` it only has to run."""
    gate: Gate | None = None
    """Through which the region is called, with inputs of these ``shapes``, where it takes over shape by shape."""
    shapes: Any = None
    failed: str | None = None
    """Why the region stays eager."""
    passed: bool = False
    vague: bool = False
    """Whether the comparison could say nothing."""
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        return self.passed or self.failed is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Eager's own call; before it, the trial, at the first one that trains."""
        module = self.region.module
        if not self.over and module.training and torch.is_grad_enabled():
            before, began = module._compiled_call_impl, time.perf_counter()
            try:
                with _apart(module):
                    self._try(module, args, kwargs)
                self.passed = self.failed is None
            except Exception as error:  # whatever it is, eager can do it
                self.failed = one_line(error)
            finally:
                module._compiled_call_impl = before
                self.seconds = time.perf_counter() - began
        return module._call_impl(*args, **kwargs)

    def _try(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit = rounding_unit(self.program.precision, next(module.parameters(), torch.empty(0)).device, module)
        # Its forward may use weights of other modules. Torch keeps the first call's tensors until the backward is
        # compiled, and with them each weight's accumulator of gradients, on whose stream no step can be captured.
        inside = set(map(id, module.parameters()))
        parameters = self.program.module.named_parameters()
        others = {f"{name} of the module": one for name, one in parameters if id(one) not in inside}
        switch_off(self.program, self.region)
        reference = None if self.parity == "off" else self._eager(args, kwargs, others, None, None)
        switch_on(self.program, self.region)
        call = self.region.compiled
        if self.gate is not None and isinstance(call, RegionCall):  # it calls the gate, and the gate what is compiled
            if call.compiled is not self.gate:
                self.gate.compiled, call.compiled = call.compiled, self.gate
            module._compiled_call_impl = self.gate.compiled
        seen = _pass(module, args, kwargs, {**dict(module.named_parameters()), **others})
        if reference is None:
            return
        switch_off(self.program, self.region)
        if reference.keys() != seen.keys():
            raise ValueError("compiled, other gradients exist than in eager")
        comparison = Comparison(MULTIPLES[self.parity])
        sizes = norms(reference.values())
        comparison.keep("outputs", reference, sizes=sizes, least=max(TENSOR_FLOOR, 16 * unit))
        apart = comparison.distances({"outputs": seen})
        del seen
        comparison.noise.append(comparison.distances({"outputs": self._eager(args, kwargs, others, unit, None)}))
        complaints, _ = comparison.verdict(apart)
        if complaints:  # a learned loss: rounding dwarfs it, and it moves little where inputs are a rounding off
            with without_autocast():
                exact = self._eager(args, kwargs, others, None, torch.double)
            comparison.noise.append(comparison.distances({"outputs": exact}))
            complaints, _ = comparison.verdict(apart)
        self.vague = bool((comparison.tolerances("outputs") > SAYS_NOTHING).any())
        if complaints:
            self.failed = f"it computes something else than eager: {complaints[0]}"

    def _eager(
        self, args: Any, kwargs: Any, others: Mapping[str, Tensor], unit: float | None, precision: torch.dtype | None
    ) -> dict[str, Tensor]:
        """A pass in eager, with weights and inputs one rounding off where ``unit`` is given, or in ``precision``; the
        weights of ``others`` are used as they are."""
        module = self.region.module
        weights = {name: _cast(one.detach(), precision) for name, one in module.named_parameters()}
        if unit is not None:
            weights = {name: one.clone() for name, one in weights.items()}
            perturb([one for one in weights.values() if one.is_floating_point()], unit, SEED)
        for name, one in module.named_parameters():
            weights[name].requires_grad_(one.requires_grad)
        state = {**weights, **{name: _cast(buffer, precision).clone() for name, buffer in module.named_buffers()}}

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, state, args, kwargs)

        return _pass(call, args, kwargs, {**weights, **others}, unit, precision)


def _pass(
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    weights: Mapping[str, Tensor],
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
    keep = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)  # not a checkpoint's around it
    with torch.random.fork_rng(sorted(device.index for device in devices)), keep:
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
