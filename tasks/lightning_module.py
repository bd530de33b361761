"""The LightningModule around every network here: its start-up, its validation, its recipe; and its operations, counted.

Layers draw their weights as they are made: a host takes seconds for a few hundred million of them and minutes for
billions, a GPU milliseconds. So networks are built without memory, and once more where they will be used.

Of operations, matrix products and convolutions count, 2 for each multiply-add; causal attention counts in full, and
nothing that a kernel computes again counts twice: the convention of ``torch.utils.flop_counter`` and of PaLM's
appendix B (https://arxiv.org/abs/2204.02311).

The layers and scores that networks share are below. Shape letters: B batch, S positions, N positions of a context,
D width, H heads, K head width or classes, T targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.special_tokens import IGNORED

LARGE = 1_000_000_000
"""Parameters from which on weights are drawn on the device whatever it is: a host takes minutes for them."""
BETAS = (0.9, 0.98)
"""Adam's decay of its two running means."""
FINAL = 0.05
"""Learning rate at the last step, as a share of the highest."""
LONGEST_COUNTED = 128
"""Positions of the longest of three examples, from which those of all other lengths follow."""
EXAMPLES = 2
"""In a batch that is counted, of examples without positions: batch norm refuses a single one."""
_counted: dict[str, tuple[int, int, int] | None] = {}
"""Operations by task."""


class Recipe(Protocol):
    """What is read here of a task, which is a ``tasks.base.TrainedTask``: that says what the members mean."""

    accuracy: ClassVar[str]
    derives: ClassVar[bool]
    embeds: ClassVar[bool]
    inputs: ClassVar[tuple[str, ...]]
    initialise: str
    learning_rate: float | None
    warmup_steps: int
    weight_decay: float

    def build_net(self) -> nn.Module: ...

    def counted_net(self) -> nn.Module: ...

    def default_learning_rate(self) -> float: ...

    def example(self, rows: int, positions: int) -> tuple[Tensor | None, ...]: ...

    def max_positions(self) -> int | None: ...


class ScoredModule(L.LightningModule):
    """Trains ``net``, which may be without memory until ``configure_model``, by the recipe.

    ``net`` returns the ``Scores`` of ``tasks.lightning_module`` for what ``task.inputs`` names of a batch. Validation
    logs ``val/loss`` and the share of right predictions, once.
    """

    def __init__(self, task: Recipe, *, max_steps: int) -> None:
        """Build the network of ``task``; its weights come now, or in ``configure_model`` on the device under the seed
        that torch has now, see ``start``. ``max_steps``: length of the schedule in optimizer steps."""
        super().__init__()
        self.net = start(task.build_net, task.initialise)
        self._task, self._max_steps, self._seed = task, max_steps, torch.initial_seed()
        self._sums: Tensor | None = None
        self._large = is_large(self.net)

    def configure_model(self) -> None:
        """Draw the weights on the device, once. Lightning calls it after ``setup`` and before it loads a checkpoint."""
        if not is_on_meta(self.net):
            return
        device = self.trainer.strategy.root_device
        # The run's random numbers are left alone.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(self._seed)
            self.net = self._task.build_net()

    def cpu(self) -> Self:
        """Stay as it is where the weights are not drawn yet. Lightning tidies up by this call when ``setup`` has
        refused to train, and torch's error would take the place of the refusal."""
        return self if is_on_meta(self.net) else super().cpu()

    def scores(self, batch: Any) -> Scores:
        """Mean loss, right predictions and targets of ``batch``, 0-D; the last two are None in training mode."""
        inputs = [getattr(batch, name) for name in self._task.inputs]
        if not self._task.derives or torch.is_grad_enabled():
            return self.net(*inputs)
        with torch.enable_grad():  # the network takes a gradient in evaluations, too
            loss, correct, count = self.net(*inputs)
        return tuple(None if one is None else one.detach() for one in (loss, correct, count))  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean loss, 0-D. Logs nothing: one ``self.log`` costs more than a small step."""
        return self.scores(batch)[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Free the gradients of a large network as soon as they are used.

        Lightning does so after the next forward, whose activations would have to fit beside them: 4 bytes a parameter.
        """
        if self._large and self.trainer.accumulate_grad_batches == 1:
            self.zero_grad(set_to_none=True)

    def on_validation_epoch_start(self) -> None:
        self._sums = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add up loss, right predictions and targets on the device."""
        loss, correct, count = self.scores(batch)
        assert correct is not None, "validation runs in eval mode"
        assert count is not None
        # float64: float32 counts exactly to 16.7 million only. MPS has none.
        precise = torch.float32 if loss.device.type == "mps" else torch.float64
        # A batch without a target has no mean loss (nan) and weighs nothing.
        weighted = torch.where(count > 0, loss.to(precise), 0.0) * count
        sums = torch.stack((weighted, correct.to(precise), count.to(precise)))
        self._sums = sums if self._sums is None else self._sums + sums

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` and the accuracy over all ranks."""
        if self._sums is None:
            return
        # The sums are added over ranks before dividing: a rank with more targets weighs more.
        loss_sum, correct, count = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.log("val/loss", (loss_sum / count).float(), sync_dist=True)
        self.log(self._task.accuracy, (correct / count).float(), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over what is trainable, fused where it can be; biases and norms (tensors of fewer than two dimensions)
        do not decay. Its schedule, a linear warm-up and a cosine, moves by step."""
        task = self._task
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": task.weight_decay},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
        # One fused kernel takes parameters of one kind of device.
        can_fuse = {parameter.device.type for parameter in trainable} in ({"cuda"}, {"cpu"})
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=task.default_learning_rate() if task.learning_rate is None else task.learning_rate,
            betas=BETAS,
            fused=can_fuse or None,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _learning_rate_share(self, step: int) -> float:
        """Learning rate at ``step`` as a share of the highest."""
        warmup_steps = min(self._task.warmup_steps, self._max_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, self._max_steps - warmup_steps))
        return FINAL + (1.0 - FINAL) * 0.5 * (1.0 + math.cos(math.pi * progress))


def start(build: Callable[[], nn.Module], initialise: str) -> nn.Module:
    """The network of ``build`` with its weights, or without memory where it is built once more, on the device: see
    ``TrainedTask.initialise``. Raises what ``build`` raises."""
    if initialise == "host":
        return build()
    try:
        net = on_meta(build)
    except Exception:  # constructors that compute with their tensors fail in ways of their own
        return build()  # raises again what has nothing to do with memory
    return net if torch.cuda.is_available() or is_large(net) else build()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose tensors have shapes but no memory; draws no random numbers."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build()


def is_large(net: nn.Module) -> bool:
    """Whether ``net`` has ``LARGE`` parameters or more."""
    return sum(parameter.numel() for parameter in net.parameters()) >= LARGE


def is_on_meta(net: nn.Module) -> bool:
    return any(tensor.is_meta for tensors in (net.parameters(), net.buffers()) for tensor in tensors)


def operations(task: Recipe) -> tuple[int, int, int] | None:
    """Floating-point operations of forward, loss and backward: of an example, of each of its positions, and of each
    pair of positions that attend to each other.

    They follow from three lengths, counted once. None for a network with an operation that torch does not know without
    numbers.
    """
    key = repr(task)
    if key not in _counted:
        most = task.max_positions()
        try:
            if most is None:
                _counted[key] = (_count(task, EXAMPLES, 0) // EXAMPLES, 0, 0)
            else:
                size = min(most, LONGEST_COUNTED) // 3
                one, two, three = (_count(task, 1, multiple * size) for multiple in (1, 2, 3))
                pair = (three - 2 * two + one) // (2 * size**2)
                position = (two - one) // size - 3 * size * pair
                _counted[key] = (one - size * position - size**2 * pair, position, pair)
        except NotImplementedError:
            _counted[key] = None
    return _counted[key]


def _count(task: Recipe, rows: int, positions: int) -> int:
    """Operations of a batch. No weight, no random state and no device is touched."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        net = task.counted_net().train()
        # The plain kernel: fused ones compute some of it again in backward, and differ in what the counter knows of
        # them. With gradients also where they are not needed: torch.nn's attention takes the path that is counted.
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = NoModuleTracker()  # type: ignore[assignment]
        with next(net.parameters()).device, sdpa_kernel(SDPBackend.MATH), counter:
            loss = net(*task.example(rows, positions))[0]
            if not task.embeds:
                loss.backward()
        net.zero_grad(set_to_none=True)
    return int(counter.get_total_flops()) * (3 if task.embeds else 1)


class NoModuleTracker:
    """For the counter's tracker of modules, whose hooks refuse a gradient that is taken within a forward."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


# ---- layers and scores that networks share ---------------------------------------------------------------------------

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""Mean loss in nats a target, right predictions and targets, all 0-D; the last two are None in training mode."""


def class_scores(
    logits_K: Tensor,
    targets: Tensor,
    *,
    training: bool,
    ignored: int = IGNORED,
    cross_entropy: Callable[..., Tensor] = F.cross_entropy,
) -> Scores:
    """Scores of logits [..., K] for int64 targets [...]; those that are ``ignored`` are no targets.

    In training mode the last two are None: an argmax over the classes is not paid for on the training path.
    """
    logits_TK, targets_T = logits_K.flatten(0, -2), targets.flatten()
    loss = cross_entropy(logits_TK, targets_T, ignore_index=ignored)
    if training:
        return loss, None, None
    real_T = targets_T != ignored
    return loss, ((logits_TK.argmax(dim=-1) == targets_T) & real_T).sum(), real_T.sum()


class ScoringTail(nn.Module):
    """Norm, head and loss: one region, so that a compiler may fuse the loss into the head."""

    cross_entropy: ClassVar[Callable[..., Tensor]] = staticmethod(F.cross_entropy)

    def __init__(self, norm: nn.Module, head: nn.Linear, *, ignored: int = IGNORED) -> None:
        """``ignored``: the target that is none."""
        super().__init__()
        self.norm, self.head, self.ignored = norm, head, ignored

    def forward(self, x_D: Tensor, targets: Tensor | None = None) -> Tensor | Scores:
        """Logits [..., K] of features [..., D]; with int64 targets [...], their ``Scores``."""
        logits_K: Tensor = self.head(self.norm(x_D))
        if targets is None:
            return logits_K
        return class_scores(
            logits_K, targets, training=self.training, ignored=self.ignored, cross_entropy=self.cross_entropy
        )


def attend(
    query_key_value: Tensor, heads: int, *, mask_B11S: Tensor | None = None, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Self-attention [B, S, D] of queries, keys and values that lie side by side, [B, S, 3 D].

    ``mask_B11S``: true where positions attend to; ``dropout``: share of attention weights dropped.
    """
    query_BHSK, key_BHSK, value_BHSK = (
        part_BSD.unflatten(-1, (heads, -1)).transpose(1, 2) for part_BSD in query_key_value.chunk(3, dim=-1)
    )
    mixed_BHSK = F.scaled_dot_product_attention(
        query_BHSK, key_BHSK, value_BHSK, attn_mask=mask_B11S, dropout_p=dropout, is_causal=causal
    )
    return mixed_BHSK.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head attention of a text sequence over a context, which may be itself."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        """``causal``: a position attends to itself and to earlier ones only."""
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor, context_BND: Tensor) -> Tensor:
        """Attend from ``x_BSD`` to ``context_BND``; returns [B, S, D]."""
        query_BHSK = self.query(x_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key_BND, value_BND = self.key_value(context_BND).chunk(2, dim=-1)
        mixed_BHSK = F.scaled_dot_product_attention(
            query_BHSK,
            key_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2),
            value_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        return self.output(mixed_BHSK.transpose(1, 2).flatten(2))


class TextEmbedding(nn.Module):
    """Token embedding plus learned positions."""

    def __init__(self, vocabulary_size: int, max_tokens: int, width: int, dropout: float) -> None:
        """``max_tokens``: the longest sequence in positions."""
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Parameter(torch.zeros(max_tokens, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.dropout(self.token(tokens_BS) + self.position[: tokens_BS.shape[1]])


def mlp(width: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))


def draw_weights(
    net: nn.Module,
    width: int,
    original: int,
    *,
    positions: Sequence[Tensor] = (),
    branch_ends: Sequence[nn.Module] = (),
) -> None:
    """Draw linear and embedding weights from a normal distribution, in the order of the module tree; biases become 0.

    Args:
        net: What is drawn, in place.
        width: Its features. The standard deviation is 0.02 at the width of the original, and kept in proportion for
            other widths, which learn slowly otherwise.
        original: Width of the published network.
        positions: Parameters drawn after them, alike.
        branch_ends: Last layers of all branches that add to the residual stream, drawn once more: scaled so that its
            variance does not grow with depth (Radford et al. 2019, section 2.3).
    """
    std = 0.02 * math.sqrt(original / width)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for position in positions:
        nn.init.normal_(position, std=std)
    for end in branch_ends:
        assert isinstance(end, nn.Linear)
        nn.init.normal_(end.weight, std=std / math.sqrt(len(branch_ends)))
