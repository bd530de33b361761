"""Bundles: what is packed is unpacked, and an archive made by somebody else fills nothing but its own directory."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from strategies.cached.directory import LIBRARIES, TORCH, Bundle, read_libraries, write_libraries


def archive(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE, torch: bool = True) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in [*([(TORCH, b"t")] if torch else []), *members]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name != TORCH and kind != tarfile.REGTYPE:
                member.type, member.linkname, member.size = kind, "/etc/passwd", 0
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_what_is_packed_is_unpacked() -> None:
    bundle = Bundle(torch=b"artifacts", libraries={"ab/c.so": b"elf", "ab/c.so.load_ok": b""})
    assert Bundle.unpack(bundle.pack()) == bundle


def test_the_same_content_gives_the_same_bytes() -> None:
    first = Bundle(torch=b"x", libraries={"a/1.so": b"1", "b/2.so": b"2"})
    second = Bundle(torch=b"x", libraries={"b/2.so": b"2", "a/1.so": b"1"})
    assert first.pack() == second.pack()


@pytest.mark.parametrize(
    "name",
    [
        "/etc/evil.so",
        "../evil.so",
        f"{LIBRARIES}/../../evil.so",
        f"{LIBRARIES}/..",
        f"{LIBRARIES}//etc/evil.so",
        f"{LIBRARIES}/./evil.so",
        f"{LIBRARIES}\\..\\evil.so",
        f"{LIBRARIES}/C:/evil.so",
        f"{LIBRARIES}/fxgraph/evil.pkl",
        f"{LIBRARIES}/evil.py",
        "elsewhere/evil.so",
        LIBRARIES,
    ],
)
def test_a_path_that_pack_would_not_write_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a bundle"):
        Bundle.unpack(archive((name, b"evil")))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(kind: bytes) -> None:
    with pytest.raises(ValueError, match="not a plain file"):
        Bundle.unpack(archive((f"{LIBRARIES}/a/b.so", b""), kind=kind))


def test_a_name_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Bundle.unpack(archive((f"{LIBRARIES}/a/b.so", b"1"), (f"{LIBRARIES}/a/b.so", b"2")))


@pytest.mark.parametrize(
    "data", [b"", b"not a tar", archive(torch=False), archive((f"{LIBRARIES}/a/b.so", b"y" * 2000))[:1900]]
)
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a bundle"):
        Bundle.unpack(data)


def test_libraries_come_back_where_they_were(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for path in ("ab/x.main.so", "triton/key/cuda_utils.so", "ab/x.cpp", "fxgraph/k/entry"):
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(path)
    (made / "ab" / "link.so").symlink_to("/etc/passwd")
    libraries = read_libraries(made)
    assert set(libraries) == {"ab/x.main.so", "triton/key/cuda_utils.so"}
    write_libraries(libraries, tmp_path / "back")
    assert read_libraries(tmp_path / "back") == libraries
