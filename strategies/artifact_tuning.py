"""Tuning results of a loaded bundle: which configuration of a Triton kernel was the fastest where it was compiled.

Torch keeps that choice beside the file of the generated kernel. A kernel that comes out of the cache still names the
file of the run that compiled it, so that in any other directory torch does not find the choice, times all
configurations again, and perhaps chooses another one, which rounds differently: a warm start would be slower than it
need be and not equal to the cold one. Torch 2.11 moreover forgets the configurations that it makes while tuning, by
halving a reduction's block; later torches do not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def tuning_in(directory: Path) -> Iterator[None]:
    """Until the block ends, what was tuned is looked for, and kept, in the cache directory ``directory``."""
    # Private to torch, on all versions supported; there is no public way to move a kernel.
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuner: Any = CachingAutotuner
    forgets = not hasattr(tuner, "_could_rblock_scale")
    recheck, scale = tuner.recheck_autotune_cache, tuner._dynamic_scale_rblock

    @functools.wraps(recheck)
    def recheck_here(kernel: Any, reload_kernel_from_src: Callable[[], Any]) -> None:
        _move(kernel, directory)
        configs = _configs(kernel)
        recheck(kernel, reload_kernel_from_src)
        if forgets:
            _take(kernel, configs, reload_kernel_from_src)

    @functools.wraps(scale)
    def scale_and_keep(kernel: Any) -> None:
        configs = _configs(kernel)
        scale(kernel)
        if len(configs) == 1 < len(kernel.compile_results) and kernel.save_cache_hook is None:
            cache = _cache(kernel, configs)  # torch keeps a choice only where there was one before
            kernel.save_cache_hook = cache and cache.save

    tuner.recheck_autotune_cache = recheck_here
    if forgets:
        tuner._dynamic_scale_rblock = scale_and_keep
    try:
        yield
    finally:
        tuner.recheck_autotune_cache, tuner._dynamic_scale_rblock = recheck, scale


def _move(kernel: Any, directory: Path) -> None:
    """Let ``kernel`` look beside a file in ``directory``; whether that exists does not matter."""

    def moved(file: str) -> str:
        return str(directory.joinpath(*Path(file).parts[-2:]))

    if kernel.filename is not None:
        kernel.filename = moved(kernel.filename)
    # Where a new choice would be kept: a directory of another run, which is not to be made anew.
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    if cache is not None and cache.local_cache is not None:
        store, file = cache.local_cache
        cache.local_cache = store, moved(file)


def _cache(kernel: Any, configs: list[Any]) -> Any:
    """Torch's cache of the choice among ``configs``; None where it keeps none."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.triton_heuristics import hash_configs

    return (
        AutotuneCache.create(kernel.inductor_meta, kernel.filename, hash_configs(configs)) if kernel.filename else None
    )


def _take(kernel: Any, configs: list[Any], reload_kernel_from_src: Callable[[], Any]) -> None:
    """Leave ``kernel`` the configuration that was chosen, compiled anew where it had been made while tuning."""
    cache = _cache(kernel, configs)
    best = None if cache is None else cache._read()
    if (
        best is None
        or best.get("configs_hash") != cache.configs_hash
        or not _settings(configs[0]).keys() <= best.keys()
    ):
        return
    chosen = [result for result in kernel.compile_results if _settings(result.config).items() <= best.items()]
    if not chosen:
        config = copy.deepcopy(configs[0])
        config.kwargs.update({name: best[name] for name in config.kwargs})
        config.num_warps, config.num_stages = best["num_warps"], best["num_stages"]
        if kernel.fn.fn is None:
            kernel.fn = reload_kernel_from_src().fn
        chosen = [kernel._precompile_config(config)]
    kernel.compile_results = chosen[:1]
    # Chosen among all there were: torch would make one more out of it, and time the two.
    kernel.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}


def _configs(kernel: Any) -> list[Any]:
    return [result.config for result in kernel.compile_results]


def _settings(config: Any) -> dict[str, Any]:
    """What torch keeps of a configuration."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
