"""Capture: a submodule as it is before a step, and the inputs of its first call in it, for running it by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from strategies import Program
from strategies.options import BudgetedBackend


@dataclass(slots=True, kw_only=True)
class Captured:
    """All that is needed to run one submodule alone."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    """torch.compile's."""
    activation_memory_budget: float | None
    autocast: str | None
    """Name of the type that the call was autocast to; None without."""
    device: str
    matmul_precision: str


class _Seen(Exception):
    """The first call was seen; the rest of the step is not needed."""


def captured(program: Program, path: str, *, arguments: dict[str, Any], run: Callable[[], None]) -> Captured:
    """Do ``run``, a step of eager, up to the first call of the submodule at ``path``.

    Raises ValueError when the step does not call it, or holds what cannot be copied.
    """
    module = program.module.get_submodule(path)
    seen: list[Captured] = []

    def see(_: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()  # before the copy: it would be a part of it
        device = program.device.type if program.device is not None else "cpu"
        autocast = torch.is_autocast_enabled(device)
        backend = arguments["backend"]
        budgeted = backend if isinstance(backend, BudgetedBackend) else None
        seen.append(
            Captured(
                path=path,
                module=copy.deepcopy(module),
                args=pytree.tree_map(_kept, args),
                kwargs=pytree.tree_map(_kept, kwargs),
                arguments={**arguments, "backend": budgeted.backend if budgeted else backend},
                activation_memory_budget=budgeted.budget if budgeted else None,
                autocast=str(torch.get_autocast_dtype(device)).removeprefix("torch.") if autocast else None,
                device=device,
                matmul_precision=torch.get_float32_matmul_precision(),
            )
        )
        raise _Seen

    handle = module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        run()
    except _Seen:
        pass
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be copied: {type(error).__name__}: {error}") from error
    finally:
        handle.remove()
    if not seen:
        raise ValueError(f"a step does not call {path}")
    return seen[0]


def _kept(value: Any) -> Any:
    """A leaf of its own, that asks for a gradient where the original had one."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value
