"""Language networks: dimensions of GPT-2 and of the Llama family, and the arithmetic that they imply."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.base import require_at_least, require_multiple, require_share, suggest

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

    def flops(self, *, rows: int, positions: int) -> int | None:
        """Floating-point operations of a forward pass: matrix products, 2 for each multiply-add.

        Causal attention counts in full, as ``torch.utils.flop_counter`` counts it and as PaLM's appendix B does
        (https://arxiv.org/abs/2204.02311): kernels compute about half of that square. None: not known.
        """
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class Gpt2Network(LanguageNetwork):
    """Dimensions of GPT-2. MLPs are four widths wide; the head shares the embedding's weight."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Width of a position."""
    heads: int = 2
    """Attention heads."""
    vocabulary_size: int = 1024
    """Outputs of the head, and the most tokens that the tokenizer learns; 259 are the bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""
    dropout: float = 0.0
    """Share of activations dropped in training; 0.1 in the original."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        require_dimensions(self, "layers", "width", "heads")
        require_share("task.network.dropout", self.dropout, below_one=True)
        require_multiple("task.network.width", self.width, "task.network.heads", self.heads)

    def limits(self) -> tuple[int, int]:
        """As given."""
        return self.vocabulary_size, self.max_tokens

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build a ``Gpt2``."""
        from tasks.language.model import Gpt2

        return Gpt2(**asdict(self), loss_chunks=loss_chunks)

    def learning_rate(self) -> float:
        """About 3e-3 for the smallest and 2.6e-4 for GPT-2: Adam's best rate falls with the width."""
        return 0.2 / self.width

    def flops(self, *, rows: int, positions: int) -> int:
        """Query, key, value and output take 4 squares of the width a position, the MLP 8."""
        block = 12 * positions * self.width**2 + 2 * positions**2 * self.width
        head = positions * self.width * self.vocabulary_size
        return 2 * rows * (self.layers * block + head)


@dataclass(kw_only=True, slots=True)
class LlamaNetwork(LanguageNetwork):
    """Dimensions of the Llama family. The head has a weight of its own."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Width of a position."""
    heads: int = 4
    """Query heads."""
    key_value_heads: int = 2
    """Key and value heads, each shared by as many query heads as there are for one; ``heads``: nothing is shared."""
    hidden_width: int = 176
    """Hidden features of an MLP."""
    vocabulary_size: int = 1024
    """Outputs of the head, and the most tokens that the tokenizer learns; 259 are the bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""
    rotary_base: float = 10000.0
    """Wavelength of the slowest rotary position; 500000 from Llama 3 on."""
    norm_epsilon: float = 1e-5
    """What RMSNorm adds to the mean square."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        require_dimensions(self, "layers", "width", "heads", "key_value_heads", "hidden_width", "rotary_base")
        require_at_least("task.network.norm_epsilon", self.norm_epsilon, 0)
        require_multiple("task.network.width", self.width, "2 x task.network.heads", 2 * self.heads)
        require_multiple("task.network.heads", self.heads, "task.network.key_value_heads", self.key_value_heads)

    def limits(self) -> tuple[int, int]:
        """As given."""
        return self.vocabulary_size, self.max_tokens

    def build(self, *, loss_chunks: int) -> nn.Module:
        """Build a ``Llama``."""
        from tasks.language.model import Llama

        return Llama(**asdict(self), loss_chunks=loss_chunks)

    def learning_rate(self) -> float:
        """About 3e-3 for the smallest and 5e-5 for 7B: Adam's best rate falls with the width."""
        return 0.2 / self.width

    def flops(self, *, rows: int, positions: int) -> int:
        """Query and output take 2 squares of the width a position, keys and values less where they are shared."""
        shared = self.width * self.width // self.heads * self.key_value_heads
        projections = 2 * self.width**2 + 2 * shared + 3 * self.width * self.hidden_width
        block = positions * projections + 2 * positions**2 * self.width
        head = positions * self.width * self.vocabulary_size
        return 2 * rows * (self.layers * block + head)


def require_dimensions(network: Gpt2Network | LlamaNetwork, *names: str) -> None:
    """Raise ValueError for a dimension that is too small."""
    for name in names:
        require_at_least(f"task.network.{name}", getattr(network, name), 1)
    require_at_least("task.network.vocabulary_size", network.vocabulary_size, 259)
    require_at_least("task.network.max_tokens", network.max_tokens, 2)


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
        from tasks.language.transformers_net import TransformersNet

        if loss_chunks != 1:
            raise ValueError(
                f"task.loss_chunks={loss_chunks} must be 1 for task/network=transformers: the library's networks "
                "return all logits at once"
            )
        return TransformersNet(self.library_config(), attention=self.attention)

    def learning_rate(self) -> float:
        """As of other networks of this width."""
        width = getattr(self.library_config().get_text_config(), "hidden_size", None)
        return 0.2 / width if isinstance(width, int) and width > 0 else 3e-4

    def blocks(self) -> tuple[str, ...]:
        """None declared: ``regional`` finds them."""
        return ()

    def parts(self) -> tuple[str, ...]:
        """The loss; final norm and head lie within the library's code."""
        return ("loss",)

    def flops(self, *, rows: int, positions: int) -> int | None:
        """Counted on a network without memory at two lengths: a part is proportional to the positions, the rest to
        their square. None for one that cannot be counted so, as one that routes tokens to experts."""
        from tasks.language.transformers_net import counted_flops

        config = self.library_config()
        if any((getattr(config, name, None) or 1) > 1 for name in EXPERTS):
            return None
        options = json.dumps(config.to_dict(), default=str, sort_keys=True)
        linear_quadratic = counted_flops(options, self.attention)
        if linear_quadratic is None:
            return None
        linear, quadratic = linear_quadratic
        return round(rows * (linear * positions + quadratic * positions**2))

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
                f"{option}: {model_type!r} is no causal language model of this transformers"
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


@dataclass(kw_only=True, slots=True)
class BertNetwork:
    """Dimensions of a BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805). MLPs are four widths wide."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Features of a position."""
    heads: int = 2
    """Attention heads."""
    vocabulary_size: int = 1024
    """Outputs of the head. The last one is the mask's token, so that the tokenizer learns at most one less; 259 are the
    bytes and the special tokens."""
    max_tokens: int = 128
    """Most positions."""
    dropout: float = 0.0
    """Share of activations and attention weights dropped in training."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range or at odds with each other."""
        for name in ("layers", "width", "heads"):
            require_at_least(f"task.network.{name}", getattr(self, name), 1)
        require_at_least("task.network.vocabulary_size", self.vocabulary_size, 260)
        require_at_least("task.network.max_tokens", self.max_tokens, 3)
        require_share("task.network.dropout", self.dropout, below_one=True)
        require_multiple("task.network.width", self.width, "task.network.heads", self.heads)

    @property
    def mask_token(self) -> int:
        """Id of the token that stands for a masked one."""
        return self.vocabulary_size - 1

    def flops(self, *, rows: int, positions: int) -> int:
        """Floating-point operations of the matrix products of one forward, 2 for each multiply-add.

        The head is computed at every position, not only where tokens are masked; padding counts.
        """
        block = 12 * positions * self.width**2 + 2 * positions**2 * self.width
        head = positions * self.width * (self.width + self.vocabulary_size)
        return 2 * rows * (self.layers * block + head)
