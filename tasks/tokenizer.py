"""Byte-level BPE trained on the training texts and kept in a file.

Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, over bytes as in GPT-2: every text has tokens, none is unknown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.resources import load_or_make

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BEGIN, END = 0, 1, 2
"""Ids of the special tokens."""

SPECIAL_TOKENS = ["<pad>", "<begin>", "<end>"]


def load_tokenizer(texts: Sequence[str], *, vocabulary_size: int) -> Tokenizer:
    """Load the tokenizer of these texts from the user's cache, or train it and keep it there.

    The file's name carries the vocabulary size and a hash of the texts: changed texts train a new tokenizer.
    """
    from tokenizers import Tokenizer

    digest = hashlib.blake2b(digest_size=6)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return load_or_make(
        f"tokenizer-{vocabulary_size}-{digest.hexdigest()}.json",
        load=lambda path: Tokenizer.from_file(str(path)),
        make=lambda: train_tokenizer(texts, vocabulary_size=vocabulary_size),
        write=lambda file, tokenizer: file.write(tokenizer.to_str().encode()),
    )


def train_tokenizer(texts: Sequence[str], *, vocabulary_size: int) -> Tokenizer:
    """Train byte-level BPE with at most ``vocabulary_size`` tokens; pad, begin and end are 0, 1 and 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return tokenizer


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of token ids up to the first end; special tokens are left out."""
    ids = list(tokens)
    if END in ids:
        ids = ids[: ids.index(END)]
    # The decoder would print an id beyond the trained vocabulary as nothing; special tokens are skipped by default.
    return str(tokenizer.decode(ids)).strip()
