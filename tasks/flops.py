"""Operations of a task's network, counted by torch on tensors without memory.

Matrix products and convolutions count, 2 for each multiply-add; causal attention counts in full, and nothing that a
kernel computes again counts twice: the convention of ``torch.utils.flop_counter`` and of PaLM's appendix B
(https://arxiv.org/abs/2204.02311).
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.base import TrainedTask

LONGEST_COUNTED = 128
"""Positions of the longest of three examples, from which those of all other lengths follow."""
_counted: dict[tuple[str, int, bool], dict[int, int]] = {}
"""Operations by positions, for each task, number of rows and whether it is trained."""


def count_flops(task: TrainedTask, *, rows: int, positions: int, training: bool) -> int | None:
    """Floating-point operations of one batch: of forward, loss and backward, or of the forward alone.

    With positions, they are a polynomial of the second degree in them (attention is quadratic), proportional to the
    rows: three lengths are counted, once.

    Returns None for a network with an operation that torch does not know without numbers.
    """
    most = task.max_positions()
    key = (repr(task), rows if most is None else 1, training)
    if key not in _counted:
        top = 0 if most is None else min(most, LONGEST_COUNTED)
        lengths = {0} if most is None else {max(1, top // 4), max(2, top // 2), top}
        try:
            _counted[key] = _count(task, key[1], sorted(lengths), training=training)
        except task.uncountable:
            _counted[key] = {}
    by_length = _counted[key]
    if not by_length:
        return None
    return _interpolate(by_length, positions) * (1 if most is None else rows)


def _count(task: TrainedTask, rows: int, lengths: list[int], *, training: bool) -> dict[int, int]:
    """Operations by length. No weight, no random state and no device is touched."""
    counts = {}
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), task.counting():
        net = task.counted_net().train(training)
        for length in lengths:
            # The plain kernel: fused ones compute some of it again in backward, and differ in what the counter knows of
            # them. With gradients also where they are not needed: torch.nn's attention takes the path that is counted.
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                loss = net(*task.example(rows, length))[0]
                if training:
                    loss.backward()
            counts[length] = int(counter.get_total_flops())
        net.zero_grad(set_to_none=True)
    return counts


def _interpolate(values: dict[int, int], at: int) -> int:
    """The polynomial through ``values``, at ``at`` (Lagrange's form)."""
    return round(
        sum(
            value * prod((Fraction(at - other, point - other) for other in values if other != point), start=Fraction(1))
            for point, value in values.items()
        )
    )
