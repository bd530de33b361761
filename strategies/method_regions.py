"""Methods as regions: a method of a module is compiled, checked and given back to eager as a submodule is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from strategies.base import Program
from strategies.compile_options import ModuleRequest
from strategies.region import Region
from strategies.regions import add_region


class Method(nn.Module):
    """A method of ``owner`` as a module of its own, with the owner's weights. It is no part of the owner."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner = owner
        self.function = getattr(type(owner), name)

    @property
    def training(self) -> bool:
        return self.owner.training

    @training.setter
    def training(self, value: bool) -> None:
        """The owner's counts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.owner, *args, **kwargs)


class MethodRegion(Region):
    """While it stands, the owner's attribute of the method's name is what is compiled."""

    module: Method

    def replace_call(self, standing: bool) -> None:
        """The method is an attribute of the owner's own meanwhile, found before that of its class."""
        super().replace_call(standing)
        attributes, name = vars(self.module.owner), self.path.rpartition(".")[2]
        if standing:
            attributes[name] = self.module
        elif attributes.get(name) is self.module:
            del attributes[name]


def compile_method(program: Program, path: str, request: ModuleRequest) -> None:
    """Hand the method at ``path`` (``method``, or ``submodule.method``) to the compiler. Raises ValueError, naming
    what there is, where there is none."""
    place, _, name = path.rpartition(".")
    try:
        owner = program.module.get_submodule(place)
    except AttributeError:
        raise ValueError(
            f"compile.second_order.functions: {path!r}: there is no submodule {place!r} in "
            f"{type(program.module).__name__}"
        ) from None
    if not callable(getattr(type(owner), name, None)):
        known = [one for one in vars(type(owner)) if callable(getattr(owner, one)) and not one.startswith("_")]
        raise ValueError(
            f"compile.second_order.functions: {type(owner).__name__} has no method {name!r}; it has {', '.join(known)}"
        )
    method = type(name, (Method,), {})(owner, name)  # a class of its own, by which kinds are told apart
    add_region(program, path, method, request.compile_arguments(), MethodRegion)


def submodules(regions: Iterable[Region]) -> list[Region]:
    """Those of ``regions`` that are submodules, not methods."""
    return [one for one in regions if not isinstance(one, MethodRegion)]
