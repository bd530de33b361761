"""The palette: readable on both papers, and told apart by readers who see colours differently."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trainer.report.pictures import ARMS, BASELINE, INK

LIGHT, DARK = 0, 1
SEEN = {
    # Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB
    "all": np.eye(3),
    "no red": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "no green": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "no blue": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB, white D65."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("place", [LIGHT, DARK])
@pytest.mark.parametrize("who", SEEN)
def test_all_arms_can_be_told_apart(place: int, who: str) -> None:
    colours = [pair[place] for pair in (*ARMS, BASELINE)]
    for one, other in itertools.combinations(colours, 2):
        apart = np.linalg.norm(lab(SEEN[who] @ linear(one)) - lab(SEEN[who] @ linear(other)))
        assert apart >= 15, (one, other)  # about 2 can just be seen side by side


@pytest.mark.parametrize("place", [LIGHT, DARK])
def test_everything_stands_out_from_its_paper(place: int) -> None:
    def luminance(colour: str) -> float:
        return float(TO_XYZ[1] @ linear(colour))

    wanted = [(pair, 3.0) for pair in (*ARMS, BASELINE)] + [(INK["ink"], 4.5), (INK["muted"], 4.5)]
    for pair, ratio in wanted:  # WCAG 2: graphics 3, text 4.5
        low, high = sorted((luminance(pair[place]), luminance(INK["paper"][place])))
        assert (high + 0.05) / (low + 0.05) >= ratio, pair


def test_no_colour_has_two_meanings() -> None:
    light = [pair[LIGHT] for pair in (*ARMS, BASELINE, *INK.values())]
    assert len(set(light)) == len(light)
