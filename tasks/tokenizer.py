"""Tokenizer: byte-level BPE trained on the training captions and kept in a file.

Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, over bytes as in GPT-2: every text has tokens, none is unknown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tasks.resources import cache_folder, write_atomically

PAD, BEGIN, END = 0, 1, 2
"""Ids of the special tokens."""

SPECIAL_TOKENS = ["<pad>", "<begin>", "<end>"]
MINIMUM_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""All bytes and the special tokens."""


def load_tokenizer(captions: Sequence[str], *, vocabulary_size: int, folder: Path) -> Tokenizer:
    """Load the tokenizer of these captions from ``folder`` or from the user's cache, or train it and keep it there.

    The file's name carries the vocabulary size and a hash of the captions: changed captions train a new tokenizer.
    A place that cannot be written is passed over; without any the tokenizer lives in memory only.
    """
    digest = hashlib.blake2b(digest_size=6)
    for caption in captions:
        digest.update(caption.encode() + b"\0")
    file_name = f"tokenizer-{vocabulary_size}-{digest.hexdigest()}.json"
    paths = [folder / file_name, cache_folder() / file_name]
    for path in paths:
        # A file that does not load (an older library's format, a full disk) is trained and written again.
        with suppress(Exception):
            if path.is_file():
                return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(captions, vocabulary_size=vocabulary_size)
    for path in paths:
        with suppress(OSError):
            write_atomically(path, lambda file: file.write(tokenizer.to_str().encode()))
            break
    return tokenizer


def train_tokenizer(captions: Sequence[str], *, vocabulary_size: int) -> Tokenizer:
    """Train byte-level BPE with at most ``vocabulary_size`` tokens; pad, begin and end are 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer=trainer, length=len(captions))
    return tokenizer


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of token ids up to the first end; special tokens are left out."""
    ids = list(tokens)
    if END in ids:
        ids = ids[: ids.index(END)]
    # The decoder would print an id beyond the trained vocabulary as nothing; special tokens are skipped by default.
    return str(tokenizer.decode(ids)).strip()
