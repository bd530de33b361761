"""Configuration that every source of text shares, and what a source hands to the data module."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.checks import require_at_least, require_share
from tasks.data.cache_files import cache_folder
from tasks.data.hold_out import held_out
from tasks.data.loading import Loading

PACKINGS = ("packed", "documents")


@dataclass(kw_only=True, slots=True)
class Documents:
    """One split of a source of text."""

    texts: list[str]
    """One text a document, none of them blank."""
    place: str
    """Where the documents come from, for messages: a folder or a file."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Items already left out, by reason."""


@dataclass(kw_only=True, slots=True)
class TextData(Loading):
    """Base of every source of text.

    A source says how documents are read (``read``); how they are split and made into rows is the same for all.
    """

    num_workers: int | None = 0
    """Loader processes a device; None: one less than this process' cores, at most 8. A row is a slice of memory, which
    no process makes faster than the training's own."""
    packing: str = "packed"
    """``packed``: documents one after the other, cut into rows of ``max_tokens`` positions, all of them useful; or
    ``documents``: one document a row, ragged, what is beyond ``max_tokens`` positions cut off and counted."""
    max_tokens: int | None = None
    """Positions of a packed row, most positions of a document; None: as many as the network takes."""
    pad_to: int | None = None
    """Positions of every batch of ``documents``, at most ``max_tokens``; None: as many as its longest one needs."""
    max_documents: int | None = None
    """Most documents to read, both splits together; None: all. A fixed choice, the same in every run."""
    val_share: float = 0.02
    """Share of the documents held out for validation, at least one; the same documents in every run. Of a source that
    is one document, its end."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        Loading.__post_init__(self)  # A slotted dataclass is a new class: super() without arguments fails.
        if self.packing not in PACKINGS:
            raise ValueError(f"task.data.packing={self.packing!r} is not one of {PACKINGS}")
        require_at_least("task.data.max_tokens", self.max_tokens, 2)
        require_at_least("task.data.pad_to", self.pad_to, 2)
        require_at_least("task.data.max_documents", self.max_documents, 2)
        require_share("task.data.val_share", self.val_share, below_one=True)
        if self.pad_to is not None and self.packing == "packed":
            raise ValueError(f"task.data.pad_to={self.pad_to} needs task.data.packing=documents: packed rows are full")

    def documents(self, *, seed: int) -> tuple[Documents, Documents]:
        """Read training and validation documents.

        Args:
            seed: Of the run, for a source that draws its text; files are split alike under every seed.

        Raises:
            ValueError: A source that cannot be used, by the name of its file.
        """
        skipped: dict[str, int] = {}
        return self.split(list(itertools.islice(self.read(skipped), self.max_documents)), skipped)

    def read(self, skipped: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of each document; the name decides on which side it falls. Counts what it leaves out.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError

    def place(self) -> str:
        """Where the documents come from, for messages."""
        raise NotImplementedError

    def split(self, named: list[tuple[str, str]], skipped: dict[str, int]) -> tuple[Documents, Documents]:
        """Hold out a share of the documents by a hash of their names; blank ones are left out and counted.

        Raises ValueError when fewer than one document a side is left.
        """
        kept = [(name, text) for name, text in named if not text.isspace() and text]
        if len(kept) < len(named):
            skipped["blank document"] = skipped.get("blank document", 0) + len(named) - len(kept)
        if len(kept) == 1:
            text = kept[0][1]
            at = min(max(1, round(len(text) * (1 - self.val_share))), len(text) - 1)
            train, val = [text[:at]], [text[at:]]
        else:
            held = held_out({name: name for name, _ in kept}, share=self.val_share)
            train = [text for name, text in kept if name not in held]
            val = [text for name, text in kept if name in held]
        if not any(train) or not any(val):
            reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items()) or "it is empty"
            raise ValueError(f"{self.place()} holds too little text to train on and to validate ({reasons})")
        return (
            Documents(texts=train, place=self.place(), skipped=skipped),
            Documents(texts=val, place=f"what is held out of {self.place()} (task.data.val_share={self.val_share})"),
        )

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer trained on these documents, and their tokens, are kept."""
        return cache_folder()
