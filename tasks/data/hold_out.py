"""Hold out a share for validation by hashes of names: the same items in every run, wherever their folder is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TypeVar

Item = TypeVar("Item")


def held_out(names: Mapping[Item, str], *, share: float) -> set[Item]:
    """Items, given with their names, that are held out: ``share`` of them, at least one and never all.

    An item stays on its side when others are added.
    """
    ranks = {
        item: hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest() for item, name in names.items()
    }
    limit = int(share * 2**64).to_bytes(9, "big")[1:]
    held = {item for item, rank in ranks.items() if rank < limit}
    if not held and len(ranks) > 1:
        held = {min(ranks, key=lambda item: ranks[item])}
    if len(held) == len(ranks) > 1:
        held.discard(max(ranks, key=lambda item: ranks[item]))
    return held
