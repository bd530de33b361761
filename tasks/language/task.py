"""Language tasks: predict the next token of a text (GPT-2, Llama), or hidden ones from those around them (BERT).

Text is Python's standard library, text files or JSON lines.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import (
    BatchCounts,
    Declaration,
    Loading,
    TrainedTask,
    held_out,
    require_at_least,
    require_choice,
    require_fields,
    require_multiple,
    require_share,
)

if TYPE_CHECKING:
    import lightning
    from torch import Tensor, nn

    from tasks.module import ScoredModule


PACKINGS = ("packed", "documents")
Named = Iterable[tuple[str, str]]
"""Name and text of each document; the name decides on which side it falls."""


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
        Loading.__post_init__(self)
        require_choice("task.data.packing", self.packing, PACKINGS)
        require_fields("task.data", self, max_tokens=2, pad_to=2, max_documents=2)
        require_share("task.data.val_share", self.val_share, below_one=True)
        if self.pad_to is not None and self.packing == "packed":
            raise ValueError(f"task.data.pad_to={self.pad_to} needs task.data.packing=documents: packed rows are full")

    def read(self) -> tuple[Named, Named | None]:
        """Training documents, and validation documents where the user names some; None: a share is held out.

        Raises ValueError, naming the file, for a source that cannot be used.
        """
        raise NotImplementedError

    def place(self) -> str:
        """Where the documents come from, for messages."""
        raise NotImplementedError

    def documents(self) -> tuple[list[str], list[str]]:
        """Training and validation documents, one text each, the same ones in every run; blank ones are left out.

        Raises ValueError, naming the file, for a source that cannot be used, and for too little text on a side.
        """
        given = self.read()
        named, val_named = (
            [(name, text) for name, text in itertools.islice(side or (), self.max_documents) if text.strip()]
            for side in given
        )
        train, val = [text for _, text in named], [text for _, text in val_named]
        if given[1] is None and len(train) == 1:
            at = min(max(1, round(len(train[0]) * (1 - self.val_share))), len(train[0]) - 1)
            train, val = [train[0][:at]], [train[0][at:]]
        elif given[1] is None:
            held = held_out({name: name for name, _ in named}, share=self.val_share)
            train, val = ([text for name, text in named if (name in held) is out] for out in (False, True))
        if not any(train) or not any(val):
            raise ValueError(f"{self.place()} holds too little text to train on and to validate")
        return train, val


def read_text(file: Path) -> str:
    """Read UTF-8, with a byte order mark or without; line ends become newlines. Raises ValueError, naming the file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text ({error})") from None


@dataclass(kw_only=True, slots=True)
class TextFiles(TextData):
    """UTF-8 files: of text, a document each, and of JSON lines (``.jsonl``), a document a line."""

    path: str = ""
    """A file, a folder (its ``.txt`` and ``.jsonl`` files at any depth), or a pattern such as ``/data/**/*.md``."""
    key: str = "text"
    """Key of the text within the object of a JSON line."""
    val_path: str = ""
    """Validation text, as ``path``; empty: a share of the documents is held out."""

    def __post_init__(self) -> None:
        TextData.__post_init__(self)
        if not self.path:
            raise ValueError("task.data.path='' must name a text file, a folder or a pattern")

    def read(self) -> tuple[Named, Named | None]:
        val = self._documents("task.data.val_path", self.val_path) if self.val_path else None
        return self._documents("task.data.path", self.path), val

    def place(self) -> str:
        return self.path

    def _documents(self, option: str, path: str) -> Iterator[tuple[str, str]]:
        """Documents, named by their path below the folder or the part of the pattern without wildcards."""
        root = Path(path)
        if root.is_dir():
            files = sorted(file for file in root.rglob("*") if file.suffix in (".txt", ".jsonl") and file.is_file())
        else:
            files = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
            while glob.has_magic(str(root)) or root == Path(path):
                root = root.parent
        if not files:
            raise ValueError(f"{option}={path!r} is not a file, a folder with .txt or .jsonl files, or a pattern")
        for file in files:
            name, text = file.relative_to(root).as_posix(), read_text(file)
            if file.suffix != ".jsonl":
                yield name, text
                continue
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield f"{name}:{number}", self._of_line(line, f"{file} line {number}")

    def _of_line(self, line: str, place: str) -> str:
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is not JSON ({error})") from None
        text = item.get(self.key) if isinstance(item, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{place} has no text under the key {self.key!r} (task.data.key)")
        return text


DEFINITION = re.compile(r"^(?:@[^\n]*\n)*(?:async def |def |class )", re.MULTILINE)
"""A function or class at the left margin, with its decorators."""
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(kw_only=True, slots=True)
class Stdlib(TextData):
    """Python's standard library as it is installed here: some 13 MB, which differ from one Python to the next.

    A document is a top-level function or class; the code before a file's first one is a document too.
    """

    def read(self) -> tuple[Named, Named | None]:
        return self._documents(), None

    def place(self) -> str:
        return "Python's standard library"

    def _documents(self) -> Iterator[tuple[str, str]]:
        """Documents, file by file in the order of a hash of their paths, so that a few are a fair sample."""
        folder = Path(sysconfig.get_path("stdlib"))
        relative = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
        names = [name for name in relative if not LEFT_OUT.intersection(name.split("/")[:-1])]
        if not names:
            raise ValueError(f"{folder} holds no Python sources; take task/data=text")
        names.sort(key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
        for name in names:
            with contextlib.suppress(ValueError):  # a few are not UTF-8
                for number, part in enumerate(definitions(read_text(relative[name]))):
                    yield f"{name}:{number}", part


def definitions(text: str) -> list[str]:
    """A Python source in pieces, which joined are the whole but for blank ones."""
    starts = [match.start() for match in DEFINITION.finditer(text)]
    edges = [0, *(start for start in starts if start), len(text)]
    return [part for begin, end in itertools.pairwise(edges) if (part := text[begin:end]).strip()]


@dataclass(kw_only=True, slots=True)
class Dimensions:
    """What the networks defined here have in common."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Features of a position."""
    heads: int = 2
    """Attention heads."""
    vocabulary_size: int = 1024
    """Outputs of the head, and the most tokens that the tokenizer learns; 259 are the bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""

    def __post_init__(self) -> None:
        require_fields("task.network", self, layers=1, width=1, heads=1, vocabulary_size=259, max_tokens=2)
        require_multiple("task.network.width", self.width, "task.network.heads", self.heads)

    def learning_rate(self) -> float:
        """2.6e-4 for GPT-2: Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        return 0.2 / self.width


@dataclass(kw_only=True, slots=True)
class LanguageNetwork(Dimensions):
    """Base of every network that predicts the next token."""

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build the network; its weights are drawn from torch's global generator."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class Gpt2Network(LanguageNetwork):
    """Dimensions of GPT-2. MLPs are four widths wide; the head shares the embedding's weight."""

    dropout: float = 0.0
    """Share of activations dropped in training; 0.1 in the original."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_share("task.network.dropout", self.dropout, below_one=True)

    def build(self, *, loss_chunks: int) -> nn.Module:
        from tasks.language.model import Gpt2

        return Gpt2(self, loss_chunks=loss_chunks)


@dataclass(kw_only=True, slots=True)
class LlamaNetwork(LanguageNetwork):
    """Dimensions of the Llama family. The head has a weight of its own."""

    heads: int = 4
    """Query heads."""
    key_value_heads: int = 2
    """Key and value heads, each shared by as many query heads as there are for one; ``heads``: nothing is shared."""
    hidden_width: int = 176
    """Hidden features of an MLP."""
    rotary_base: float = 10000.0
    """Wavelength of the slowest rotary position; 500000 from Llama 3 on."""
    norm_epsilon: float = 1e-5
    """What RMSNorm adds to the mean square."""

    def __post_init__(self) -> None:
        require_fields("task.network", self, heads=1, key_value_heads=1, hidden_width=1, rotary_base=1, norm_epsilon=0)
        require_multiple("task.network.width", self.width, "2 x task.network.heads", 2 * self.heads)
        require_multiple("task.network.heads", self.heads, "task.network.key_value_heads", self.key_value_heads)
        Dimensions.__post_init__(self)

    def build(self, *, loss_chunks: int) -> nn.Module:
        from tasks.language.model import Llama

        return Llama(self, loss_chunks=loss_chunks)


@dataclass(kw_only=True, slots=True)
class BertNetwork(Dimensions):
    """Dimensions of a BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805). MLPs are four widths wide.

    The last output of the head is the mask's token, so that the tokenizer learns at most ``vocabulary_size - 1``.
    """

    dropout: float = 0.0
    """Share of activations and attention weights dropped in training."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_fields("task.network", self, vocabulary_size=260)
        require_share("task.network.dropout", self.dropout, below_one=True)

    @property
    def mask_token(self) -> int:
        return self.vocabulary_size - 1

    def learning_rate(self) -> float:
        """The original's 1e-4 for base; Adam's best rate falls with the width."""
        return 0.0768 / self.width


@dataclass(kw_only=True, slots=True)
class TextTask(TrainedTask):
    """Base of the tasks over text."""

    monitor: ClassVar[str | None] = "val/loss"
    embeds: ClassVar[bool] = True
    extra: ClassVar[int] = 1
    """Tokens of a row beyond the positions that the network computes."""

    network: Dimensions = field(default_factory=Dimensions)
    """The network."""
    data: TextData = field(default_factory=TextData)
    """Text: the embedded standard library (also where only the base is given), text files or JSON lines."""

    def __post_init__(self) -> None:
        if type(self.data) is TextData:
            # The default is the bare base because OmegaConf lets a subclass replace the base, never another subclass.
            self.data = Stdlib(**asdict(self.data))
        TrainedTask.__post_init__(self)
        for name in ("max_tokens", "pad_to"):
            value, most = getattr(self.data, name), self.max_positions()
            if value is not None and value > most:
                raise ValueError(f"task.data.{name}={value} must be at most task.network.max_tokens={most}")

    def default_learning_rate(self) -> float:
        return self.network.learning_rate()

    def max_positions(self) -> int:
        return self.network.max_tokens

    def count(self, batch: Any) -> BatchCounts:
        rows, positions = batch.tokens.shape[0], batch.tokens.shape[1] - self.extra
        return BatchCounts(samples=rows, tokens=rows * positions, useful_tokens=batch.useful_tokens)

    def ragged(self, *fields: tuple[str, int, float, int]) -> tuple[tuple[str, int, float, int], ...]:
        """``fields`` where rows are documents: packed ones are not ragged."""
        return fields if self.data.packing == "documents" else ()


@dataclass(kw_only=True, slots=True)
class LanguageModelling(TextTask):
    """Next-token prediction over text."""

    name: ClassVar[str] = "language_modelling"

    loss_chunks: int = 1
    """Pieces of the positions whose logits are in memory at once in training; those of more than one are computed
    again in backward, which costs another product with the head."""
    network: LanguageNetwork = field(default_factory=LanguageNetwork)
    """The network; the smallest GPT-2 where only the base is given."""

    def __post_init__(self) -> None:
        if type(self.network) is LanguageNetwork:  # the bare base as of the data
            self.network = Gpt2Network()
        TextTask.__post_init__(self)
        require_at_least("task.loss_chunks", self.loss_chunks, 1)

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.language.data import TextDataModule

        return TextDataModule(self, vocabulary_size=self.network.vocabulary_size, seed=seed)

    def build_net(self) -> nn.Module:
        return self.network.build(loss_chunks=self.loss_chunks)

    def module_class(self) -> type[ScoredModule]:
        from tasks.language.model import LanguageModel

        return LanguageModel

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with the loss apart."""
        from tasks.loading import PAD

        # The model reads all tokens but the last and predicts all but the first.
        ragged = self.ragged(("tokens", 1, PAD, 1))
        return Declaration(whole=("net",), blocks=("net.blocks",), parts=("net.tail",), ragged=ragged)

    def example(self, rows: int, positions: int) -> tuple[Tensor, Tensor]:
        import torch

        tokens = torch.zeros(rows, positions, dtype=torch.long)
        return tokens, tokens

    def counted_net(self) -> nn.Module:
        """What is computed again in backward (``loss_chunks``) does not count: it brings the training no further."""
        return self.network.build(loss_chunks=1)


@dataclass(kw_only=True, slots=True)
class MaskedLM(TextTask):
    """BERT's masked tokens, hidden anew in every epoch; see ``tasks/language/data.py``."""

    name: ClassVar[str] = "masked_lm"
    extra: ClassVar[int] = 0

    masked_share: float = 0.15
    """Share of a row's tokens to predict, rounded, at least one: of them 80% show the mask, 10% a random token and 10%
    themselves."""
    network: BertNetwork = field(default_factory=BertNetwork)
    """Dimensions of the network."""
    data: TextData = field(default_factory=lambda: TextData(packing="documents"))
    """Text: the embedded standard library (also where only the base is given), text files or JSON lines."""

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        if not 0 < self.masked_share < 1:
            raise ValueError(f"task.masked_share={self.masked_share} must be above 0 and below 1")

    def build_data(self, *, seed: int) -> lightning.LightningDataModule:
        from tasks.language.data import MaskedDataModule

        return MaskedDataModule(self, vocabulary_size=self.network.mask_token, seed=seed)

    def build_net(self) -> nn.Module:
        from tasks.language.model import Bert

        return Bert(self.network)

    def module_class(self) -> type[ScoredModule]:
        from tasks.language.model import MaskedModule

        return MaskedModule

    def declare(self) -> Declaration:
        """One graph for the whole network with its loss; or its blocks, with embedding and loss apart."""
        from tasks.loading import PAD
        from tasks.module import IGNORED

        ragged = self.ragged(("tokens", 1, PAD, 0), ("targets", 1, IGNORED, 0), ("mask", 1, False, 0))
        return Declaration(whole=("net",), blocks=("net.blocks",), parts=("net.embed", "net.tail"), ragged=ragged)

    def example(self, rows: int, positions: int) -> tuple[Tensor | None, ...]:
        """The head is computed at every position, not only where tokens are masked."""
        import torch

        tokens = torch.zeros(rows, positions, dtype=torch.long)
        return tokens, None, tokens
