"""Gradients of embeddings, added up in eager's order by Inductor as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from strategies.prepare import is_prepared


@contextlib.contextmanager
def embeddings_as_in_eager() -> Iterator[None]:
    """Until the block ends, compiled graphs call eager's own kernel for the gradient of an embedding.

    Inductor's own adds the rows of a token that occurs more than once with atomics, in whatever order they arrive: two
    runs of the same compiled captioner ended at different losses, cold and warm, where two of eager's do not.

    Where Inductor is not imported yet, there is nothing to do.
    """
    if not is_prepared():
        yield
        return
    from torch._inductor import decomposition, lowering

    gradient = torch.ops.aten.embedding_dense_backward
    lowering.make_fallback(gradient, warn=False, override_decomp=True)
    tables: list[dict[Any, Any]] = [decomposition.decompositions, decomposition.fast_random_decomps()]
    taken = [(table, table.pop(gradient.default, None)) for table in tables]
    try:
        yield
    finally:
        for table, rule in taken:
            if rule is not None:
                table[gradient.default] = rule
