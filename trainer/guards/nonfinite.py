"""Non-finite losses: a training whose loss is NaN or infinite ends, and its last finite checkpoint stays.

No step waits for the device. The losses of every ``trainer.log_every_n_steps`` steps are copied to the host for the
curves in any case, and read when the next ones are sent: they are looked at there, replayed steps like all others. A
checkpoint, which waits for the device itself, is written only once every loss before it was read and the weights are
finite; so is the end of a training. A fault is found up to two such intervals after it happened, and named by its step.

A gradient scaler leaves steps with infinite gradients out; their loss is finite, and they are no fault. The comparisons
with eager (see ``trainer.guards.parity``) take NaN where eager has NaN for equal: only here it is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parameter import is_lazy

from strategies.loop import Loop
from trainer.telemetry.telemetry import Telemetry


class NonFiniteLoss(RuntimeError):
    """The training went to NaN or infinity, and was not to continue."""


class FiniteLosses:
    """Watches one training.

    Args:
        mode: ``fail``, or ``warn`` once and continue.
        telemetry: Gives the telemetry of the training, which reads the losses.
        note: Takes the warning for the record.
    """

    def __init__(self, mode: str, telemetry: Callable[[], Telemetry], note: Callable[[str], None]) -> None:
        self._mode, self._telemetry, self._note = mode, telemetry, note
        self._warned = self._weights = False
        self._loop: Loop | None = None

    def start(self, loop: Loop) -> None:
        """Weights that are infinite from the beginning, as a mask that is a parameter may be, are the module's own."""
        self._loop, self._weights = loop, not _spoilt(loop)

    def check(self, *, everything: bool, saved: str | None) -> None:
        """Raise NonFiniteLoss, on all processes alike, where a loss was not finite; every process calls this.

        ``everything`` waits for the losses of all steps so far, and looks at the weights too; ``saved`` is the last
        checkpoint, for the message.
        """
        loop = self._loop
        if self._warned or loop is None:
            return
        telemetry = self._telemetry()
        found = telemetry.nonfinite(everything=everything)
        if found is None and everything and self._weights and (names := _spoilt(loop)):
            found = telemetry.last_step.place(f"weights are not finite after it: {', '.join(names[:3])}")
        if not loop.anywhere(found is not None):
            return
        everywhere = [found]
        if loop.world_size > 1:
            everywhere = [None] * loop.world_size
            torch.distributed.all_gather_object(everywhere, found)
        step, where = min(one for one in everywhere if one is not None)
        if self._mode == "fail":
            raise NonFiniteLoss(
                f"step {step} {where}. Last finite checkpoint: {saved or 'none was written'}. "
                "on_nonfinite_loss=warn continues in spite of it"
            )
        self._warned = True
        line = f"on_nonfinite_loss=warn: the run continues after step {step} {where}"
        rank_zero_warn(line)
        self._note(line)


def _spoilt(loop: Loop) -> list[str]:
    """Names of the trainable weights that are not finite, as far as this process holds them; waits for the device."""
    weights = {
        name: getattr(weight.detach(), "_local_tensor", weight.detach())  # of a sharded one (DTensor), the own part
        for name, weight in loop.module.named_parameters()
        if weight.requires_grad and weight.is_floating_point() and weight.element_size() > 1 and not is_lazy(weight)
    }
    weights = {name: weight for name, weight in weights.items() if weight.numel()}
    if not weights:
        return []
    norms = torch._foreach_norm(list(weights.values()), math.inf)
    largest = torch.stack([norm.to(loop.device, torch.float32) for norm in norms]).tolist()
    return [name for name, value in zip(weights, largest, strict=True) if not math.isfinite(value)]
