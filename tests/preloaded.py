"""What the process that pairs are forked from has imported once, so that no rank has to: some of it torch's, as late as
the first compile. It compiles nothing: processes that such a one's forks fork in turn are now and then aborted."""

from __future__ import annotations

from importlib import import_module

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
    "trainer.guards.checks",
    "tests.processes",
    "tests.trainer.lightning_modules",
    "tests.trainer.runs",
):
    import_module(name)
