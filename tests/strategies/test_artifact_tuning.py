"""What a cold run tuned holds in a warm one, whose cache directory is another: torch's own classes, no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo.utils import counters
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.runtime_utils import cache_dir
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, hash_configs

from strategies import Cached, Regional
from strategies.torch_patches import tuning_in
from tests.strategies.modules import new_program

triton = pytest.importorskip("triton")
FILE = "ab/cabcd.py"


def configs() -> list[Any]:
    return [triton.Config({"XBLOCK": size, "R0_BLOCK": 1024}, num_warps=4) for size in (64, 128)]


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory and a home of its own; kernels count as launched statically, as they are on a GPU."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(CachingAutotuner, "is_statically_launchable", lambda _: True)


def new_kernel(directory: str) -> Any:
    """A kernel as it comes out of a cache, compiled by a run whose cache directory was ``directory``."""
    kernel = CachingAutotuner.__new__(CachingAutotuner)
    file = f"{directory}/{FILE}"
    kernel.filename, kernel.inductor_meta = file, {}
    kernel.heuristic_type, kernel.fn = HeuristicType.POINTWISE, SimpleNamespace(fn=None)
    kernel.size_hints, kernel.device_props = {"x": 4096}, SimpleNamespace(type="cuda")
    kernel.compile_results = [SimpleNamespace(config=config) for config in configs()]
    cache = AutotuneCache.create({}, file, hash_configs(configs()))
    kernel.save_cache_hook = cache.save
    return kernel


def no_source() -> Any:
    raise AssertionError("nothing is to be compiled")


def tune(kernel: Any, choice: Any) -> None:
    """What torch does after timing."""
    kernel.save_cache_hook(choice, 1_000_000)


def test_a_warm_start_takes_what_the_cold_one_chose(tmp_path: Path) -> None:
    before = counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]
    strategy = Cached(url=str(tmp_path / "store"))
    strategy.apply(cold := new_program(strategy, Regional()))
    compiled_in = cache_dir()
    tune(new_kernel(compiled_in), configs()[1])
    counters["inductor"]["fxgraph_cache_miss"] += 1
    strategy.end(cold)
    assert cold.report["cached"]["artifacts_saved"] == 1

    strategy.apply(warm := new_program(strategy, Regional()))
    try:
        assert cache_dir() != compiled_in
        kernel = new_kernel(compiled_in)
        kernel.recheck_autotune_cache(no_source)
        assert [result.config.kwargs["XBLOCK"] for result in kernel.compile_results] == [128]
        assert kernel.filename == f"{cache_dir()}/{FILE}"
        counters["inductor"]["fxgraph_cache_hit"] += 1
        counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"] += 3
    finally:
        strategy.end(warm)
        counters["inductor"].update(fxgraph_cache_miss=before[0], fxgraph_cache_hit=before[1])
    assert warm.report["cached"]["kernels_timed"] == 3
    assert "3 timings of kernels did not" in " ".join(warm.notes), "a warm start that still tuned says so"


def test_what_is_tuned_anew_is_kept_in_the_directory_of_this_run(tmp_path: Path) -> None:
    usual = CachingAutotuner.recheck_autotune_cache, CachingAutotuner._dynamic_scale_rblock
    kernel = new_kernel(str(tmp_path / "elsewhere"))
    with tuning_in(tmp_path / "here"):
        kernel.recheck_autotune_cache(no_source)
        assert len(kernel.compile_results) == 2, "nothing is known yet"
        tune(kernel, configs()[0])
        again = new_kernel(str(tmp_path / "elsewhere"))
        again.recheck_autotune_cache(no_source)
        assert [result.config.kwargs["XBLOCK"] for result in again.compile_results] == [64]
    assert (CachingAutotuner.recheck_autotune_cache, CachingAutotuner._dynamic_scale_rblock) == usual
    assert not (tmp_path / "elsewhere").exists()
    assert list((tmp_path / "here" / "ab").glob("*.best_config"))


def test_a_choice_that_was_made_while_tuning_is_compiled_and_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CachingAutotuner, "_precompile_config", lambda self, config: SimpleNamespace(config=config, of=self.fn.fn)
    )
    halved = configs()[1]
    halved.kwargs["R0_BLOCK"] //= 2
    with tuning_in(tmp_path):
        tune(new_kernel(str(tmp_path)), halved)
        kernel = new_kernel("/nowhere")
        kernel.recheck_autotune_cache(lambda: SimpleNamespace(fn=SimpleNamespace(fn="source")))
        assert [result.config.kwargs for result in kernel.compile_results] == [{"XBLOCK": 128, "R0_BLOCK": 512}]
        assert kernel.compile_results[0].of == "source"


@pytest.mark.parametrize("halved", [False, True], ids=["as it was", "halved"])
def test_a_choice_between_a_single_configuration_and_its_half_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halved: bool
) -> None:
    """Torch 2.11 keeps none of these; later ones do by themselves, and are made to look like it here."""
    monkeypatch.delattr(CachingAutotuner, "_could_rblock_scale", raising=False)
    monkeypatch.setattr(CachingAutotuner, "recheck_autotune_cache", lambda self, reload: None)
    monkeypatch.setattr(CachingAutotuner, "_precompile_config", lambda _, config: SimpleNamespace(config=config))
    half = configs()[0]
    half.kwargs["R0_BLOCK"] //= 2
    monkeypatch.setattr(
        CachingAutotuner,
        "_dynamic_scale_rblock",
        lambda self: self.compile_results.append(SimpleNamespace(config=half)),
    )

    def single(directory: str) -> Any:
        kernel = new_kernel(directory)
        kernel.compile_results, kernel.save_cache_hook = kernel.compile_results[:1], None
        return kernel

    with tuning_in(tmp_path):
        cold = single(str(tmp_path))
        cold._dynamic_scale_rblock()
        assert len(cold.compile_results) == 2
        tune(cold, half if halved else configs()[0])
        warm = single("/nowhere")
        warm.recheck_autotune_cache(lambda: SimpleNamespace(fn=SimpleNamespace(fn="source")))
    assert [result.config.kwargs["R0_BLOCK"] for result in warm.compile_results] == [512 if halved else 1024]
    assert warm.inductor_meta["dynamic_scale_rblock"] is False, "it is not made and timed again"
