"""What the training sends to its helper: regions without their weights, their inputs without the values."""

from __future__ import annotations

import io
import operator
import os
import pickle
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strategies.regions import recomputes, recomputing
from trainer.background import environment

KEPT_ELEMENTS = 4096
"""Integers on the host up to this many are sent as they are (tables of positions); all others become zeros, which
index any table."""
CONFIGURATIONS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
DEVICES = ("cpu", "cuda")


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a region, as the training makes it."""

    path: str
    number: int = 0
    """Which of the shapes that the region is called with, in the order in which they came."""
    arguments: dict[str, Any]
    """Of ``torch.compile``."""
    pickled: bytes
    """The region, its positional and its keyword arguments, see ``dumps``."""
    autocast: dict[str, tuple[bool, torch.dtype]]
    """By type of device."""


@dataclass(slots=True, kw_only=True)
class Request:
    """All that the helper is to compile, and how this process has set torch."""

    calls: list[Call]
    settings: dict[str, Any]
    """``Program.settings``."""
    device: torch.device
    main: str | None
    """The user's script, where a call needs it."""
    max_device_gib: float
    together: bool
    """Whether several processes train together: then the backward is compiled with the forward, see
    ``strategies.torch_patches.one_compile_for_all_ranks``."""
    validates: bool
    """Whether forwards in eval mode are compiled as well, once all else is."""
    last: bool
    """Whether no request follows."""
    environment: dict[str, str] = field(default_factory=environment)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    directory: str = field(default_factory=os.getcwd)
    threads: int = field(default_factory=torch.get_num_threads)
    torch_state: dict[str, Any] = field(default_factory=lambda: torch_state())
    configurations: dict[str, bytes] = field(default_factory=lambda: configurations())


def call_of(path: str, module: nn.Module, arguments: dict[str, Any], args: Any, kwargs: Any, number: int = 0) -> Call:
    """The call under way. Raises what pickle raises for what it cannot send."""
    return Call(
        path=path,
        number=number,
        arguments=arguments,
        pickled=dumps((module, args, dict(kwargs))),
        autocast={kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES},
    )


def dumps(value: Any) -> bytes:
    """Pickle ``value`` with its tensors described, not copied. Raises PicklingError for tensors of other kinds."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        owner = getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None
        if isinstance(owner, nn.Module) and vars(owner).get("forward") is value and recomputes(owner):
            return recomputing, (owner,)
        if not isinstance(value, Tensor):
            return NotImplemented
        kind = type(value)
        if kind not in (Tensor, nn.Parameter, nn.Buffer) or value.layout is not torch.strided or value.is_quantized:
            raise pickle.PicklingError(f"a tensor of {kind.__name__} cannot be described to another process")
        kept = None
        if not value.is_floating_point() and value.device.type == "cpu" and value.numel() <= KEPT_ELEMENTS:
            kept = value.detach().numpy().copy()
        size = value.untyped_storage().nbytes()
        place = value.storage_offset(), tuple(value.shape), value.stride()
        marks = {name: mark for name, mark in vars(value).items() if name.startswith("_dynamo_")}
        parameter = isinstance(value, nn.Parameter)
        return rebuilt, (size, place, value.dtype, value.device, value.requires_grad, parameter, marks, kept)


def rebuilt(
    size: int,
    place: tuple[Any, Any, Any],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    parameter: bool,
    marks: Mapping[str, Any],
    kept: Any,
) -> Tensor:
    """A tensor that lies in memory of ``size`` bytes as the one described did; small random values, or zeros."""
    memory = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device=device).set_(memory, *place)
    with torch.no_grad():
        whole = torch.empty(0, dtype=dtype, device=device).set_(memory)
        if dtype.is_floating_point and dtype.itemsize > 1:
            whole.normal_(std=0.1)
        else:
            whole.zero_()
        if kept is not None:
            tensor.copy_(torch.from_numpy(kept))
    if parameter:
        tensor = nn.Parameter(tensor, requires_grad=requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    for name, mark in marks.items():
        setattr(tensor, name, mark)
    return tensor


# ---- what torch is set to in this process, part of the keys of its caches --------------------------------------------

_SWITCHES = (
    *(f"cuda.matmul.allow_{name}" for name in ("tf32", "fp16_reduced_precision_reduction")),
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    *(f"cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
)
"""Of ``torch.backends``."""
_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def torch_state() -> dict[str, Any]:
    """Settings of torch that change how code is compiled."""
    return {
        "precision": torch.get_float32_matmul_precision(),
        "own_precision": torch.backends.cuda.matmul.fp32_precision,
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        **{name: operator.attrgetter(name)(torch.backends) for name in _SWITCHES},
        **{name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in _ATTENTION},
    }


def set_torch_state(state: Mapping[str, Any]) -> None:
    """The reverse, in the helper."""
    torch.set_default_dtype(state["dtype"])
    torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["warn_only"])
    if torch.backends.cuda.matmul.fp32_precision != state["own_precision"]:  # "none" is not "ieee" in the caches' keys
        torch.set_float32_matmul_precision(state["precision"])
    for path in _SWITCHES:
        group, _, name = path.rpartition(".")
        if operator.attrgetter(path)(torch.backends) != state[path]:
            setattr(operator.attrgetter(group)(torch.backends), name, state[path])
    for name in _ATTENTION:
        getattr(torch.backends.cuda, f"enable_{name}")(state[name])


def configurations() -> dict[str, bytes]:
    """Of the compiler's configurations those that this process has imported, and so may have changed."""
    return {name: sys.modules[name].save_config() for name in CONFIGURATIONS if name in sys.modules}
