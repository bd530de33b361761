"""Ids of special tokens, and the target that is none."""

from __future__ import annotations

PAD, BEGIN, END = 0, 1, 2
"""Ids of the special tokens."""
SPECIAL_TOKENS = ["<pad>", "<begin>", "<end>"]
IGNORED = -100
"""Target that is no target: padding, or a token that was not masked. torch's default for ``cross_entropy``."""
