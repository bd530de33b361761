"""``cached`` without a compiler: fake artifacts through torch's own manager, and every way a store can fail."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.compiler._cache import CacheArtifactManager

from strategies import Cached, Program, Regional, Whole
from strategies.cached import store as artifact_store
from strategies.cached.cache_session import facts_of, fingerprint_of
from strategies.cached.store import ArtifactStore
from tests.strategies.modules import Block, new_program

KEY = "a secret of the team"


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache directory, a home and no key; counters as they were."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CRUCIBLE_CACHE_KEY", raising=False)
    before = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
    yield
    counters["inductor"].update({name: value - counters["inductor"][name] for name, value in before.items()})


def artifact(key: str) -> tuple[str, bytes]:
    return f"f{key * 51}"[:52], f"code of {key}".encode()


def run(strategy: Cached, compiled: str = "", hits: str = "", program: Program | None = None) -> dict[str, Any]:
    """One run that compiles the graphs named ``compiled`` and finds those named ``hits``; returns its report."""
    program = program or new_program(strategy, Regional())
    strategy.apply(program)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "fxgraph"
    stored = {path.name for path in folder.glob("*/*")} if folder.exists() else set()
    for key in hits:
        assert artifact(key)[0] in stored, "torch was given what it now finds"
    for key in compiled + hits:
        CacheArtifactManager.record_artifact("inductor", *artifact(key))
    counters["inductor"]["fxgraph_cache_miss"] += len(compiled)
    counters["inductor"]["fxgraph_cache_hit"] += len(hits)
    strategy.end(program)
    report = program.report["cached"]
    json.dumps(report)
    assert all(note.startswith("cached: ") for note in program.notes)
    assert program.notes, "nothing is silent"
    return {**report, "notes": " | ".join(program.notes)}


def test_a_second_run_is_warm(tmp_path: Path) -> None:
    cold = run(Cached(url=tmp_path / "store"), compiled="ab")  # type: ignore[arg-type]
    assert (cold["state"], cold["artifacts_saved"], cold["graph_misses"]) == ("cold", 2, 2)
    assert "nothing is stored yet" in cold["reason"]
    warm = run(Cached(url=str(tmp_path / "store")), hits="ab")
    assert (warm["state"], warm["artifacts_loaded"], warm["graph_hits"], warm["graph_misses"]) == ("warm", 2, 2, 0)
    assert "bytes_saved" not in warm
    assert warm["bytes_loaded"] == cold["bytes_saved"] > 0
    assert warm["fingerprint"] == cold["fingerprint"]


def test_a_memory_store_is_signed_with_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRUCIBLE_CACHE_KEY", KEY)
    url = "memory://signed"
    assert run(Cached(url=url), compiled="a")["state"] == "cold"
    assert run(Cached(url=url), hits="a")["state"] == "warm"
    monkeypatch.setenv("CRUCIBLE_CACHE_KEY", "another key altogether")
    report = run(Cached(url=url))
    assert report["state"] == "idle"
    assert "does not match the key" in report["refused"][0]
    monkeypatch.delenv("CRUCIBLE_CACHE_KEY")
    assert "no key to check it with" in run(Cached(url=url))["refused"][0]


def test_nothing_is_written_that_nobody_could_load(tmp_path: Path) -> None:
    report = run(Cached(url="memory://unsigned"), compiled="a")
    assert "needs a key to sign with (set CRUCIBLE_CACHE_KEY)" in report["save_error"]
    assert ArtifactStore("memory://unsigned").bundles() == {}
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    report = run(Cached(url=str(tmp_path / "open")), compiled="a")
    assert "chmod go-w" in report["save_error"]
    assert list((tmp_path / "open").iterdir()) == []


def test_nothing_is_compiled_where_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "inductor").mkdir()
    (tmp_path / "inductor").chmod(0o777)
    program = new_program(strategy := Cached(url=str(tmp_path / "store")), Regional())
    strategy.apply(program)
    assert not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
    assert f"because other users may write {tmp_path / 'inductor'}" in " ".join(program.notes)
    strategy.end(program)


def test_new_shapes_are_merged_and_none_is_lost(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    run(Cached(url=url), compiled="a")
    partly = run(Cached(url=url), hits="a", compiled="b")
    assert (partly["state"], partly["artifacts_saved"]) == ("partly", 2)
    assert "1 graphs were compiled anew" in partly["notes"]
    assert len(ArtifactStore(url).names(partly["fingerprint"])) == 1, "the second bundle holds the first"
    run(Cached(url=url), compiled="c")
    assert len(ArtifactStore(url).names(partly["fingerprint"])) == 2, "the third run met neither a nor b"
    assert run(Cached(url=url), hits="abc")["state"] == "warm"


def test_what_another_writer_stored_meanwhile_is_kept(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    first, second = Cached(url=url), Cached(url=url)
    program = new_program(first, Regional())
    first.apply(program)
    CacheArtifactManager.record_artifact("inductor", *artifact("a"))
    counters["inductor"]["fxgraph_cache_miss"] += 1
    with pytest.MonkeyPatch.context() as elsewhere:  # what the other process has for itself
        elsewhere.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
        run(second, compiled="b")
    first.end(program)
    assert run(Cached(url=url), hits="ab")["artifacts_loaded"] == 2


@pytest.mark.parametrize(
    "other",
    [
        new_program(Whole()),
        new_program(Regional(mode="max-autotune-no-cudagraphs")),
        new_program(Regional(), precision="bf16-mixed"),
        Program(module=nn.Linear(8, 8), strategies=(Regional(),), device=torch.device("cpu")),
        Program(module=nn.Sequential(*(Block() for _ in range(3))).double(), strategies=(Regional(),)),
        Program(module=nn.Sequential(*(Block() for _ in range(3))).requires_grad_(False), strategies=(Regional(),)),
    ],
    ids=["strategy", "parameter", "precision", "structure", "type", "frozen"],
)
def test_another_program_is_foreign(other: Program, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    run(Cached(url=url), compiled="a")
    assert run(Cached(url=url), program=other)["artifacts_loaded"] == 0


def test_another_torch_is_foreign_and_another_seed_or_store_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(cached: Cached) -> str:
        return fingerprint_of(facts_of(new_program(cached, Regional()), leave_out="cached"))

    torch.manual_seed(0)
    first = fingerprint(Cached(url="/one"))
    torch.manual_seed(1)
    assert fingerprint(Cached(url="/another", max_gib=1)) == first
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert fingerprint(Cached()) != first


# ---- what can go wrong ---------------------------------------------------------------------------------------------


def test_a_damaged_store_means_a_cold_start_that_mends_it(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    run(Cached(url=url), compiled="a")
    bundle = next((tmp_path / "store").glob("*.bundle"))
    bundle.write_bytes(bundle.read_bytes()[:-1])
    cold = run(Cached(url=url), compiled="a")
    assert cold["state"] == "cold"
    assert "refused: it" in cold["reason"]
    assert cold["reason"] in cold["notes"]
    assert run(Cached(url=url), hits="a")["state"] == "warm"


def test_a_store_that_cannot_be_reached_costs_the_warm_start_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        strategy = Cached(url="s3://bucket/x", timeout_seconds=3, storage_options={"endpoint_url": endpoint})
        report = run(strategy, compiled="a")
    assert report["state"] == "cold"
    assert "the store cannot be read" in report["reason"]
    assert "save_error" in report
    assert "nothing stored" in report["notes"]


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(ArtifactStore, "names", lambda self, fingerprint: over.wait(100))
    began = time.perf_counter()
    report = run(Cached(url=str(tmp_path / "store"), timeout_seconds=0.2), compiled="a")
    over.set()
    assert "no answer within 0.2 s" in report["reason"]
    assert time.perf_counter() - began < 50, "it would have answered after 100 s"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_is_full_or_read_only_costs_the_next_warm_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(artifact_store.os, "fsync", fail)
    report = run(Cached(url=str(tmp_path / "store")), compiled="a")
    assert os.strerror(number) in report["save_error"]
    assert os.strerror(number) in report["notes"]
    assert list((tmp_path / "store").iterdir()) == []


def test_the_store_is_kept_under_its_cap(tmp_path: Path) -> None:
    run(Cached(url=str(tmp_path / "other")), compiled="a")
    assert "max_gib" in run(Cached(url=str(tmp_path / "none"), max_gib=1e-9), compiled="a")["save_error"]
    url, size = str(tmp_path / "store"), sum(file.stat().st_size for file in (tmp_path / "other").iterdir())
    cap = 1.9 * size / 2**30
    assert run(Cached(url=url, max_gib=cap), compiled="a")["bundles_evicted"] == 0
    reports = [run(Cached(url=url, max_gib=cap), compiled=key) for key in "bcd"]
    assert sum(report["bundles_evicted"] for report in reports) >= 1
    assert sum(ArtifactStore(url).bundles().values()) <= cap * 2**30


# ---- a good neighbour ----------------------------------------------------------------------------------------------


def test_nothing_of_the_process_is_changed_for_good(tmp_path: Path) -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    manager = CacheArtifactManager._new_cache_artifacts
    run(Cached(url=str(tmp_path / "store")), compiled="a")
    assert {name: os.environ.get(name) for name in names} == before
    assert CacheArtifactManager._new_cache_artifacts is manager


def test_a_training_after_a_validation_has_a_session_of_its_own(tmp_path: Path) -> None:
    strategy = Cached(url=str(tmp_path / "store"))
    program = new_program(strategy, Regional())
    run(strategy, compiled="a", program=program)
    strategy.end(program)  # twice does no harm
    strategy.begin(program)
    assert program.report["cached"]["artifacts_loaded"] == 1
    strategy.begin(program)
    strategy.end(program)


# ---- configuration -------------------------------------------------------------------------------------------------


def test_what_this_machine_cannot_do_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"compile\.cached\.url='nonsense://x'.*nonsense"):
        Cached(url="nonsense://x").check()
    with pytest.raises(ValueError, match=r"compile\.cached\.key_file=.*No such file"):
        Cached(key_file=str(tmp_path / "none")).check()
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("short")
    with pytest.raises(ValueError, match="too short"):
        Cached(key_file=str(key)).check()
    key.write_text(KEY)
    for url in (
        None,
        str(tmp_path),
        "/data/@team/x?",
        "file:///tmp/x",
        "s3://bucket/x",
        "memory://x",
        "simplecache::s3://bucket/x",
    ):
        Cached(url=url, key_file=str(key)).check()
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    with pytest.raises(ValueError, match="switches torch's caches off"):
        Cached().check()
