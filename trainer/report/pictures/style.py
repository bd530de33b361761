"""Ink and paper of the pictures: palette, type, axes, and a figure as SVG that follows its page's colours or as PNG.

Every picture is drawn once, in the light palette. No colour of it occurs twice, so that a page can put a CSS variable
in place of each one: the same SVG then serves light and dark. Matplotlib is imported where it is used.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer.telemetry.facts import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MISSING = "pictures need matplotlib: pip install -e '.[report]'"

DOTS_PER_INCH = 160

INK: Mapping[str, tuple[str, str]] = {
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#5b636d", "#a3abb5"),
    "grid": ("#e3e6ea", "#31363d"),
    "soft": ("#eef0f3", "#23272d"),
    "paper": ("#ffffff", "#16191d"),
}
"""Name, light and dark colour of everything but arms."""
ARMS: tuple[tuple[str, str], ...] = (
    ("#1e6ff0", "#6699f7"),
    ("#d97214", "#cf9a35"),
    ("#0fa266", "#7dda9c"),
    ("#c16fc6", "#b84aa3"),
    ("#604408", "#e8e33b"),
    ("#3a24e6", "#7657f7"),
    ("#751535", "#cf4044"),
    ("#0b4184", "#50eff7"),
)
"""Light and dark colours of arms. Found by search: apart from each other and from the baseline's grey for all three
kinds of colour blindness (Machado et al. 2009), and each at three to one or more against its paper."""
BASELINE = ("#6a717a", "#9aa2ac")
"""Grey: what the others are compared with."""
_PALETTE = {**INK, **{f"arm-{number}": pair for number, pair in enumerate(ARMS)}, "baseline": BASELINE}
_VARIABLES = {light: f"var(--{name})" for name, (light, _) in _PALETTE.items()}


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's settings for what is drawn inside. Raises ValueError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError(MISSING) from error
    ink, muted, grid, paper = (INK[name][0] for name in ("ink", "muted", "grid", "paper"))
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10.0,
        "text.parse_math": False,  # a dollar in an override is not a formula
        "text.color": ink,
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), muted),
        "axes.facecolor": "none",
        "axes.linewidth": 0.8,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.unicode_minus", "legend.frameon"), False),
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "figure.facecolor": paper,
        "svg.fonttype": "none",
        "svg.hashsalt": "crucible",  # the same records make the same page
        "path.simplify": True,
    }
    with mpl.rc_context(settings):
        yield


def colours(pictured: Iterable[Sequence[str]], *, baselines: Collection[str]) -> dict[str, str]:
    """A colour for each arm, baselines grey.

    ``pictured`` holds the arms that stand in one picture each; two of these share a colour only where there are more
    than eight.
    """
    together = [list(arms) for arms in pictured]
    chosen = {arm: BASELINE[0] for arms in together for arm in arms if arm in baselines}
    for arm in dict.fromkeys(arm for arms in together for arm in arms if arm not in baselines):
        taken = [chosen.get(other) for arms in together if arm in arms for other in arms]
        used = list(chosen.values())
        chosen[arm] = min((light for light, _ in ARMS), key=lambda one: (taken.count(one), used.count(one)))
    return chosen


def variables(*, dark: bool) -> str:
    """The palette as CSS declarations."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in _PALETTE.items())


def variable(colour: str) -> str:
    """The CSS variable of one of the light colours."""
    return _VARIABLES[colour]


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure, not known to pyplot: nothing is left behind in the process."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches))


def place_axes(
    figure: Figure, *, left: float, right: float, bottom: float, top: float, sharex: Axes | None = None
) -> Axes:
    """Axes whose margins to the figure's edges are ``left``, ``right``, ``bottom`` and ``top`` inches."""
    width, height = figure.get_size_inches()
    box = (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    return figure.add_axes(box, sharex=sharex)


def plain(text: str, *, longest: int = 60) -> str:
    """One line without control characters, short enough for a picture."""
    line = " ".join("".join(" " if unicodedata.category(sign)[0] == "C" else sign for sign in text).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def svg(figure: Figure, *, name: str, title: str, description: str) -> str:
    """The figure as an SVG element to put into a page: text as text, colours as CSS variables, no address outside it.

    ``name`` is put before all identifiers, so that several figures fit on one page. ``title`` and ``description`` are
    for a screen reader; both already escaped.
    """
    import io

    buffer = io.StringIO()
    with drawing():
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = buffer.getvalue()
    body = text[text.index("<svg") :]
    opening, body = body[: body.index(">") + 1], body[body.index(">") + 1 :]
    found = re.search(r'viewBox="([^"]+)"', opening)
    assert found is not None, "matplotlib's SVG has a view box"
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r"#([\w-]+)[\")]", body))
    body = re.sub(r' id="([\w.-]+)"', lambda hit: f' id="{name}-{hit[1]}"' if hit[1] in used else "", body)
    body = re.sub(r"(url\(|href=\")#([\w-]+)", rf"\1#{name}-\2", body)
    body = re.sub(r"#[0-9a-f]{6}\b", lambda hit: _VARIABLES.get(hit[0], hit[0]), body)
    return (
        f'<svg viewBox="{found[1]}" role="img" aria-labelledby="{name}-title {name}-description">\n'
        f'<title id="{name}-title">{title}</title><desc id="{name}-description">{description}</desc>{body}'
    )


def png(figure: Figure, file: Path | IO[bytes]) -> None:
    """Write the figure as a PNG in light colours."""
    with drawing():
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def duration(seconds: float) -> str:
    """``90`` as ``1.5 min``: in the unit that fits."""
    for limit, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= limit:
            return f"{number(seconds / limit)} {unit}"
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"
