"""What the process that pairs are forked from has done once, so that no rank has to: imports that take seconds, among
them some of torch's as late as the first compile, and tables that Dynamo fills in its first compile."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

for name in (
    "pytest",
    "torch._dynamo.backends.debugging",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.compiler_bisector",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.utils.tensorboard",
    "torchmetrics",
    "s3fs",
    "strategies",
    "trainer.run",
    "trainer.callback",
    "trainer.guards.audits",
    "tests.processes",
    "tests.trainer.lightning_modules",
    "tests.trainer.runs",
):
    import_module(name)

if not Path("/dev/nvidiactl").exists():  # a process that has asked for CUDA's devices cannot be forked
    import torch
    from torch._dynamo import trace_rules
    from torch._inductor.codecache import torch_key

    from tests.processes import compile_quickly

    compile_quickly()
    torch.set_num_threads(1)  # no threads are there after a fork
    with torch.no_grad():  # a backward starts threads
        torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2))
    torch._dynamo.reset()
    torch_key()  # a hash of torch's files
    vars(trace_rules).update(clear_lru_cache=lambda: None)  # by each process group, as it may import something: 0.2 s
