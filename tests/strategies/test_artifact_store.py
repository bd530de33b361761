"""The store of artifacts, with small fake bytes: what is whole and genuine is loaded, everything else is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strategies.cached import store as artifact_store
from strategies.cached.store import TORCH, ArtifactStore, Refused, pack, read_libraries, signature_of, unpack

KEY = b"0123456789abcdef"
OTHER_KEY = b"fedcba9876543210"
PROGRAM = hashlib.sha256(b"one program").hexdigest()
FOREIGN = hashlib.sha256(b"another").hexdigest()


@pytest.fixture
def local(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    store = ArtifactStore(url)
    if store.fs.exists(store.root):
        store.fs.rm(store.root, recursive=True)


def save(store: ArtifactStore, data: bytes = b"artifacts", fingerprint: str = PROGRAM) -> str:
    return store.save(data, fingerprint=fingerprint, facts={"torch": "2"}, artifacts=[f"inductor {data!r}"])


def change(store: ArtifactStore, name: str, edit: Callable[[bytes], bytes]) -> None:
    path = Path(f"{store.root}/{name}.bundle")
    path.write_bytes(edit(path.read_bytes()))


def manifest_changed(edit: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        line, _, data = content.partition(b"\n")
        return edit(line) + b"\n" + data

    return changed


def test_what_is_saved_is_loaded(local: ArtifactStore, memory: str) -> None:
    for store in (local, ArtifactStore(memory, key=KEY)):
        name = save(store)
        assert store.names(PROGRAM) == [name]
        assert store.names(FOREIGN) == []
        loaded = store.load(name, fingerprint=PROGRAM)
        assert (loaded.data, loaded.manifest["facts"]) == (b"artifacts", {"torch": "2"})


def test_an_empty_store_holds_nothing(local: ArtifactStore, memory: str) -> None:
    assert local.names(PROGRAM) == ArtifactStore(memory).names(PROGRAM) == []


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: b"", "cannot be read"),
        (lambda data: data[:-1] + b"A", "corrupt"),
        (manifest_changed(lambda line: line[:-9]), "cannot be read"),
        (manifest_changed(lambda line: b"[" * 100_000), "cannot be read"),
        (manifest_changed(lambda line: b"{}"), "cannot be read"),
        (manifest_changed(lambda line: b"\xff\xfe"), "cannot be read"),
        (manifest_changed(lambda line: b" " * (artifact_store.MAX_MANIFEST_BYTES + 1)), "too large"),
        (manifest_changed(lambda line: line.replace(b'"schema": 3', b'"schema": 4')), "format is 4"),
        (manifest_changed(lambda line: line.replace(PROGRAM.encode(), FOREIGN.encode())), "another bundle"),
    ],
)
def test_a_damaged_bundle_is_refused_with_the_reason(
    local: ArtifactStore, edit: Callable[[bytes], bytes], reason: str
) -> None:
    name = save(local)
    change(local, name, edit)
    with pytest.raises(Refused, match=reason):
        local.load(name, fingerprint=PROGRAM)


def test_a_bundle_that_is_gone_is_refused(local: ArtifactStore) -> None:
    name = save(local)
    local.remove(name)
    assert local.names(PROGRAM) == []
    with pytest.raises(Refused, match="file is missing"):
        local.load(name)


def test_a_bundle_of_another_program_is_refused(local: ArtifactStore) -> None:
    # The names hold only part of the fingerprint: the manifest has all of it.
    twin = PROGRAM[:32] + FOREIGN[32:]
    name = save(local, fingerprint=twin)
    assert local.names(PROGRAM) == [name]
    with pytest.raises(Refused, match="another program or machine"):
        local.load(name, fingerprint=PROGRAM)


# ---- who wrote it --------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_local_needs_a_signature(memory: str) -> None:
    name = save(ArtifactStore(memory))
    with pytest.raises(Refused, match=r"no key .*CRUCIBLE_CACHE_KEY.*not a local folder"):
        ArtifactStore(memory).load(name)
    with pytest.raises(Refused, match="not signed"):
        ArtifactStore(memory, key=KEY).load(name)


def test_a_signature_by_another_key_is_refused_everywhere(local: ArtifactStore, memory: str) -> None:
    for url in (local.root, memory):
        name = save(ArtifactStore(url, key=OTHER_KEY))
        with pytest.raises(Refused, match="does not match"):
            ArtifactStore(url, key=KEY).load(name)


def test_data_swapped_together_with_its_digest_is_refused(memory: str) -> None:
    # The digest alone proves nothing to somebody who can write the file.
    store = ArtifactStore(memory, key=KEY)
    genuine = save(store)
    evil = b"evil data"
    digest = hashlib.sha256(evil).hexdigest()
    manifest = json.loads(store.fs.cat_file(f"{store.root}/{genuine}.bundle").partition(b"\n")[0])
    manifest.update(sha256=digest, bytes=len(evil))
    name = f"{PROGRAM[:32]}-{digest}"
    store.fs.pipe_file(f"{store.root}/{name}.bundle", json.dumps(manifest).encode() + b"\n" + evil)
    with pytest.raises(Refused, match="does not match"):
        store.load(name)


@pytest.mark.parametrize("field", ["fingerprint", "facts", "artifacts", "bytes", "created"])
def test_the_signature_covers_every_field(field: str) -> None:
    manifest = {"fingerprint": "f", "facts": {}, "artifacts": [], "bytes": 1, "created": "now", "signature": None}
    changed = {**manifest, field: "another"}
    assert signature_of(manifest, KEY) != signature_of(changed, KEY)
    assert signature_of(manifest, KEY) == signature_of({**manifest, "signature": "x"}, KEY)
    assert signature_of(manifest, KEY) != signature_of(manifest, OTHER_KEY)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("kind", ["", "bundle"])
def test_what_others_may_write_is_refused_unless_it_is_signed(local: ArtifactStore, mode: int, kind: str) -> None:
    name = save(local)
    path = Path(f"{local.root}/{name}.{kind}") if kind else Path(local.root)
    before = path.stat().st_mode
    path.chmod(mode)
    with pytest.raises(Refused, match=r"other users may write .*chmod go-w"):
        local.load(name)
    path.chmod(before)
    assert local.load(name).data
    signed = ArtifactStore(local.root, key=KEY)
    name = save(signed)
    path.chmod(mode)
    assert signed.load(name).data


def test_links_are_refused_unless_it_is_signed(local: ArtifactStore, tmp_path: Path) -> None:
    name = save(local)
    path, elsewhere = Path(f"{local.root}/{name}.bundle"), tmp_path / "elsewhere.bundle"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(Refused, match="is a link"):
        local.load(name)


def test_a_folder_of_another_user_is_refused(local: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(local)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(local.root).st_uid + 1)
    with pytest.raises(Refused, match="belongs to another user"):
        local.load(name)


def test_what_is_written_is_safe_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = ArtifactStore(str(tmp_path / "store"))
        assert store.load(save(store)).data
    finally:
        os.umask(before)


# ---- writing -------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_nothing_behind(local: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(local)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact_store.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(local, b"more")
    assert {Path(path).stem for path in os.listdir(local.root)} == {first}
    assert local.load(first).data == b"artifacts"


def test_writers_at_once_lose_nothing(local: ArtifactStore, memory: str) -> None:
    for url in (local.root, memory):
        barrier = threading.Barrier(8)

        def write(number: int, url: str = url, barrier: threading.Barrier = barrier) -> None:
            store = ArtifactStore(url, key=KEY)
            barrier.wait()
            save(store, f"shapes {number % 4}".encode())  # two writers each with the same content

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store = ArtifactStore(url, key=KEY)
        assert {store.load(name).data for name in store.names(PROGRAM)} == {f"shapes {n}".encode() for n in range(4)}


# ---- eviction ------------------------------------------------------------------------------------------------------


def age(store: ArtifactStore, name: str, seconds: float) -> None:
    os.utime(f"{store.root}/{name}.bundle", (time.time() - seconds,) * 2)


def test_the_bundle_used_longest_ago_is_evicted_first(local: ArtifactStore) -> None:
    old, used, new = (save(local, bytes([number]) * 5000) for number in range(3))
    for name, seconds in ((old, 300), (used, 400), (new, 100)):
        age(local, name, seconds)
    local.touch(used)
    total = sum(stored.size for stored in local.bundles())
    assert [stored.name for stored in local.evict(max_bytes=total)] == []
    assert [stored.name for stored in local.evict(max_bytes=total - 1)] == [old]
    assert [stored.name for stored in local.evict(max_bytes=0, keep=[new])] == [used]
    assert local.names(PROGRAM) == [new]
    assert {Path(path).stem for path in os.listdir(local.root)} == {new}


def test_eviction_touches_nothing_that_is_not_ours(local: ArtifactStore) -> None:
    save(local)
    mine = Path(local.root) / "notes.json"
    mine.write_text("mine")
    (Path(local.root) / "folder").mkdir()
    local.evict(max_bytes=0)
    assert sorted(os.listdir(local.root)) == ["folder", "notes.json"]


# ---- what a bundle holds -------------------------------------------------------------------------------------------


def test_what_is_packed_is_unpacked_and_the_same_content_gives_the_same_bytes() -> None:
    libraries = {"ab/c.so": b"elf", "ab/c.so.load_ok": b""}
    assert unpack(pack(b"artifacts", libraries)) == (b"artifacts", libraries)
    assert pack(b"artifacts", libraries) == pack(b"artifacts", dict(reversed(libraries.items())))


EVIL = "/etc/evil.so ../evil.so a/../../evil.so a/.. a//evil.so a/./evil.so a\\..\\evil.so a/C:/evil.so a/b.pkl b.py a"


@pytest.mark.parametrize("name", EVIL.split())
def test_a_path_that_pack_would_not_write_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a bundle"):
        unpack(pack(b"t", {name: b"evil"}))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [[], ["a/b.so"], [TORCH, "a/b.so", "a/b.so"]])
def test_what_is_no_bundle_is_refused(names: list[str]) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 100)
    for data in (buffer.getvalue(), buffer.getvalue()[:-30], b"", b"not a zip"):
        with pytest.raises(ValueError, match="not a bundle"):
            unpack(data)


def test_a_changed_byte_is_noticed() -> None:
    data = pack(b"t" * 1000, {})
    with pytest.raises(ValueError, match="not a bundle"):
        unpack(data.replace(b"ttt", b"tet", 1))


def test_only_plain_libraries_are_kept(tmp_path: Path) -> None:
    for path in ("ab/x.main.so", "triton/key/cuda_utils.so", "ab/x.cpp", "fxgraph/k/entry"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "ab" / "link.so").symlink_to("/etc/passwd")
    assert set(read_libraries(tmp_path)) == {"ab/x.main.so", "triton/key/cuda_utils.so"}
