"""TransformersNetwork: any causal language model that the transformers library defines, with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.checks import near
from tasks.language_network import LanguageNetwork

if TYPE_CHECKING:
    from torch import nn

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
        from tasks.models.transformers_net import TransformersNet

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
        from tasks.models.transformers_net import counted_flops

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
                + near(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            )
        kind = CONFIG_MAPPING[model_type]
        known = kind().to_dict()
        for name in self.overrides:
            if name not in known and not hasattr(kind, name) and name not in getattr(kind, "attribute_map", {}):
                raise ValueError(f"task.network.overrides.{name} is not an option of {model_type}{near(name, known)}")
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
