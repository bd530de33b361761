"""FSDP2 (``fully_shard``) for any LightningModule: ``trainer.strategy=fsdp2``, or ``L.Trainer(strategy=FSDP2())``.

Lightning's ``ModelParallelStrategy`` leaves the sharding to the module's ``configure_model``. Here the strategy itself
shards. Each region that a compile strategy made, else each repeated block, is a unit of its own. The rest is one, with
the steps of the module as its forward. Strategies have recomputed and compiled in place by then, see
https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md for that order.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from strategies import Program
from strategies.region import submodules
from strategies.regions import expand_blocks, find_containers, never_called
from trainer.loops.checkpoint_io import ShardedCheckpoints
from trainer.loops.compiled_training import CompiledTraining
from trainer.loops.ddp import group_variables
from trainer.loops.ranks import UNKNOWN, Agreement

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods that Lightning calls in the place of the module's ``forward``."""
CAST_BY_AUTOCAST = {
    *(nn.Linear, NonDynamicallyQuantizableLinear, nn.MultiheadAttention),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
}
"""Layers whose outputs have the same precision under autocast when their weights are in bfloat16; no subclasses."""


class FSDP2(ShardedCheckpoints):
    """Shards parameters, gradients and optimizer state over all processes.

    A module whose ``configure_model`` has called ``fully_shard`` stays as that has left it.

    Args:
        reshard_after_forward: Whether units give their gathered parameters back after the forward and gather them
            again for the backward; see ``fully_shard``.
        reshard_after_backward: Whether they do so after the backward of a micro-batch that is not its step's last.
        reduce_each_micro_batch: Whether each micro-batch reduces its gradients; else the last one of a step reduces
            the sum, and each process holds whole gradients until then.
        mp_policy: Of all units and the rest. None: under ``bf16-mixed`` on a GPU, units of ``CAST_BY_AUTOCAST`` alone
            are gathered in bfloat16 and their gradients reduced in float32; everything else is as the weights are.
        **options: Of ``lightning.pytorch.strategies.ModelParallelStrategy``. ``save_distributed_checkpoint=False``
            writes one file, which the first process assembles, in place of a directory.

    Raises:
        ValueError: A parameter that cannot be sharded.
    """

    def __init__(
        self,
        *,
        reshard_after_forward: bool = True,
        reshard_after_backward: bool = True,
        reduce_each_micro_batch: bool = False,
        mp_policy: MixedPrecisionPolicy | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.mp_policy = mp_policy
        self.reshard_after_forward, self.reshard_after_backward = reshard_after_forward, reshard_after_backward
        self.reduce_each_micro_batch = reduce_each_micro_batch
        self.units: list[str] = []
        self._modules: tuple[nn.Module, list[FSDPModule]] | None = None
        self._agreement: Agreement | None = None
        self._called: list[str | None] = []
        self._calls_before = 0

    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        with group_variables():
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
        sharded = any(isinstance(one, FSDPModule) for one in module.modules())
        if sharded and is_overridden("configure_model", module):
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self.model = module
        if not sharded:
            if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:  # sync_batchnorm=True
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
            program = next((one.program for one in trainer.callbacks if isinstance(one, CompiledTraining)), None)  # type: ignore[attr-defined]
            self._shard(module, program)
        self.model_to_device()  # what is neither a parameter nor a buffer, as metrics
        validation = trainer.fit_loop.epoch_loop.val_loop
        for loop in (validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # parameters gathered in it could not be trained with
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._agreement = Agreement() if trainer.world_size > 1 else None
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            step_on_shards(optimizer)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin

        def clip_grad_by_norm(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
            if clip_by_norm(plugin.main_params(optimizer), clip_val) is None:
                type(plugin).clip_grad_by_norm(plugin, optimizer, clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm

    def on_train_end(self) -> None:
        super().on_train_end()
        self._compare_calls(last=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Compare what the processes called in the step before the last. Raises ValueError in all where it differs."""
        super().on_train_batch_start(batch, batch_idx)
        self._compare_calls()

    def _compare_calls(self, *, last: bool = False) -> None:
        if self._agreement is None:
            return
        # A replayed graph calls nothing here. Gathers meet by their order alone: others of the same size are mixed.
        order = zlib.crc32(repr(self._called).encode())
        orders = [self._agreement.exchange(*((order, -order) if self._called else (0, -UNKNOWN)))]
        orders += [self._agreement.wait()] if last else []
        mine, self._called = ", ".join(dict.fromkeys(one or "the rest" for one in self._called)), []
        if any(largest != -least and least != -UNKNOWN for largest, least in orders):
            raise ValueError(
                "FSDP2: in one step the processes called different units, or in another order, and took each other's "
                f"weights. Call all in each process; multiply what is left out by 0. Last called here: {mine}"
            )

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._called = [group._module_fqn for group in self._forwards()[self._calls_before :]]
        self._calls_before = 0  # a backward forgets them

    def _forwards(self) -> list[Any]:
        contexts = {id(one): one for one in (each._get_fsdp_state()._comm_ctx for each in self._sharded())}
        return [group for context in contexts.values() for group in getattr(context, "post_forward_order", ())]

    def _shard(self, module: L.LightningModule, program: Program | None) -> None:
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"FSDP2: {name} has no shape before the first batch: call the module once before the fit"
                )
            if parameter.ndim == 0:
                raise ValueError(f"FSDP2 cannot shard {name}, which has no dimensions: give it the shape (1,)")
        self.units = shard_units(module, program)
        for path in self.units:
            self._shard_one(module, path, self.reshard_after_forward)
        roots = [""] if module.automatic_optimization else _called_children(module)
        for path in roots:
            if not isinstance(module.get_submodule(path), FSDPModule):
                # Under manual optimization a network may run forward alone, and be trained before it runs again.
                self._shard_one(module, path, None if path == "" else True)
        if roots == [""]:
            for step in STEPS:
                if is_overridden(step, module):
                    register_fsdp_forward_method(cast(nn.Module, module), step)

    def _shard_one(self, module: nn.Module, path: str, reshard_after_forward: bool | None) -> None:
        unit = module.get_submodule(path)
        self._place(unit, path)
        policy = self.mp_policy or self._policy(unit, is_root=path == "")
        fully_shard(unit, mesh=self.device_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    def _policy(self, unit: nn.Module, *, is_root: bool) -> MixedPrecisionPolicy:
        """What is gathered in bfloat16: units of layers that autocast treats so by itself. It stays in force beside,
        and inputs are left as they are: norms, losses and sums compute as on one device.

        A weight that the module itself adds or multiplies would in bfloat16 decide the precision of all that follows.
        """
        low = str(self.precision_plugin.precision) == "bf16-mixed" and self.root_device.type == "cuda" and not is_root
        holders = [one for one in unit.modules() if any(value is not None for value in one._parameters.values())]
        low = low and all(type(one) in CAST_BY_AUTOCAST for one in holders)
        given, reduced = (torch.bfloat16, torch.float32) if low else (None, None)
        return MixedPrecisionPolicy(param_dtype=given, reduce_dtype=reduced, cast_forward_inputs=False)

    def _place(self, unit: nn.Module, path: str) -> None:
        """Move what of ``unit`` is not sharded yet to this process's device, with the values of the first process.

        What has no memory yet gets it here, and initial values by the ``reset_parameters`` of its modules.
        """
        given: dict[Tensor, Tensor] = {}
        drawn: dict[nn.Module, str] = {}
        for name, one in unit.named_modules(prefix=path):
            for tensors in (one._parameters, one._buffers):
                for key, tensor in tensors.items():
                    if tensor is None or isinstance(tensor, DTensor):
                        continue
                    if tensor not in given:
                        given[tensor] = tensor
                        if tensor.is_meta:
                            empty = torch.empty_like(tensor, device=self.root_device)
                            given[tensor] = (
                                nn.Parameter(empty, tensor.requires_grad) if tensors is one._parameters else empty
                            )
                    if tensor.is_meta:
                        drawn[one] = name
                    tensors[key] = given[tensor]
        lacking = [name or type(one).__name__ for one, name in drawn.items() if _reset(one) is None]
        if lacking:
            raise ValueError(
                f"FSDP2: built on the device meta, and without reset_parameters, which would draw their weights or "
                f"buffers: {', '.join(lacking)}. Build these on another device"
            )
        for one in reversed(list(unit.modules())):  # an outer one may draw those within it in a way of its own
            if one in drawn or _draws_whole(one, drawn):
                _reset(one)()  # type: ignore[misc]
        for tensor in given.values():
            tensor.data = tensor.data.to(self.root_device)
            torch.distributed.broadcast(tensor.data, 0)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Raises ValueError where it takes a sharded weight outside its submodule's forward."""
        self._calls_before = len(self._forwards())
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise ValueError(
                "FSDP2: the training step uses weights of a submodule outside the forward of that submodule, where "
                f"they are sharded. Sharded by themselves are {', '.join(self.units) or 'the children'}: call these, "
                "not their methods or weights"
            ) from error

    def on_validation_end(self) -> None:
        """Give back what the last evaluation has gathered: no backward did."""
        for one in self._sharded():
            one.reshard()

    on_test_end = on_predict_end = on_validation_end

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around a micro-batch that is not its step's last."""
        for one in self._sharded():
            one.set_requires_gradient_sync(self.reduce_each_micro_batch, recurse=False)
            one.set_reshard_after_backward(self.reshard_after_backward, recurse=False)
        try:
            yield
        finally:
            for one in self._sharded():
                one.set_requires_gradient_sync(True, recurse=False)
                one.set_reshard_after_backward(True, recurse=False)

    def _sharded(self) -> list[FSDPModule]:
        assert self.model is not None
        if self._modules is None or self._modules[0] is not self.model:  # looked for once: these are many
            self._modules = self.model, [one for one in self.model.modules() if isinstance(one, FSDPModule)]
        return self._modules[1]


def _reset(module: nn.Module) -> Callable[[], None] | None:
    """What draws initial weights; some modules of torch have it under a private name (``nn.MultiheadAttention``)."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _draws_whole(module: nn.Module, drawn: Container[nn.Module]) -> bool:
    """Whether ``module`` draws the weights of others, all of which are among those ``drawn``."""
    own = [one for one in module.modules() if any(True for _ in one.parameters(recurse=False))]
    return hasattr(module, "reset_parameters") and bool(own) and all(one in drawn for one in own)


def _called_children(module: nn.Module, path: str = "") -> list[str]:
    """Paths of the outermost submodules that are called: of a module that runs backward within its training step."""
    if own := [name for name, one in module.named_parameters(path, recurse=False) if one is not None]:
        raise ValueError(f"FSDP2 under manual optimization needs {', '.join(own)} in a submodule that is called")
    paths: list[str] = []
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if any(True for _ in child.parameters()):
            paths += _called_children(child, inner) if never_called(child) else [inner]
    return paths


def shard_units(module: nn.Module, program: Program | None) -> list[str]:
    """Paths of the submodules to shard as units: the outermost regions of ``program``, else the repeated blocks.

    One that shares a parameter with the rest of the module is none: both have to be gathered together.
    """
    paths = [one.path for one in submodules(program.regions)] if program is not None else []
    if not paths:
        containers = [] if program is None else list(program.blocks)
        paths = expand_blocks(module, containers or find_containers(module))
    unit_of: dict[nn.Module, str] = {}
    for path in paths:
        if path:
            for one in module.get_submodule(path).modules():
                unit_of.setdefault(one, path)
    holders: defaultdict[Tensor, set[str]] = defaultdict(set)
    for one in module.modules():
        for parameter in one.parameters(recurse=False):
            holders[parameter].add(unit_of.get(one, ""))
    shared = {path for holding in holders.values() if len(holding) > 1 for path in holding}
    owning = {path for holding in holders.values() for path in holding}
    return [path for path in dict.fromkeys(unit_of.values()) if path in owning and path not in shared]


# ---- the optimizer on this process's own shards ----------------------------------------------------------------------

# Parameters, gradients and optimizer state are DTensors, and each operation on them goes through DTensor's dispatch. It
# looks up how tensors are laid out. Where an operation has no meta kernel, as fused optimizers have none, it runs the
# operation on tensors of the full sizes to learn the shape of its result: ten seconds for a large model, and again
# whenever an argument that is a number changes (``_propagate_tensor_meta_non_cached`` in
# https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/tensor/_sharding_prop.py). An elementwise step needs
# none of that: here the same functions of torch.optim get the local tensors. ``param_groups``, ``state`` and state
# dicts hold DTensors as before.

ELEMENTWISE = frozenset({ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD})
"""Optimizers whose step of one element depends on that element alone. Adafactor and Muon take means and products of a
whole matrix, LBFGS of all parameters: they keep DTensors. A subclass may do anything."""


def step_on_shards(optimizer: Optimizer) -> bool:
    """Have each step of ``optimizer`` work on this process's own shards, from now on; whether it can.

    Torch's steps gather parameters, gradients and state in lists (``_init_group``) and hand them to a function. What is
    in those lists becomes local.
    """
    if type(optimizer) not in ELEMENTWISE or not hasattr(optimizer, "_init_group"):
        return False
    gathered: Callable[..., Any] = optimizer._init_group
    whole: list[tuple[Tensor, DTensor]] = []
    """Of the step under way: the local tensors and the parameters that they are of."""

    def init_group(group: dict[str, Any], *lists: list[Any], **named: Any) -> Any:
        result = gathered(group, *lists, **named)
        every = [*lists, *(one for one in named.values() if isinstance(one, list))]
        if isinstance(optimizer, SGD):  # it files new momentum under what is in its list of parameters
            whole.extend((local_of(one), one) for one in every[0] if isinstance(one, DTensor))
        for one in every:
            one[:] = map(local_of, one)
        return result

    def file_momentum(*_: Any) -> None:
        for local, parameter in whole:
            if local in optimizer.state:
                momentum, state = optimizer.state.pop(local)["momentum_buffer"], optimizer.state[parameter]
                if not isinstance(state.get("momentum_buffer"), DTensor):
                    state["momentum_buffer"] = None if momentum is None else sharded_like(parameter, momentum)
        whole.clear()

    optimizer._init_group = init_group
    if isinstance(optimizer, SGD):
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(optimizer.register_step_post_hook(file_momentum).id, last=False)  # the user's see the state
    return True


def local_of(value: Any) -> Any:
    """This process's own part of a DTensor, without a copy; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def sharded_like(parameter: DTensor, local: Tensor) -> DTensor:
    """The DTensor of which every process holds a ``local`` part, laid out as ``parameter`` is."""
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor | None:
    """Scale the gradients to a norm of at most ``largest``, as ``torch.nn.utils.clip_grad_norm_`` does, with one
    reduction over all processes. Returns the norm before, 0-D; None, with nothing done, where the gradients are not all
    sharded over one and the same dimension of processes."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    meshes = {one.device_mesh for one in gradients if isinstance(one, DTensor)}
    if len(meshes) != 1 or (mesh := next(iter(meshes))).ndim != 1:
        return None
    if not all(isinstance(one, DTensor) and isinstance(one.placements[0], Shard) for one in gradients):
        return None
    local = [local_of(one) for one in gradients]
    norms = [one.to(torch.promote_types(one.dtype, torch.float32)) for one in torch._foreach_norm(local)]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=mesh.get_group())
    norm = squares.sqrt()
    torch._foreach_mul_(local, torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm
