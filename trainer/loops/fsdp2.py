"""FSDP2 (``fully_shard``) for any LightningModule: ``trainer.strategy=fsdp2``, or ``L.Trainer(strategy=FSDP2())``.

Lightning's ``ModelParallelStrategy`` leaves the sharding to the module's ``configure_model``. Here the strategy itself
shards: each region that a compile strategy made, else each repeated block, is a unit of its own, and the rest is one
with the steps of the module as its forward. Strategies have recomputed and compiled in place by then, see
https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md for that order.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from strategies import Program
from strategies.regions import expand_blocks, find_containers, outermost
from trainer.loops.sharded import ShardedCheckpoints
from trainer.loops.training import CompiledTraining

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods that Lightning calls in the place of the module's ``forward``."""


class FSDP2(ShardedCheckpoints):
    """Shards parameters, gradients and optimizer state over all processes.

    A module whose ``configure_model`` has called ``fully_shard`` stays as that has left it.

    Args:
        reshard_after_forward: Whether units give their gathered parameters back after the forward and gather them
            again for the backward; see ``fully_shard``.
        **options: Of ``lightning.pytorch.strategies.ModelParallelStrategy``. ``save_distributed_checkpoint=False``
            writes one file, which the first process assembles, in place of a directory.

    Raises:
        ValueError: A parameter that cannot be sharded.
    """

    def __init__(self, *, reshard_after_forward: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.reshard_after_forward = reshard_after_forward

    def setup_environment(self) -> None:
        """Start the processes' group, with one mesh over all of them."""
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self._device_mesh = init_device_mesh(
            self.root_device.type, (self.world_size,), mesh_dim_names=("data_parallel",)
        )
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the module, and build its optimizers on what is left of it here."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        if not isinstance(module, FSDPModule):
            if any(isinstance(one, FSDPModule) for one in module.modules()):
                super().setup(trainer)
                return
            self.accelerator.setup(trainer)
            self.model = self.precision_plugin.convert_module(module)
            program = next((one.program for one in trainer.callbacks if isinstance(one, CompiledTraining)), None)  # type: ignore[attr-defined]
            self._shard(module, program)
        self.model = module
        self.model_to_device()  # what is neither a parameter nor a buffer, as metrics
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: L.LightningModule, program: Program | None) -> None:
        _refuse(module)
        # Autocast stays in force beside it, so that norms and losses compute in fp32 as on one device; what a unit gets
        # is therefore left as it is.
        mixed = str(self.precision_plugin.precision) == "bf16-mixed"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if mixed else None,
            reduce_dtype=torch.float32 if mixed else None,
            cast_forward_inputs=False,
        )
        options: dict[str, Any] = {"mesh": self.device_mesh, "mp_policy": policy}
        for path in shard_units(module, program):
            unit = module.get_submodule(path)
            self._place(unit)
            fully_shard(unit, reshard_after_forward=self.reshard_after_forward, **options)
        self._place(module)
        fully_shard(module, **options)
        for step in STEPS:
            if is_overridden(step, module):
                register_fsdp_forward_method(cast(nn.Module, module), step)

    def _place(self, unit: nn.Module) -> None:
        """Move what of ``unit`` is not sharded yet to this process's device, with the values of the first process."""
        seen: set[int] = set()
        for one in unit.modules():
            for tensor in (*one._parameters.values(), *one._buffers.values()):
                if tensor is None or isinstance(tensor, DTensor) or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                tensor.data = tensor.data.to(self.root_device)
                torch.distributed.broadcast(tensor.data, 0)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each process."""
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def shard_units(module: nn.Module, program: Program | None) -> list[str]:
    """Paths of the submodules to shard as units: the outermost regions of ``program``, else the repeated blocks.

    One that shares a parameter with the rest of the module is none: both have to be gathered together.
    """
    paths = [region.path for region in outermost(program)] if program is not None else []
    if not paths:
        containers = [] if program is None else list(program.blocks)
        paths = expand_blocks(module, containers or [found.path for found in find_containers(module)])
    unit_of: dict[nn.Module, str] = {}
    for path in paths:
        if path:
            for one in module.get_submodule(path).modules():
                unit_of.setdefault(one, path)
    holders: defaultdict[Tensor, set[str]] = defaultdict(set)
    for one in module.modules():
        for parameter in one._parameters.values():
            if parameter is not None:
                holders[parameter].add(unit_of.get(one, ""))
    shared = {path for holding in holders.values() if len(holding) > 1 for path in holding}
    owning = {path for holding in holders.values() for path in holding}
    return [path for path in dict.fromkeys(unit_of.values()) if path in owning and path not in shared]


def _refuse(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"FSDP2: {name} has no shape before the first batch: call the module once before the fit")
        if parameter.ndim == 0:
            raise ValueError(f"FSDP2 cannot shard {name}, which has no dimensions: give it the shape (1,)")
