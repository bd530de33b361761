"""Bars with their figures beside them, in sections one below the other.

An arm's name stands above its bars, so that it is never cut; half a page wide on a screen, a whole one on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer.evidence import pictures_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, BARS_INCHES = 4.6, 2.6
NAME_INCHES, BAR_INCHES, GAP_INCHES, TITLE_INCHES = 0.2, 0.19, 0.09, 0.34


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``value`` is all of its length."""

    value: float
    text: str
    low: float | None = None
    """Ends of the line that shows the spread."""
    high: float | None = None
    pale: bool = False
    """For warm starts and for what is only compared with."""
    dark: float | None = None
    """Part of it, from its start, drawn in full colour over a paler rest."""
    inner: float | None = None
    """Length of a line inside it."""


@dataclass(frozen=True, slots=True)
class Section:
    """Bars on one scale."""

    title: str
    groups: list[tuple[str, str, list[Bar]]] = field(default_factory=list)
    """Name, colour and bars."""
    legend: list[str] = field(default_factory=list)
    """Lines below."""
    whole: float | None = None
    """Value of a bar of full length; None for the largest."""

    @property
    def longest(self) -> float:
        """The largest value that is drawn."""
        return max(max(bar.value, bar.high or 0.0) for _, _, bars in self.groups for bar in bars)


def draw(sections: Sequence[Section]) -> Figure | None:
    """The sections one below the other; None when none has a bar."""
    sections = [section for section in sections if section.groups]
    if not sections:
        return None
    height = sum(
        TITLE_INCHES
        + sum(NAME_INCHES + BAR_INCHES * len(bars) + GAP_INCHES for _, _, bars in section.groups)
        + NAME_INCHES * len(section.legend)
        for section in sections
    ) + GAP_INCHES * len(sections)
    with style.drawing():
        figure = style.new_figure(WIDTH_INCHES, height)
        axes = style.place_axes(figure, left=0.01, right=0.01, bottom=0.0, top=0.0)
        axes.set(xlim=(0, WIDTH_INCHES - 0.02), ylim=(height, 0))
        axes.axis("off")
        y = 0.0
        for section in sections:
            axes.text(0, y + TITLE_INCHES / 2, section.title, weight="bold", size=11, va="center")
            y += TITLE_INCHES
            longest = (
                section.whole
                or max(max(bar.value, bar.high or 0.0) for _, _, bars in section.groups for bar in bars)
                or 1.0
            )
            for name, colour, bars in section.groups:
                axes.text(0, y + NAME_INCHES / 2, style.plain(name, longest=52), va="center")
                y += NAME_INCHES
                for bar in bars:
                    _bar(axes, bar, y, BARS_INCHES / longest, colour)
                    y += BAR_INCHES
                y += GAP_INCHES
            for line in section.legend:
                axes.text(0, y + NAME_INCHES / 2, line, va="center", size=9, color=style.INK["muted"][0])
                y += NAME_INCHES
            y += GAP_INCHES
    return figure


def _bar(axes: Axes, bar: Bar, y: float, scale: float, colour: str) -> None:
    middle, height = y + BAR_INCHES / 2, BAR_INCHES - 0.04
    axes.barh(middle, BARS_INCHES, height=height, color=style.INK["soft"][0])
    pale = 0.55 if bar.pale else 1.0
    if bar.dark is not None:
        axes.barh(middle, bar.value * scale, height=height, color=colour, alpha=0.45 * pale)
        axes.barh(middle, min(bar.dark, bar.value) * scale, height=height, color=colour, alpha=pale)
    else:
        axes.barh(middle, bar.value * scale, height=height, color=colour, alpha=pale)
    if bar.inner is not None:
        _line(axes, 0.0, bar.inner * scale, middle + height / 2 - 0.035)
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        _line(axes, bar.low * scale, bar.high * scale, middle)
    axes.text(BARS_INCHES + 0.08, middle, bar.text, va="center", size=9)


def _line(axes: Axes, begin: float, end: float, y: float) -> None:
    """A line with an edge of paper, to be seen on a bar of any colour."""
    for colour, width in ((style.INK["paper"][0], 3.2), (style.INK["ink"][0], 1.4)):
        axes.plot([begin, end], [y, y], color=colour, linewidth=width, solid_capstyle="butt")
