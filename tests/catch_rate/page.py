"""The page."""

from __future__ import annotations
from collections import Counter


def rate(lines):
    return str(Counter(one["result"] for one in lines))


def write_page(a, b):
    pass
