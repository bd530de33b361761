"""Guards: reads torch's text about a guard that failed into what changed, from what to what, and at which line.

Two forms exist: a sentence about a tensor (``tensor 'x' size mismatch at index 0. expected 3, actual 4``) and a Python
expression that was true for the compiled code (``self.scale == 0.5  # return x * self.scale``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from trainer.explain import source
from trainer.explain.explanation import Line, Recompile
from trainer.explain.mends import RECOMPILE_MENDS

TENSOR = re.compile(
    r"tensor '(?P<name>.+?)' (?P<what>size|stride|dtype|device|rank|requires_grad|dispatch key set|Tensor device index)"
    r"[\w ]*? mismatch(?: at index (?P<index>\d+))?\.? ?expected (?P<before>.*?)[,.] actual (?P<after>.*)"
)
TENSOR_KINDS = {
    "size": "shape",
    "stride": "strides",
    "requires_grad": "requires gradient",
    "dispatch key set": "dispatch",
    "Tensor device index": "device",
}
ABOUT_TENSORS = {*TENSOR_KINDS.values(), "dtype", "rank", "device", "gradient mode"}
COMPILE_ID = re.compile(r"^\d+/\d+(_\d+)?: ")
AS_TENSOR = re.compile(r"___as_tensor\((?P<number>[^()]+)\)\.item\(\)")
"""How torch writes a Python number that it has begun to treat as a tensor."""
HINT = re.compile(r'\(HINT: guard on "(?P<name>[^"]+)"\)')
"""Torch's word for a variable of a closure."""
COMPARISON = re.compile(r"^(?P<what>.+?) (?P<sign>==|!=|is not|is|>=|<=|>|<) (?P<value>.+)$")
MODES = ("gradient mode", "training flag", "requires gradient", "dispatch")
SIZES = ("shape", "strides", "rank", "size relation")
DIFFER = (*SIZES, "requires gradient")
"""Kinds by which copies of one class differ that share their code: widths, and the first one's input."""
EXPECTED = {"validating": MODES, "warming": (*MODES, *SIZES)}
"""Kinds of recompiles that every run has: graphs for validation, and the shapes that a strategy compiles beforehand."""
CALLS = {"len", "type", "list", "tuple", "size", "stride", "keys"}
"""Calls in a guard's expression that may be made to see its value: they change nothing."""
LONGEST = 80
"""Characters of a value that are shown."""


def read_recompile(
    text: str,
    *,
    after: str | None,
    function: Line | None,
    region: str | None,
    phase: str,
    first_call: bool = False,
    resumed: bool = False,
) -> Recompile:
    """The recompile that torch explains as ``text``.

    ``after`` is the value that the guard's expression has now (see ``value_now``), ``function`` the code that was
    compiled again, for a guard that names no line; ``resumed`` says that it is the rest of one behind a break,
    ``first_call`` that a region was called for the first time, which shares its code with others of its class.
    """
    guard = guard_of(text)
    where = source.of_interest(source.lines_of_stack(text))[0] or function
    if where is not None and source.is_machinery(where.file):
        where = None  # a module of torch's own: the region says which
    kind, what, change = _classified(guard, after)
    if hint := HINT.search(text):
        what = hint["name"]
    expected = kind in EXPECTED.get(phase, ()) or (first_call and kind in DIFFER)
    return Recompile(
        kind=kind,
        what=what,
        guard=guard,
        changes=[change] if change else [],
        mend=RECOMPILE_MENDS[kind],
        where=where,
        region=region,
        phase=phase,
        expected=expected,
        resumed=resumed,
    )


def merged(recompiles: list[Recompile]) -> list[Recompile]:
    """One recompile for each line and thing that changed, counted, with each of its changes."""
    kept: dict[tuple[object, ...], Recompile] = {}
    causes: dict[tuple[object, ...], Recompile] = {}
    for each in recompiles:
        # What changes at the beginning of a function is met again in each of its pieces behind a break.
        cause = (each.kind, each.region, each.expected, *each.changes)
        if each.resumed and each.kind in ABOUT_TENSORS and cause in causes:
            causes[cause].count += each.count
            continue
        where = (each.where.file, each.where.number) if each.where else None
        key = (where, each.kind, each.what, each.region, each.expected)
        if key in kept:
            kept[key].count += each.count
            kept[key].changes += [change for change in each.changes if change not in kept[key].changes]
        else:
            kept[key] = each
        causes.setdefault(cause, kept[key])
    return list(kept.values())


def guard_of(text: str) -> str:
    """The guard alone: without the number of the compiled code, the line of code and the stack."""
    if not text.strip():
        return ""
    guard = COMPILE_ID.sub("", text.strip().splitlines()[0]).split("  #")[0].strip()
    return AS_TENSOR.sub(r"\g<number>", guard)


def value_now(text: str, names: Mapping[str, Any], variables: Mapping[str, Any]) -> str | None:
    """What the guard's expression is now, as text; None where that cannot be told without running somebody's code.

    ``names`` are the local variables of the function that is compiled again, ``variables`` its module's.
    """
    compared = COMPARISON.match(guard_of(text))
    if compared is None:
        return None
    try:
        tree = ast.parse(compared["what"], mode="eval")
        if not all(_harmless(node) for node in ast.walk(tree)):
            return None
        known = {"L": dict(names), "G": dict(variables), "__builtins__": {}, "len": len, "type": type, "list": list}
        value = eval(compile(tree, "<guard>", "eval"), known, dict(names))
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"a tensor {' x '.join(map(str, value.shape))}".rstrip()
        return _short(repr(value))
    except Exception:  # a guard that speaks of more than the function can see
        return None


def _harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in CALLS
    allowed = (ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context, ast.UnaryOp)
    return isinstance(node, (*allowed, ast.unaryop, ast.BinOp, ast.operator, ast.Slice))


def _classified(guard: str, after: str | None) -> tuple[str, str, str | None]:
    """Kind, what changed, and ``before -> after``."""
    if tensor := TENSOR.search(guard):
        what = f"tensor {tensor['name']}" + (f", dimension {tensor['index']}" if tensor["index"] else "")
        kind = TENSOR_KINDS.get(tensor["what"], tensor["what"])
        return kind, what, f"{tensor['before']} -> {tensor['after'].strip(' .')}"
    if "requires_grad mismatch" in guard:
        return "requires gradient", guard.partition(" requires_grad")[0], None
    if "GLOBAL_STATE" in guard or "___check_global_state" in guard:
        kind = "gradient mode" if "grad_mode" in guard else "autocast" if "autocast" in guard else "global state"
        return kind, guard.partition(":")[2].strip() or "torch's global state", None
    for sign, kind in (
        ("___dict_contains", "keys"),
        (".keys()", "keys"),
        ("___check_type_id", "kind of object"),
        ("___check_obj_id", "identity"),
        ("hasattr", "attribute"),
        ("___check_metadata", "attribute"),
    ):
        if sign in guard:
            return kind, guard, None
    if "___stack" in guard:
        value = guard.partition("== ")[2]
        return "value carried over a break", "a result of this line", f"{_short(value)} -> {after or '?'}"
    if guard.startswith("not ") and guard[4:].replace(".", "").isidentifier():
        return "length", guard[4:], "empty -> not empty"
    if guard.startswith("TYPE_MISMATCH"):
        return "kind of object", guard, None
    compared = COMPARISON.match(guard)
    if compared is None:
        return "other", guard, None
    what, sign, value = compared["what"], compared["sign"], _short(compared["value"])
    if what.startswith("len("):
        # torch writes the negation: ``len(x) != 1`` says that 1 was expected.
        return "length", what[4:-1], f"{value} -> {after or '?'} items"
    if sign not in ("==", "is"):
        return "size relation" if ".size()" in what or ".stride()" in what else "other", guard, None
    change = f"{value} -> {after or '?'}"
    if what.endswith(".training"):
        return "training flag", what, change
    if ".size()" in what or ".stride()" in what or "%" in what:
        return "size relation", guard, change
    if value[:1] in "'\"":
        return "text", what, change
    if what.startswith("G["):
        return "global variable", what.replace("G['", "").replace("']", "", 1), change
    if value in ("True", "False"):
        return "flag", what, change
    if value == "None":
        return "None at first", what, change
    return "number" if _is_number(value) else "other", what, change


def _is_number(value: str) -> bool:
    try:
        return isinstance(ast.literal_eval(value), int | float | complex)
    except (ValueError, SyntaxError):
        return value in ("nan", "inf", "-inf")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
