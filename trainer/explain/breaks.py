"""Breaks: reads torch's text about a graph break into kind, explanation, hints and the line of code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainer.explain import source
from trainer.explain.explanation import Break, Line
from trainer.explain.mends import mend

IDENTIFIER = re.compile(r"/gb/(gb\d{4})\.html")
WITHOUT_WORDS = {
    "generic_jump": (
        "Data-dependent branching",
        "Which way the code goes on depends on the value of a tensor, known only when it runs.",
    ),
    "step_unsupported": (
        "Call of code that breaks",
        "A function that is called here holds a graph break of its own, so that the graph around the call ends too.",
    ),
}
"""Kind and explanation of the breaks for which torch has one word and no explanation."""


def read_break(text: str, stack: Sequence[Line], *, region: str | None, phase: str) -> Break:
    """The break that torch describes as ``text`` at the end of ``stack``, outermost line first."""
    lines = [one.strip() for one in text.strip().splitlines() if one.strip()]
    head = lines[0] if lines else "no reason given"
    hints = [one.removeprefix("Hint:").strip() for one in lines if one.startswith("Hint:")]
    explained = [one.removeprefix("Explanation:").strip() for one in lines if one.startswith("Explanation:")]
    found = IDENTIFIER.search(text)
    identifier = found[1].upper() if found else None
    kind, reason = WITHOUT_WORDS.get(head.split()[0], (head, head))
    where, called_from, inside = source.of_interest(stack)
    return Break(
        kind=kind,
        identifier=identifier,
        reason=explained[0] if explained else reason,
        mend=mend(identifier, text, hints, in_hook=_in_hook(stack)),
        where=where,
        called_from=called_from,
        inside=inside,
        region=region,
        phase=phase,
    )


def merged(breaks: Sequence[Break]) -> list[Break]:
    """One break for each line and kind, counted: a break in an inlined function is met again in the function itself."""
    kept: dict[tuple[object, ...], Break] = {}
    for each in breaks:
        where = each.where
        key = (where.file, where.number, each.kind) if where else (None, each.region, each.kind)
        if key in kept:
            kept[key].count += each.count
            kept[key].called_from = kept[key].called_from or each.called_from
        else:
            kept[key] = each
    return list(kept.values())


def _in_hook(stack: Sequence[Line]) -> bool:
    """Whether ``torch.nn.Module`` called a hook on the way."""
    return any(
        source.is_machinery(frame.file) and frame.file.endswith("module.py") and "hook(" in (frame.code or "")
        for frame in stack
    )
