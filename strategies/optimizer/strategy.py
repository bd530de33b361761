"""The strategy ``optimizer``: which optimizers it compiles, by which update, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Program, Stage, wrong
from strategies.compile_options import CompileOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from strategies.optimizer.step import Update

MODES = ("default", "max-autotune-no-cudagraphs")
INDUCTOR: dict[str, Any] = {
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

    Torch's own functions (``torch.optim.adam.adam`` and its like, for ``fused=True`` too) are compiled for chunks of
    parameters. NAdam, ASGD, Adagrad and torch's newer ones are compiled as they are written, and everybody else's run
    eager: what their steps do on the host is not known. The record's report says which. ``param_groups`` and state
    dicts stay as they are without this strategy. A step runs compiled only after it did what torch's own does.
    """

    name: ClassVar[str] = "optimizer"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    headlines: ClassVar[tuple[str, ...]] = ("form",)
    one_graph: ClassVar[str] = ": an update has no graph breaks to allow"

    mode: str = "default"
    """Inductor preset, one of ``MODES``."""
    dynamic: bool | None = False
    """False and nothing else: shapes of parameters do not change."""

    def __post_init__(self) -> None:
        CompileOptions.__post_init__(self)
        if self.mode not in MODES or self.options.get("triton.cudagraphs"):
            complaint = (
                f"with options={self.options}: Inductor's CUDA graphs are not for updates in place (mode is one of "
                f"{MODES}); the strategy cuda_graph beside it captures them"
            )
            raise wrong("compile.optimizer", "mode", self.mode, complaint)
        if self.dynamic is not False:
            raise wrong(
                "compile.optimizer", "dynamic", self.dynamic, ": shapes of parameters do not change; leave it out"
            )

    def begin(self, program: Program) -> None:
        import torch

        from strategies.optimizer.calls import Reader
        from strategies.optimizer.step import install

        program.report.pop(self.name, None)  # of an earlier training of this program
        program.given_up.pop(self.name, None)
        if not program.optimizers:
            program.notes.append("optimizer: the module has no optimizer, nothing is compiled")
        on_cuda = program.device is not None and program.device.type == "cuda"
        captured = on_cuda and any(strategy.captures_step for strategy in program.strategies)
        eager = program.kept[self.name] = []
        for optimizer in program.optimizers:
            reason = reason_for_eager(optimizer, program)
            if reason is None and Reader.of(optimizer) is None:
                if captured:
                    reason = "it is captured as it is; compiled as it is written, it would run after each graph"
                elif any(one.dtype == torch.float64 for one in _parameters(optimizer)):
                    reason = "compiled as it is written, it would compute its rates in single precision"
            if reason is not None:
                name = type(optimizer).__name__
                program.notes.append(f"optimizer: {name} runs eager: {reason}")
                program.given_up[self.name] = f"{name}: {reason}"
                eager.append({"form": "eager", "tensors": None, "chunks": None, "graphs": None})
                continue
            if on_cuda and not captured and any(group.get("fused") for group in optimizer.param_groups):
                program.notes.append(
                    "optimizer: fused=True alone may be as fast: without cuda_graph, kernels are launched one by one"
                )
            install(optimizer, self.update_for(optimizer, program))
        self._report(program)

    def is_compiled(self, program: Program) -> bool:
        return any(not update.reason for update in _updates(program)) or self.name not in program.given_up

    def end(self, program: Program) -> None:
        from strategies.optimizer.step import ATTRIBUTE

        for optimizer in program.optimizers:
            vars(optimizer).pop(ATTRIBUTE, None)  # its own step continues from the state as it is

    def update_for(self, optimizer: torch.optim.Optimizer, program: Program) -> Update:
        """The compiled update of ``optimizer``."""
        import torch

        from strategies.optimizer.calls import Reader
        from strategies.optimizer.functional import FunctionalUpdate
        from strategies.optimizer.step import GenericUpdate

        def gave_up(reason: str) -> None:
            program.given_up[self.name] = reason

        # Dynamo makes inputs of numbers that change, where ``dynamic`` leaves that to it.
        arguments: dict[str, Any] = {**self.compile_arguments(), "dynamic": None}
        about: dict[str, Any] = {
            "names": lambda: {id(parameter): name for name, parameter in program.module.named_parameters()},
            "checking": program.checking,
            "report": lambda line: program.notes.append(f"optimizer: {line}"),
            "gave_up": gave_up,
            "changed": lambda: self._report(program),
        }
        reader = Reader.of(optimizer)
        if reader is None or any(parameter.is_complex() for parameter in _parameters(optimizer)):
            return GenericUpdate(optimizer, compiler=lambda function: torch.compile(function, **arguments), **about)
        options = arguments.pop("options", None)

        def compiler(function: Callable[..., None]) -> Callable[..., None]:
            # A copy for each: torch takes entries out of the options that it is given.
            return torch.compile(function, options=None if options is None else {**INDUCTOR, **options}, **arguments)

        return FunctionalUpdate(
            optimizer,
            reader,
            places=places_of(program),
            compiler=compiler,
            **about,
        )

    def _report(self, program: Program) -> None:
        """One optimizer's facts; of several, their forms side by side and their figures added up."""
        report: dict[str, Any] = {}
        for facts in [*program.kept.get(self.name, []), *(update.facts() for update in _updates(program))]:
            for name, value in facts.items():
                before = report.get(name)
                if before is None or value is None:
                    report[name] = value if before is None else before
                else:
                    report[name] = f"{before}, {value}" if isinstance(value, str) else before + value
        if report:
            program.report[self.name] = report


def _updates(program: Program) -> list[Update]:
    from strategies.optimizer.step import installed

    return [update for optimizer in program.optimizers if (update := installed(optimizer)) is not None]


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
    if any(hasattr(parameter, "device_mesh") for parameter in _parameters(optimizer)):
        return "its parameters are sharded (DTensor)"
    if any(isinstance(beta, torch.Tensor) for group in optimizer.param_groups for beta in group.get("betas", ())):
        return "its betas are tensors"
    sparse = [one for one in program.module.modules() if getattr(one, "sparse", False) is True]
    with_sparse = {id(weight) for one in sparse for weight in one.parameters(recurse=False)}
    if any(id(parameter) in with_sparse for parameter in _parameters(optimizer)):
        return "it has embeddings with sparse gradients"
    return None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def places_of(program: Program) -> Mapping[Tensor, str]:
    """The repeated block that each parameter lies in, for those that lie in one; it keeps no parameter alive."""
    from torch.utils.weak import WeakIdKeyDictionary

    from strategies.regions import expand_blocks, find_containers

    containers = list(program.blocks) or find_containers(program.module)
    places: Any = WeakIdKeyDictionary()
    for path in expand_blocks(program.module, containers):
        for parameter in program.module.get_submodule(path).parameters():
            places[parameter] = path
    return places
