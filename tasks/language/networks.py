"""Networks of language tasks: dimensions of GPT-2, of the Llama family and of BERT, and the transformers library's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.base import require_fields, require_multiple, require_share, suggest

if TYPE_CHECKING:
    from torch import nn


@dataclass(kw_only=True, slots=True)
class LanguageNetwork:
    """Base of every network that predicts the next token."""

    def limits(self) -> tuple[int, int]:
        """(outputs of the head, most positions). Raises ValueError for a network that cannot be built."""
        raise NotImplementedError

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build the network; its weights are drawn from torch's global generator."""
        raise NotImplementedError

    def learning_rate(self) -> float:
        """The highest learning rate where none is given."""
        raise NotImplementedError

    def blocks(self) -> tuple[str, ...]:
        """Containers of repeated blocks, as paths within the network."""
        return ("blocks",)

    def parts(self) -> tuple[str, ...]:
        """Other submodules worth a region of their own."""
        return ("tail",)

    def has_experts(self) -> bool:
        """Whether tokens are routed by their values, so that operations are not known without them."""
        return False


@dataclass(kw_only=True, slots=True)
class Dimensions:
    """What the networks defined here have in common."""

    least: ClassVar[tuple[int, int]] = (259, 2)
    """Of vocabulary_size and max_tokens."""

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
        vocabulary_size, max_tokens = self.least
        require_fields("task.network", self, layers=1, width=1, heads=1)
        require_fields("task.network", self, vocabulary_size=vocabulary_size, max_tokens=max_tokens)
        require_multiple("task.network.width", self.width, "task.network.heads", self.heads)

    def limits(self) -> tuple[int, int]:
        return self.vocabulary_size, self.max_tokens

    def learning_rate(self) -> float:
        """2.6e-4 for GPT-2: Adam's best rate falls with the width (https://arxiv.org/abs/2203.03466)."""
        return 0.2 / self.width


@dataclass(kw_only=True, slots=True)
class Gpt2Network(Dimensions, LanguageNetwork):
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
class LlamaNetwork(Dimensions, LanguageNetwork):
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

    least: ClassVar[tuple[int, int]] = (260, 3)

    dropout: float = 0.0
    """Share of activations and attention weights dropped in training."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        require_share("task.network.dropout", self.dropout, below_one=True)

    @property
    def mask_token(self) -> int:
        return self.vocabulary_size - 1

    def learning_rate(self) -> float:
        """The original's 1e-4 for base; Adam's best rate falls with the width."""
        return 0.0768 / self.width


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The library's names for the number of experts."""
UNLIMITED = 2048
"""Positions where a network's configuration names no most."""


@dataclass(kw_only=True, slots=True)
class TransformersNetwork(LanguageNetwork):
    """A causal language model of transformers (``pip install -e '.[models]'``), built from its configuration.

    Nothing is ever downloaded; weights are random.
    """

    config: str = ""
    """A ``config.json`` as models are published with, or the folder that holds it."""
    model_type: str = ""
    """Instead of a file: the library's name of an architecture (``qwen2``, ``mistral``), at its default dimensions."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Options of that configuration by the library's names: ``{num_hidden_layers: 2, hidden_size: 128}``."""
    attention: str | None = None
    """The library's ``attn_implementation``; None: its own choice, ``sdpa`` where the architecture has it."""

    def limits(self) -> tuple[int, int]:
        """Vocabulary and positions of the configuration. Raises ValueError for one that cannot be read."""
        config = self.library_config()
        text = config.get_text_config()
        most = getattr(text, "max_position_embeddings", None)
        return text.vocab_size, most if isinstance(most, int) and most > 0 else UNLIMITED

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build a ``TransformersNet``. Raises ValueError, naming the option, for what the library refuses."""
        from tasks.language.model import TransformersNet

        if loss_chunks != 1:
            raise ValueError(
                f"task.loss_chunks={loss_chunks} must be 1 for task/network=transformers: the library's networks "
                "return all logits at once"
            )
        return TransformersNet(self.library_config(), attention=self.attention)

    def learning_rate(self) -> float:
        width = getattr(self.library_config().get_text_config(), "hidden_size", None)
        return 0.2 / width if isinstance(width, int) and width > 0 else 3e-4

    def blocks(self) -> tuple[str, ...]:
        """None declared: ``regional`` finds them."""
        return ()

    def parts(self) -> tuple[str, ...]:
        """The loss; final norm and head lie within the library's code."""
        return ("loss",)

    def has_experts(self) -> bool:
        config = self.library_config()
        return any((getattr(config, name, None) or 1) > 1 for name in EXPERTS)

    def library_config(self) -> Any:
        """The library's configuration object. Raises ValueError, in one line, for whatever is wrong with it."""
        try:
            from transformers import CONFIG_MAPPING
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        except ImportError as error:
            raise ValueError(
                f"task/network=transformers needs the transformers package ({error}): pip install -e '.[models]'"
            ) from None
        if bool(self.config) == bool(self.model_type):
            raise ValueError(
                f"task.network.config={self.config!r} and task.network.model_type={self.model_type!r}: give one of them"
            )
        option, values = "task.network.model_type", {}
        model_type = self.model_type
        if self.config:
            option, values = "task.network.config", _read(Path(self.config))
            model_type = str(values.get("model_type", ""))
        if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(
                f"{option}: {model_type!r} is not a causal language model of this transformers"
                + suggest(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            )
        kind = CONFIG_MAPPING[model_type]
        known = kind().to_dict()
        for name in self.overrides:
            if name not in known and not hasattr(kind, name) and name not in getattr(kind, "attribute_map", {}):
                raise ValueError(
                    f"task.network.overrides.{name} is not an option of {model_type}{suggest(name, known)}"
                )
        try:
            config = kind.from_dict({**values, **dict(self.overrides)})
        except Exception as error:  # each architecture checks in a way of its own
            raise ValueError(f"{option}: {model_type}: {' '.join(str(error).split())}") from None
        config.use_cache = False  # kept keys and values are of no use to a training
        if getattr(config, "is_decoder", None) is False:
            config.is_decoder = True  # BERT and its kind see later positions otherwise
        return config


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"task.network.config={str(path)!r}: {file} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"task.network.config={str(path)!r}: {file} is not JSON ({error})") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"task.network.config={str(path)!r}: {file} names no model_type")
    return values
