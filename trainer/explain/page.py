"""Page: an explanation as one HTML file that needs no network; light or dark as the reader's system is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from trainer.explain.explanation import Break, Coverage, Explanation, Line, Recompile
from trainer.explain.terminal import changes, heading, lines_at_the_end, place, times, verdict

STYLE = """\
:root { color-scheme: light dark; --line: #8884; --soft: #888; --bad: #c62828; --warn: #b26a00; --good: #2e7d32;
  --card: #8881; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; --warn: #ffcc80; --good: #a5d6a7; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { font-size: 1.15rem; font-weight: 600; } .bad { color: var(--bad); } .warn { color: var(--warn); }
.good { color: var(--good); } .soft { color: var(--soft); }
.card { background: var(--card); border-left: 4px solid var(--bad); border-radius: 4px; margin: 1rem 0;
  padding: .6rem 1rem; } .card.warn-card { border-color: var(--warn); }
.card h3 { margin: 0 0 .3rem; font-size: 1rem; } .card p { margin: .3rem 0; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { margin: .3rem 0; overflow-x: auto; padding: .4rem .6rem;
  background: var(--card); border-radius: 4px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); } th { font-weight: 600; color: var(--soft); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { display: flex; height: 1.4rem; border-radius: 4px; overflow: hidden; margin: .6rem 0; }
.bar span { min-width: 1px; } .scroll { overflow-x: auto; }
"""
COLOURS = {"compiled": ("#2e7d32", "#43a047", "#66bb6a"), "eager": ("#e65100", "#f57c00", "#ffb74d", "#ffcc80")}
"""Of the bar's pieces, largest first; they repeat."""


def page(explanation: Explanation, folder: Path | None = None) -> str:
    """The whole document, to lie in ``folder`` (None = the working directory), from which its links lead."""
    title = f"{explanation.task} under {explanation.strategies}"
    tone = "bad" if explanation.problems else "good"
    body = [
        f"<h1>Why: {escape(title)}</h1>",
        *(f"<p class=soft>{escape(line)}</p>" for line in heading(explanation).splitlines()),
        f"<p class='verdict {tone}'>{escape(verdict(explanation))}</p>",
        *_section("Does not compile", [f"<pre>{escape(each)}</pre>" for each in explanation.failures]),
        *_section("Graph breaks", [_break(number, each) for number, each in enumerate(explanation.breaks, 1)]),
        *_section("Recompiles", [_recompile(number, each) for number, each in enumerate(explanation.unexpected, 1)]),
        *_section("Graphs", [_graphs(explanation)] if explanation.graphs else []),
        *_section("Time of a step", _coverage(explanation.coverage) if explanation.coverage else []),
        *_section("Batches of the epoch", [_batches(explanation)] if explanation.batch_kinds else []),
        *_section("Also", [f"<p>{escape(line)}</p>" for line in lines_at_the_end(explanation)]),
        *_section("Files", list(_links(explanation, folder or Path.cwd()))),
    ]
    if explanation.command:
        body.append(f"<p class=soft><code>python -m scripts.explain {escape(' '.join(explanation.command))}</code></p>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(title: str, parts: Sequence[str]) -> Iterator[str]:
    if parts:
        yield f"<h2>{escape(title)}</h2>"
        yield from parts


def _links(explanation: Explanation, folder: Path) -> Iterator[str]:
    for name, file in explanation.files.items():
        if name == "page":
            continue
        path = Path(file)
        listed = sorted(path.glob("*.py")) if path.is_dir() else []
        for each in listed or [path]:
            link = escape(quote(os.path.relpath(each, folder)), quote=True)
            yield f'<p>{escape(name)}: <a href="{link}"><code>{escape(str(each))}</code></a></p>'


def _break(number: int, one: Break) -> str:
    name = f" <span class=soft>{escape(one.identifier)}</span>" if one.identifier else ""
    parts = [f"<h3><span class=bad>{number}.</span> {escape(one.kind)}{name}{times(one.count)}</h3>", _line(one.where)]
    if one.inside is not None:
        parts.append(f"<p class=soft>which reaches <code>{escape(place(one.inside))}</code></p>")
    if one.called_from is not None:
        parts += ["<p class=soft>called from</p>", _line(one.called_from)]
    if one.region:
        parts.append(f"<p class=soft>in region {escape(one.region)}</p>")
    parts += [f"<p>{escape(one.reason)}</p>", _mend(one.mend)]
    return "<div class=card>" + "".join(parts) + "</div>"


def _recompile(number: int, one: Recompile) -> str:
    parts = [f"<h3><span class=warn>{number}.</span> {escape(one.kind)}{times(one.count)}</h3>", _line(one.where)]
    if one.region:
        parts.append(f"<p class=soft>in region {escape(one.region)}</p>")
    changed = f": {escape(changes(one, 10))}" if one.changes else ""
    parts += [f"<p><code>{escape(one.what)}</code>{changed}</p>", _mend(one.mend)]
    if one.guard != one.what:
        parts.append(f"<p class=soft>guard: <code>{escape(one.guard)}</code></p>")
    return "<div class='card warn-card'>" + "".join(parts) + "</div>"


def _line(line: Line | None) -> str:
    if line is None:
        return ""
    code = f"<pre>{escape(line.code)}</pre>" if line.code else ""
    return f"<p><code>{escape(place(line))}</code></p>{code}"


def _mend(text: str) -> str:
    return f"<p><span class=good>Mend:</span> {escape(text)}</p>"


def _graphs(explanation: Explanation) -> str:
    rows = [
        [
            each.region,
            len(each.paths) or "-",
            *(each.forward, each.backward, each.validation, each.operations, each.breaks, each.recompiles),
        ]
        for each in explanation.graphs
    ]
    names = ("region", "submodules", "forward", "backward", "validation", "operations", "breaks", "recompiles")
    return _table(names, rows, text={0})


def _coverage(measured: Coverage) -> list[str]:
    kinds = {True: "compiled", False: "eager"}
    seen = {True: 0, False: 0}
    pieces = []
    for share in measured.shares:
        colours = COLOURS[kinds[share.compiled]]
        colour = colours[seen[share.compiled] % len(colours)]
        seen[share.compiled] += 1
        label = escape(f"{share.phase}: {share.what}, {share.share:.1%}", quote=True)
        pieces.append(f'<span style="flex:{share.share:.4f};background:{colour}" title="{label}"></span>')
    rows = [
        [
            f"{share.share:.1%}",
            f"{share.seconds * 1e3:.3g}",
            "-" if share.device_seconds is None else f"{share.device_seconds * 1e3:.3g}",
            *(kinds[share.compiled], share.phase, share.what),
        ]
        for share in measured.shares
    ]
    return [
        f"<p>{measured.compiled_share:.0%} of {measured.step_seconds * 1e3:.3g} ms is compiled code "
        f"(host time, mean of {measured.steps} steps).</p>",
        f"<div class=bar>{''.join(pieces)}</div>",
        _table(("share", "ms", "device ms", "", "phase", "what"), rows, text={3, 4, 5}),
    ]


def _batches(explanation: Explanation) -> str:
    rows = [[kind, count] for kind, count in explanation.batch_kinds.items()]
    return _table(("tensors", "batches"), rows, text={0})


def _table(names: Sequence[str], rows: Iterable[Sequence[object]], *, text: set[int]) -> str:
    def cells(values: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if index in text else ' class=number'}>{escape(str(value))}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{cells(names, 'th')}</tr>{body}</table></div>"
