"""Bisect: the smallest submodule whose compiled results are not eager's."""

if __name__ == "bisect":  # this folder's parent is on the path (``python scripts/x.py``): who asks means the library's
    from _bisect import bisect_left, bisect_right, insort_left, insort_right  # noqa: F401

    bisect, insort = bisect_right, insort_right
