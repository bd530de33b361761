"""The pair of processes that tests share."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.processes import Pair, RanksFailed

pytestmark = pytest.mark.xdist_group("two_processes")


def summed(number: int) -> tuple[int, float]:
    torch.distributed.init_process_group("gloo")
    tensor = torch.full((), number + torch.distributed.get_rank(), dtype=torch.float32)
    torch.distributed.all_reduce(tensor)
    return torch.distributed.get_rank(), float(tensor)


def one_raises() -> None:
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 1:
        raise ValueError("planted")
    torch.distributed.barrier()


def one_hangs(begun: Path) -> None:
    if os.environ["RANK"] == "0":
        print("before the hang")
        begun.touch()
        time.sleep(1000)
    while not begun.exists():
        time.sleep(0.01)
    raise ValueError("planted")


def one_dies() -> None:
    if os.environ["RANK"] == "0":
        os._exit(3)


def test_two_ranks_are_one_group(pair: Pair) -> None:
    assert pair(summed, 3) == pair("tests.test_processes:summed", 3) == [(0, 7.0), (1, 7.0)]


def test_what_a_rank_raises_fails_the_test_with_its_traceback(pair: Pair) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 raised.*rank 1 raised.*ValueError: planted"):
        pair(one_raises)


def test_a_rank_that_hangs_after_the_other_failed_is_killed_and_its_stack_shown(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = r"(?s)rank 0 .*before the hang.*in one_hangs.*rank 1 raised.*planted"
    monkeypatch.setattr(processes, "answers", functools.partial(processes.answers, left=0.1))
    with pytest.raises(RanksFailed, match=expected):
        pair(one_hangs, tmp_path / "begun")


def test_a_rank_that_dies_fails_the_test(pair: Pair) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 died"):
        pair(one_dies)
