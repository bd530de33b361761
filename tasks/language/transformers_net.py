"""TransformersNet: a causal language model of the transformers library with its loss inside forward.

Shape letters: B batch, S positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tasks.language.model import score
from tasks.layers import Scores


class NextTokenLoss(nn.Module):
    """Loss of logits that are there already: a region of its own, so that it can be compiled without the network."""

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Scores:
        """Scores as ``NextTokenTail`` returns them."""
        return score(logits_BSV.flatten(0, 1), targets_BS.flatten(), training=self.training)


class TransformersNet(nn.Module):
    """The library's network, and the loss that it has none of its own for where padding is concerned."""

    def __init__(self, config: Any, *, attention: str | None) -> None:
        """Build from the library's configuration object; weights are drawn from torch's global generator.

        Raises ValueError for what the library refuses to build.
        """
        super().__init__()
        from_config: Any = AutoModelForCausalLM.from_config
        try:
            # In the precision of the run, not in the one that the configuration's weights are published in.
            self.model = from_config(config, attn_implementation=attention, dtype=torch.get_default_dtype())
        except Exception as error:  # each architecture checks in a way of its own
            raise ValueError(f"task/network=transformers: {' '.join(str(error).split())}") from error
        self.loss = NextTokenLoss()

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Scores:
        """Score int64 targets [B, S] after int64 tokens [B, S], padding 0; without targets, return logits [B, S, V].

        Padding lies to the right of what attends, and is no target.
        """
        logits_BSV: Tensor = self.model(input_ids=tokens_BS, use_cache=False).logits
        if targets_BS is None:
            return logits_BSV
        result: Scores = self.loss(logits_BSV, targets_BS)
        return result
