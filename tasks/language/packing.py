"""Whole documents, packed one after the other into batches of one number of positions, and attention within them.

A batch is one row, so that everything compiled or captured meets one shape. Which documents share a row is decided by
first fit: Johnson et al. 1974, https://doi.org/10.1137/0203025, over a window.

Shape letters: T positions of a row, N sequences of a row (its documents, padding, and empty ones), S positions of the
longest one, D width, H heads, K head width, E = 3 D.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tasks.language.data import CollateMasked, MaskedBatch, MaskedDataModule, TextDataset
from tasks.lightning_module import attend
from tasks.resumable_data import ResumableSampler
from tasks.special_tokens import IGNORED, PAD

if TYPE_CHECKING:
    from tasks.language.task import MaskedLM

WINDOW = 64
"""Documents that may wait for room in a later row."""
MULTIPLE = 128
"""Positions of which a row that is fitted to the data is a multiple: whole tiles of matrix products."""


def first_fit(order: Iterable[int], lengths: Sequence[int], *, positions: int, most: int) -> Iterator[list[int]]:
    """Pack each example of ``order`` into one row, of at most ``positions`` and at most ``most`` examples.

    A row takes what fits, in order: first of those that wait, the longest waiting one always, then of what follows.
    What does not fit waits, until ``WINDOW`` examples do, which closes the row. So the order is that of ``order`` but
    for examples that come up to ``WINDOW`` rows later. No example may be longer than ``positions``.
    """
    source, waiting = iter(order), list[int]()
    while True:
        chosen, left, room = list[int](), list[int](), positions
        before = iter(waiting)
        for example in itertools.chain(before, source):
            if lengths[example] <= room and len(chosen) < most:
                chosen.append(example)
                room -= lengths[example]
            else:
                left.append(example)
                if len(left) == WINDOW:
                    break
        if not chosen:
            return
        waiting = [*left, *before]
        yield chosen


class PackedSampler(ResumableSampler):
    """Draws rows, as lists of examples, by seed and epoch alone, so that every rank packs the same and takes its share.

    An epoch has as many rows as its tokens would fill without padding, the same number on each rank; packing never
    needs fewer. So every example comes at most once an epoch, and none twice. What is then left is left out of it: at
    most as many tokens as the rows have padding, and less than a row a rank. It is what the order, drawn anew each
    epoch, has last. Not shuffled, every row is drawn, and ranks repeat some where they do not divide.
    """

    def __init__(self, lengths: Sequence[int], *, positions: int, most: int, shuffle: bool, **options: Any) -> None:
        """``lengths`` of the examples, of which a row holds ``positions`` in all, at most ``most`` examples.

        Other options are those of ``ResumableSampler``.
        """
        super().__init__(lengths, batch_size=1, **options)  # type: ignore[arg-type]
        self.lengths, self.positions, self.most, self.shuffle = lengths, positions, most, shuffle
        rows = sum(lengths) // positions if shuffle else -(-len(self.order(0)) // self.num_replicas) * self.num_replicas
        self.num_samples = rows // self.num_replicas
        self.total_size = self.num_samples * self.num_replicas

    def order(self, epoch: int) -> list[Any]:
        examples = super().order(epoch) if self.shuffle else range(len(self.lengths))
        rows = first_fit(examples, self.lengths, positions=self.positions, most=self.most)
        return list(itertools.islice(rows, self.total_size)) if self.shuffle else list(rows)


@dataclass(kw_only=True, slots=True)
class CollatePacked(CollateMasked):
    """Make one row of documents, masked as an unpacked batch of them."""

    positions: int
    """Of the row."""
    sequences: int
    """Of the row, those of padding and empty ones included."""

    def __call__(self, batch: Sequence[Any]) -> MaskedBatch:
        (rows,) = batch
        lengths, tokens_T, targets_T = self.hide(rows)
        longest = self.task.longest()
        whole, rest = divmod(self.positions - len(tokens_T), longest)
        lengths_N = np.zeros(self.sequences, dtype=np.int64)
        filled = [*lengths.tolist(), *[longest] * whole, rest]
        lengths_N[: len(filled)] = filled
        offsets = np.concatenate(([0], lengths_N.cumsum()))
        padding = (0, self.positions - len(tokens_T))
        return MaskedBatch(
            tokens=torch.from_numpy(np.pad(tokens_T, padding, constant_values=PAD)[None]),
            targets=torch.from_numpy(np.pad(targets_T, padding, constant_values=IGNORED)[None]),
            mask=None,
            useful_tokens=len(tokens_T),
            positions=torch.from_numpy((np.arange(self.positions) - np.repeat(offsets[:-1], lengths_N))[None]),
            offsets=torch.from_numpy(offsets.astype(np.int32)),
            documents=len(rows),
            attended=int((lengths_N**2).sum()),
        )


class PackedDataModule(MaskedDataModule):
    """Loads packed rows, in an order that a resumed run continues exactly; in validation in the order of the data."""

    def __init__(self, task: MaskedLM, *, seed: int) -> None:
        super().__init__(task, seed=seed)
        self.batch_size = 1  # a row

    def collation(self) -> Callable[[list[Any]], Any]:
        """Fit the row: positions of ``task.data.batch_size`` documents of mean length, and at most twice as many
        documents. Raises ValueError where ranks get no row."""
        if isinstance(self.trainer, L.Trainer):
            warn_without_kernel(self.trainer.strategy.root_device, str(self.trainer.precision), self.task.network)
        data, lengths, longest = self.task.data, self.train_set.lengths, self.train_set.positions
        positions = -(-max(int(lengths.mean() * data.batch_size), longest) // MULTIPLE) * MULTIPLE
        replicas, total = self._replicas()[0], int(lengths.sum())
        if total < positions * replicas:
            raise ValueError(
                f"task.data.packing=packed_documents: a row of {positions} positions on each of {replicas} devices is "
                f"more than the {total:,} training tokens (task.data.batch_size)"
            )
        most = 2 * -(-positions // int(lengths.mean()))
        self._row = {"positions": positions, "most": most}
        return CollatePacked(
            seed=self.seed,
            token_count=self.tokenizer.get_vocab_size(),
            task=self.task,
            positions=positions,
            sequences=most + positions // longest + 1,
        )

    def sampler(self, data: TextDataset, *, shuffle: bool) -> PackedSampler:
        replicas, rank = self._replicas()
        options = {**self._row, "num_replicas": replicas, "rank": rank, "seed": self.seed}
        return PackedSampler(data.lengths.tolist(), shuffle=shuffle, **options)


# ---- attention -------------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(device_index: int, head_width: int) -> bool:
    """Whether torch's variable-length attention runs on this CUDA device, from Ampere on, with heads this wide."""
    capable = torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (8, 0)
    return capable and head_width % 8 == 0 and head_width <= 256


def warn_without_kernel(device: torch.device, precision: str, network: Any) -> None:
    """Print a warning where a training of ``network`` on a GPU does without that kernel."""
    width = network.width // network.heads
    if device.type == "cuda" and not ("16" in precision and has_kernel(device.index, width)):
        print(
            "warning: task.data.packing=packed_documents: documents attend as padded rows, slower. torch's "
            "variable-length attention needs bf16 or fp16, a GPU from Ampere on, and heads of 8, 16, ... or 256 "
            f"features; here are {precision}, {torch.cuda.get_device_name(device)}, {width}",
            file=sys.stderr,
        )


def fits_kernel(query_key_value: Tensor, heads: int) -> bool:
    """Whether torch's variable-length attention takes these: in half precision, on a device that has it."""
    if not query_key_value.is_cuda or query_key_value.dtype not in (torch.bfloat16, torch.float16):
        return False
    return has_kernel(query_key_value.device.index, query_key_value.shape[-1] // 3 // heads)


def attend_packed(query_key_value_1TE: Tensor, heads: int, offsets_N: Tensor, *, longest: int) -> Tensor:
    """Self-attention [1, T, D] within each of the sequences that begin at int32 ``offsets_N`` and end at the next one.

    ``longest``: positions that no sequence has more of. Where the kernel does not run, sequences are laid out as padded
    rows, [N, S, E], and attend under a mask: the same results, from some times the work.
    """
    if fits_kernel(query_key_value_1TE, heads):
        query_THK, key_THK, value_THK = (
            part_TD.unflatten(-1, (heads, -1)) for part_TD in query_key_value_1TE[0].chunk(3, dim=-1)
        )
        mixed_THK = varlen_attn(query_THK, key_THK, value_THK, offsets_N, offsets_N, longest, longest)
        assert isinstance(mixed_THK, Tensor)
        return mixed_THK.flatten(1)[None]
    positions = query_key_value_1TE.shape[1]
    ends_N, begins_N = offsets_N[1:], offsets_N[:-1]
    at_S = torch.arange(longest, device=offsets_N.device, dtype=offsets_N.dtype)
    at_T = torch.arange(positions, device=offsets_N.device, dtype=offsets_N.dtype)
    rows_NS = begins_N[:, None] + at_S
    # An empty sequence attends to one position, of another: softmax over none has no gradient. Nobody reads its result.
    mask_NS = (rows_NS < ends_N[:, None]) | (at_S == 0)
    rows_NSE = query_key_value_1TE[0][rows_NS.clamp(max=positions - 1)]
    mixed_NSD = attend(rows_NSE, heads, mask_B11S=mask_NS[:, None, None])
    sequence_T = torch.searchsorted(ends_N, at_T, right=True)
    return mixed_NSD[sequence_T, at_T - begins_N[sequence_T]][None]
