"""Operations of a classification network, counted by running it without memory and without numbers."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.models.image_classifier_library import skeleton


@functools.lru_cache(maxsize=64)
def count_flops(name: str, *, classes: int, image_size: int, batch_size: int, training: bool) -> int | None:
    """Floating-point operations of matrix products and convolutions for one batch, 2 for each multiply-add.

    ``training``: forward, loss and backward; else the forward alone. Counted once for each size of batch, on a
    skeleton of the network: no weight, no random state and no device is touched. Attention counts as its plain
    kernel does: fused ones compute some of it again in backward, which counts as nothing here.

    Returns None for a network with an operation that torch knows without numbers on no device.

    Raises:
        ValueError: A batch that the network cannot take.
    """
    model = skeleton(name, classes=classes, image_size=image_size).train(training)
    images = torch.empty(batch_size, 3, image_size, image_size, device="meta")
    labels = torch.empty(batch_size, dtype=torch.long, device="meta")
    try:
        # With gradients also where they are not asked for: torch.nn's attention then takes the path that is counted.
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            logits = model(images)
            if training:
                F.cross_entropy(logits, labels).backward()
    except NotImplementedError:
        return None
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"task.image_size={image_size} with task.data.batch_size={batch_size}: {name} cannot take it ({reason})"
        ) from None
    finally:
        model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())
