"""Text as rows of tokens, packed full or one document each, for predicting the next token or masked ones.

Shape letters: B batch, S tokens of a row, T tokens of all rows, one after the other, or some of them, P the
picked ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from tasks.resumable_data import ResumableDataModule, load_tokenizer, load_tokens, pad_rows
from tasks.special_tokens import BEGIN, END, IGNORED, PAD, SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tasks.language.task import MaskedLM, TextTask


class TextBatch(NamedTuple):
    """What the loader yields and the module takes."""

    tokens: Tensor
    """int64 [B, S]. The model reads S - 1 positions, all but the last, and predicts all tokens but the first."""
    useful_tokens: int
    """Targets that are not padding."""

    @property
    def inputs(self) -> Tensor:
        """int64 [B, S - 1], contiguous, so that no compiled region sees strides that depend on the length."""
        return self.tokens[:, :-1].contiguous()

    @property
    def targets(self) -> Tensor:
        """int64 [B, S - 1], the token after each of ``inputs``."""
        return self.tokens[:, 1:].contiguous()

    @staticmethod
    def host_only() -> tuple[str, ...]:
        """Fields that no training step reads: CUDA graphs need not be captured for each of their values."""
        return ("useful_tokens",)


def collate_text(rows: Sequence[Tensor], *, pad_to: int | None) -> TextBatch:
    """Make a batch of ``pad_to`` positions; None: as many as the longest row needs."""
    tokens_BS = pad_rows(rows, width=None if pad_to is None else pad_to + 1)
    return TextBatch(tokens_BS, sum(len(row) - 1 for row in rows))


class TextDataset(Dataset[Tensor]):
    """Rows of tokens, int64 [length]; item ``i`` is the same in every run.

    Packed: documents one after the other, each with its end, cut into rows of ``task.longest()`` positions; what is
    left at the end makes no row. Else a row is begin, document, end, cut to as many.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, task: TextTask) -> None:
        """Tokenize all documents, one a text, and lay out the rows."""
        self.skipped: dict[str, int] = {}
        self._packed = task.data.packing == "packed"
        self.positions, self._extra = task.longest(), task.extra
        # One flat array instead of a list of lists: forked workers share its pages, as no reference count changes.
        self._ids = load_tokens(texts, tokenizer)
        self._ends = np.flatnonzero(self._ids == END)
        tokens = np.diff(self._ends, prepend=-1) + 1  # begin and end included
        if self._packed:
            self.lengths = np.full((len(self._ids) - self._extra) // self.positions, self.positions, dtype=np.int64)
        else:
            self.lengths = np.minimum(tokens - self._extra, self.positions)
            if cut := int((tokens - self._extra > self.positions).sum()):
                self.skipped["rest of a document that is too long"] = cut

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        """A row; of a list of numbers, as ``PackedSampler`` draws them, a list of rows."""
        if isinstance(index, list):
            return [self[each] for each in index]
        count = int(self.lengths[index]) + self._extra
        if self._packed:
            begin = index * self.positions
            return torch.from_numpy(self._ids[begin : begin + count].astype(np.int64))
        begin = int(self._ends[index - 1]) + 1 if index else 0
        return torch.from_numpy(np.concatenate(([BEGIN], self._ids[begin : begin + count - 1]), dtype=np.int64))


SHARE = 0.15
"""Of a row's ordinary tokens to predict, at least one of them."""
MASKED, REPLACED = 0.8, 0.1
"""Of the tokens to predict, the shares that show the mask and a random token; the rest show themselves."""


class MaskedBatch(NamedTuple):
    """What the loader yields and the module takes: a document a row, rows packed full, or one row of several documents.

    Only the last has positions, offsets, and counts of them. N are its sequences: documents, padding, empty ones.
    """

    tokens: Tensor
    """int64 [B, S]: what the model reads, then padding."""
    targets: Tensor
    """int64 [B, S]: the tokens to predict; ``IGNORED`` at all others."""
    mask: Tensor | None
    """bool [B, S]: true at tokens, false at padding; None where none is hidden from its own document's others."""
    useful_tokens: int
    """Positions that are not padding."""
    positions: Tensor | None = None
    """int64 [1, S]: place of each token within its document."""
    offsets: Tensor | None = None
    """int32 [N + 1], ascending: sequence i is offsets[i] to offsets[i + 1]. The last is S: padding is made of sequences
    of its own, at most as long as a document, and what is left of the N are empty."""
    documents: int | None = None
    """Documents in the row."""
    attended: int | None = None
    """Pairs of positions that attend to each other, over all sequences."""

    @staticmethod
    def host_only() -> tuple[str, ...]:
        """Fields that no training step reads: CUDA graphs need not be captured for each of their values."""
        return ("useful_tokens", "documents", "attended")


@dataclass(kw_only=True, slots=True)
class CollateMasked:
    """Make a batch of rows of tokens, masked as BERT was (Devlin et al. 2018, section 3.1).

    What is masked is drawn from the seed and from the rows that came together, in their order. So a row is masked anew
    in each epoch, as it then comes with others. A resumed run, any number of worker processes and every validation mask
    alike. A row that comes alone (a batch of one) is masked alike every time.
    """

    seed: int
    """Of the run."""
    token_count: int
    """Tokens of the tokenizer; the ordinary ones among them replace others at random."""
    task: MaskedLM

    def __call__(self, rows: Sequence[Any]) -> MaskedBatch:
        lengths, tokens_T, targets_T = self.hide(rows)
        data = self.task.data
        # A mask takes half the time of padding row by row, and the training itself waits for it.
        mask_BS = np.arange(lengths.max() if data.pad_to is None else data.pad_to) < lengths[:, None]
        tokens_BS, targets_BS = np.full(mask_BS.shape, PAD), np.full(mask_BS.shape, IGNORED)
        tokens_BS[mask_BS], targets_BS[mask_BS] = tokens_T, targets_T
        mask = torch.from_numpy(mask_BS) if data.packing == "documents" else None
        return MaskedBatch(torch.from_numpy(tokens_BS), torch.from_numpy(targets_BS), mask, len(tokens_T))

    def hide(self, rows: Sequence[Tensor]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Lengths of the rows; what the model reads of all of them, one after the other; and its targets."""
        lengths = np.array([len(row) for row in rows])
        tokens_T = torch.cat(list(rows)).numpy()
        # numpy: several times as fast as torch on arrays of this size, and a batch has to be ready in milliseconds.
        generator = np.random.default_rng((self.seed, zlib.crc32(tokens_T.tobytes())))
        # A random order in which special tokens come last; each row takes its first ones.
        order_T, special_T = generator.random(len(tokens_T), dtype=np.float32), tokens_T < len(SPECIAL_TOKENS)
        order_T[special_T] = 2.0
        begins, picked = lengths.cumsum() - lengths, []
        ordinary_B = lengths - np.add.reduceat(special_T, begins, dtype=np.int64)
        for begin, length, ordinary in zip(begins.tolist(), lengths.tolist(), ordinary_B.tolist(), strict=True):
            count = min(ordinary, max(1, round(SHARE * ordinary)))
            picked.append(begin + order_T[begin : begin + length].argpartition(count - 1)[:count])
        picked_T = np.sort(np.concatenate(picked))
        targets_T = np.full(len(tokens_T), IGNORED, dtype=np.int64)
        targets_T[picked_T] = true_P = tokens_T[picked_T]
        draw_P = generator.random(len(true_P), dtype=np.float32)
        random_P = generator.integers(len(SPECIAL_TOKENS), self.token_count, len(true_P))
        mask_token = self.task.network.vocabulary_size - 1
        shown_P = np.where(draw_P < MASKED, mask_token, true_P)
        tokens_T[picked_T] = np.where((draw_P >= MASKED) & (draw_P < MASKED + REPLACED), random_P, shown_P)
        return lengths, tokens_T, targets_T


class TextDataModule(ResumableDataModule):
    """Loads batches of rows of tokens, in an order that a resumed run continues exactly."""

    tokenizer: Tokenizer
    train_set: TextDataset
    val_set: TextDataset

    def open(self) -> None:
        task = self.task
        train, val = task.data.documents()
        self.tokenizer = load_tokenizer(train, vocabulary_size=task.network.vocabulary_size - task.network.reserved)
        self.train_set, self.val_set = (TextDataset(texts, self.tokenizer, task) for texts in (train, val))
        for option, rows in (("max_tokens", self.train_set), ("val_share", self.val_set)):
            if not len(rows):
                raise ValueError(
                    f"task.data.{option}: too little text for a row of {task.longest()} in {task.data.place()}"
                )
        self.collate = self.collation()

    def collation(self) -> Callable[[list[Any]], Any]:
        return partial(collate_text, pad_to=self.task.data.pad_to)


class MaskedDataModule(TextDataModule):
    """Loads batches of masked rows."""

    def collation(self) -> Callable[[list[Any]], Any]:
        return CollateMasked(seed=self.seed, token_count=self.tokenizer.get_vocab_size(), task=self.task)
