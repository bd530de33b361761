"""Mends: what usually helps against each kind of graph break and recompile, by torch's own names for them.

An unknown kind gets torch's own hints. Torch's list of kinds with examples:
https://meta-pytorch.org/compile-graph-break-site/
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mend:
    """What helps against breaks of some kinds."""

    identifiers: tuple[str, ...]
    """Torch's numbers; empty = any."""
    pattern: str
    """What the text of the break has to hold, a regular expression."""
    advice: str


BRANCH = (
    "the branch depends on what is in a tensor: torch.where(condition, a, b) where both sides are cheap, torch.cond "
    "for one of two functions, or decide on the host before the compiled module and hand in a Python value"
)
ASSERTION = "use torch._assert_async or torch._check on tensors, or move the check out of the compiled module"
SCALAR = (
    "keep it a tensor: .item(), float(), int() and bool() wait for the device and end the graph; log "
    "tensor.detach() and read it after the step"
)
LOGGING = (
    "move the message out of the compiled module, or put it under `if not torch.compiler.is_compiling():`; "
    "torch._dynamo.config.reorderable_logging_functions.add(print) prints after the graph instead"
)
EXTENSION = (
    "wrap the C function as a custom operator (torch.library.custom_op with register_fake), or take the call out of "
    "the compiled module; torch.compiler.disable on the smallest function around it keeps the rest in graphs"
)
SHAPE_OF_DATA = (
    "its result has as many elements as the data says: mask instead (torch.where, a weight of 0), use the size= of "
    "nonzero_static, or set torch._dynamo.config.capture_dynamic_output_shape_ops = True"
)

MENDS: tuple[Mend, ...] = (
    Mend(("GB0170", "GB0035"), "", BRANCH),
    Mend((), r"^generic_jump|[Dd]ata-dependent (branching|jump)", BRANCH),
    Mend(("GB0034", "GB0171"), "", ASSERTION),
    Mend((), r"assert(ion)? .*data.dependent|torch\._assert", ASSERTION),
    Mend(("GB0124",), "", SCALAR),
    Mend(("GB0109",), "", "keep it a tensor: .tolist() waits for the device and ends the graph"),
    Mend(("GB0033",), r"_local_scalar_dense|\.item", SCALAR),
    Mend(("GB0033", "GB0036", "GB0037", "GB0246"), "", SHAPE_OF_DATA),
    Mend((), r"builtin (operator )?`?print`?|`builtins\.print`|function `print`", LOGGING),
    Mend((), r"`_?warnings\.warn|[Ll]ogging\.|Logger method|warn_once|tqdm", LOGGING),
    Mend(
        ("GB9193",),
        "",
        "take the clock out of the compiled module: time around the call, or with CUDA events and the profiler",
    ),
    Mend((), r"`time\.\w+`|perf_counter", "take the clock out of the compiled module: time around the call"),
    Mend(
        ("GB0029", "GB0083", "GB5821", "GB0013", "GB0100", "GB0101"),
        "",
        "register the hook outside the compiled module, on its output in eager code, or return what the hook wants to "
        "see as a further output",
    ),
    Mend(
        ("GB0098", "GB0099"),
        "",
        "somebody has excluded this function with torch.compiler.disable (Lightning its self.log, too): call it "
        "outside the compiled module, or drop the decorator where it is yours",
    ),
    Mend(("GB0025", "GB0269"), "", "the code asks for it: torch._dynamo.graph_break() is called here; drop the call"),
    Mend(("GB4636", "GB4297"), "", "the code asks for it with a call into torch._dynamo; drop the call"),
    Mend(("GB0123",), "", "call backward() outside the compiled module"),
    Mend(
        ("GB0014",),
        "",
        "torch.nn.RNN, GRU and LSTM are left out of graphs: leave them to cuDNN and compile what is around them "
        "(compile=modular), or set torch._dynamo.config.allow_rnn = True",
    ),
    Mend(("GB0264", "GB0235", "GB0226"), "", "create parameters and modules in __init__, not in the compiled forward"),
    Mend(("GB0179",), "", "copy outside the compiled module: copy.deepcopy() of a module or tensor is not traced"),
    Mend(
        ("GB0107", "GB0110", "GB7650"),
        "",
        "use torch.rand and torch.randn without a generator= in the compiled module, or draw outside it",
    ),
    Mend(("GB0015", "GB0016", "GB0233"), "", "hand in strided tensors: sparse and nested ones are not traced here"),
    Mend(
        ("GB0105", "GB0157", "GB0158", "GB0159", "GB0185", "GB0231", "GB0250"),
        "",
        "use the torch function in place of NumPy's, or take the call out of the compiled module",
    ),
    Mend((), r"numpy|ndarray", "use the torch function in place of NumPy's, or take it out of the compiled module"),
    Mend(
        ("GB0064", "GB0087", "GB0090", "GB3069", "GB0043"),
        "",
        "the operator cannot be run without data: give it a fake implementation (register_fake of torch.library), or "
        "take the call out of the compiled module",
    ),
    Mend(("GB0142",), "", "enter the context manager around the compiled module instead of inside it"),
    Mend(("GB0088", "GB0089", "GB0111"), "", "an exception is raised here while tracing: test for the case before it"),
    Mend(("GB0042", "GB0203", "GB0196"), "", "use the same keys, known before the step, in every batch"),
    Mend(("GB0569", "GB0184", "GB9198"), "", LOGGING),
    Mend(
        ("GB0007", "GB0147", "GB0005", "GB0194", "GB9493"),
        r"C/C\+\+|C extension|builtin|pybind",
        EXTENSION,
    ),
    Mend(
        ("GB0007", "GB0008", "GB0009"),
        "",
        "torch does not look into this function: call it outside the compiled module, or, if its code can be traced, "
        "allow it with torch._dynamo.allow_in_graph or torch._dynamo.config.traceable_tensor_subclasses",
    ),
    Mend((), r"^step_unsupported", "goes away with the break in the function that is called here"),
    Mend((), r"DDPOptimizer", "DDP splits graphs at its buckets on purpose, so that gradients travel during backward"),
    Mend(
        ("GB0039",),
        "",
        "one piece of code was compiled too often and runs eager from now on: see the recompiles for what changes",
    ),
)

RECOMPILE_MENDS: dict[str, str] = {
    "shape": (
        "pad to a few lengths (compile=[...,buckets]) or make the dimension symbolic (compile=[...,dynamic], or "
        "torch._dynamo.mark_dynamic); the last, smaller batch of an epoch goes away with drop_last"
    ),
    "rank": "hand in tensors with the same number of dimensions: unsqueeze before the call",
    "strides": "call .contiguous() (or fix the memory format) before the compiled module",
    "dtype": "cast before the compiled module, or let autocast do it: each dtype has a graph of its own",
    "device": "move it to the device before the compiled module",
    "requires gradient": "detach it, or let it require a gradient, in every batch alike",
    "dispatch": "the same tensor comes under another mode (inference, autocast, a subclass): use one for all calls",
    "training flag": ("train() and eval() have a graph each; flip them seldom, and not within a step"),
    "gradient mode": "torch.no_grad and enable_grad have a graph each; enter them around the compiled module alike",
    "autocast": "enter autocast around all calls of the compiled module, or around none",
    "global state": "a process-wide setting of torch changed between two calls: set it once, before the first step",
    "number": (
        "make it a tensor (an attribute: a buffer that is filled in place), or do not read it in the compiled module: "
        "a Python number is a constant to the compiler, and what depends on it is compiled again"
    ),
    "flag": "a Python flag that changes is a constant to the compiler: set it once, before the first step",
    "None at first": "fill it before the first compiled call, in __init__ or with one eager call",
    "global variable": "hand it in as a tensor argument, or keep it constant: globals are constants to the compiler",
    "text": "a string that changes is a constant to the compiler: hand in a tensor, or choose before the call",
    "length": "the number of items is part of the graph: pad the list or dict, or stack the items into one tensor",
    "keys": "use the same keys in the same order in every batch; put what is optional in as a tensor of zeros",
    "kind of object": "hand in objects of one class at this place",
    "identity": "the object at this place was replaced by another: create it once, and reuse it",
    "value carried over a break": "goes away with the graph break at this line",
    "attribute": "modules of one class differ here, and share their code: give them the same attributes and hooks",
    "size relation": "the compiled code takes any size for which this holds: pad so that it always does",
    "other": "torch's guard says what changed; keep it constant, or hand it in as a tensor",
}
"""What helps against recompiles, by the kind of guard that failed."""


def mend(identifier: str | None, text: str, hints: Sequence[str] = (), *, in_hook: bool = False) -> str:
    """What helps against a break: this project's advice, or torch's hints where it has none."""
    advice = next(
        (
            each.advice
            for each in MENDS
            if (not each.identifiers or identifier in each.identifiers)
            and (each.identifiers or each.pattern)
            and re.search(each.pattern, text)
        ),
        None,
    )
    if advice is None:
        useful = [hint for hint in hints if "report an issue" not in hint.lower()]
        advice = (
            "torch says: " + " ".join(useful)
            if useful
            else (
                "none known; torch.compiler.disable on the smallest function around the line keeps the rest in graphs"
            )
        )
    return f"in a hook, which the compiler traces with its module: {advice}" if in_hook else advice
