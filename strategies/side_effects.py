"""What a forward changes beside its outputs, as Dynamo sees it before any of it runs.

Dynamo records every attribute, entry, cell and global that the code it traces binds anew, and writes code that does the
same. That is asked here, so that a forward that changes what cannot be put back is never run once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from torch._dynamo.side_effects import SideEffects

Remember = Callable[[Any, Iterable[str]], bool]
"""Given an object, and the names of its attributes that change: copies what it holds now, to be put back; returns
whether that can be. Of globals the object is None."""


class ChangesElsewhere(Exception):
    """A forward changes something that cannot be put back; nothing of it has run."""


@contextlib.contextmanager
def refused_elsewhere(remember: Remember) -> Iterator[list[str]]:
    """Inside, Dynamo compiles nothing that changes what cannot be put back; yields the names of what it would."""
    own = SideEffects.codegen_update_mutated
    found: list[str] = []

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(name for name in _elsewhere(self, remember) if name not in found)
        if found:
            raise ChangesElsewhere(", ".join(found))  # which Dynamo may wrap in an error of its own
        return own(self, *args, **kwargs)

    with mock.patch.object(SideEffects, "codegen_update_mutated", checked):
        yield found


def _elsewhere(effects: Any, remember: Remember) -> Iterator[str]:
    """Names, as Dynamo writes them, of what is changed and cannot be put back."""
    from torch._dynamo.source import TempLocalSource
    from torch._dynamo.variables import NewGlobalVariable

    objects = {id(one): one for one in effects.keepalive}
    keys = {id(variable): key for key, variable in effects.id_to_variable.items()}
    for variable in effects._get_modified_vars():
        if variable.source is None or isinstance(variable.source, TempLocalSource):  # made within the forward
            continue
        stored = [str(name) for name in effects.store_attr_mutations.get(variable, ())]
        name = variable.source.name
        name = name() if callable(name) else name  # a method in torch 2.11
        changed = None if isinstance(variable, NewGlobalVariable) else objects.get(keys[id(variable)])
        if not remember(changed, stored):
            yield name
