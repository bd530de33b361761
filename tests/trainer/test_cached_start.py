"""``cached`` with Inductor for real, each start a fresh process with empty caches of its own, as on a new machine."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import cpp_builder

from strategies import Cached, Regional
from tests.processes import on_ranks
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile

pytestmark = pytest.mark.xdist_group("two_processes")


def trained(folder: Path, store: Path) -> dict[str, Any]:
    built: list[bool] = []
    run_compile_cmd = cpp_builder.run_compile_cmd

    def spy(command: Any, *arguments: Any, **options: Any) -> Any:
        # The rest: a header preprocessed once a process, to know whether it changed, and probes of the processor.
        built.append(".main.cpp" in str(command))
        return run_compile_cmd(command, *arguments, **options)

    cpp_builder.run_compile_cmd = spy
    compile_ = Compile([Regional(), Cached(url=str(store))], warmup_steps=1)
    losses = fit(Blocks(), folder, [compile_])
    record = compile_.record
    atexit._run_exitfuncs()  # as a process of its own ends
    return {
        "losses": losses,
        "built": sum(built),
        "report": record.report["cached"],
        "cache": record.cache,
        "parity": record.report["parity"],
        "notes": record.notes,
    }


def start(folder: Path, store: Path) -> dict[str, Any]:
    """Train in a process that has compiled nothing, with caches of its own."""
    folder.mkdir()
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    (result,) = on_ranks(trained, folder, store, environment=environment, ranks=1)
    assert not list((folder / "inductor").glob("cached-*")), "the directory of the run is gone"
    return result


def test_a_second_process_starts_warm_with_the_same_losses_to_the_last_bit(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cold = start(tmp_path / "cold", store)
    assert (cold["cache"], cold["report"]["state"]) == ("cold", "cold")
    assert "nothing is stored yet" in cold["report"]["reason"]
    assert cold["report"]["artifacts_saved"] > cold["report"]["graph_misses"] > 0
    assert cold["built"] > 0

    warm = start(tmp_path / "warm", store)
    assert (warm["cache"], warm["report"]["state"]) == ("warm", "warm")
    assert warm["report"]["graph_hits"] == cold["report"]["graph_misses"]
    assert (warm["report"]["graph_misses"], warm["report"]["libraries_built"], warm["built"]) == (0, 0, 0)
    assert warm["report"]["artifacts_loaded"] == cold["report"]["artifacts_saved"]
    assert "bytes_saved" not in warm["report"], "nothing new, nothing stored"
    assert any("warm start: all" in note for note in warm["notes"])
    assert warm["losses"] == cold["losses"]
    # Artifacts are executable code of an earlier run: regions are checked anew.
    assert (cold["parity"]["verdict"], warm["parity"]["verdict"]) == ("passed", "passed")
