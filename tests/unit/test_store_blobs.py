"""Blobs by digest: complete or absent, resumed after a crash, refused when the bytes are others."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.store import blobs
from spes_p2p.store.blobs import RANGE_BYTES_MAX, BlobStore
from spes_protocols.codec import sha256
from spes_protocols.errors import IntegrityError, RemoteError, UserError
from tests.unit.store_support import run, small_disk

__all__ = ["small_disk"]

DATA = bytes(range(256)) * 20_000
DIGEST = sha256(DATA)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_bytes_and_files_are_stored_by_digest(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    assert store.put(b"small") == sha256(b"small")
    assert store.put(tmp_path / "source") == DIGEST
    assert store.put(DATA) == DIGEST
    assert store.digests() == sorted([DIGEST, sha256(b"small")])
    assert store.path(DIGEST).read_bytes() == DATA
    assert (store.has(DIGEST), store.size(DIGEST)) == (True, len(DATA))
    assert store.total_bytes() == len(DATA) + 5
    assert len(os.listdir(store.directory)) == 2


def test_absent_blobs(store: BlobStore) -> None:
    assert not store.has(DIGEST)
    assert store.size(DIGEST) is None
    assert store.read_range(DIGEST, 0, 10) is None
    store.remove(DIGEST)
    with pytest.raises(IntegrityError, match="missing"):
        store.verify(DIGEST)


def test_ranges(store: BlobStore) -> None:
    store.put(DATA)
    assert store.read_range(DIGEST, 1000, 300) == DATA[1000:1300]
    assert store.read_range(DIGEST, len(DATA) - 5, 300) == DATA[-5:]
    assert store.read_range(DIGEST, len(DATA) + 5, 300) == b""
    assert store.read_range(DIGEST, 0, 2**60) == DATA[:RANGE_BYTES_MAX]
    assert store.read_range(DIGEST, -1, -1) == b""


def test_a_download_goes_on_after_kill_9(store: BlobStore) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom spes_p2p.store.blobs import BlobStore\n"
        "store = BlobStore(Path(sys.argv[1]))\n"
        "file = store.partial(bytes.fromhex(sys.argv[2])).open('wb', buffering=0)\n"
        "file.write(bytes(range(256)) * 9_999)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    status, _ = run(code, store.directory, DIGEST.hex())
    assert status == -9
    again = BlobStore(store.directory)
    assert (again.has(DIGEST), again.digests()) == (False, [])
    have = again.partial(DIGEST).stat().st_size
    assert have == again.total_bytes() == 256 * 9_999
    with again.partial(DIGEST).open("ab") as file:
        file.write(DATA[have:])
    again.adopt(DIGEST)
    assert again.path(DIGEST).read_bytes() == DATA
    assert not again.partial(DIGEST).exists()
    again.adopt(DIGEST)


def test_other_bytes_are_not_adopted(store: BlobStore) -> None:
    for received in (b"", DATA[:-1], DATA[:-1] + b"x"):
        store.partial(DIGEST).write_bytes(received)
        with pytest.raises(RemoteError) as caught:
            store.adopt(DIGEST)
        assert caught.value.check == "blob_digest"
        assert os.listdir(store.directory) == []
    with pytest.raises(RemoteError, match="not received"):
        store.adopt(DIGEST)


def test_a_download_that_is_removed_while_it_is_adopted_was_not_received(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is over, and a blob that no commit names goes while a thread still looks at it."""
    store.partial(DIGEST).write_bytes(DATA)
    monkeypatch.setattr(blobs, "sync", lambda file, path: store.remove(DIGEST))
    with pytest.raises(RemoteError, match="not received"):
        store.adopt(DIGEST)
    assert os.listdir(store.directory) == []


def test_a_flipped_bit_is_found(store: BlobStore) -> None:
    store.put(DATA)
    store.verify(DIGEST)
    changed = bytearray(DATA)
    changed[77] ^= 4
    store.path(DIGEST).write_bytes(changed)
    with pytest.raises(IntegrityError, match=DIGEST.hex()) as caught:
        store.verify(DIGEST)
    assert caught.value.check == "blob_digest"
    store.put(DATA)
    store.verify(DIGEST)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_blob_that_the_disk_does_not_give_back_is_a_damaged_one(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    store.put(DATA)
    monkeypatch.setattr(blobs.hashlib, "file_digest", failing)
    with pytest.raises(IntegrityError, match=os.strerror(number)):  # `spes repair` moves it aside and goes on
        store.verify(DIGEST)


def test_remove_takes_the_download_too(store: BlobStore) -> None:
    store.put(DATA)
    store.partial(DIGEST).write_bytes(b"half")
    store.remove(DIGEST)
    assert os.listdir(store.directory) == []


def test_a_full_disk_leaves_no_half_written_blob(small_disk: Path, tmp_path: Path) -> None:
    store = BlobStore(small_disk / "blobs")
    kept = store.put(b"kept")
    (tmp_path / "source").write_bytes(DATA)
    for source in (DATA, tmp_path / "source"):
        with pytest.raises(UserError, match="disk full"):
            store.put(source)
        assert os.listdir(store.directory) == [kept.hex()]
    store.verify(kept)


def test_a_size_limit_leaves_no_half_written_blob(store: BlobStore) -> None:
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom spes_p2p.store.blobs import BlobStore\n"
        "from spes_protocols.errors import UserError\nresource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    BlobStore(Path(sys.argv[1])).put(bytes(2**20))\nexcept UserError as error:\n    print(error)"
    )
    status, out = run(code, store.directory)
    assert status == 0 and "disk full" in out
    assert os.listdir(store.directory) == []


def test_what_goes_while_it_is_counted_is_no_error(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir
    store.put(b"kept")
    store.partial(DIGEST).write_bytes(DATA)

    class Listed(contextlib.nullcontext[None], list[os.DirEntry[str]]):
        def __enter__(self) -> Any:
            return self

    def listed(path: Path) -> Listed:
        found = Listed()
        with scandir(path) as entries:
            found += entries
        store.adopt(DIGEST)
        return found

    monkeypatch.setattr(blobs.os, "scandir", listed)
    assert store.total_bytes() in (4, 4 + len(DATA))
