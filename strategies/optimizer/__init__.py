"""``compile=optimizer``: the optimizer's step compiled chunk by chunk; no schedule recompiles it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Program, Stage
from strategies.options import CompileOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from strategies.optimizer.step import Update

ATTRIBUTE = "_compiled_update"
"""Attribute of an optimizer that holds what stands in for its step."""
MODES = ("default", "max-autotune-no-cudagraphs")
INDUCTOR: dict[str, Any] = {
    "size_asserts": False,
    # Inductor gives a buffer of its own to what is read more than once or is computed from a lot. Copying it to its
    # place is twice the memory traffic. Without one, the whole update of a tensor is one loop.
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/ir.py (StorageBox.should_realize_on_reuse)
    "realize_reads_threshold": 1_000_000,
    "realize_opcount_threshold": 1_000_000,
    "realize_acc_reads_threshold": 1_000_000,
}


@dataclass(kw_only=True, slots=True)
class Optimizer(CompileOptions):
    """One kernel for each repeated block instead of a dozen passes over all tensors, compiled once for all blocks.

    Adam, AdamW and SGD of ``torch.optim`` are computed by formulas over chunks of parameters, ``fused=True`` ones
    included. Torch's others are compiled as they are written. Everybody else's run eager: what their steps do on the
    host is not known. The record's report says which. ``param_groups`` and state dicts stay as they are without this
    strategy.
    """

    name: ClassVar[str] = "optimizer"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    headlines: ClassVar[tuple[str, ...]] = ("form",)

    mode: str = "default"
    """Inductor preset, one of ``MODES``."""
    dynamic: bool | None = False
    """False and nothing else: shapes of parameters do not change."""

    def __post_init__(self) -> None:
        CompileOptions.__post_init__(self)
        if self.mode not in MODES or self.options.get("triton.cudagraphs"):
            raise ValueError(
                f"compile.optimizer.mode={self.mode!r} with options={self.options}: Inductor's CUDA graphs are not for "
                f"updates in place (mode is one of {MODES}); compile=[optimizer,cuda_graph] captures them"
            )
        if not self.fullgraph:
            raise ValueError("compile.optimizer.fullgraph=False: an update has no graph breaks to allow")
        if self.dynamic is not False:
            raise ValueError(f"compile.optimizer.dynamic={self.dynamic}: shapes of parameters do not change; use false")

    def begin(self, program: Program) -> None:
        from strategies.optimizer.functional import formula_of
        from strategies.optimizer.step import clip_inside, install

        program.report.pop(self.name, None)  # of an earlier training of this program
        if not program.optimizers:
            program.notes.append("optimizer: the module has no optimizer, nothing is compiled")
        on_cuda = program.device is not None and program.device.type == "cuda"
        captured = on_cuda and any(strategy.captures_step for strategy in program.strategies)
        for optimizer in program.optimizers:
            reason = reason_for_eager(optimizer, program)
            if reason is None and captured and formula_of(optimizer) is None:
                reason = "it is captured as it is; compiled as it is written, it would run after each graph"
            if reason is not None:
                self._runs_eager(program, f"{type(optimizer).__name__} runs eager: {reason}")
                self._report(program, {"form": "eager", "tensors": None, "chunks": None, "graphs": None})
                continue
            if on_cuda and not captured and any(group.get("fused") for group in optimizer.param_groups):
                program.notes.append(
                    "optimizer: fused=True alone may be as fast: without cuda_graph, kernels are launched one by one"
                )
            install(optimizer, self.update_for(optimizer, program), after_first=partial(self._report, program))
        if program.loop is not None:
            program.kept[self.name] = program.loop.clip_with(clip_inside)

    def is_compiled(self, program: Program) -> bool:
        forms = [update.form for update in self._updates(program)]
        return self.name not in program.eager_parts or any(form != "eager" for form in forms)

    @staticmethod
    def _updates(program: Program) -> list[Update]:
        return [update for optimizer in program.optimizers if (update := installed(optimizer)) is not None]

    def aside(self, program: Program) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for optimizer in program.optimizers:  # so that it is clipped as eager clips it
            if (update := vars(optimizer).pop(ATTRIBUTE, None)) is not None:
                stack.callback(setattr, optimizer, ATTRIBUTE, update)
        return stack

    def is_exact(self, program: Program) -> bool:
        return all(update.exact for update in self._updates(program))

    def gradient_scale(self, optimizer: Any, device: torch.device) -> Tensor | float:
        update = installed(optimizer)
        return 1.0 if update is None else update.scale_on(device)

    def take(self, program: Program) -> Callable[[], None]:
        """Steps are counted on the host, and the updates hold on to state tensors that may be gone after a restore."""
        put_back = [update.take() for update in self._updates(program)]

        def put_all_back() -> None:
            for put in put_back:
                put()

        return put_all_back

    def end(self, program: Program) -> None:
        program.kept.pop(self.name, lambda: None)()
        for optimizer in program.optimizers:
            vars(optimizer).pop(ATTRIBUTE, None)  # its own step continues from the state as it is

    def update_for(
        self, optimizer: torch.optim.Optimizer, program: Program, places: Mapping[Tensor, str] | None = None
    ) -> Update:
        """The compiled update of ``optimizer``; ``places`` as of ``places_of`` where ``program`` does not tell."""
        import torch

        from strategies.optimizer.functional import FunctionalUpdate, formula_of
        from strategies.optimizer.step import GenericUpdate

        arguments = self.compile_arguments()
        formula = formula_of(optimizer)
        if formula is None or _is_special(optimizer):
            return GenericUpdate(
                optimizer,
                compiler=lambda function: torch.compile(function, **{**arguments, "dynamic": None}),
                report=lambda line: self._runs_eager(program, line),
            )
        options = {
            # The update compares what could change itself; guards would cost as much time as the kernels.
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
            **(INDUCTOR if self.needs_inductor else {}),
            **arguments.get("options", {}),
        }
        return FunctionalUpdate(
            optimizer,
            formula,
            places=places_of(program) if places is None else places,
            # A copy for each: torch takes guard_filter_fn out of the options that it is given.
            compiler=lambda function: torch.compile(function, **{**arguments, "options": {**options}}),
        )

    def _runs_eager(self, program: Program, line: str) -> None:
        program.notes.append(f"optimizer: {line}")
        program.eager_parts[self.name] = line

    def _report(self, program: Program, facts: dict[str, Any]) -> None:
        """One optimizer's facts; of several, their forms side by side and their figures added up."""
        report = program.report.setdefault(self.name, {})
        for name, value in facts.items():
            before = report.get(name)
            if before is None or value is None:
                report[name] = value if before is None else before
            else:
                report[name] = f"{before}, {value}" if isinstance(value, str) else before + value


def installed(optimizer: torch.optim.Optimizer) -> Update | None:
    """The update that stands in for the step of ``optimizer``, or None."""
    return vars(optimizer).get(ATTRIBUTE)


def reason_for_eager(optimizer: Any, program: Program) -> str | None:
    import torch

    from strategies.optimizer.step import not_torchs_own

    if not isinstance(optimizer, torch.optim.Optimizer):
        return "it is not a torch.optim.Optimizer"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it evaluates the loss within its step, as often as the loss demands"
    if (reason := not_torchs_own(optimizer)) is not None:
        return reason
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True keeps a graph of each step"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return "its parameters are sharded (DTensor)"
    if any(getattr(module, "sparse", False) is True for module in program.module.modules()):
        return "the module has embeddings with sparse gradients"
    return None


def _is_special(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the formulas do not cover its numbers: complex parameters, hyperparameters that live on the device."""
    import torch

    return any(
        any(parameter.is_complex() for parameter in group["params"])
        or any(isinstance(value, torch.Tensor) and not value.is_cpu for value in group.values())
        or any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ()))
        for group in optimizer.param_groups
    )


def places_of(program: Program) -> dict[Tensor, str]:
    """The repeated block that each parameter lies in, for those that lie in one."""
    from strategies.regions import expand_blocks, find_containers

    containers = list(program.blocks) or find_containers(program.module)
    return {
        parameter: path
        for path in expand_blocks(program.module, containers)
        for parameter in program.module.get_submodule(path).parameters()
    }
