"""Of several ranks one compiles a graph and the others load it; a graph of products alone needs no C++ compiler."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import codecache, compile_fx, cpu_vec_isa

from strategies import Cached
from strategies.base import Program, compiler_settings
from strategies.torch_patches import _locked
from tests.processes import Pair, RanksFailed

pytestmark = pytest.mark.xdist_group("two_processes")
GRAPHS = 2
"""Of one function: forward and backward."""


def figures() -> tuple[int, int, int, int]:
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return (
        inductor["fxgraph_cache_miss"],
        inductor["fxgraph_cache_hit"],
        autograd["autograd_cache_miss"],
        autograd["autograd_cache_hit"],
    )


def begin(folder: str) -> None:
    dist.init_process_group("gloo")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]  # none, and the C++ compiler is not asked for them
    torch._dynamo.reset()
    counters.clear()


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows @ weight


def gradient(compiled: Callable[..., torch.Tensor], rows: int) -> list[float]:
    weight = torch.arange(12.0).reshape(4, 3).requires_grad_()
    compiled(torch.ones(rows, 4), weight).backward(torch.ones(rows, 3))
    gradients: list[float] = weight.grad.flatten().tolist()
    return gradients


def trained(folder: str, own_folders: bool = False, collectives: bool = False) -> tuple[Any, Any]:
    """Figures and gradients of a graph and, later, of another one for another shape."""
    begin(f"{folder}/{os.environ['RANK']}" if own_folders else folder)
    dist.barrier()
    with compiler_settings({}):
        compiled = torch.compile(product, dynamic=False)
        gradients = []
        for rows in (2, 5):
            gradients.append(gradient(compiled, rows))
            if collectives:  # as a forward under FSDP: none waits for a lock while another waits for its gradients
                dist.barrier()
    return figures(), gradients


def met_while_compiling(folder: str) -> tuple[int, int, int, int]:
    """All ranks wait for each other in the middle of a compile, with torch as it is."""
    begin(folder)
    generate = compile_fx.fx_codegen_and_compile

    def meet(*graph: Any, **options: Any) -> Any:
        dist.barrier()
        return generate(*graph, **options)

    compile_fx.fx_codegen_and_compile = meet
    gradient(torch.compile(product, dynamic=False), 2)
    return figures()


def test_what_one_rank_compiles_the_others_load(pair: Pair, tmp_path: Path) -> None:
    said = pair(trained, str(tmp_path), False, True)
    misses, hits, _, traces_loaded = (sum(of_rank) for of_rank in zip(*(each for each, _ in said), strict=True))
    assert misses == 2 * GRAPHS, "as many as one rank alone"
    assert hits == 2 * GRAPHS
    assert traces_loaded == 2, "the other one does not trace a backward either"
    assert said[0][1] == said[1][1] == [gradient(product, rows) for rows in (2, 5)]


@pytest.mark.slow
def test_ranks_whose_caches_differ_go_on_alike(pair: Pair, tmp_path: Path) -> None:
    said = pair(trained, str(tmp_path), True)
    assert [each[0] for each, _ in said] == [2 * GRAPHS] * 2, "as on two hosts: each has a directory of its own"
    again = pair(trained, str(tmp_path / "1"), False)
    assert [each[0] for each, _ in again] == [0, 0], "rank 0 loads what rank 1 compiled"
    assert said[0][1] == said[1][1] == again[0][1] == again[1][1]


def cached(folder: str) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    """The cache directory, and what the strategy reports, of a graph compiled under it."""
    begin(f"{folder}/usual")
    strategy = Cached(url=f"{folder}/store")
    program = Program(module=nn.Linear(2, 2), strategies=(strategy,), device=torch.device("cpu"))
    strategy.apply(program)
    directory = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    with compiler_settings({}):
        gradient(torch.compile(product, dynamic=False), 2)
    dist.barrier()
    strategy.end(program)
    return directory, program.report["cached"], figures()


def test_ranks_share_what_is_fetched_and_one_of_them_stores(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    cold, warm = (pair(cached, str(tmp_path)) for _ in range(2))
    for said in (cold, warm):
        assert said[0][0] == said[1][0] != str(tmp_path / "usual"), "one directory for both"
    assert sum(misses for _, _, (misses, *_) in cold) == GRAPHS
    assert [misses for _, _, (misses, *_) in warm] == [0, 0]
    assert ["artifacts_saved" in report for _, report, _ in cold] == [True, False]
    assert [report["state"] for _, report, _ in warm] == ["warm", "warm"]
    assert len(list((tmp_path / "store").glob("*.bundle"))) == 1


@pytest.mark.slow
def test_torch_itself_still_lets_every_rank_compile(pair: Pair, tmp_path: Path) -> None:
    """Where this fails, torch has a lock of its own and ours can go."""
    assert pair(met_while_compiling, str(tmp_path)) == [(GRAPHS, 0, 1, 0)] * 2


def test_a_graph_with_collectives_waits_for_nobody() -> None:
    from strategies.torch_patches import _communicates

    with_them = torch.fx.Graph()
    with_them.call_function(functional.all_reduce, (with_them.placeholder("x"), "sum", "group"))
    assert _communicates(torch.fx.GraphModule({}, with_them), [])
    without = torch.fx.symbolic_trace(lambda x: torch.mm(x, x).relu())
    assert not _communicates(without, [torch.ones(2, 2)])


def test_one_process_alone_is_left_as_it_is() -> None:
    backends: Any = sys.modules["torch._dynamo.backends.common"]
    before = backends.aot_module_simplified
    with compiler_settings({}):
        assert backends.aot_module_simplified is before


def inside_or_dead(folder: Path) -> str:
    """The first rank dies with the lock, once the second one wants it."""
    rank, other = os.environ["RANK"], str(1 - int(os.environ["RANK"]))
    with _locked(folder / "key") if rank == "0" else contextlib.nullcontext():
        (folder / rank).touch()
        while not (folder / other).exists():
            time.sleep(0.01)
        if rank == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    with _locked(folder / "key"):
        return "got it"


def test_a_rank_that_dies_while_it_compiles_keeps_no_other_waiting(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 died.*rank 1 returned"):
        pair(inside_or_dead, tmp_path)


def hashed(folder: str) -> tuple[int, str]:
    """How often this rank has read torch's sources, and the hash of them."""
    begin(folder)
    codecache.torch_key.clear()  # type: ignore[attr-defined]
    read, roots = codecache.build_code_hash, []

    def counted(root: Any, prefix: str, *others: Any) -> None:
        roots.extend([root] if not prefix else [])
        read(root, prefix, *others)

    codecache.build_code_hash = counted
    with compiler_settings({}):
        return len(roots), codecache.torch_key().hex()


def test_one_rank_reads_torchs_sources_for_all(pair: Pair, tmp_path: Path) -> None:
    one, other = pair(hashed, str(tmp_path))
    assert sorted([one[0], other[0]]) == [0, 1]
    assert one[1] == other[1]
