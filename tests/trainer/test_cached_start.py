"""``cached`` with Inductor for real, each start a fresh process with empty caches of its own, as on a new machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

CHILD = """
import json, sys
from pathlib import Path
import torch
from torch._inductor import cpp_builder
from strategies import Cached, Regional
from tests.trainer.lightning_modules import Blocks, fit
from trainer.callback import Compile

folder, store = Path(sys.argv[1]), sys.argv[2]
built = []
run_compile_cmd = cpp_builder.run_compile_cmd
def spy(command, *arguments, **options):
    # The rest: a header preprocessed once a process, to know whether it changed, and probes of the processor.
    built.append(".main.cpp" in str(command))
    return run_compile_cmd(command, *arguments, **options)
cpp_builder.run_compile_cmd = spy
compile_ = Compile([Regional(), Cached(url=store)], warmup_steps=1)
losses = fit(Blocks(), folder, [compile_])
record = compile_.record
print("RESULT" + json.dumps({
    "losses": [loss.hex() for loss in losses], "built": sum(built), "report": record.report["cached"],
    "cache": record.cache, "parity": record.report["parity"], "notes": record.notes,
    "warmup_seconds": record.warmup_seconds,
}))
"""
Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    def run(store: Path) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("start")
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        command = [sys.executable, "-c", CHILD, str(folder), str(store)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert not list((folder / "inductor").glob("cached-*")), "the directory of the run is gone"
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
        result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
        return result

    return run


@pytest.mark.timeout(240)
def test_a_second_process_starts_warm_with_the_same_losses_to_the_last_bit(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    cold = start(store)
    assert (cold["cache"], cold["report"]["state"]) == ("cold", "cold")
    assert "nothing is stored yet" in cold["report"]["reason"]
    assert cold["report"]["artifacts_saved"] > cold["report"]["graph_misses"] > 0
    assert cold["built"] > 0

    warm = start(store)
    assert (warm["cache"], warm["report"]["state"]) == ("warm", "warm")
    assert warm["report"]["graph_hits"] == cold["report"]["graph_misses"]
    assert (warm["report"]["graph_misses"], warm["report"]["libraries_built"], warm["built"]) == (0, 0, 0)
    assert warm["report"]["artifacts_loaded"] == cold["report"]["artifacts_saved"]
    assert "bytes_saved" not in warm["report"], "nothing new, nothing stored"
    assert any("warm start: all" in note for note in warm["notes"])
    assert warm["losses"] == cold["losses"]
    # What the cold start compared with eager is what the warm one runs.
    assert "compared" not in cold["parity"]
    assert warm["parity"] == {**cold["parity"], "compared": warm["parity"]["compared"]}
    assert warm["warmup_seconds"] < cold["warmup_seconds"]
