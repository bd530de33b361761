"""Peer: regional compilation as accelerate has it: of a module built anew, the blocks and what is between them.

https://huggingface.co/docs/accelerate/usage_guides/compilation
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import distributed

from scripts.peers.work import TrainingStep, Work


def train(work: Work) -> None:
    several: dict[str, Any] = {}
    if work.sharded:
        kinds = {type(work.module.get_submodule(path)).__name__ for path in work.blocks()}
        several["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted(kinds),
        )
    accelerator = Accelerator(
        cpu=work.device.type == "cpu",
        mixed_precision="bf16" if work.precision == "bf16-mixed" else "no",
        dynamo_plugin=TorchDynamoPlugin(backend=work.backend, use_regional_compilation=True),
        **several,
    )
    if several and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError("trainer.strategy=fsdp2: accelerate shards on accelerators alone, and this is a CPU")
    module, loader = work.placed(), work.loader()
    optimizer, schedule = work.optimizer_and_schedule()
    model: Any = TrainingStep(module)
    if distributed.is_initialized():
        # The loader is split already, and accelerate's schedule would step once for each process.
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        schedule = None if schedule is None else accelerator.prepare(schedule)
    work.optimizers = (optimizer,)
    for batch in work.batches(loader):
        optimizer.zero_grad()
        loss = model(batch)  # enters autocast
        accelerator.backward(loss)
        if work.clip is not None:
            accelerator.clip_grad_norm_(module.parameters(), work.clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        work.stepped(loss)
