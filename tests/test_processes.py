"""The pair of processes that tests share."""

from __future__ import annotations

import pytest
import torch

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


def test_two_ranks_are_one_group(pair: Pair) -> None:
    assert pair(summed, 3) == pair("tests.test_processes:summed", 3) == [(0, 7.0), (1, 7.0)]


def test_what_a_rank_raises_fails_the_test_with_its_traceback(pair: Pair) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 raised.*rank 1 raised.*ValueError: planted"):
        pair(one_raises)
