"""What compiling costs all ranks of one host together: ``python -m tests.strategies.one_compile_cost 1 2 4 8``
(``whole`` or ``fsdp2`` in place of regional blocks under DDP; ``apart`` as torch alone does it).

Four transformer blocks and a head under DDP over gloo, compiled by Inductor from an empty cache. CPU seconds are those
of the first step, of all ranks and the compilers that they start, without imports; wall seconds mean something only
where each rank has a core.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from strategies.base import compiler_settings
from tests.processes import on_ranks

WIDTH, HEADS, LENGTH = 64, 4, 16


class Block(nn.Module):
    """As in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = self.inputs(self.norms[0](x_BTD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.outputs(mixed.transpose(1, 2).flatten(2))
        changed: Tensor = x_BTD + self.down(nn.functional.gelu(self.up(self.norms[1](x_BTD))))
        return changed


@dataclass(kw_only=True, slots=True)
class Cost:
    """Of one rank."""

    cpu_seconds: float
    wall_seconds: float
    graphs_compiled: int
    graphs_loaded: int
    loss: float


def first_step(folder: str, kind: str = "regional", once: bool = True) -> Cost:
    """Train three steps and tell what the first one cost; ``kind`` is regional, whole or fsdp2."""
    import os

    from torch._inductor import config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    config.compile_threads = 1  # so that what compilers take is known when they end
    dist.init_process_group("gloo")
    module: nn.Module = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(WIDTH, 100))
    for part in [module] if kind == "whole" else module.children():
        part.compile()
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for part in module.children():
            fully_shard(part)
        fully_shard(module)
    model = module if kind == "fsdp2" else nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x_BTD = torch.randn(4, LENGTH, WIDTH)
    costs = []
    dist.barrier()
    cpu, wall = cpu_seconds(), time.perf_counter()
    with compiler_settings({}) if once else contextlib.nullcontext():
        for _ in range(3):
            loss = model(x_BTD).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            costs.append((cpu_seconds() - cpu, time.perf_counter() - wall))
            cpu, wall = cpu_seconds(), time.perf_counter()
    compiled, loaded = (counters["inductor"][f"fxgraph_cache_{what}"] for what in ("miss", "hit"))
    return Cost(
        cpu_seconds=costs[0][0],
        wall_seconds=costs[0][1],
        graphs_compiled=compiled,
        graphs_loaded=loaded,
        loss=float(loss),
    )


def cpu_seconds() -> float:
    """Of this process and of those it has started that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def costs_of(ranks: int, kind: str = "regional", once: bool = True) -> list[Cost]:
    """The cost to each of ``ranks``, from an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(first_step, folder, kind, once, ranks=ranks, timeout_seconds=900)


def main(numbers: list[int], kind: str = "regional", once: bool = True) -> None:
    one = None
    print("ranks  cpu s  of one  first  others (mean)  compiled  loaded  wall s  of one")
    for number in numbers:
        costs = sorted(costs_of(number, kind, once), key=lambda cost: -cost.cpu_seconds)
        total, wall = sum(cost.cpu_seconds for cost in costs), max(cost.wall_seconds for cost in costs)
        one = one or (total, wall)
        others = sum(cost.cpu_seconds for cost in costs[1:]) / (number - 1) if number > 1 else 0.0
        print(
            f"{number:5}  {total:5.1f}  {total / one[0]:6.2f}  {costs[0].cpu_seconds:5.1f}  {others:13.2f}"
            f"  {sum(cost.graphs_compiled for cost in costs):8}  {sum(cost.graphs_loaded for cost in costs):6}"
            f"  {wall:6.1f}  {wall / one[1]:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    words = sys.argv[1:]
    kind = next((word for word in words if word in ("whole", "fsdp2")), "regional")
    main([int(word) for word in words if word.isdigit()], kind, once="apart" not in words)
