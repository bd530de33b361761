"""``cached`` against a real S3-protocol server on the loopback interface (moto), through s3fs and botocore."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strategies import Cached
from strategies.cached.store import ArtifactStore, Refused

server = pytest.importorskip("moto.server", reason="the test extra brings moto[server]")
pytest.importorskip("s3fs", reason="the test extra brings s3fs")

KEY = b"a secret of the team"
PROGRAM = "0123456789abcdef" * 4
URL = "s3://artifacts/compiled"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(endpoint: str) -> Iterator[ArtifactStore]:
    store = connect(endpoint)
    store.fs.mkdir("artifacts")
    yield store
    store.fs.rm("artifacts", recursive=True)


def connect(endpoint: str, key: bytes | None = KEY, url: str = URL) -> ArtifactStore:
    return ArtifactStore(url, key=key, storage_options={"endpoint_url": endpoint, "skip_instance_cache": True})


def save(store: ArtifactStore, data: bytes = b"artifacts") -> str:
    return store.save(data, {}, {"fingerprint": PROGRAM, "artifacts": [f"inductor {data!r}"]})[0]


def load(store: ArtifactStore, name: str) -> bytes:
    return store.load(name, fingerprint=PROGRAM).artifacts


def test_what_one_client_saves_another_one_loads(store: ArtifactStore, endpoint: str) -> None:
    other = connect(endpoint)
    assert other.names(PROGRAM) == []
    name = save(store)
    assert other.names(PROGRAM) == [name], "no stale listing"
    assert load(other, name) == b"artifacts"


def test_unsigned_foreign_and_truncated_objects_are_refused(store: ArtifactStore, endpoint: str) -> None:
    name = save(store)
    with pytest.raises(Refused, match="no key"):
        load(connect(endpoint, key=None), name)
    with pytest.raises(Refused, match="does not match"):
        load(connect(endpoint, key=b"another key altogether"), name)
    path = store.path(name)
    store.fs.pipe_file(path, store.fs.cat_file(path)[:-1])
    with pytest.raises(Refused, match="truncated"):
        load(store, name)
    unsigned = save(connect(endpoint, key=None), b"unsigned")
    with pytest.raises(Refused, match="not signed"):
        load(store, unsigned)


def test_writers_at_once_lose_nothing(store: ArtifactStore, endpoint: str) -> None:
    def write(number: int) -> None:
        save(connect(endpoint), f"shapes {number}".encode())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {load(store, name) for name in store.names(PROGRAM)} == {f"shapes {n}".encode() for n in range(3)}


def test_eviction_removes_what_was_written_first(store: ArtifactStore) -> None:
    names = [save(store, bytes([number]) * 4000) for number in range(2)]
    sizes = store.bundles()
    assert set(sizes) == set(names)
    assert all(size > 4000 for size in sizes.values())
    removed = store.evict(max_bytes=sum(sizes.values()) - 1, keep=[names[1]])
    assert removed == [names[0]]
    assert store.names(PROGRAM) == [names[1]]
    assert store.evict(max_bytes=1 << 30) == []


def test_a_bucket_that_does_not_exist_is_never_made(endpoint: str) -> None:
    absent = connect(endpoint, url="s3://absent/compiled")
    assert absent.names(PROGRAM) == []
    with pytest.raises(FileNotFoundError):
        save(absent)
    assert not absent.fs.exists("absent")


def test_a_run_starts_warm_from_a_bucket(
    store: ArtifactStore, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.strategies.test_cached import run

    monkeypatch.setenv("CRUCIBLE_CACHE_KEY", KEY.decode())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    def cached(**options: Any) -> Cached:
        return Cached(url=URL, storage_options={"endpoint_url": endpoint}, **options)

    cold = run(cached(), compiled="a")
    assert (cold["state"], "save_error" in cold) == ("cold", False)
    assert run(cached(), hits="a")["state"] == "warm"
    assert "testing" not in str(cold), "no credentials in the record"
