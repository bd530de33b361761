"""The store of artifacts, with small fake bytes: what is whole and genuine is loaded, everything else is refused.

In a folder, in memory, and on a real S3-protocol server on the loopback interface (moto), through s3fs and botocore.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strategies.cached.store import UNSIGNED, ArtifactStore, Refused, read_libraries, signature_of

KEY = b"0123456789abcdef"
OTHER_KEY = b"fedcba9876543210"
PROGRAM = hashlib.sha256(b"one program").hexdigest()
FOREIGN = hashlib.sha256(b"another").hexdigest()
Connect = Callable[..., ArtifactStore]
"""Given a key, a client of one store; ``url`` may be another one at the same place."""


@pytest.fixture
def local(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


@pytest.fixture
def in_memory() -> Iterator[Connect]:
    url = f"memory://{uuid.uuid4().hex}"
    yield lambda key=KEY: ArtifactStore(url, key=key)
    store = ArtifactStore(url)
    if store.fs.exists(store.root):
        store.fs.rm(store.root, recursive=True)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = pytest.importorskip("moto.server", reason="the test extra brings moto[server]")
    pytest.importorskip("s3fs", reason="the test extra brings s3fs")
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
def in_bucket(endpoint: str) -> Iterator[Connect]:
    def connect(key: bytes | None = KEY, url: str = "s3://artifacts/compiled") -> ArtifactStore:
        return ArtifactStore(url, key=key, storage_options={"endpoint_url": endpoint, "skip_instance_cache": True})

    store = connect()
    store.fs.mkdir("artifacts")
    yield connect
    store.fs.rm("artifacts", recursive=True)


@pytest.fixture(params=["memory", pytest.param("bucket", marks=pytest.mark.slow)])
def remote(request: pytest.FixtureRequest) -> Connect:
    connect: Connect = request.getfixturevalue(f"in_{request.param}")
    return connect


@pytest.fixture(params=["folder", "memory", pytest.param("bucket", marks=pytest.mark.slow)])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    if request.param == "folder":
        return lambda key=KEY: ArtifactStore(str(tmp_path / "store"), key=key)
    connect: Connect = request.getfixturevalue(f"in_{request.param}")
    return connect


def save(store: ArtifactStore, data: bytes = b"artifacts", fingerprint: str = PROGRAM) -> str:
    manifest = {"fingerprint": fingerprint, "facts": {"torch": "2"}, "artifacts": [f"inductor {data!r}"]}
    return store.save(data, {"ab/c.so": b"elf"}, manifest)[0]


def load(store: ArtifactStore, name: str) -> bytes:
    return store.load(name, fingerprint=PROGRAM).artifacts


def test_what_one_client_saves_another_one_loads(anywhere: Connect) -> None:
    store, other = anywhere(), anywhere()
    assert other.names(PROGRAM) == [], "an empty store holds nothing"
    name = save(store)
    assert other.names(PROGRAM) == [name]
    assert other.names(FOREIGN) == []
    bundle = other.load(name, fingerprint=PROGRAM)
    assert (bundle.artifacts, bundle.libraries) == (b"artifacts", {"ab/c.so": b"elf"})
    assert bundle.manifest["facts"] == {"torch": "2"}
    assert other.bundles() == {name: bundle.size}
    later = save(store, b"more")
    assert set(other.names(PROGRAM)) == {name, later}, "no stale listing"


@pytest.mark.parametrize("edit", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"A"])
def test_a_damaged_bundle_is_refused(anywhere: Connect, edit: Callable[[bytes], bytes]) -> None:
    name = save(store := anywhere())
    path = store.path(name)
    store.fs.pipe_file(path, edit(store.fs.cat_file(path)))
    with pytest.raises(Refused, match="truncated or was changed"):
        load(store, name)


def test_what_is_no_bundle_is_refused(local: ArtifactStore) -> None:
    save(local)
    for data in (b"", b"no zip", b"PK\x05\x06" + bytes(18)):
        name = f"{PROGRAM[:32]}-{hashlib.sha256(data).hexdigest()}"
        Path(local.path(name)).write_bytes(UNSIGNED + data)
        Path(local.path(name)).chmod(0o644)
        with pytest.raises(Refused, match="not a bundle"):
            load(local, name)


def test_a_bundle_that_is_gone_or_of_another_program_is_refused(local: ArtifactStore) -> None:
    # The names hold only part of the fingerprint: the manifest has all of it.
    name = save(local, fingerprint=PROGRAM[:32] + FOREIGN[32:])
    assert local.names(PROGRAM) == [name]
    with pytest.raises(Refused, match="another program or machine"):
        local.load(name, fingerprint=PROGRAM)
    local.remove(name)
    assert local.names(PROGRAM) == []
    with pytest.raises(Refused, match="file is missing"):
        load(local, name)


# ---- who wrote it --------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_local_needs_a_signature(remote: Connect) -> None:
    unsigned, signed = save(remote(key=None), b"unsigned"), save(remote())
    for name in (unsigned, signed):
        with pytest.raises(Refused, match=r"no key .*CRUCIBLE_CACHE_KEY.*not a local folder"):
            load(remote(key=None), name)
    with pytest.raises(Refused, match="not signed"):
        load(remote(), unsigned)


def test_a_signature_by_another_key_is_refused_everywhere(anywhere: Connect) -> None:
    name = save(anywhere(key=OTHER_KEY))
    with pytest.raises(Refused, match="does not match"):
        load(anywhere(), name)


def test_data_swapped_together_with_its_digest_is_refused(in_memory: Connect) -> None:
    # The digest alone proves nothing to somebody who can write the file; what they wrote is not even opened.
    store = in_memory()
    signature = store.fs.cat_file(store.path(save(store)))[: len(UNSIGNED)]
    for signed in (signature, signature_of(b"evil data", OTHER_KEY), b"0" * 64, b"\xff" * 64):
        name = f"{PROGRAM[:32]}-{hashlib.sha256(b'evil data').hexdigest()}"
        store.fs.pipe_file(store.path(name), signed + b"evil data")
        with pytest.raises(Refused, match="does not match"):
            load(store, name)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("kind", ["", "bundle"])
def test_what_others_may_write_is_refused_unless_it_is_signed(local: ArtifactStore, mode: int, kind: str) -> None:
    name = save(local)
    path = Path(local.path(name)) if kind else Path(local.root)
    before = path.stat().st_mode
    path.chmod(mode)
    with pytest.raises(Refused, match=r"other users may write .*chmod go-w"):
        load(local, name)
    path.chmod(before)
    assert load(local, name)
    signed = ArtifactStore(local.root, key=KEY)
    name = save(signed)
    path.chmod(mode)
    assert load(signed, name)


def test_a_link_and_a_folder_of_another_user_are_refused(
    local: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(local)
    path, elsewhere = Path(local.path(name)), tmp_path / "elsewhere.bundle"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(Refused, match="is a link"):
        load(local, name)
    elsewhere.replace(path)
    assert load(local, name)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(local.root).st_uid + 1)
    with pytest.raises(Refused, match="belongs to another user"):
        load(local, name)


def test_what_is_written_is_safe_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = ArtifactStore(str(tmp_path / "store"))
        assert load(store, save(store))
    finally:
        os.umask(before)


# ---- writing -------------------------------------------------------------------------------------------------------


def test_writers_at_once_lose_nothing(anywhere: Connect) -> None:
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        store = anywhere()
        barrier.wait()
        save(store, f"shapes {number % 4}".encode())  # two writers each with the same content

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = anywhere()
    assert {load(store, name) for name in store.names(PROGRAM)} == {f"shapes {n}".encode() for n in range(4)}


# ---- eviction ------------------------------------------------------------------------------------------------------


def test_the_oldest_bundle_is_evicted_first(local: ArtifactStore) -> None:
    old, younger, new = (save(local, bytes([number]) * 5000) for number in range(3))
    for name, seconds in ((old, 300), (younger, 200), (new, 100)):
        os.utime(local.path(name), (time.time() - seconds,) * 2)
    total = sum(local.bundles().values())
    assert local.evict(max_bytes=total) == []
    assert local.evict(max_bytes=total - 1) == [old]
    assert local.evict(max_bytes=0, keep=[new]) == [younger]
    assert local.names(PROGRAM) == [new]
    assert {Path(path).stem for path in os.listdir(local.root)} == {new}


def test_eviction_touches_nothing_that_is_not_ours(local: ArtifactStore) -> None:
    save(local)
    mine = Path(local.root) / "notes.json"
    mine.write_text("mine")
    (Path(local.root) / "folder").mkdir()
    local.evict(max_bytes=0)
    assert sorted(os.listdir(local.root)) == ["folder", "notes.json"]


def test_only_plain_libraries_are_kept(tmp_path: Path) -> None:
    for path in ("ab/x.main.so", "triton/key/cuda_utils.so", "ab/x.cpp", "fxgraph/k/entry"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "ab" / "link.so").symlink_to("/etc/passwd")
    assert set(read_libraries(tmp_path)) == {"ab/x.main.so", "triton/key/cuda_utils.so"}
