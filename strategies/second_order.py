"""``compile=second_order``: losses that hold a gradient of the network, such as forces, gradient penalties and PINNs.

Compiled code has no gradient of its gradient. So what takes the inner gradient has to be within what is compiled:
forward, ``torch.autograd.grad(..., create_graph=True)`` and what follows are one graph, of which the outer backward is
taken. Dynamo traces that where ``torch._dynamo.config.trace_autograd_ops`` is set
(https://github.com/pytorch/pytorch/pull/169493).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from strategies.base import Program, Stage
from strategies.compile_options import ModuleOptions


@dataclass(kw_only=True, slots=True)
class SecondOrder(ModuleOptions):
    """Compile a loss that holds a gradient of the network: forward, inner gradient and loss as one graph.

    For forces (the derivative of an energy by positions), gradient penalties and PINNs. Without ``functions``, modules
    are compiled as by ``whole``: right where a module's forward takes the inner gradient itself. Else the methods that
    are named, each one graph. What is derived by is an argument of the method, or of the module's forward, or a tensor
    that is made within; ``x.requires_grad_()`` may be within for both. What cannot be traced runs eager, with the line
    that stands in the way.
    """

    name: ClassVar[str] = "second_order"
    stage: ClassVar[Stage] = Stage.MODULE
    one_graph: ClassVar[str] = "would split the inner gradient from the loss"

    functions: list[str] = field(default_factory=list)
    """Methods to compile, as they are called: ``penalty`` of the module itself, ``net.energy_and_forces`` of the
    submodule ``net``."""

    def apply(self, program: Program) -> None:
        from strategies.regions import callable_paths, compile_children, compile_method, compile_regions

        program.settings["trace_autograd_ops"] = program.checking.derives = True
        for path in self.functions:
            compile_method(program, path, self)
        modules = [] if self.functions else callable_paths(program.module, program.whole)
        compile_regions(program, self, modules, small=False)
        if not (self.functions or program.whole):
            compile_children(program, self)
