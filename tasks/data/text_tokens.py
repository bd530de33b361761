"""Tokens of documents in one flat array, kept in a file beside the tokenizer: a second start reads them at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasks.data.cache_files import cache_folder, write_atomically
from tasks.data.tokenizer import END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AT_ONCE = 4096
"""Documents encoded at once: the library's own objects take some fifty times the memory of their numbers."""


def load_tokens(texts: Sequence[str], tokenizer: Tokenizer, *, folder: Path) -> NDArray[np.integer]:
    """Token ids of all documents, one after the other, an ``END`` after each and nowhere else; read-only.

    Loaded from ``folder`` or from the user's cache, or encoded and kept there. The file's name carries a hash of
    tokenizer and texts. It is mapped into memory, which loader processes then share.
    """
    digest = hashlib.blake2b(tokenizer.to_str().encode(), digest_size=8)
    for text in texts:
        digest.update(text.encode(errors="replace") + b"\0")
    paths = [place / f"tokens-{digest.hexdigest()}.npy" for place in (folder, cache_folder())]
    for path in paths:
        # A file that does not load (a full disk) is encoded and written again.
        with suppress(Exception):
            if path.is_file():
                return np.load(path, mmap_mode="r")
    ids = encode(texts, tokenizer)
    for path in paths:
        with suppress(OSError):
            write_atomically(path, lambda file: np.save(file, ids))
            break
    return ids


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> NDArray[np.integer]:
    """Token ids of ``texts``, an ``END`` after each; uint16 where they fit."""
    kind = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32
    parts = []
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # a text that holds "<end>" is no end
    try:
        for begin in range(0, len(texts), AT_ONCE):
            # A lone surrogate, which JSON can hold, is no text to the tokenizer.
            chunk = [text.encode(errors="replace").decode() for text in texts[begin : begin + AT_ONCE]]
            encodings = tokenizer.encode_batch_fast(chunk, add_special_tokens=False)
            parts.append(np.concatenate([np.array([*encoding.ids, END], dtype=kind) for encoding in encodings]))
    finally:
        tokenizer.encode_special_tokens = before
    return np.concatenate(parts)
